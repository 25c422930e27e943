"""What trying again may cost: an allowance that grows with time and is spent on trials."""

from __future__ import annotations

from collections import defaultdict, deque

from .costs import bucket, robust

Prices = dict[int, deque[float]]
Purse = defaultdict[int, float]

SHARE = 0.01
"""Of all time, for trials of requests that are off."""
GAP = 8
"""Rounds between two trials of one request, unless the last one paid for itself."""
AS_DEAR = 1.08
"""A trial goes as deep as its round takes no more than this many times what the least would: a hit that is long is to be seen."""
TRIED = 8
"""Requests that are tried in one round at most: so many tell enough, and looking which of them to try takes time."""
SPARSE = 4
"""While nobody is given guesses in a large batch, one plain round in so many tells what they take, and every text is looked at in
one of so many."""
CALM, STALL = 8, 0.05
"""Trials without a stall after which one is chance, and the seconds that are charged at most where it is none."""
NEAR = 0.8
"""Share of a trial's price below which nobody asks the tables whether one has become cheaper: that takes time in every round."""
MOST = 0.1
"""How far the allowance grows, as a multiple of a usual trial's price beyond one."""


class Allowance:
    """Seconds that may be spent on trials, a purse for every size class of the batch. A trial is charged what it really took,
    so a slow drafter is tried seldom. `prices`, what trials took lately by size class, and the `purse` outlive a controller: in
    a few short texts none may earn a dear trial."""

    def __init__(self, prices: Prices | None = None, purse: Purse | None = None) -> None:
        self._seconds = Purse(float) if purse is None else purse
        self._prices: Prices = {} if prices is None else prices
        self._expected = dict[int, float]()
        self._calm = CALM  # trials since one was stalled
        self._fresh: int | None = None
        self._since, self._pair = 0, False  # rounds since a trial, and whether it was the second of two

    def price(self, batch: int) -> float:
        """Seconds that a trial in such a batch will take, as was expected of the last one, or as was seen."""
        known = self._prices.get(bucket(batch), ())
        return max(self._expected.get(bucket(batch), 0.0), robust(known) if len(known) > 2 else 0.0)

    def ripe(self, batch: int, share: float = 1.0) -> bool:
        """Whether there is enough for another trial like the last ones in such batches, or for so large a share of one."""
        return self._seconds[bucket(batch)] > 0 and self._seconds[bucket(batch)] >= share * self.price(batch)

    def earn(self, seconds: float, batch: int = 1) -> None:
        """A round of such a batch took so long. Nothing is saved up beyond one trial and a little."""
        self._since += 1
        most = max((1 + MOST) * self.price(batch), SHARE * seconds)
        self._seconds[bucket(batch)] = min(self._seconds[bucket(batch)] + SHARE * seconds, most)

    def affords(self, price: float, batch: int = 1) -> bool:
        """Whether there is enough for a trial in such a batch that should cost `price`; trials so far may say that it will cost
        more."""
        self._expected[bucket(batch)] = price
        return self._seconds[bucket(batch)] >= self.price(batch)

    def owe(self, seconds: float, batch: int = 1) -> None:
        """A trial that nobody could know the price of."""
        self._seconds[bucket(batch)] -= seconds

    def pay(self, extra: float, gain: float, stalled: bool = False, batch: int = 1, joined: bool = False) -> None:
        """A trial in such a batch took `extra` seconds and brought tokens worth `gain`. A stall is no price: at most
        twice what was expected is charged at once (and more is expected next time, if trials go on to cost more); but where every
        few trials are `stalled`, they pay for it. One launched before the last was told is `joined` to it: both together are what
        trying takes."""
        most = STALL if stalled and self._calm < CALM else 0.0
        self._calm = 0 if stalled else self._calm + 1
        self._spend(extra, gain, most, batch)
        seconds = max(0.0, min(extra, 2 * self.price(batch)) if stalled else extra)
        known = self._prices.setdefault(bucket(batch), deque(maxlen=7))
        self._pair = joined and not self._pair and self._fresh == bucket(batch) and self._since == 1
        if self._pair:
            known[-1] += seconds
        else:
            known.append(seconds)
        self._fresh, self._since = bucket(batch), 0

    def wait(self, seconds: float, batch: int = 1) -> None:
        """A plain round took so much longer, for the last trial's sake if it is the first after it."""
        if self._fresh == bucket(batch):
            self._prices[self._fresh][-1] += max(0.0, seconds)
        self._fresh = None
        self._spend(seconds, 0.0, 0.0, batch)

    def _spend(self, extra: float, gain: float, most: float, batch: int) -> None:
        self._seconds[bucket(batch)] -= max(0.0, min(extra, max(most, 2 * self.price(batch))) - gain)


def halves(most: int) -> list[int]:
    """So many, half as many, ..., one."""
    return [most >> i for i in range(most.bit_length())]
