"""What a round should take, by the tables of costs as they were some rounds ago: reading them takes time."""

from __future__ import annotations

from .costs import Costs, bucket

LATELY, MOST = 12, 256
"""Rounds for which it is remembered what a round of some shape should take, and shapes for which it is."""


class Usual:
    """Of one controller."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._told = dict[tuple[int, int, int, int, bool], tuple[int, float]]()

    def seconds(self, now: int, batch: int, rows: int, drafted: int = 0, deepest: int = 0, chain: bool = False) -> float:
        """Of a round of so many requests and rows, with guesses for `drafted` requests up to `deepest` levels, in round `now`."""
        shape = bucket(batch), rows, drafted, deepest, chain
        told, seconds = self._told.get(shape, (now - LATELY, 0.0))
        if now - told >= LATELY:
            costs = self._costs
            seconds = costs.plain(batch, rows, chain) + costs.other(batch) + costs.guessing(batch, drafted, deepest, chain)
            if len(self._told) >= MOST:
                self._told.clear()
            self._told[shape] = now, seconds
        return seconds
