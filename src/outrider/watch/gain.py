"""Does speculation pay, here and now? Rounds with guesses against what plain rounds of the same width were measured to cost."""

from __future__ import annotations

import logging
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
BACK = 1.0
"""What it must come to again before that is taken back."""
log = logging.getLogger("outrider.watch")


class Gain:
    """`speedup`: seconds that plain decoding would have taken for the tokens of late, over those that they took. 1 while nothing
    is known. `plain` is the measured cost of a plain round of one request, in seconds (0: not measured). `losing` is told to the
    log when it begins and when it ends."""

    def __init__(self, plain: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._last = clock, float("-inf")
        self._costs = dict[int, float]()
        self._plain = self._spent = self._rounds = 0.0
        self.losing = False
        self.assume(plain)

    def assume(self, plain: float) -> None:
        """A plain round of one request was measured to take so many seconds; 0 says nothing."""
        if plain > 0:
            self._costs[1] = plain

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
        self._judge()

    @property
    def known(self) -> bool:
        """Whether there is anything to compare."""
        return self._spent > 0

    @property
    def speedup(self) -> float:
        return self._plain / self._spent if self._spent > 0 else 1.0

    @property
    def plain_rate(self) -> float:
        """Tokens per second of plain decoding, one request alone, as last measured; 0 where it was not."""
        return 1 / self._costs[1] if 1 in self._costs else 0.0

    def _judge(self) -> None:
        """Losing begins and ends at different speeds, so that the log is not full of it."""
        if self._rounds < ENOUGH or self.losing == (self.speedup < (BACK if self.losing else NOISE)):
            return
        self.losing = not self.losing
        facts = {"fields": {"speedup": round(self.speedup, 3)}}
        if self.losing:
            log.warning("speculation is losing: %.2f times the speed of plain decoding", self.speedup, extra=facts)
        else:
            log.warning("speculation pays again: %.2f times the speed of plain decoding", self.speedup, extra=facts)

    def _cost(self, width: int) -> float | None:
        """Of a plain round this wide; of the widest one known below it, which can only be cheaper, if need be."""
        below = [w for w in self._costs if w <= width]
        return self._costs[max(below)] if below else None
