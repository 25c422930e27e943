"""Reads GGUF files: the header, checked against the file's size, and tensors as fp32 arrays.

The layout is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian). Everything is
checked before any tensor is touched, so that a truncated download is named as such and never ends in a wrong model.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BadWeights, UnsupportedModel

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_NESTING = 4
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `shape` outermost dimension first, `kind` the name of its type (`"Q4_1"`), `offset` and
    `size` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GGUF:
    """The header of a GGUF file: `meta` by key, `tensors` by name."""

    path: Path
    meta: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of `key`, or `default` where it is absent. Raises `BadWeights` if it is not of `kind`."""
        value = self.meta.get(key, default)
        if value is default:
            return default
        if not isinstance(value, kind) and not (kind is float and isinstance(value, int)):
            raise BadWeights(f"{self.path}: the metadata key {key} should be {kind.__name__}, it is {value!r:.60}")
        return value

    def need(self, key: str, kind: type) -> Any:
        """The value of `key`; `BadWeights` where it is absent."""
        value = self.get(key, kind)
        if value is None:
            raise BadWeights(f"{self.path}: the metadata lacks {key}; download or convert the file again")
        return value


def is_gguf(path: Path) -> bool:
    """Whether the file starts as GGUF files do, whatever its name."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(path: Path) -> GGUF:
    """Parses and checks the header. Raises `BadWeights` (not GGUF, truncated, corrupt) or `UnsupportedModel` (another
    version, byte order, split files, a tensor type that cannot be dequantised)."""
    size = path.stat().st_size
    if size < len(MAGIC) or not is_gguf(path):
        raise BadWeights(f"{path} is not a GGUF file: it does not start with 'GGUF' ({size:,} bytes)")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Parser(path, data, size).header()


def dequantised(path: Path, info: TensorInfo) -> NDArray[np.float32]:
    """The tensor's values, `info.shape`, fp32. Raises `BadWeights` where the file has become shorter."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize, quant_shape_to_byte_shape

    kind = GGMLQuantizationType[info.kind]
    raw = np.fromfile(path, dtype=np.uint8, count=info.size, offset=info.offset)
    if raw.size != info.size:
        raise BadWeights(f"{path} ended while {info.name} was read; was it changed meanwhile?")
    if info.kind in ("F32", "F16"):
        values = raw.view(np.float32 if info.kind == "F32" else np.float16)
        return values.astype(np.float32, copy=False).reshape(info.shape)
    with np.errstate(all="ignore"):
        values = dequantize(raw.reshape(quant_shape_to_byte_shape(info.shape, kind)), kind)
    return np.ascontiguousarray(values, dtype=np.float32).reshape(info.shape)


class _Parser:
    """A cursor over the header; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size = path, data, size
        self.at = len(MAGIC)

    def header(self) -> GGUF:
        version = self.scalar("I")
        if version not in _VERSIONS:
            swapped = version & 0xFFFF == 0
            why = "big-endian byte order" if swapped else f"version {version}"
            raise UnsupportedModel(f"{self.path} is a GGUF file of {why}; convert it to version 3, little-endian")
        n_tensors, n_meta = self.count("Q", 24), self.count("Q", 13)
        meta: dict[str, Any] = {}
        for _ in range(n_meta):
            key = self.string()
            meta[key] = self.value(self.scalar("I"))
        if isinstance(split := meta.get("split.count", 0), int) and split > 1:
            raise UnsupportedModel(
                f"{self.path} is one of {split} parts; join them first: llama-gguf-split --merge FIRST_PART OUTPUT"
            )
        raw = [self.tensor() for _ in range(n_tensors)]
        return GGUF(self.path, meta, self.placed(raw, meta.get("general.alignment", 32)))

    def placed(self, raw: list[tuple[str, tuple[int, ...], int, int]], alignment: object) -> dict[str, TensorInfo]:
        if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
            raise BadWeights(f"{self.path}: general.alignment is {alignment!r}; the file is corrupt, download it again")
        start = -(-self.at // alignment) * alignment
        infos: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in raw:
            if name in infos:
                raise BadWeights(f"{self.path}: tensor {name} appears twice; the file is corrupt, download it again")
            infos[name] = self.info(name, shape, kind, start + offset)
        end = max((i.offset + i.size for i in infos.values()), default=start)
        if end > self.size:
            raise BadWeights(
                f"{self.path} is truncated: its header promises {end:,} bytes, the file has {self.size:,}; download it again"
            )
        return infos

    def info(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            known = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[known]
        except (ValueError, KeyError):
            raise UnsupportedModel(f"{self.path}: tensor {name} has the unknown type {kind}; {_USE_ANOTHER}") from None
        if known.name not in _readable_kinds():
            raise UnsupportedModel(f"{self.path}: tensor {name} is {known.name}, which cannot be read; {_USE_ANOTHER}")
        if not shape or shape[-1] % block or min(shape) < 1:
            raise BadWeights(f"{self.path}: tensor {name} of shape {shape} cannot be {known.name}; the file is corrupt")
        return TensorInfo(name, shape, known.name, offset, math.prod(shape) // block * block_bytes)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """One tensor record: name, shape (outermost first), type number, offset within the tensor data."""
        name = self.string()
        dims = self.scalar("I")
        if dims > _MAX_DIMS:
            raise BadWeights(f"{self.path}: tensor {name!r:.60} claims {dims} dimensions; the file is corrupt")
        shape = tuple(self.scalar("Q") for _ in range(dims))[::-1]
        return name, shape, self.scalar("I"), self.scalar("Q")

    def value(self, kind: int, nesting: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and nesting < _MAX_NESTING:
            return self.array(nesting + 1)
        if kind not in _SCALARS:
            raise BadWeights(f"{self.path}: unknown metadata type {kind} at byte {self.at:,}; the file is corrupt")
        value = self.scalar(_SCALARS[kind])
        return bool(value) if kind == _BOOL else value

    def array(self, nesting: int) -> list[Any]:
        kind = self.scalar("I")
        if kind not in _SCALARS:
            return [self.value(kind, nesting) for _ in range(self.count("Q", 8))]
        code = _SCALARS[kind]
        n = self.count("Q", struct.calcsize(code))
        values = list(struct.unpack_from(f"<{n}{code}", self.data, self.advance(n * struct.calcsize(code))))
        return [bool(v) for v in values] if kind == _BOOL else values

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.advance(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        n = self.count("Q", 1)
        start = self.advance(n)
        try:
            return str(self.data[start : start + n], "utf-8")
        except UnicodeDecodeError:
            raise BadWeights(f"{self.path}: text at byte {start:,} is not UTF-8; the file is corrupt") from None

    def count(self, code: str, least: int) -> int:
        """A number of items that take at least `least` bytes each, checked against what is left of the file."""
        n: int = self.scalar(code)
        self.need(n * least)
        return n

    def advance(self, n: int) -> int:
        self.need(n)
        start, self.at = self.at, self.at + n
        return start

    def need(self, n: int) -> None:
        if self.at + n > self.size:
            raise BadWeights(
                f"{self.path} is truncated or corrupt: its header needs {self.at + n:,} bytes, the file has {self.size:,}; "
                "download it again"
            )


_USE_ANOTHER = "use a file quantised as Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, F16, BF16 or F32"


def _readable_kinds() -> frozenset[str]:
    """Types that `gguf.quants` dequantises and that weights of a language model come in."""
    plain = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    blocks = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"}
    return frozenset(plain | blocks)
