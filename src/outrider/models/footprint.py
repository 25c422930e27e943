"""How much memory a model will take, told from the headers of its files before anything is loaded; and how much there is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelNotFound, OutOfMemory
from .directory import check_directory, read_json, safetensors_header
from .gguf_file import GGUF, read_header
from .weights import Source, fetch

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Footprint:
    """`parameters`: numbers in the weights. `kv`: numbers in one token's keys and values, over all layers. `layers`: how many."""

    parameters: int
    kv: int
    layers: int

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights in `dtype`."""
        return self.parameters * dtype.itemsize


def footprint(source: Source) -> Footprint:
    """What `source` will need; a hub's files are fetched. Raises as `weights.load` does for damaged files."""
    source = fetch(source)
    if source.path is None:
        raise ModelNotFound(f"{source.name} has no path")
    return _of_gguf(read_header(source.path)) if source.kind in ("gguf", "embedded") else _of_directory(source.path)


def check_room(name: str, own: Footprint, dtype: torch.dtype, device: torch.device, beside: int = 0) -> None:
    """Raise `OutOfMemory`, with the arithmetic, for weights that cannot fit on `device`. `beside`: bytes of a drafter's."""
    need, free = own.bytes(dtype), free_memory(device)
    if need + beside <= free:
        return
    drafter = f", its drafter {beside / GIB:.2f} GiB" if beside else ""
    raise OutOfMemory(
        f"the weights of {name} take {need / GIB:.2f} GiB ({own.parameters:,} numbers of {dtype.itemsize} bytes){drafter}, and "
        f"{free / GIB:.2f} GiB are free on {device}; use a smaller model, a dtype of fewer bytes, or free memory there"
    )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as file:
            line = next(row for row in file if row.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return 4 * GIB


def _of_directory(path: Path) -> Footprint:
    files = check_directory(path)
    config = read_json(path / "config.json")
    tensors = [info for file in files for info in safetensors_header(file).values()]
    count = sum(math.prod(info["shape"]) for info in tensors)
    return _shape(count, config.get("text_config") or config)


def _shape(count: int, config: Mapping[str, Any]) -> Footprint:
    layers, heads = int(config.get("num_hidden_layers") or 0), int(config.get("num_attention_heads") or 1)
    pairs = int(config.get("num_key_value_heads") or heads)
    dim = int(config.get("head_dim") or int(config.get("hidden_size") or 0) // heads)
    return Footprint(count, 2 * layers * pairs * dim, layers)


def _of_gguf(header: GGUF) -> Footprint:
    count = sum(math.prod(info.shape) for info in header.tensors.values())
    kind = header.get("general.architecture", str, "")

    def number(key: str, default: int) -> int:
        value = header.meta.get(f"{kind}.{key}", default)
        return int(max(value)) if isinstance(value, list) else int(value)

    heads = max(1, number("attention.head_count", 1))
    dim = number("attention.key_length", number("embedding_length", 0) // heads)
    layers = number("block_count", 0)
    return Footprint(count, 2 * layers * number("attention.head_count_kv", heads) * dim, layers)
