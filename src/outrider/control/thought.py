"""When to plan: plans take time themselves, of which they may have a share."""

from __future__ import annotations

THINKING, WONDERING, WELCOME, CURIOUS = 0.02, 0.005, 0.05, 0.01
"""Share of time that plans may take: with many requests, or a slow host, they are made less often; while nobody is given guesses;
where somebody is new, who has until then what the last plan gave most requests, or something is amiss; and where somebody is new
while nobody is given guesses."""
QUICK = 1e-3
"""Seconds that a plan takes, about. From one to the next no more than twice as long is believed: a busy machine stalls."""
TASTE = 2
"""Rounds in which it is found out what drafting takes: in the first one the drafter catches up with the text."""
_NOW = float("-inf")


class Thought:
    """Of one drafter. `idle`: the size class of the batch for which the last plan was made, if it gave nobody guesses. Time is
    that of the rounds since the beginning: while nobody asks for anything, nothing is earned."""

    def __init__(self) -> None:
        self._took, self._next, self._ended, self._life = QUICK, _NOW, _NOW, 0.0
        self.idle: int | None = None

    def lived(self, seconds: float) -> None:
        """A round took so long."""
        self._life += seconds

    def due(self, new: bool = False, idle: bool = False) -> bool:
        """Whether a plan may be made; `new`: somebody is; `idle`: the last one for such a batch gave nobody guesses."""
        share = CURIOUS if idle else WELCOME
        return self._life >= (min(self._next, self._ended + self._took / share) if new else self._next)

    def rests(self, size: int, newcomers: bool) -> bool:
        """Whether guesses have little to promise to a batch of this size class: by the last plan, for as many or, if it was one
        for `newcomers`, for fewer."""
        return self.idle is not None and (self.idle == size or (newcomers and self.idle < size))

    def urge(self) -> None:
        """The next one is due at once, unless one was made just now: what that took has its share of time."""
        self._next = min(self._next, self._ended + self._took / WELCOME)

    def planned(self, seconds: float, idle: int | None) -> None:
        """A plan was made in so many seconds; `idle`: for such a batch, and nobody is given guesses."""
        self._took = min(seconds, 2 * max(self._took, QUICK))  # a stall is no price
        self._next = self._life + self._took / (THINKING if idle is None else WONDERING)
        self._ended, self.idle = self._life, idle
