"""Does speculation pay, here and now? Rounds with guesses against what plain rounds of the same width were measured to cost."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..types import StepEvent

FRESH = 0.1
"""How much a new plain round weighs in the cost of its width."""
FADE = 0.99
"""How much of the past a round with guesses leaves."""
ENOUGH = 20.0
"""Rounds with guesses, about, before losing is called losing."""
NOISE = 0.97
"""A speed-up below this is a loss."""


class Gain:
    """`speedup`: seconds that plain decoding would have taken for the tokens of late, over those that they took. 1 while nothing
    is known. `plain` is the measured cost of a plain round of one request, in seconds (0: not measured)."""

    def __init__(self, plain: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._last = clock, float("-inf")
        self._costs: dict[int, float] = {1: plain} if plain > 0 else {}
        self._plain = self._spent = self._rounds = 0.0

    def observe(self, event: StepEvent) -> None:
        """Learn from a round in which everybody wrote."""
        served = [item for item in event.committed if item.tokens and not item.late]
        now = self._clock()
        seconds, self._last = min(event.seconds, now - self._last), now  # rounds may overlap
        if event.prefill or not served or seconds <= 0:
            return
        width = len(served)
        if not any(item.drafted for item in served):
            known = self._costs.get(width, seconds)
            self._costs[width] = known + FRESH * (seconds - known)
            return
        cost = self._cost(width)
        if cost is None:
            return
        rounds = sum(len(item.tokens) for item in served) / width
        self._plain = FADE * self._plain + rounds * cost
        self._spent = FADE * self._spent + seconds
        self._rounds = FADE * self._rounds + 1

    @property
    def speedup(self) -> float:
        return self._plain / self._spent if self._spent > 0 else 1.0

    @property
    def plain_rate(self) -> float:
        """Tokens per second of plain decoding, one request alone, as last measured; 0 where it was not."""
        return 1 / self._costs[1] if 1 in self._costs else 0.0

    @property
    def losing(self) -> bool:
        return self._rounds >= ENOUGH and self.speedup < NOISE

    def _cost(self, width: int) -> float | None:
        """Of a plain round this wide; of the widest one known below it, which can only be cheaper, if need be."""
        below = [w for w in self._costs if w <= width]
        return self._costs[max(below)] if below else None
