"""Checks of a model: its directory (config.json and safetensors) before transformers opens it, its values after.

transformers fills missing tensors with random numbers and names damaged files badly; both are caught here or right after.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BadWeights, ModelNotFound, UnsupportedModel

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000


def check_directory(path: Path) -> list[Path]:
    """The directory's weight files, all whole. Raises `ModelNotFound` where config.json or the weights are missing,
    `BadWeights` for damaged ones, `UnsupportedModel` for weights of another format."""
    if not (path / "config.json").is_file():
        held = sorted(f.name for f in path.glob("*.gguf"))
        hint = f"; it holds {held[0]}: give that file" if held else "; give a directory that save_pretrained wrote"
        raise ModelNotFound(f"{path} has no config.json{hint}")
    read_json(path / "config.json")
    files = _weight_files(path)
    for file in files:
        check_safetensors(file)
    return files


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises `BadWeights` if the file is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadWeights(f"{path} cannot be read ({error}); download the model again") from error
    if not isinstance(content, dict):
        raise BadWeights(f"{path} is not a JSON object; download the model again")
    return content


def check_safetensors(path: Path) -> None:
    """Raises `BadWeights` unless the header is sound and promises exactly the bytes that are there."""
    safetensors_header(path)


def safetensors_header(path: Path) -> dict[str, Any]:
    """What the file holds: shape, type and offsets by tensor name. Raises `BadWeights` unless it is sound and promises exactly
    the bytes that are there."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            raise BadWeights(f"{path} is no safetensors file, or is cut off in its header ({size:,} bytes); download it again")
        header = file.read(length)
    try:
        tensors = {name: info for name, info in json.loads(header).items() if name != "__metadata__"}
        end = max((int(info["data_offsets"][1]) for info in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise BadWeights(f"{path} has a corrupt safetensors header ({error!r:.80}); download it again") from error
    if (wanted := 8 + length + end) != size:
        raise BadWeights(f"{path} is cut off or corrupt: its header promises {wanted:,} bytes, it has {size:,}; get it again")
    return tensors


def finite(values: Tensor) -> bool:
    """Whether all is finite; one pass over memory in the usual case (a finite sum has finite terms)."""
    return bool(values.sum(dtype=torch.float32).isfinite()) or bool(values.isfinite().all())


def _weight_files(path: Path) -> list[Path]:
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    if (path / _INDEX).is_file():
        names = read_json(path / _INDEX).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
            raise BadWeights(f"{path / _INDEX} names no weight files; download the model again")
        files = [path / name for name in sorted(set(names.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise BadWeights(f"{path} lacks {len(missing)} of {len(files)} weight files, first {missing[0]}; download it again")
        return files
    if any(path.glob("*.bin")) or any(path.glob("*.pt")):
        raise UnsupportedModel(
            f"{path} has no safetensors, only pickled weights, which can run code when opened; load them where you trust them "
            "and save_pretrained() them again"
        )
    raise ModelNotFound(f"{path} has a config.json but no weights ({_SINGLE} or {_INDEX}); download the model again")
