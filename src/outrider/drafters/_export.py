"""Trained drafters for other engines: whole, under the names that those engines look for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import BadInput
from ..models import checkpoint as files
from ..models import eagle_files, medusa_heads
from ..models.hf import resolved

MEDUSA_LAYOUTS = ("medusa", "vllm")
"""The original's, and vLLM's own, which knows a shared vocabulary head over some tokens."""


@dataclass(frozen=True, slots=True)
class Target:
    """What an export needs to know of the target: its rows `[V, H]`, its number of layers, what it is called."""

    name: str
    embeddings: Tensor
    head: Tensor
    layers: int
    architectures: Sequence[str] = ()


def export_medusa(path: Path, out: Path, layout: str, target: Target, dtype: torch.dtype = torch.float32) -> None:
    """Write the heads of `path` to the directory `out`. Raises `BadInput`, `BadWeights` or `DrafterMismatch`."""
    if layout not in MEDUSA_LAYOUTS:
        raise BadInput(f"layout must be {' or '.join(MEDUSA_LAYOUTS)} for Medusa heads, got {layout!r}")
    made = files.read(path)
    heads, ids = medusa_heads.build(made, target.head, dtype, target.name)
    if layout == "vllm":
        _vllm_medusa(out, heads, ids, target)
        return
    own = medusa_heads.tensors(heads, None, dtype)
    if heads.shared or ids is not None:
        for k in range(heads.count):
            own[f"{k}.{heads.layers}.weight"] = _whole(heads, k, ids, target.head, dtype)
    config = {
        "medusa_num_heads": heads.count,
        "medusa_num_layers": heads.layers,
        "hidden_size": heads.hidden,
        "vocab_size": len(target.head),
        "base_model_name_or_path": target.name,
    }
    files.write(out, config, own, medusa_heads.FILE)


def _whole(heads: medusa_heads.Heads, k: int, ids: Tensor | None, head: Tensor, dtype: torch.dtype) -> Tensor:
    """Head k's vocabulary head `[V, H]`: where the tokens it answers for are few, the target's rows stand in for the others."""
    if heads.shared or ids is None:
        return head.to(dtype)
    own: Tensor = heads.heads[k].weight
    return head.to(dtype).index_copy(0, ids, own.to(dtype))


def _vllm_medusa(out: Path, heads: medusa_heads.Heads, ids: Tensor | None, target: Target) -> None:
    tensors: dict[str, Tensor] = {}
    for k in range(heads.count):
        for j, block in enumerate(heads.blocks[k]):
            tensors[f"blocks.{k}.layers.{j}.weight"], tensors[f"blocks.{k}.layers.{j}.bias"] = block.weight, block.bias
    for k, head in enumerate(heads.heads):
        tensors[f"lm_heads.{k}.weight"] = head.weight
    size = heads.heads[0].weight.shape[0]
    if ids is not None:
        tensors["token_map"] = ids
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": heads.hidden,
        "vocab_size": len(target.head),
        "truncated_vocab_size": size,
        "num_heads": heads.count,
        "num_hidden_layers": heads.layers,
        "medusa_fc_bias": True,
        "original_lm_head": heads.shared,
    }
    files.write(out, config, tensors)


def export_eagle(path: Path, out: Path, layout: str, target: Target, dtype: torch.dtype = torch.float32) -> None:
    """Write the drafter of `path` to the directory `out`. Raises `BadInput`, `BadWeights` or `DrafterMismatch`."""
    made = files.read(path)
    found = eagle_files.describe(path, made.config)
    net, ids = eagle_files.build(made, eagle_files.Rows(target.embeddings, target.head), dtype, target.name)
    facts = {
        "target": target.name,
        "vocabulary": len(target.head),
        "feature": resolved(found.feature, target.layers),
        "architectures": list(target.architectures),
        "steps": made.own.get("steps", 5),
    }
    eagle_files.export(out, net, ids, facts, layout, _own_embeddings(made))


def _own_embeddings(made: files.Checkpoint) -> Tensor | None:
    return next((v for k, v in made.tensors.items() if k.removeprefix("model.") == "embed_tokens.weight"), None)
