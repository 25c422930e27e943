"""Rounds of a panel that go on as the ones before them: the same model guesses as it did, launched ahead of what it brings.

Looking at what became of guesses takes the host longer than asking for them, and all that it does in a round should fit into the
device's time for one. So once two such rounds in a row were alike, of some that follow nothing is learned, then of one all: what
a text is like is seen as well from one round in a few.
"""

from __future__ import annotations

from typing import NamedTuple

from ..types import Batch, Budget, Request
from ._members import Member

LIGHT = 10
"""Rounds of which nothing is learned, after two in a row that were alike, or one like those before it."""
TWICE = 4
"""Of so many times once two are looked at: what a round takes is the time from one to the next."""


class Like(NamedTuple):
    """A round in which one member's guesses were all there was: what the panel was asked for, the member, what that was asked
    for, and how many levels it went."""

    requests: tuple[Request, ...]
    budget: Budget
    member: Member
    asked: Budget
    levels: int

    def same(self, other: Like | None) -> bool:
        """Whether another one was for the same requests, and no different."""
        return other is not None and self.requests is other.requests and self[1:] == other[1:]

    def deeper(self, other: Like | None) -> bool:
        """Whether it was no different from another one, except that one level more was asked for."""
        if other is None or self.requests is not other.requests or self[1:3] != other[1:3]:
            return False
        return all(0 <= a - b <= 1 for a, b in zip(self.asked.depth, other.asked.depth, strict=True))


class Alike:
    """What the last round was like, and how many more may go on as it did."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The next round is none that goes on."""
        self._last: Like | None = None
        self._learned = self._left = self._times = 0

    def note(self, like: Like | None, tried: bool = False) -> None:
        """A round of which all is learned; None where no other can go on as it did. One level more that is only `tried` does not
        keep others from going on as before."""
        if tried and like is not None and like.deeper(self._last):
            return
        self._learned = self._learned + 1 if like is not None and like.same(self._last) else 1
        self._last, self._left = like, LIGHT if like is not None and self._learned > 1 else 0
        self._times += self._left > 0

    def again(self, batch: Batch, budget: Budget) -> Like | None:
        """The last round, if this one is to go on as it did."""
        like = self._last
        if like is None or not self._left or not batch.blind or batch.requests is not like.requests or budget != like.budget:
            return None
        self._left, self._learned = self._left - 1, int(self._times % TWICE > 0)
        return like
