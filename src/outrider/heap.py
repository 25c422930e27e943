"""Objects that are there for good, kept out of the garbage collector's sight."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen() -> Iterator[None]:
    """Nothing that exists now is collected inside: a full collection over a model's objects takes a third of a second, in which
    nobody is answered. One within another adds what exists by then, and ends with the outer one."""
    inner = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not inner:
            gc.unfreeze()


def collect() -> None:
    """Free what nobody can reach, of what was frozen as well."""
    inside = gc.get_freeze_count() > 0
    if inside:
        gc.unfreeze()
    gc.collect()
    if inside:
        gc.freeze()
