"""Whether the host has time to look at what would be guessed: what a look takes, against the time in which it only waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from .costs import bucket

IDLE, SHARE = 0.5, 0.01
"""Looking may take this share of the time in which the host waits for the device, or of all time where it never does."""
FEW = 4
"""Requests that are looked at before it is known what a look takes."""
ENOUGH, LAST = 8, 31
"""Looks, or rounds, after which that is known; and how many are remembered."""
LATER, LATEST = 32, 1024
"""Refusals after which it is found out anew: at first, and at most."""


def _some() -> deque[float]:
    return deque(maxlen=LAST)


@dataclass(slots=True)
class Pace:
    """Seconds of a `look` at one text that was looked at before; by size class of the batch those of rounds (`walls`), and of the
    waiting in them (`waits`)."""

    look: deque[float] = field(default_factory=_some)
    walls: dict[int, deque[float]] = field(default_factory=dict)
    waits: dict[int, deque[float]] = field(default_factory=dict)
    refused: int = 0
    later: int = LATER

    def heard(self, size: int, wall: float, waited: float) -> None:
        """A round of so many requests."""
        self.walls.setdefault(bucket(size), _some()).append(wall)
        self.waits.setdefault(bucket(size), _some()).append(waited)

    def looked(self, seconds: float) -> None:
        """What one look took."""
        self.look.append(seconds)

    @property
    def known(self) -> bool:
        """Whether it is known what a look takes."""
        return len(self.look) >= ENOUGH

    def looks(self, count: int) -> float:
        """Seconds of looking at so many texts; 0 while nothing is known."""
        return count * median(self.look) if self.look else 0.0

    def spare(self, size: int) -> float:
        """Seconds for looking in a round of so many requests; 0 where none was heard of."""
        walls, waits = (of.get(bucket(size), ()) for of in (self.walls, self.waits))
        return max(IDLE * median(waits), SHARE * median(walls)) if walls and waits else 0.0

    def affords(self, size: int, turns: int = 1) -> bool:
        """Whether there is time to look at so many texts in so many rounds, a part of them in each."""
        if not self.known or len(self.walls.get(bucket(size), ())) < ENOUGH:
            return size <= FEW
        if self.looks(size) <= turns * self.spare(size):
            self.later = LATER
            return True
        self.refused += 1
        if self.refused >= self.later:  # machines have slow moments
            self.refused, self.later = 0, min(LATEST, 2 * self.later)
            self.look.clear()
        return False
