"""Requests whose states a drafter reads from the device's ring (`kernels.ring`): how far it may lag behind, which is all that the
host knows of them while rounds are launched ahead.

A request enters with a captured round, when KV of everything before it is there, and leaves with one that was not captured. What
lies in the ring is read before it is full, even if nobody guesses.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..models.climbs import Asked, Climbs
from ..types import Request

BESIDE = 16
"""Tokens of a round that another drafter's guess may have brought, for one that does not guess alone."""


class Lags:
    """Of one drafter. `reach`: states that a round usually adds at most."""

    def __init__(self, climbs: Climbs, reach: int) -> None:
        self._climbs, self._reach = climbs, reach
        self._of: dict[int, int] = {}
        self._all: Sequence[Request] = ()  # all that are followed, where the last round was theirs
        self._passed = self._spare = 0  # states of such rounds that are not in `_of` yet, and how many more there may be

    def __contains__(self, request: Request) -> bool:
        return request.id in self._of

    def has(self, requests: Sequence[Request]) -> bool:
        """Whether all of them are followed."""
        return (len(self._all) > 0 and requests == self._all) or all(r.id in self._of for r in requests)

    def passed(self, requests: Sequence[Request]) -> bool:
        """Another plain round was launched ahead of being read, for the same requests as the one before. That is all there is to
        note, as long as the ring has room; False where it is not so, and each has to be looked at."""
        if not self._spare or requests != self._all:
            return False
        self._passed, self._spare = self._passed + 1, self._spare - 1
        return True

    def _settle(self) -> None:
        """Book what has passed."""
        if self._passed:
            self._of = {i: n + self._passed for i, n in self._of.items()}
        self._all, self._passed, self._spare = (), 0, 0

    def unread(self, request: Request, known: int | None) -> int:
        """At most how many states the ring holds that were not read; at least one is read again. `known`: what the host knows of
        it, None while a round is in flight."""
        self._settle()
        return max(1, self._most(request, known))

    def _most(self, request: Request, known: int | None) -> int:
        """Of two bounds the lower one: the host does not know what was read in the meantime."""
        return self._of[request.id] if known is None else min(known, self._of[request.id])

    def enter(self, requests: Sequence[Request], upto: Sequence[int]) -> None:
        """From the round under way on, states of these requests are in the ring; all positions below `upto` have KV."""
        if requests:
            self._settle()
            self._climbs.mark(requests, upto)
            self._of |= {r.id: 0 for r in requests}

    def read(self, requests: Sequence[Request]) -> None:
        """All that the ring holds of them was read."""
        self._settle()
        self._of |= {r.id: 0 for r in requests if r.id in self._of}

    def grow(self, requests: Sequence[Request], known: Sequence[int | None], more: Sequence[int]) -> None:
        """A round puts at most `more` states of each of these requests into the ring; `known` as for `unread`, before it."""
        self._settle()
        late = list[Request]()
        for request, before, new in zip(requests, known, more, strict=True):
            if request.id in self._of:
                self._of[request.id] = self._most(request, before) + new
                if self._of[request.id] > self._climbs.most - max(new, self._reach):
                    late.append(request)
        if late and all(n is None for n in known):  # all, which takes no longer: so they are late together the next time
            late = [r for r in requests if r.id in self._of]
        if late and self._read(late):
            self.read(late)
        if len(requests) == len(self._of):
            room = self._climbs.most - max(1, self._reach)
            self._all, self._spare = tuple(requests), max(0, room - max(self._of.values(), default=room))

    def leave(self, requests: Sequence[Request]) -> bool:
        """A round that was not captured: from here on the host knows where these stand, and the ring does not. Whether KV of all
        before is there."""
        self._settle()
        there = not requests or self._read(requests)
        for request in requests:
            del self._of[request.id]
        return there

    def drop(self, request: Request) -> None:
        """Forget a request."""
        self._settle()
        self._of.pop(request.id, None)

    def _read(self, requests: Sequence[Request]) -> bool:
        return self._climbs.read(requests, [Asked(None, max(1, self._of[r.id]), 1, 1) for r in requests])
