"""How much longer rounds take that wait for the host, told by when they begin."""

from __future__ import annotations

import pytest

from outrider.drafters._beats import HOPED, MOST, Beats


def played(ahead: float, waiting: float, rounds: int = 6, count: int = 1) -> Beats:
    """Rounds launched ahead, then some that wait."""
    beats, now = Beats(), 0.0
    for longer, blind in ((ahead, True), (waiting, False)):
        for _ in range(rounds):
            beats.begin(now, blind, count)
            now += longer
    return beats


def test_what_waiting_costs_is_measured() -> None:
    assert played(1.0, 1.7).ratio == pytest.approx(1.7)
    assert played(2.0, 1.0).ratio == 1.0, "never less"
    assert played(1.0, 90.0).ratio == MOST


def test_too_few_rounds_tell_nothing() -> None:
    assert Beats().ratio == HOPED
    assert played(1.0, 3.0, rounds=3).ratio == HOPED


def test_only_rounds_that_are_alike_are_compared() -> None:
    beats = played(1.0, 1.7)
    for count in (1, 2, 1, 2, 1, 2):
        beats.begin(1000.0 * count, False, count)
    assert beats.ratio == pytest.approx(1.7), "of other batches nothing follows"
    for i in range(9):
        beats.pause()
        beats.begin(1e4 + 50.0 * i, False, 1)
    assert beats.ratio == pytest.approx(1.7), "nor across rounds without guesses"


def test_one_stall_is_no_rule() -> None:
    beats, now = played(1.0, 1.7, rounds=8), 100.0
    for gap in (40.0, 1.7, 1.7, 1.7):
        beats.begin(now, False, 1)
        now += gap
    assert beats.ratio == pytest.approx(1.7)


def test_passes_are_those_of_rounds_alike() -> None:
    """Twelve rounds of each kind, of two rows and of ten. One after another kind began too early, or too late."""
    beats, now = Beats(), 0.0
    assert not beats.timed and not beats.passes(0, True, 1, 9).any()
    for ahead, some, many in ((False, 3.0, 4.0), (True, 1.0, 2.0)):
        for i in range(12):
            beats.begin(now, ahead, 1)
            beats.made(now + 0.5, 1, (2, 10)[i % 2], 0.25)
            now += 0.5 + (some, many)[i % 2]
        passes = beats.passes(0, ahead, 1, 10)
        assert beats.timed and passes[2] == pytest.approx(some - 0.25) and passes[10] == pytest.approx(many - 0.25)
    assert beats.passes(50, False, 1, 10)[2] == pytest.approx(2.75), "as before"


def test_until_a_kind_was_seen_the_other_stands_for_it() -> None:
    beats = Beats()
    for i in range(3):
        beats.begin(2.0 * i, False, 1)
        beats.made(2.0 * i, 1, 5, 0.0)
    assert beats.passes(0, True, 1, 5)[5] == pytest.approx(2.0) == beats.passes(0, False, 1, 5)[5]


def test_replays_are_not_all_of_a_pass_and_pauses_tell_nothing() -> None:
    beats = Beats()
    for i in range(3):
        beats.begin(1.0 * i, True, 1)
        beats.made(1.0 * i, 1, 5, 7.0)
    assert beats.passes(0, True, 1, 5)[5] == pytest.approx(0.5)
    beats.pause()
    beats.begin(99.0, True, 1)
    assert beats.passes(50, True, 1, 5)[5] == pytest.approx(0.5)
