"""Requests whose states a drafter reads from the device's ring (`kernels.ring`): how far it may lag behind, which is all that the
host knows of them while rounds are launched ahead.

A request enters with a captured round, when KV of everything before it is there, and leaves with one that was not captured. What
lies in the ring is read before it is full, even if nobody guesses.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..models.climbs import Asked, Climbs
from ..types import Proposal, Request


class Lags:
    """Of one drafter, which looks at most `depth` tokens ahead."""

    def __init__(self, climbs: Climbs, depth: int) -> None:
        self._climbs, self._depth = climbs, depth
        self._of: dict[int, int] = {}

    def __contains__(self, request: Request) -> bool:
        return request.id in self._of

    def unread(self, request: Request, known: int | None) -> int:
        """At most how many states the ring holds that were not read; at least one is read again. `known`: such a bound of the
        host's, if it has one."""
        lag = self._of[request.id]
        return max(1, lag if known is None else min(lag, known))

    def enter(self, requests: Sequence[Request], upto: Sequence[int]) -> None:
        """From the round under way on, states of these requests are in the ring; all positions below `upto` have KV."""
        if requests:
            self._climbs.mark(requests, upto)
            self._of |= {r.id: 0 for r in requests}

    def read(self, requests: Sequence[Request]) -> None:
        """All that the ring holds of them was read."""
        self._of |= {r.id: 0 for r in requests if r.id in self._of}

    def grow(self, requests: Sequence[Request], proposal: Proposal, rows: int) -> None:
        """A round with `rows` rows of guesses in all, among them the drafter's own `proposal`, puts states of these requests into
        the ring. Another's guesses may be deeper."""
        others, late = rows - sum(proposal.widths), []
        for request, width in zip(requests, proposal.widths, strict=True):
            if request.id in self._of:
                self._of[request.id] += 1 + (min(width, self._depth) if others <= 0 else width + others)
                if self._of[request.id] > self._climbs.most - self._depth - 1:
                    late.append(request)
        if late and self._read(late):
            self.read(late)

    def leave(self, request: Request) -> bool:
        """A round that was not captured: from here on the host knows where the request stands, and the ring does not. Whether
        KV of all before is there."""
        there = self._read([request])
        del self._of[request.id]
        return there

    def drop(self, request: Request) -> None:
        """Forget a request."""
        self._of.pop(request.id, None)

    def _read(self, requests: Sequence[Request]) -> bool:
        most = self._climbs.most
        asked = [Asked(r, None, max(1, min(self._of[r.id], most)), 1, 1) for r in requests]
        return self._climbs.climb(asked) is not None
