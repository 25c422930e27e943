"""Notices that acceptance has changed by more than noise.

First guesses are counted in blocks. Each block's share of hits is compared with all blocks before it: standardised by their mean,
spread and correlation from block to block (texts have easy and hard stretches), and turned into a normal deviate as if its spread
were known (Hawkins 1987, self-starting cumulative sums; Wallace 1959 for the transformation; Alwan and Roberts 1988 for
correlated series). Two cumulative sums (Page 1954), one for falls and one for rises, raise the alarm; then all begins anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

BLOCK = 16
"""First guesses per block."""
WARM = 12
"""Blocks before anything can be told."""
ALLOWED = 0.5
"""Standard deviations by which blocks may stray for nothing."""
ALARM = 9.0
"""Sum at which a change is believed."""
RARE = 1 / 32
"""Share of hits, or of misses, below which blocks are thought to spread no less: one miss after thousands of hits is no news."""
MOST_CORRELATED = 0.8
"""Correlation between blocks that is believed at most."""


@dataclass(frozen=True, slots=True)
class Change:
    """An alarm: shares of first guesses that were right, before and since, and how many first guesses ago it began."""

    before: float
    after: float
    since: int


@dataclass(slots=True)
class _Sum:
    """A cumulative sum; blocks and their shares since it was last nothing."""

    value: float = 0.0
    blocks: int = 0
    total: float = 0.0

    def add(self, step: float, share: float) -> bool:
        self.value += step
        self.blocks += 1
        self.total += share
        if self.value <= 0:
            self.value, self.blocks, self.total = 0.0, 0, 0.0
        return self.value > ALARM


@dataclass(slots=True)
class _Record:
    """Running moments of the blocks' shares (Welford), and of neighbours."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    last: float = 0.0

    def add(self, share: float) -> None:
        self.count += 1
        off = share - self.mean
        self.mean += off / self.count
        self.squares += off * (share - self.mean)
        self.products += (share - self.mean) * self.last
        self.last = share - self.mean

    def deviate(self, share: float) -> float:
        """The next share as a normal deviate. Its spread is never believed to be smaller than that of independent guesses."""
        n = self.count
        chance = min(1 - RARE, max(RARE, (self.mean * n * BLOCK + 1) / (n * BLOCK + 2)))
        variance = max(self.squares / (n - 1), chance * (1 - chance) / BLOCK)
        alike = min(MOST_CORRELATED, max(0.0, self.products / self.squares)) if self.squares > 0 else 0.0
        scale = math.sqrt(variance * (1 - alike**2) * (n + 1) / n)
        return _normal((share - self.mean - alike * self.last) / scale, n - 1)


def _normal(t: float, freedom: int) -> float:
    """The normal deviate as rare as Student's `t` with so many degrees of freedom (Wallace 1959)."""
    size = (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(t * t / freedom))
    return math.copysign(size, t)


@dataclass(slots=True)
class Drift:
    """`see` takes first guesses, right or wrong, in order. `alarms` counts changes."""

    alarms: int = 0
    _tests: int = 0
    _hits: int = 0
    _record: _Record = field(default_factory=_Record)
    _fall: _Sum = field(default_factory=_Sum)
    _rise: _Sum = field(default_factory=_Sum)

    def see(self, hit: bool) -> Change | None:
        """One first guess. A `Change` at the moment when it is believed."""
        self._tests += 1
        self._hits += hit
        if self._tests < BLOCK:
            return None
        share, self._tests, self._hits = self._hits / BLOCK, 0, 0
        record = self._record
        if record.count >= WARM:
            off = record.deviate(share)
            fell, rose = self._fall.add(-off - ALLOWED, share), self._rise.add(off - ALLOWED, share)
            if fell or rose:
                return self._alarm(self._fall if fell else self._rise, share)
        record.add(share)
        return None

    def _alarm(self, found: _Sum, share: float) -> Change:
        """What changed; the record begins anew."""
        record = self._record
        since = found.blocks - 1  # of them in the record
        before = (record.mean * record.count - (found.total - share)) / (record.count - since) if record.count > since else share
        change = Change(before, found.total / found.blocks, found.blocks * BLOCK)
        self.alarms += 1
        self._record, self._fall, self._rise = _Record(), _Sum(), _Sum()
        return change
