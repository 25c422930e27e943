"""What trying again may cost: an allowance that grows with time and is spent on trials."""

from __future__ import annotations

from collections import deque

from .costs import bucket, robust

Prices = dict[int, deque[float]]

SHARE = 0.01
"""Of all time, for trials of requests that are off."""
GAP = 8
"""Rounds between two trials of one request, unless the last one paid for itself."""
AS_DEAR = 1.08
"""A trial goes as deep as its round takes no more than this many times what the least would: a hit that is long is to be seen."""
CALM, STALL = 8, 0.05
"""Trials without a stall after which one is chance, and the seconds that are charged at most where it is none."""
MOST = 0.1
"""How far the allowance grows, as a multiple of a usual trial's price beyond one."""


class Allowance:
    """Seconds that may be spent on trials. A trial is charged what it really took, so a slow drafter is tried seldom. `prices`:
    what trials took lately, by size class of the batch, which outlives a controller."""

    def __init__(self, prices: Prices | None = None) -> None:
        self._seconds, self._price = 0.0, 0.0
        self._prices: Prices = {} if prices is None else prices
        self._calm = CALM  # trials since one was stalled
        self._fresh = False

    @property
    def any(self) -> bool:
        return self._seconds > 0

    @property
    def ripe(self) -> bool:
        """Whether there is enough for another trial like the last ones."""
        return self._seconds > 0 and self._seconds >= self._price

    def earn(self, seconds: float) -> None:
        """A round took so long. Nothing is saved up beyond one trial and a little."""
        self._seconds = min(self._seconds + SHARE * seconds, max((1 + MOST) * self._price, SHARE * seconds))

    def affords(self, price: float, batch: int = 1) -> bool:
        """Whether there is enough for a trial in such a batch that should cost `price`; trials so far may say that it will cost
        more."""
        known = self._prices.get(bucket(batch), ())
        self._price = max(price, robust(known) if len(known) > 2 else 0.0)
        return self._seconds >= self._price

    def owe(self, seconds: float) -> None:
        """A trial that nobody could know the price of."""
        self._seconds -= seconds

    def pay(self, extra: float, gain: float, stalled: bool = False, batch: int = 1) -> None:
        """A trial in such a batch took `extra` seconds and brought tokens worth `gain`. A stall is no price: at most
        twice what was expected is charged at once (and more is expected next time, if trials go on to cost more); but where every
        few trials are `stalled`, they pay for it."""
        most = STALL if stalled and self._calm < CALM else 0.0
        self._calm = 0 if stalled else self._calm + 1
        self._note(min(extra, 2 * self._price) if stalled else extra, batch)
        self._spend(extra, gain, most)

    def wait(self, seconds: float, batch: int = 1) -> None:
        """A plain round took so much longer, for the last trial's sake if it is the first after it."""
        known = self._prices.get(bucket(batch))
        if known and self._fresh:
            known[-1] += max(0.0, seconds)
        self._fresh = False
        self._spend(seconds, 0.0, 0.0)

    def _note(self, extra: float, batch: int) -> None:
        self._prices.setdefault(bucket(batch), deque(maxlen=7)).append(max(0.0, extra))
        self._fresh = True

    def _spend(self, extra: float, gain: float, most: float) -> None:
        self._seconds -= max(0.0, min(extra, max(most, 2 * self._price)) - gain)


def halves(most: int) -> list[int]:
    """So many, half as many, ..., one."""
    return [most >> i for i in range(most.bit_length())]
