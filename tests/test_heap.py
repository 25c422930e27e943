"""What is frozen is let go of, whatever happens."""

from __future__ import annotations

import gc

import pytest

from outrider.heap import frozen


def test_what_there_is_is_not_looked_at_and_later_is_again() -> None:
    assert not gc.get_freeze_count()
    with pytest.raises(ValueError, match="oh no"), frozen():
        assert gc.get_freeze_count() > 1000
        raise ValueError("oh no")
    assert not gc.get_freeze_count()
