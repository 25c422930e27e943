"""Large tables of zeros that cost nothing before they are used.

What the system gives for them comes in pages that are cleared when they are touched first. Large pages of 2 MiB, which numpy asks
for, are cleared whole for each entry of a table that is hit here and there: the first text of 300 tokens in a store of a million
took 16 milliseconds instead of two."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Literal

_BYTES = {"i": 4, "q": 8}
_LARGE = 1 << 21


def blank(count: int, kind: Literal["i", "q"]) -> memoryview:
    """`count` zeros of 4 ("i") or 8 ("q") bytes, `count` >= 1. Raises `MemoryError`."""
    size = count * _BYTES[kind]
    if size < _LARGE:
        return memoryview(bytearray(size)).cast(kind)
    try:
        memory = (
            mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MAP_PRIVATE")
            else mmap.mmap(-1, size)
        )
    except OSError as error:
        raise MemoryError(f"no memory for a table of {size} bytes") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a system without large pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memoryview(memory).cast(kind)
