"""When to plan: plans take time themselves, of which they may have a share."""

from __future__ import annotations

THINKING, WONDERING, WELCOME = 0.02, 0.005, 0.1
"""Share of time that plans may take: with many requests, or a slow host, they are made less often; while nobody is given guesses;
and where somebody is new, who has until then what the last plan gave most requests."""
QUICK = 1e-3
"""Seconds that a plan takes, about. From one to the next no more than twice as long is believed: a busy machine stalls."""
TASTE = 2
"""Rounds in which it is found out what drafting takes: in the first one the drafter catches up with the text."""
_NOW = float("-inf")


class Thought:
    """Of one drafter. `idle`: the size class of the batch for which the last plan was made, if it gave nobody guesses. Time is
    that of the rounds since the beginning: while nobody asks for anything, nothing is earned."""

    def __init__(self) -> None:
        self._took, self._next, self._welcome, self._life = QUICK, _NOW, _NOW, 0.0
        self.idle: int | None = None

    def lived(self, seconds: float) -> None:
        """A round took so long."""
        self._life += seconds

    def due(self, hurry: bool = False) -> bool:
        """Whether a plan may be made; `hurry`: somebody is new."""
        return self._life >= (self._welcome if hurry else self._next)

    def urge(self) -> None:
        """The next one is due at once."""
        self._next = _NOW

    def planned(self, seconds: float, idle: int | None) -> None:
        """A plan was made in so many seconds; `idle`: for such a batch, and nobody is given guesses."""
        self._took = min(seconds, 2 * max(self._took, QUICK))  # a stall is no price
        self._next = self._life + self._took / (THINKING if idle is None else WONDERING)
        self._welcome, self.idle = self._life + self._took / WELCOME, idle
