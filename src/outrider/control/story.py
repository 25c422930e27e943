"""A controller explains itself: what it did on average, and why it last changed its mind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .plan import Plan, Planner

_QUIET = 1.0
"""Seconds between lines of the log."""


@dataclass(slots=True)
class Story:
    """Counts of what was asked for, and one line per change. `depth`: the mean one that was last told."""

    name: str
    clock: Callable[[], float]
    asked: int = 0
    levels: int = 0
    off: int = 0
    depth: float = -1.0
    reason: str = "nothing was decided yet"
    _spoke: float = float("-inf")

    def count(self, depths: list[int]) -> None:
        """One round's depths of requests that might have looked ahead."""
        self.asked += len(depths)
        self.levels += sum(depths)
        self.off += sum(d == 0 for d in depths)

    def change(self, depth: float, why: Callable[[], str]) -> None:
        """The mean depth is now `depth`. Tells why where that is news: off, on again, or a level more or less."""
        turned = (depth > 0) != (self.depth > 0) or self.depth < 0
        if not turned and abs(depth - self.depth) < 1.0:
            return
        what = "off" if depth == 0 else "on" if self.depth <= 0 else "deeper" if depth > self.depth else "less deep"
        self.reason = f"{what}: {why()}"
        self.depth = depth
        now = self.clock()
        if now - self._spoke >= _QUIET:
            self._spoke = now
            logging.getLogger("outrider.control").info("%s, mean depth %.1f, %s", self.name, depth, self.reason)

    def explain(self) -> str:
        """All of it in one line."""
        if not self.asked:
            return f"{self.name}: {self.reason}"
        mean, off = self.levels / self.asked, self.off / self.asked
        return f"{self.name}: mean depth {mean:.1f}, off in {off:.0%} of rounds; last {self.reason}"


def why(planner: Planner, plan: Plan, gain: float) -> str:
    """The reason for a plan that is expected to bring `gain` times the speed of plain decoding."""
    load = planner.load
    first = float(load.accept[:, 0].mean())
    if any(plan.depths):
        return f"first guess accepted {first:.0%}, {gain:.2f} times plain speed expected"
    one = planner.value(np.minimum(load.high, 1)).speed / plan.speed
    return f"first guess accepted {first:.0%}; with one guess each {one:.2f} times plain speed expected"
