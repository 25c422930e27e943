"""Noticing that a text has turned: from code to prose, from prose to a quotation.

Two cumulative sums (Page 1954) of log-likelihood ratios of first guesses: one for chances that fell to a fraction of what is
believed, one for chances of failure that did. A fading record would need many rounds to follow; after an alarm it starts anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

ALTERED = 0.4
"""What a turn leaves of the chance of success (or of failure)."""
FALL, RISE = 4.5, 3.5
"""Log-likelihood ratios at which a turn is believed: four wrong guesses where 85 % were right, two right ones of 10 %."""
SURE = 0.02
"""Chances are kept this far from 0 and 1."""


@dataclass(slots=True)
class Evidence:
    """A sum that starts anew whenever it falls to nothing; `rounds` and `hits` since it did."""

    alarm: float
    sum: float = 0.0
    rounds: int = 0
    hits: int = 0

    def add(self, ratio: float, hit: bool) -> bool:
        """One more log-likelihood ratio; True for an alarm."""
        self.sum += ratio
        self.rounds += 1
        self.hits += hit
        if self.sum <= 0:
            self.clear()
        return self.sum > self.alarm

    def clear(self) -> None:
        self.sum, self.rounds, self.hits = 0.0, 0, 0


@dataclass(slots=True)
class Turns:
    """Evidence that success has become rarer, and that it has become more frequent."""

    fall: Evidence = field(default_factory=lambda: Evidence(FALL))
    rise: Evidence = field(default_factory=lambda: Evidence(RISE))

    def see(self, chance: float, hit: bool) -> tuple[int, int] | None:
        """One first guess, whose chance was thought to be `chance`. If the text has turned: the rounds since, and the hits among
        them, this one included."""
        p = min(1 - SURE, max(SURE, chance))
        fails = ALTERED * (1 - p)
        falls = self.fall.add(math.log(ALTERED) if hit else math.log((1 - ALTERED * p) / (1 - p)), hit)
        rises = self.rise.add(math.log((1 - fails) / p) if hit else math.log(ALTERED), hit)
        if not (falls or rises):
            return None
        found = self.fall if falls else self.rise
        since = found.rounds, found.hits
        self.fall.clear()
        self.rise.clear()
        return since
