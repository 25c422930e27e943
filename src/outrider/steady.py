"""A batch that goes on as it is while rounds are launched ahead of being read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .protocols import Cache
from .types import Batch, Request

SOON = 32
"""Tokens for which memory is taken beforehand, where there is plenty of it."""


@dataclass(slots=True)
class Steady:
    """A batch that writes, round after round, each launched before the one before was read: all that changes is that everybody is
    a token further. `spare` has the tokens that each one's KV memory still holds beside the room for guesses, of which `least` is
    the smallest; `left` is for how many rounds everybody may go on so, whatever comes of the rounds in flight."""

    now: Batch
    spare: list[int]
    least: int
    left: int
    gone: int = 0

    @classmethod
    def of(cls, batch: Batch, cache: Cache) -> Steady | None:
        """Of a batch in which everybody writes; None where somebody is about to end."""
        left = min(request.room - request.flying for request in batch.requests) - 2
        if left < 1:
            return None
        taken = zip(batch.requests, batch.room, strict=True)
        spare = [cache.room(request) - reach(request) - room for request, room in taken]
        return cls(batch, spare, min(spare), left)

    def further(self, cache: Cache) -> bool:
        """Everybody one token on, with memory for it; False where that is no longer all."""
        self.gone += 1
        if self.gone > self.left:
            return False
        if self.gone <= self.least:
            return True
        for b, spare in enumerate(self.spare):  # for those who need it soon, all at once
            if spare >= self.gone + SOON:
                continue
            request = self.now.requests[b]
            at, room = reach(request), self.now.room[b]
            if not cache.reserve(request, soon(request) + room) and not cache.reserve(request, at + room):
                return False
            self.spare[b] = self.gone + cache.room(request) - at - room
        self.least = min(self.spare)
        return True

    def batch(self, queued: bool) -> Batch:
        """The next round's; `requests` is the same object."""
        now = self.now
        return now if queued == now.queued else replace(now, queued=queued)


def reach(request: Request) -> int:
    """Virtual indices that are taken, or may be by the round in flight."""
    return len(request.tokens) + request.flying


def soon(request: Request) -> int:
    """Virtual indices that will be taken before long."""
    return min(reach(request) + SOON, longest(request))


def longest(request: Request) -> int:
    """The most tokens a request can have and still be running."""
    return request.prompt_len + min(request.params.max_tokens, request.limit) - 1
