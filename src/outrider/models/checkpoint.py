"""A trained drafter's directory: `config.json` and its tensors, whatever file they lie in.

We write safetensors only. Public heads often come as `.bin` or `.pt`; torch reads those without running code (`weights_only`).
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import BadInput, BadWeights, DrafterMismatch, ModelNotFound, OutriderWarning
from .directory import check_safetensors, finite, read_json, safetensors_header

KEY = "outrider"
"""Where our own facts stand in a config that others read, too."""
_PICKLED = (".bin", ".pt", ".pth")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`config` as in `config.json`, `own` our part of it, `tensors` by name, on the CPU, all finite."""

    path: Path
    config: Mapping[str, Any]
    tensors: dict[str, Tensor]

    @property
    def own(self) -> Mapping[str, Any]:
        found = self.config.get(KEY)
        return found if isinstance(found, Mapping) else {}

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`. Raises `BadWeights` if it is missing, or has another shape than `shape` (-1: any size)."""
        found = self.tensors.get(name)
        if found is None:
            raise BadWeights(f"{self.path}: the tensor {name} is missing; train, export or download the drafter again")
        if shape and (found.dim() != len(shape) or any(w not in (-1, n) for w, n in zip(shape, found.shape, strict=True))):
            raise BadWeights(f"{self.path}: the tensor {name} has shape {list(found.shape)}, its config.json says {list(shape)}")
        return found

    def number(self, name: str, default: int | None = None) -> int:
        """A positive whole number of the config. Raises `BadWeights` where there is none."""
        value = self.config.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadWeights(f"{self.path / 'config.json'}: {name} must be a positive whole number, it is {value!r}")
        return value


def folder(drafter: str, path: str) -> Path:
    """The directory that `path` names; for a hub id ("org/name") what was fetched of it, now or before. Raises `ModelNotFound`
    if there is none, or it has no `config.json`."""
    try:
        where = Path(os.path.expanduser(path))
        there = where.is_dir()
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{drafter}: {path!r} cannot be read: {error}") from error
    if not there and _HUB_ID.fullmatch(path):
        where = _fetched(drafter, path)
    elif not there:
        raise ModelNotFound(f"{drafter}: no directory {path!r}; download or train the drafter first, and give its directory")
    if not (where / "config.json").is_file():
        raise ModelNotFound(f"{drafter}: {where} has no config.json; give the directory that holds it, beside the weights")
    return where


def _fetched(drafter: str, name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "*.safetensors", *(f"*{s}" for s in _PICKLED)]))
    except Exception as error:  # a dozen kinds, from several network libraries
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelNotFound(
            f"{drafter}: no directory {name!r} here, and the hub gave nothing ({type(error).__name__}: {reason:.160}); check the "
            "name and the network, or give a directory"
        ) from error


def config_of(path: Path) -> dict[str, Any]:
    """The directory's `config.json`. Raises `BadWeights` if it is damaged."""
    return read_json(path / "config.json")


def read(path: Path) -> Checkpoint:
    """Everything in the directory, checked for NaN. Raises `BadWeights` or `ModelNotFound`."""
    file = weights_file(path)
    tensors = load_file(file) if file.suffix == ".safetensors" else _unpickled(file)
    for name, values in tensors.items():
        if values.is_floating_point() and not finite(values):
            raise BadWeights(f"{path}: the tensor {name} holds NaN or infinity; train or download the drafter again")
    return Checkpoint(path, config_of(path), tensors)


def weights_file(path: Path) -> Path:
    """The one file of weights in a drafter's directory; safetensors are preferred. Raises `ModelNotFound` where there is none,
    `BadInput` where it cannot be told which it is."""
    for suffixes in ((".safetensors",), _PICKLED):
        found = sorted(f for f in path.iterdir() if f.suffix in suffixes and f.is_file())
        if len(found) > 1:
            raise BadInput(f"{path} holds {len(found)} files of weights ({', '.join(f.name for f in found)}); keep one of them")
        if found:
            if suffixes == (".safetensors",):
                check_safetensors(found[0])
            return found[0]
    raise ModelNotFound(f"{path} has a config.json but no weights (.safetensors, .bin or .pt); download or train it again")


def numbers(path: Path) -> int:
    """How many numbers the weights hold, told without reading them."""
    file = weights_file(path)
    if file.suffix != ".safetensors":
        return file.stat().st_size // 2
    return sum(math.prod(info["shape"]) for info in safetensors_header(file).values())


def write(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str = "model.safetensors") -> None:
    """Make the directory, whole tensors on the CPU."""
    path.mkdir(parents=True, exist_ok=True)
    plain = {k: v.detach().to("cpu").clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}
    save_file(plain, path / file, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(dict(config), indent=1) + "\n", encoding="utf-8")


def same_target(checkpoint: Checkpoint, fingerprint: str, name: str) -> None:
    """Warn where the target's weights are others than those the drafter learned from."""
    learned = checkpoint.own.get("fingerprint")
    if learned and fingerprint and learned != fingerprint:
        text = (
            f"{checkpoint.path.name} was trained for other weights than those of {name}: it may guess badly; the text is unharmed"
        )
        warnings.warn(text, OutriderWarning, stacklevel=2)


def same_width(checkpoint: Checkpoint, hidden: int, wanted: int, name: str) -> None:
    """Raise `DrafterMismatch` unless the drafter reads states as wide as the target's."""
    if hidden != wanted:
        raise DrafterMismatch(
            f"{checkpoint.path.name} reads hidden states of size {hidden}, those of {name} have {wanted}: it was trained for "
            "another model; train one for this model (outrider train), or use --draft ngram"
        )


def known_ids(checkpoint: Checkpoint, ids: Tensor, vocabulary: int, name: str) -> Tensor:
    """`ids`, if the target has all of them; `DrafterMismatch` if not."""
    if ids.numel() == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        found = f"{int(ids.min())} to {int(ids.max())}" if ids.numel() else "none"
        raise DrafterMismatch(
            f"{checkpoint.path.name} guesses token ids {found}, the vocabulary of {name} has 0 to {vocabulary - 1}: it was "
            "trained for another model, or its d2t holds ids where offsets belong"
        )
    return ids


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged archives raise a dozen kinds
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadWeights(f"{file} cannot be read without running code from it ({first:.120}); get it as safetensors") from error
    if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise BadWeights(f"{file} holds no table of tensors by name; get the drafter as safetensors")
    return dict(loaded)
