"""What a round should take, by the tables of costs as they were some rounds ago: reading them takes time."""

from __future__ import annotations

import numpy as np

from .costs import Costs, Floats, grain

LATELY, MOST = 12, 256
"""Rounds for which it is remembered what rounds should take, and kinds of rounds for which it is."""
LEAST = 16
"""Rows and levels that are read at once, at least."""


class Usual:
    """Of one controller, or a drafter that weighs costs itself."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._told = dict[tuple[int, int | None, int, bool], tuple[int, Floats]]()

    def seconds(self, now: int, batch: int, rows: int, drafted: int = 0, deepest: int = 0, chain: bool = False) -> float:
        """Of a round of so many requests and rows, with guesses for `drafted` requests up to `deepest` levels, in round `now`."""
        return float(self.passes(now, batch, rows, chain)[rows] + self._read(now, batch, drafted, deepest, chain)[deepest])

    def passes(self, now: int, batch: int, rows: int, chain: bool = False) -> Floats:
        """Seconds of a pass by its rows, of which there may be so many."""
        return self._read(now, batch, None, rows, chain)

    def _read(self, now: int, batch: int, drafted: int | None, most: int, chain: bool) -> Floats:
        """Of passes by rows (`drafted` is None), or of all beside them by levels. The size of a crowd changes every few
        rounds, so a size a little larger stands for it."""
        size = grain(batch, up=True)
        count = 1 + size if drafted is None and most <= batch else max(LEAST, 1 << most.bit_length())  # plain ones have few
        kind = size, drafted and grain(drafted, up=True), count, chain
        told, seconds = self._told.get(kind, (now - LATELY, None))
        if seconds is None or not 0 <= now - told < LATELY:  # rounds may be counted anew
            if len(self._told) >= MOST:
                self._told.clear()
            seconds = self._table(*kind)
            self._told[kind] = now, seconds
        return seconds

    def _table(self, batch: int, drafted: int | None, count: int, chain: bool) -> Floats:
        costs, sizes = self.costs, np.arange(float(count))
        if drafted is None:
            return costs.verify(batch, sizes, chain)
        guessing = costs.drafts(drafted, sizes, chain) + costs.waits(batch, sizes, chain) if drafted else np.zeros(count)
        return guessing + costs.other(batch)
