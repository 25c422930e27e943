"""What happens while nobody is given guesses: plans are made in the device's time, and trials are priced when they are near."""

from __future__ import annotations

from collections import deque

import pytest

from outrider.bench.simulate import Asks
from outrider.control import Goodput
from outrider.control.costs import bucket
from outrider.types import Batch

from .. import tiny


def batch(size: int, blind: bool = False) -> Batch:
    requests = tuple(tiny.request([1, 2, 3]) for _ in range(size))
    return Batch(requests, (1,) * size, (True,) * size, (4,) * size, blind)


def quiet(size: int) -> Goodput:
    """One whose last plan gave nobody guesses, and that knows what plain rounds take."""
    made = Goodput(Asks(4, 4), lambda: 0.0)
    made.overlaps, made._off = True, True
    made.costs.add_verify(size, size, 1.0)
    made.costs.add_draft(size, 1, 10.0)
    made._book.ask(batch(size), [0] * size)
    return made


@pytest.mark.parametrize("why", ["stale", "turned"])
def test_a_plan_that_is_due_is_made_while_the_device_works(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, plans = quiet(2), list[int]()
    monkeypatch.setattr(made, "_plan", lambda some, limits: plans.append(len(some)))
    assert made.resting
    made.rest(batch(2, blind=True))
    assert not plans, "the plan stands"
    made._stale, made._book.turned = why == "stale", why == "turned"
    assert made.resting, "that is no reason to wait for the round under way"
    made.rest(batch(2, blind=True))
    assert plans == [2]
    made._thought.planned(1.0, bucket(2))
    made.rest(batch(2, blind=True))
    assert plans == [2], "plans have their share of time, and no more"


@pytest.mark.parametrize(("size", "purse", "looks"), [(1, 0.7, False), (1, 0.85, True), (16, 0.85, False), (16, 1.05, True)])
def test_what_a_trial_takes_is_reckoned_when_there_may_be_one(
    size: int, purse: float, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, looked = quiet(size), list[int]()
    made._allowance._prices[bucket(size)] = deque([1.0] * 3, maxlen=7)
    made._allowance._seconds[bucket(size)] = purse
    monkeypatch.setattr(made, "_trial", lambda *some: (looked.append(1), 9.0)[1])
    made._book.round = 100
    assert not made._probe(batch(size), [(0, 4)] * size, [0] * size)
    assert bool(looked) is looks
