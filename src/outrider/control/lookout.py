"""Whether to go on guessing where nothing is right at the moment, because such stretches of a text have ended soon before.

A text that copies does so in stretches. Who stops guessing after each, and is tried again from 1 % of the time, misses most of
the next one. So while rounds with guesses were worth it on the whole, the poor ones among them included, guessing goes on for
some rounds after the last hit.
"""

from __future__ import annotations

from dataclasses import dataclass

KEEP = 0.96
"""What was seen is worth this much after one more round with guesses: a memory of two dozen."""
PAYS = 1.1
"""Speed against plain decoding from which on it was worth it."""
ROUNDS = 20
"""Rounds with guesses after the last one that was right."""


@dataclass(slots=True)
class Lookout:
    """Of one request alone. `seconds` of rounds with guesses, and what plain decoding would have taken for their tokens."""

    seconds: float = 0.0
    plain: float = 0.0
    missed: int = ROUNDS

    def saw(self, hit: bool, seconds: float, plain: float) -> None:
        """A round with guesses."""
        self.seconds, self.plain = KEEP * self.seconds + seconds, KEEP * self.plain + plain
        self.missed = 0 if hit else self.missed + 1

    @property
    def stays(self) -> bool:
        return self.missed < ROUNDS and self.plain > PAYS * self.seconds
