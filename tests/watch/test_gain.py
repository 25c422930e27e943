"""The estimate of what speculation brings, and when it is said to lose."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from outrider.types import Committed, Finish, StepEvent
from outrider.watch.gain import Gain

from .. import tiny


def event(seconds: float, tokens: tuple[int, ...], drafted: int = 0, prefill: int = 0) -> StepEvent:
    """A round in which each request got so many tokens."""
    request = tiny.request([1])
    items = tuple(Committed(request, (5,) * n, (-1,) * n, drafted, max(n - 1, 0), (), (), "", Finish.RUNNING) for n in tokens)
    return StepEvent(items, draft_seconds=0.0, verify_seconds=seconds, seconds=seconds, prefill=prefill, rows=1)


def feed(gain: Gain, clock: list[float], *events: Any) -> None:
    for one in events:
        clock[0] += one.seconds
        gain.observe(one)


@pytest.mark.parametrize(("tokens", "seconds", "want"), [(3, 0.1, 3.0), (2, 0.2, 1.0), (1, 0.125, 0.8)])
def test_speedup(tokens: int, seconds: float, want: float) -> None:
    clock = [0.0]
    gain = Gain(0.1, lambda: clock[0])
    feed(gain, clock, *[event(seconds, (tokens,), drafted=3)] * 50)
    assert gain.speedup == pytest.approx(want) and gain.losing == (want < 0.97) and gain.plain_rate == pytest.approx(10)


def test_plain_rounds_are_learned_by_width_and_prompts_do_not_count() -> None:
    clock = [0.0]
    gain = Gain(0.1, lambda: clock[0])
    assert gain.speedup == 1.0 and not gain.losing
    feed(gain, clock, *[event(0.3, (1, 1, 1))] * 200, event(9.0, (1,), prefill=100))
    feed(gain, clock, *[event(0.3, (2, 2, 2), drafted=2)] * 50)
    assert gain.speedup == pytest.approx(2.0)
    feed(gain, clock, *[event(0.05, (1,))] * 200)
    assert gain.plain_rate == pytest.approx(20)


def test_rounds_that_overlap_are_not_counted_twice() -> None:
    clock = [0.0]
    gain = Gain(0.0, lambda: clock[0])
    for _ in range(300):
        clock[0] += 0.1
        gain.observe(event(0.2, (1,)))  # launched before the last one was read
    assert gain.plain_rate == pytest.approx(10, rel=1e-3)


def test_losing_is_told_once_when_it_begins_and_once_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    gain = Gain(0.1, lambda: clock[0])
    assert not gain.known
    with caplog.at_level(logging.INFO, "outrider.watch"):
        feed(gain, clock, *[event(0.2, (1,), drafted=3)] * 60)
        assert gain.losing and gain.known
        feed(gain, clock, *[event(0.1, (3,), drafted=3)] * 300)
    assert not gain.losing
    lost, back = caplog.records
    assert "losing: 0.50 times" in lost.getMessage() and "pays again" in back.getMessage()
    assert lost.fields["speedup"] == 0.5  # type: ignore[attr-defined]
