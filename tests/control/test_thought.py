"""When plans are made: they may have a share of the time that was worked."""

from __future__ import annotations

import pytest

from outrider.control.thought import CURIOUS, THINKING, WELCOME, WONDERING, Thought


@pytest.mark.parametrize(
    ("bucket", "new", "share"), [(None, False, THINKING), (None, True, WELCOME), (4, False, WONDERING), (4, True, CURIOUS)]
)
def test_a_plan_has_its_share_of_the_time_that_was_worked(bucket: int | None, new: bool, share: float) -> None:
    """Sooner where somebody is new; late where the last one gave nobody guesses, less late for somebody new."""
    thought = Thought()
    assert thought.due() and thought.due(new, bucket is not None)
    thought.planned(1e-3, bucket)
    rounds = 0
    while not thought.due(new, bucket is not None):
        thought.lived(1e-4)
        rounds += 1
    assert rounds * 1e-4 == pytest.approx(1e-3 / share, rel=0.02) and thought.idle == bucket


def test_a_stall_is_no_price_and_whoever_is_urged_plans_soon() -> None:
    thought = Thought()
    thought.planned(5.0, None)
    thought.lived(2e-3 / THINKING)
    assert thought.due()
    thought.planned(1e-3, 3)
    assert not thought.due() and not thought.due(True, True)
    thought.urge()
    assert not thought.due(), "not in every round, whatever is amiss"
    thought.lived(1.01e-3 / WELCOME)
    assert thought.due() and thought.due(True, True)
    thought.planned(1e-3, None)
    thought.lived(1e-3 / THINKING / 2)
    assert not thought.due()
    thought.urge()
    assert thought.due(), "at once where the last one is some time ago"


def test_what_a_plan_without_guesses_says_of_other_batches() -> None:
    """Of as many requests the same; of more, too, if it was one for newcomers, of whom more are no better."""
    thought = Thought()
    assert not thought.rests(4, True)
    thought.planned(1e-3, 4)
    assert thought.rests(4, False) and thought.rests(5, True)
    assert not thought.rests(5, False) and not thought.rests(3, True)
    thought.planned(1e-3, None)
    assert not thought.rests(4, True)
