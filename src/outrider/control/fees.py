"""What rounds with guesses cost beyond their drafting and their pass, where plain ones are launched ahead: something once, for
those before and after that cannot be, and something for each.

Guesses in a row share the first part, so it is charged by how many there usually are in a row.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

from .costs import WINDOW, bucket

FEW = 3
"""Rows that tell something: one may have been stalled."""
OLD = 256
"""Rounds without guesses in which one row is forgotten: nobody shall be kept from guessing for good by what it took once."""


@dataclass(frozen=True, slots=True)
class Fee:
    """Seconds: `once` for a row of rounds with guesses, `each` for every one of them; `row`: how many there are in one."""

    once: float
    each: float
    row: float = 1.0

    @property
    def entering(self) -> float:
        """For the first round of a row, its share of what is paid once; those to come are worth theirs."""
        return self.each + self.once / self.row


@dataclass(slots=True)
class Fees:
    """By size class of the batch: rounds in a row, and the seconds that they took altogether beyond their parts."""

    seen: dict[int, deque[tuple[int, float]]] = field(default_factory=dict)
    idle: Counter[int] = field(default_factory=Counter)

    def add(self, batch: int, rounds: int, seconds: float) -> None:
        """So many rounds in a row took so much longer than their parts."""
        self.seen.setdefault(bucket(batch), deque(maxlen=WINDOW)).append((rounds, seconds))

    def pause(self, batch: int) -> None:
        """A round without guesses."""
        size = bucket(batch)
        self.idle[size] += 1
        if self.idle[size] % OLD == 0 and self.seen.get(size):
            self.seen[size].popleft()

    def of(self, batch: int, believed: float) -> Fee:
        """As it was seen in such batches; where little was, as in those of about this size, but no more than is `believed`."""
        size, half = bucket(batch), believed / 2
        known = [k for k, rows in self.seen.items() if len(rows) >= FEW]
        if not known:
            return Fee(half, half)
        nearest = min(known, key=lambda k: abs(k - size))
        found = _fitted(self.seen[nearest])
        return found if nearest == size else Fee(min(half, found.once), min(half, found.each), found.row)


def _fitted(rows: Sequence[tuple[int, float]]) -> Fee:
    """A line through what rows of different lengths took (Theil and Sen); where all are equally long, nobody knows which part is
    which."""
    slopes = [(b - a) / (m - n) for (n, a), (m, b) in combinations(rows, 2) if n != m]
    each = max(0.0, median(slopes) if slopes else median(x / (n + 1) for n, x in rows))
    return Fee(max(0.0, median(x - each * n for n, x in rows)), each, sum(n for n, _ in rows) / len(rows))
