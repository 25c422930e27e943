"""What is frozen is let go of, whatever happens."""

from __future__ import annotations

import gc
import weakref

import pytest

from outrider.heap import collect, frozen


def test_what_there_is_is_not_looked_at_and_later_is_again() -> None:
    assert not gc.get_freeze_count()
    with pytest.raises(ValueError, match="oh no"), frozen():
        assert gc.get_freeze_count() > 1000
        raise ValueError("oh no")
    assert not gc.get_freeze_count()


def test_one_within_another_ends_with_the_outer_one() -> None:
    with frozen():
        before = gc.get_freeze_count()
        with frozen():
            assert gc.get_freeze_count() >= before
        assert gc.get_freeze_count() >= before > 1000
    assert not gc.get_freeze_count()


class Ring:
    """Holds itself, so that it takes a collector."""

    def __init__(self) -> None:
        self.own = self


def test_what_nobody_can_reach_any_more_is_freed_though_it_was_frozen() -> None:
    ring = Ring()
    gone = weakref.ref(ring)
    with frozen():
        del ring
        gc.collect()
        assert gone() is not None
        collect()
        assert gone() is None and gc.get_freeze_count() > 1000
    collect()
    assert not gc.get_freeze_count()
