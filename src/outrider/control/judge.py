"""Whether guessing pays, by nothing but the tokens and the whole time of the rounds that were run.

Tables and chances may be wrong in ways nobody thought of. Where rounds with guesses were slower than plain ones although the plan
had just been made anew, guessing rests: longer every time, until it has been seen to pay.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from .costs import bucket

FEW, MANY = 4, 24
"""Rounds that tell something, and those that tell enough."""
LOSING, PAYING = 0.97, 1.02
"""Speed against plain decoding."""
ODD = 3.0
"""A round counts for at most so many times the middle one: the machine stalls now and then."""
REST, LONGEST = 64, 8192
"""Rounds without guesses after a verdict: at first, and at most."""


@dataclass(slots=True)
class Judge:
    """`rest`: rounds that guessing still has to rest; `next`: how many it will the next time; `size`: size class of the batch
    that the last rounds had, which alone this holds for. Rounds of different ones are not compared."""

    rest: int = 0
    size: int = 0
    _heard: int = 0
    next: int = REST
    _short: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=2 * FEW))
    _long: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=2 * MANY))

    def add(self, batch: int, tokens: float, seconds: float, plain: float) -> bool:
        """A round with guesses gave so many tokens; `plain`: tokens per second without guesses. True where the last few were
        slower than that, so that the plan is to be made anew."""
        if bucket(batch) != self.size:
            self.size, self.rest = bucket(batch), 0
            self.renew()
            self._long.clear()
        self._short.append((tokens, seconds))
        self._long.append((tokens, seconds))
        self._heard += 1
        if len(self._long) == 2 * MANY and self._heard % FEW == 0:
            whole = _speed(self._long) / plain
            if whole < LOSING:
                self.rest, self.next = self.next, min(LONGEST, 2 * self.next)
                self.renew()
                self._long.clear()
                return True
            if whole > PAYING:
                self.next = REST
        return len(self._short) >= FEW and _speed(self._short) < LOSING * plain

    def renew(self) -> None:
        """The plan is a new one."""
        self._short.clear()

    def rests(self, batch: int) -> bool:
        """Whether guessing has to rest in a batch of this size."""
        return self.rest > 0 and bucket(batch) == self.size

    def tick(self) -> None:
        """A round without guesses."""
        self.rest = max(0, self.rest - 1)


def _speed(rounds: deque[tuple[float, float]]) -> float:
    most = ODD * median(seconds for _, seconds in rounds)
    return sum(tokens for tokens, _ in rounds) / max(1e-12, sum(min(most, seconds) for _, seconds in rounds))
