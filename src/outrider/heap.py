"""Objects that are there for good, kept out of the garbage collector's sight."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen() -> Iterator[None]:
    """Nothing that exists now is collected inside: a full collection over a model's objects takes a third of a second, in which
    nobody is answered."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
