"""How far a drafter may lag behind what the device's ring holds: never further than the ring reaches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.bench import tiny
from outrider.drafters._lags import Lags
from outrider.models.climbs import Asked
from outrider.types import Proposal, Request

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

    def climb(self, asked: Sequence[Asked]) -> object | None:
        assert all(a.states is None and (a.depth, a.nodes) == (1, 1) for a in asked)
        self.asked.append([(a.request.id, a.unread) for a in asked])
        return object() if self.able else None


def made(able: bool = True) -> tuple[Lags, Any, list[Request]]:
    climbs: Any = Climbs(able)
    return Lags(climbs, DEPTH), climbs, [tiny.request([1, 2, 3]) for _ in range(2)]


def guesses(*widths: int) -> Proposal:
    return Proposal.chains([[5] * w for w in widths])


def test_only_who_entered_is_followed() -> None:
    lags, climbs, (one, two) = made()
    lags.enter([one], [7])
    assert one in lags and two not in lags and climbs.marked == {one.id: 7}
    lags.grow([one, two], guesses(2, 2), 4)
    assert two not in lags and lags.unread(one, None) == 3 and lags.unread(one, 2) == 2
    lags.read([one, two])
    assert two not in lags and lags.unread(one, None) == 1, "the last one is read again"
    lags.drop(one)
    assert one not in lags


def test_what_nobody_guesses_for_is_read_before_the_ring_is_full() -> None:
    lags, climbs, (one, two) = made()
    lags.enter([one, two], [3, 3])
    most = 0
    for _ in range(100):
        lags.grow([one, two], guesses(0, 0), 0)
        most = max(most, lags.unread(one, None))
    assert most <= MOST - DEPTH - 1, "another round of guesses must still fit"
    assert len(climbs.asked) == 100 // (MOST - DEPTH) and all(
        n <= MOST for n, _ in ((n, i) for call in climbs.asked for i, n in call)
    )


def test_another_drafters_guesses_may_be_deeper() -> None:
    lags, _, (one, two) = made()
    lags.enter([one, two], [3, 3])
    lags.grow([one, two], guesses(2, 0), 9)  # seven rows are not its own
    assert lags.unread(one, None) == 10 and lags.unread(two, None) == 8


def test_leaving_reads_what_is_left() -> None:
    for able in (True, False):
        lags, climbs, (one, _) = made(able)
        lags.enter([one], [3])
        lags.grow([one], guesses(3), 3)
        assert lags.leave(one) is able and one not in lags and climbs.asked == [[(one.id, 4)]]


def test_a_ring_that_cannot_be_read_is_tried_again() -> None:
    lags, climbs, (one, _) = made(able=False)
    lags.enter([one], [3])
    for _ in range(MOST):
        lags.grow([one], guesses(0), 0)
    assert len(climbs.asked) > 1 and max(n for call in climbs.asked for _, n in call) <= MOST


def test_widths_are_bounds() -> None:
    """A tree may have more nodes than a path has: no path is longer than the drafter looks ahead."""
    lags, _, (one, _) = made()
    lags.enter([one], [3])
    tree = Proposal.trees([[(5, -1), (6, -1), (7, 0), (8, 1), (9, 2)]])
    lags.grow([one], tree, 5)
    assert tree.widths == (5,) and lags.unread(one, None) == DEPTH + 1
    assert torch.equal(tree.sizes, torch.tensor([5]))
