"""How much memory a model will take, told from the headers of its files before anything is loaded; and how much there is."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelNotFound, OutOfMemory
from .directory import check_directory, read_json, safetensors_header
from .gguf_file import GGUF, read_header
from .quantize import quantized_bytes
from .weights import Source, fetch

GIB = 2**30
_IN_A_LAYER = re.compile(r"\.\d+\.")
"""Names of tensors in a numbered layer, whose matrices `quantize` rounds; embeddings and the head have no number."""


@dataclass(frozen=True, slots=True)
class Form:
    """What weights are turned into: their type, and how the layers' matrices are rounded (`quantize.SCHEMES`)."""

    dtype: torch.dtype
    quantize: str = "none"


@dataclass(frozen=True, slots=True)
class Footprint:
    """`parameters`: numbers in the weights. `kv`: numbers in one token's keys and values, over all layers. `layers`: how many.
    `matrices`: shapes `(N, K)` of what may be quantised."""

    parameters: int
    kv: int
    layers: int
    matrices: tuple[tuple[int, int], ...] = ()

    def bytes(self, dtype: torch.dtype, quantize: str = "none") -> int:
        """Bytes of the weights in `dtype`, the layers' matrices as `quantize` says. `BadInput` where int4 cannot take them."""
        if quantize == "none":
            return self.parameters * dtype.itemsize
        inside = sum(wide * inner for wide, inner in self.matrices)
        return (self.parameters - inside) * dtype.itemsize + sum(quantized_bytes(shape, quantize) for shape in self.matrices)


def footprint(source: Source) -> Footprint:
    """What `source` will need; a hub's files are fetched. Raises as `weights.load` does for damaged files."""
    source = fetch(source)
    if source.path is None:
        raise ModelNotFound(f"{source.name} has no path")
    return _of_gguf(read_header(source.path)) if source.kind in ("gguf", "embedded") else _of_directory(source.path)


def check_room(name: str, own: Footprint, form: Form, device: torch.device, beside: int = 0) -> None:
    """Raise `OutOfMemory`, with the arithmetic, for weights that cannot fit on `device`. `beside`: bytes of a drafter's. On CPU,
    weights to be quantised must fit as they are: there they are read in full first."""
    rounded = form.quantize if device.type != "cpu" else "none"
    need, free = own.bytes(form.dtype, rounded), free_memory(device)
    if need + beside <= free:
        return
    drafter = f", its drafter {beside / GIB:.2f} GiB" if beside else ""
    rest = f", {sum(n * k for n, k in own.matrices):,} of them as {rounded}" if rounded != "none" else ""
    raise OutOfMemory(
        f"the weights of {name} take {need / GIB:.2f} GiB ({own.parameters:,} numbers of {form.dtype.itemsize} bytes{rest})"
        f"{drafter}, and {free / GIB:.2f} GiB are free on {device}; use a smaller model, fewer "
        f"bytes per weight (dtype, quantize), or free memory there"
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
    shapes = {name: tuple(info["shape"]) for file in files for name, info in safetensors_header(file).items()}
    return of_shapes(shapes, config.get("text_config") or config)


def _matrices(shapes: Mapping[str, tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    return tuple((s[0], s[1]) for name, s in shapes.items() if len(s) == 2 and _IN_A_LAYER.search(name))


def of_shapes(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Footprint:
    """From tensors' shapes by name, and the keys of a `config.json` that tell layers and heads."""
    layers, heads = int(config.get("num_hidden_layers") or 0), int(config.get("num_attention_heads") or 1)
    pairs = int(config.get("num_key_value_heads") or heads)
    dim = int(config.get("head_dim") or int(config.get("hidden_size") or 0) // heads)
    return Footprint(sum(map(math.prod, shapes.values())), 2 * layers * pairs * dim, layers, _matrices(shapes))


def _of_gguf(header: GGUF) -> Footprint:
    shapes = {name: info.shape for name, info in header.tensors.items()}
    kind = header.get("general.architecture", str, "")

    def number(key: str, default: int) -> int:
        value = header.meta.get(f"{kind}.{key}", default)
        return int(max(value)) if isinstance(value, list) else int(value)

    heads = max(1, number("attention.head_count", 1))
    dim = number("attention.key_length", number("embedding_length", 0) // heads)
    layers = number("block_count", 0)
    pairs = 2 * layers * number("attention.head_count_kv", heads) * dim
    return Footprint(sum(map(math.prod, shapes.values())), pairs, layers, _matrices(shapes))
