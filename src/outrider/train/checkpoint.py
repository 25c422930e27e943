"""A training run on disk, to be gone on with to the last bit: weights, optimiser, random numbers, and where it stood.

One safetensors file, written whole or not at all; what was there before stays until the new one is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import BadWeights, OutOfMemory
from ..trained import write_bytes

CHECKPOINT = "checkpoint.safetensors"
BEST = "best.safetensors"


def write(path: Path, module: nn.Module, state: dict[str, Any], optimiser: Optimizer | None = None) -> None:
    """Write weights and `state`, and with an optimiser all that resuming takes. `OutOfMemory` where the disk has no room."""
    frozen = _frozen(module)
    tensors = {f"module/{k}": v for k, v in module.state_dict().items() if k not in frozen}
    if optimiser is not None:
        for i, moments in optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser/{i}/{k}": v for k, v in moments.items()}
        tensors["random/cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors["random/cuda"] = torch.cuda.get_rng_state()
    plain = {k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, save(plain, metadata={"state": json.dumps(state)}))
    except (OSError, SafetensorError) as error:
        raise OutOfMemory(
            f"the checkpoint {path} cannot be written ({error}); the one before is whole: make room, and run the command again"
        ) from error


def read(path: Path, module: nn.Module, optimiser: Optimizer | None = None) -> dict[str, Any]:
    """Put back what `write` wrote; its state. `BadWeights` for a damaged file, or one of another shape."""
    try:
        with safe_open(path, "pt") as file:
            state = json.loads(file.metadata()["state"])
        tensors = load_file(path)
        found = {k.removeprefix("module/"): v for k, v in tensors.items() if k.startswith("module/")}
        lost = set(module.load_state_dict(found, strict=False).missing_keys) - _frozen(module)
        if lost or found.keys() - module.state_dict().keys():
            raise ValueError(f"other weights than those of this module: {sorted(lost or found)[0]}")
        if optimiser is not None:
            _restore(optimiser, tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadWeights(f"{path} cannot be gone on from ({first:.200}); remove it to start anew") from error
    return dict(state)


def _frozen(module: nn.Module) -> set[str]:
    """What training does not change, and a checkpoint need not hold: rows that are borrowed from the target."""
    return {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}


def _restore(optimiser: Optimizer, tensors: dict[str, Tensor]) -> None:
    whole = optimiser.state_dict()
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimiser/"):
            _, i, name = key.split("/")
            moments.setdefault(int(i), {})[name] = value
    optimiser.load_state_dict({"state": moments, "param_groups": whole["param_groups"]})
    torch.set_rng_state(tensors["random/cpu"])
    if torch.cuda.is_available() and "random/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random/cuda"])
