"""Objects that are there for good, kept out of the garbage collector's sight."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0


@contextmanager
def frozen() -> Iterator[None]:
    """Nothing that exists now is collected inside: a full collection over a model's objects takes a third of a second, in which
    nobody is answered. One within another adds what exists by then, and ends with the outer one."""
    global _depth
    gc.collect()
    gc.freeze()
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            gc.unfreeze()


def collect() -> None:
    """Free what nobody can reach, of what was frozen as well."""
    if _depth:
        gc.unfreeze()
    gc.collect()
    if _depth:
        gc.freeze()
