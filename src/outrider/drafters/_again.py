"""A round with guesses that is like the one before it: nothing is told to the device but to do the same once more.

With many requests it takes the host longer to look at each than it takes the device to guess for all. Between two rounds that
were launched ahead of being read, with the same requests and the same budget, the host learns nothing that guessing needs.
"""

from __future__ import annotations

from typing import NamedTuple

from ..models.climbs import Climbs
from ..types import Batch, Budget, Proposal, Request

ROUNDS = 16
"""Rounds in a row that may be so; in the one after them all is looked at again."""


class Like(NamedTuple):
    """A round that may be repeated."""

    requests: tuple[Request, ...]
    budget: Budget
    proposal: Proposal


class Again:
    """Of a drafter that guesses by `climbs`, if it does so at all."""

    def __init__(self, climbs: Climbs | None) -> None:
        self._climbs = climbs
        self._like: Like | None = None
        self._left, self._repeated = 0, False

    def repeat(self, batch: Batch, budget: Budget) -> Proposal | None:
        """The guesses of a round that is like the last, launched; None where it is not."""
        like, self._repeated = self._like, False
        if like is None or self._climbs is None or not batch.blind or batch.requests is not like.requests or not self._left:
            return None
        if budget.depth != like.budget.depth or budget.nodes != like.budget.nodes:
            return None
        if not self._climbs.repeat(like.requests, 1 + max(like.budget.nodes)):
            return None
        self._left, self._repeated = self._left - 1, True
        return like.proposal

    def note(self, batch: Batch, budget: Budget, proposal: Proposal, whole: bool) -> Proposal:
        """A round that was not; `whole`: one climb guessed for all its requests from the ring."""
        self._like = Like(batch.requests, budget, proposal) if whole and batch.blind else None
        self._left = ROUNDS
        return proposal

    def passed(self, batch: Batch, proposal: Proposal, captured: bool) -> bool:
        """Told of every round: whether it was such a repetition, after which things stand as they did after the round before.
        None is one in which others guessed, who may bring more tokens: they show another proposal than its own."""
        like = self._like
        if like is None or proposal is not like.proposal or not captured or not batch.blind:
            self._like = None
            return False
        return self._repeated

    def read(self, request: Request) -> int:
        """Below which position a request has KV for certain, as far as repetitions know: what the last round but one brought."""
        like = self._like
        if like is None or self._left == ROUNDS or request not in like.requests:
            return 0
        return max(0, len(request.tokens) - 2 - max(like.budget.nodes))

    def forget(self) -> None:
        """Somebody is gone."""
        self._like = None
