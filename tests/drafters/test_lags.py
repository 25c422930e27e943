"""How far a drafter may lag behind what the device's ring holds: never further than the ring reaches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from outrider.bench import tiny
from outrider.drafters._lags import Lags
from outrider.models.climbs import Asked
from outrider.types import Request

DEPTH, MOST = 3, 16


class Climbs:
    """Notes who was to be read, and how much of it."""

    most = MOST

    def __init__(self, able: bool = True) -> None:
        self.able = able
        self.asked: list[list[tuple[int, int]]] = []
        self.marked: dict[int, int] = {}

    def mark(self, requests: Sequence[Request], upto: Sequence[int]) -> None:
        self.marked |= {r.id: n for r, n in zip(requests, upto, strict=True)}

    def read(self, requests: Sequence[Request], asked: Sequence[Asked]) -> bool:
        assert all(a.states is None for a in asked)
        self.asked.append([(r.id, a.unread) for r, a in zip(requests, asked, strict=True)])
        return self.able


def made(able: bool = True) -> tuple[Lags, Any, list[Request]]:
    climbs: Any = Climbs(able)
    return Lags(climbs, DEPTH + 1), climbs, [tiny.request([1, 2, 3]) for _ in range(2)]


def test_only_who_entered_is_followed() -> None:
    lags, climbs, (one, two) = made()
    lags.enter([one], [7])
    assert one in lags and two not in lags and climbs.marked == {one.id: 7}
    lags.grow([one, two], [None, None], [3, 3])
    assert two not in lags and lags.unread(one, None) == 3 and lags.unread(one, 2) == 2
    lags.grow([one], [None], [2])
    assert lags.unread(one, None) == 5
    lags.grow([one], [1], [2])
    assert lags.unread(one, None) == 3, "what the host knows counts"
    lags.read([one, two])
    assert two not in lags and lags.unread(one, None) == 1, "the last one is read again"
    lags.drop(one)
    assert one not in lags


def test_what_nobody_guesses_for_is_read_before_the_ring_is_full() -> None:
    lags, climbs, (one, two) = made()
    lags.enter([one, two], [3, 3])
    most = 0
    for _ in range(100):
        lags.grow([one, two], [None, None], [1, 1])
        most = max(most, lags.unread(one, None))
    assert most <= MOST - DEPTH - 1, "another round of guesses must still fit"
    assert len(climbs.asked) == 100 // (MOST - DEPTH) and all(
        n <= MOST for n, _ in ((n, i) for call in climbs.asked for i, n in call)
    )


def test_those_who_began_apart_are_read_together_from_then_on() -> None:
    lags, climbs, (one, two) = made()
    lags.enter([one], [3])
    for _ in range(5):
        lags.grow([one], [None], [1])
    lags.enter([two], [3])
    for _ in range(10 * MOST):
        lags.grow([one, two], [None, None], [1, 1])
    assert all([i for i, _ in call] == [one.id, two.id] for call in climbs.asked)
    assert len(climbs.asked) == 1 + (10 * MOST - (MOST - DEPTH - 1 - 5)) // (MOST - DEPTH), "no more often than one alone"


def test_where_the_host_knows_the_texts_the_others_are_not_read_with_one_that_is_late() -> None:
    lags, climbs, (one, two) = made()
    lags.enter([one, two], [3, 3])
    for n in range(2 * MOST):
        lags.grow([one, two], [min(n, MOST), 0], [1, 1])
    assert climbs.asked and all([i for i, _ in call] == [one.id] for call in climbs.asked)


def test_leaving_reads_what_is_left() -> None:
    for able in (True, False):
        lags, climbs, (one, _) = made(able)
        lags.enter([one], [3])
        lags.grow([one], [None], [4])
        assert lags.leave([one]) is able and one not in lags and climbs.asked == [[(one.id, 4)]]


def test_a_ring_that_cannot_be_read_is_tried_again() -> None:
    lags, climbs, (one, _) = made(able=False)
    lags.enter([one], [3])
    for _ in range(MOST):
        lags.grow([one], [None], [1])
    assert len(climbs.asked) > 1


@pytest.mark.parametrize("between", ["nothing", "unread", "other", "drop"])
def test_plain_rounds_that_pass_are_noted_like_those_looked_at_one_by_one(between: str) -> None:
    """The same rounds twice, once by `grow` alone."""
    (short, fast, both), (long, slow, _) = made(), made()
    for lags in (short, long):
        lags.enter(both, [3, 3])
    hurried = 0
    for number in range(200):
        long.grow(both, [None, None], [1, 1])
        if short.passed(tuple(both)):
            hurried += 1
        else:
            short.grow(both, [None, None], [1, 1])
        if number % 7 == 3:
            if between == "unread":
                assert short.unread(both[0], None) == long.unread(both[0], None)
            if between == "other":
                assert not short.passed((both[0],))
                for lags in (short, long):
                    lags.grow(both[:1], [None], [2])
            if between == "drop":
                for lags in (short, long):
                    lags.drop(both[1])
                    assert not lags.has(both) and lags.has(both[:1])
                    lags.enter(both[1:], [3])
        assert fast.asked == slow.asked, number
    assert hurried > 80 and [short.unread(r, None) for r in both] == [long.unread(r, None) for r in both]
