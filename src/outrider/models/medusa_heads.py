"""Medusa's heads (Cai et al. 2024, arXiv 2401.10774): small networks that read the target's last hidden state, one for each
position after the next token.

Head k, from 0, turns the state of token t into scores of token t + k + 2: residual blocks x + SiLU(W x + b), then a vocabulary
head. Where that one is the target's own (`shared`) it is not stored, and may answer for some tokens only, listed by id.

Directory: `config.json` (`medusa_num_heads`, `medusa_num_layers`, and our part under `outrider`) and `medusa_lm_head.safetensors`
with the original's names: `k.j.linear.weight`, `k.j.linear.bias` for block j, `k.L.weight` for the vocabulary head; ours adds
`ids [n]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadWeights, DrafterMismatch
from . import checkpoint as files
from .checkpoint import KEY, Checkpoint

FILE = "medusa_lm_head.safetensors"


class Heads(nn.Module):
    """`count` heads of `layers` blocks over states of size `hidden`. `head [n, hidden]` is the vocabulary head that all of them
    share; without one each has its own `[size, hidden]`. New blocks change nothing: their weights are zero."""

    def __init__(self, count: int, layers: int, hidden: int, head: Tensor | None, size: int = 0) -> None:
        super().__init__()
        self.count, self.layers, self.hidden, self.shared = count, layers, hidden, head is not None
        self.blocks: Any = nn.ModuleList(nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers)) for _ in range(count))
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)
        owned = [hidden_head(head)] if head is not None else [nn.Linear(hidden, size, bias=False) for _ in range(count)]
        self.heads: Any = nn.ModuleList(owned)

    def states(self, hidden: Tensor) -> Tensor:
        """`[..., K, H]` from `[..., H]`: what enters the vocabulary heads."""
        return torch.stack([self.state(hidden, k) for k in range(self.count)], -2)

    def state(self, hidden: Tensor, k: int) -> Tensor:
        """`[..., H]`: what enters the vocabulary head of head k."""
        for block in self.blocks[k]:
            hidden = hidden + nn.functional.silu(block(hidden))
        return hidden

    def scores(self, states: Tensor, k: int) -> Tensor:
        """Logits `[..., n]` of head k from its own states `[..., H]`."""
        out: Tensor = self.heads[0 if self.shared else k](states)
        return out

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits `[..., K, n]` from the target's last states `[..., H]`."""
        states = self.states(hidden)
        if self.shared:
            return self.scores(states, 0)
        return torch.stack([self.scores(states[..., k, :], k) for k in range(self.count)], -2)


def hidden_head(rows: Tensor) -> nn.Linear:
    """Rows `[n, H]` of somebody's vocabulary head as a layer that is not trained."""
    with torch.device("meta"):
        made = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
    made.weight = nn.Parameter(rows, requires_grad=False)
    return made


def shape_of(config: Mapping[str, Any], path: Path) -> tuple[int, int]:
    """Heads and blocks per head, from a config. Raises `BadWeights` where they are not told."""
    found = Checkpoint(path, config, {})
    if "medusa_num_heads" not in config and "num_heads" in config:  # vLLM's layout
        return found.number("num_heads"), found.number("num_hidden_layers", 1)
    return found.number("medusa_num_heads"), found.number("medusa_num_layers", 1)


def build(made: Checkpoint, head: Tensor, dtype: torch.dtype, name: str) -> tuple[Heads, Tensor | None]:
    """The heads of a directory on the device of `head [V, H]`, the vocabulary head of the target `name`, and the ids `[n]` that
    they answer for (None: all). Raises `BadWeights` or `DrafterMismatch`."""
    count, layers = shape_of(made.config, made.path)
    made, kept = _normal(made, layers)
    hidden = int(_named(made, 0, "0.linear.weight", -1, -1).shape[1])
    files.same_width(made, hidden, head.shape[1], name)
    ids = None
    if "ids" in made.tensors:
        ids = files.known_ids(made, made.take("ids", -1).long(), head.shape[0], name).to(head.device)
    shared = kept is not None or made.own.get("head") == "target"
    size = int(_named(made, 0, f"{layers}.weight", -1, hidden).shape[0]) if not shared else 0
    if not shared and ids is None and not abs(size - head.shape[0]) <= 256:
        raise DrafterMismatch(
            f"{made.path.name} scores {size} tokens, {name} has {head.shape[0]}: it was trained for another model"
        )
    rows = head if ids is None else head[ids]
    if kept is not None:
        rows = made.take(kept, len(rows), hidden).to(head.device)
    with torch.device("meta"):
        heads = Heads(count, layers, hidden, rows.to(dtype) if shared else None, size)
    found: dict[str, Tensor] = {}
    for k in range(count):
        for j in range(layers):
            found[f"blocks.{k}.{j}.weight"] = _named(made, k, f"{j}.linear.weight", hidden, hidden)
            found[f"blocks.{k}.{j}.bias"] = _named(made, k, f"{j}.linear.bias", hidden)
        if not shared:
            found[f"heads.{k}.weight"] = _named(made, k, f"{layers}.weight", size, hidden)
    heads.load_state_dict({k: v.to(head.device, dtype) for k, v in found.items()}, strict=False, assign=True)
    return heads.requires_grad_(False).eval(), ids


def _normal(made: Checkpoint, layers: int) -> tuple[Checkpoint, str | None]:
    """A directory in vLLM's layout under the original's names, and the name of its vocabulary head if all heads share it."""
    if not any(name.startswith("blocks.") for name in made.tensors):
        return made, None
    named: dict[str, Tensor] = {}
    for name, values in made.tensors.items():
        parts = name.split(".")
        if parts[0] == "blocks" and parts[4] == "weight":
            k, j = parts[1], parts[3]
            bias = made.tensors.get(f"blocks.{k}.layers.{j}.bias")
            named[f"{k}.{j}.linear.weight"] = values
            named[f"{k}.{j}.linear.bias"] = values.new_zeros(len(values)) if bias is None else bias
        elif parts[0] == "lm_heads":
            named[f"{parts[1]}.{layers}.weight"] = values
        elif name == "token_map":
            named["ids"] = values
    shared = f"0.{layers}.weight" if made.config.get("original_lm_head") else None
    return Checkpoint(made.path, made.config, named), shared


def _named(made: Checkpoint, k: int, rest: str, *shape: int) -> Tensor:
    """A head's tensor, with or without the prefix that some files have."""
    prefixed = f"medusa_head.{k}.{rest}"
    return made.take(prefixed if prefixed in made.tensors else f"{k}.{rest}", *shape)


def tensors(heads: Heads, ids: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """The heads under the original's names; a shared vocabulary head is left out."""
    out: dict[str, Tensor] = {}
    for k in range(heads.count):
        for j, block in enumerate(heads.blocks[k]):
            out[f"{k}.{j}.linear.weight"], out[f"{k}.{j}.linear.bias"] = block.weight.to(dtype), block.bias.to(dtype)
        if not heads.shared:
            out[f"{k}.{heads.layers}.weight"] = heads.heads[k].weight.to(dtype)
    if ids is not None:
        out["ids"] = ids.to(torch.int32)
    return out


def save(path: Path, heads: Heads, ids: Tensor | None, facts: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a directory. `facts`: our part of the config, with `target`, `vocabulary` and what else is known of the heads."""
    config = {
        "medusa_num_heads": heads.count,
        "medusa_num_layers": heads.layers,
        "hidden_size": heads.hidden,
        "vocab_size": facts["vocabulary"],
        "base_model_name_or_path": facts["target"],
        KEY: dict(facts) | {"head": "target" if heads.shared else "own"},
    }
    files.write(path, config, tensors(heads, ids, dtype), FILE)


def check(path: Path) -> Mapping[str, Any]:
    """The config of a directory of Medusa heads. Raises `BadWeights` for another drafter's."""
    config = files.config_of(path)
    if "medusa_num_heads" not in config and not ("num_heads" in config and config.get("architectures") == ["MedusaModel"]):
        raise BadWeights(f"{path / 'config.json'} tells no medusa_num_heads: this is no directory of Medusa heads")
    return config
