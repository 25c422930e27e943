"""How wide trees of guesses are: many nodes a level where rows cost little, few of them where many requests share a pass.

A drafter that is given fewer nodes keeps the likeliest. What that does to the chance that a level has the right token among its
own is not measured for every width: with twice the nodes, misses are taken to be `2 ** -STEEP` times as frequent, and what is
measured of the width in use puts that right.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count, takewhile

import numpy as np

from ..types import Budget
from .costs import CROWD, Costs, Floats, bucket
from .plan import Load, Planner, alike

STEEP = 0.5
"""How misses fall with the number of nodes a level: 15 nodes on 5 levels miss a third less often than 5 on 5 do."""
STAYS = 1.03
"""Another width must promise this much more than the one in use."""
LATELY = 0.9
"""What the mean width of rounds before is worth after one more."""
SOME = 4
"""Plans of batches of one size among which widths are compared once."""


class Trees:
    """The widths of one drafter, whose trees have at most `full` nodes a level; `now`: the one in use. `fixed`: there is no
    other. What was seen of late is told apart for crowds; as long as none were seen, they are believed to be like the others."""

    def __init__(self, full: float, fixed: bool = False) -> None:
        self.full, self.now = full, full
        self._late, self._means, self._mean, self._seen = dict[bool, float](), dict[int, float](), full, full
        narrower = takewhile(lambda width: width < full, (2.0**i for i in count()))
        self.widths = (full,) if fixed else (*narrower, full)
        self._of: dict[int, tuple[float, int]] = {}

    def chain(self, width: float) -> bool:
        """Whether guesses of this width are chains, of a drafter that makes others, too."""
        return width == 1.0 < self.full

    def chains(self, budget: Budget) -> bool:
        """Whether this is what a budget asks such a drafter for: nobody has more nodes than levels."""
        return self.chain(1.0) and budget.any and budget.nodes == budget.depth

    @property
    def linear(self) -> bool:
        """Whether those of the next round are chains."""
        return self.chain(self.now)

    def whole(self) -> None:
        """The next round has as many nodes as there may be."""
        self.now = self.full

    def used(self, batch: int = 1) -> None:
        """A round with guesses of this width, in such a batch."""
        size, crowd = bucket(batch), batch > CROWD
        self._mean = self._late[crowd] = LATELY * self._lately(crowd) + (1 - LATELY) * self.now
        self._means[size] = LATELY * self._means.get(size, self._mean) + (1 - LATELY) * self.now

    def _lately(self, crowd: bool) -> float:
        return self._late.get(crowd, self._late.get(not crowd, self.full))

    def choose(self, load: Load, costs: Costs) -> Planner:
        """The width that promises most for a load, and the arithmetic for it. Batches of other sizes have other widths."""
        size, self._mean = bucket(load.batch), self._lately(load.batch > CROWD)
        self.now, plans = self._of.get(size, (self.full, 0))
        self._seen = self._means.get(size, self._mean) if load.fresh else self._mean  # newcomers were mostly seen in such batches
        due = len(self.widths) > 1 and plans % SOME == 0
        planners = {w: Planner(self._load(load, w), costs) for w in (self.widths if due else (self.now,))}
        if due:
            crowd = load.batch > CROWD  # then a glance has to do: weighing all takes long
            speeds = {w: alike(p.load, costs) if crowd else p.best().speed for w, p in planners.items()}
            self.now = max(speeds, key=lambda w: speeds[w] * (STAYS if w == self.now else 1.0))
        self._of[size] = self.now, plans + 1
        return planners[self.now]

    def _load(self, load: Load, width: float) -> Load:
        """A load measured under the widths of late, as it would be with another one."""
        rows = load.width if width == self._mean else max(1.0, min(load.width * width / self._mean, width))
        return replace(load, accept=_wider(load.accept, width / self._seen), width=rows, chain=self.chain(width))

    def spread(self, accept: Floats) -> Floats:
        """Chances of acceptance `[widths, N]`, of `accept [N]` that were measured under the widths of late, as they would be with
        each width."""
        return _scaled(accept, np.array(self.widths)[:, None] / self._mean)


def _wider(accept: Floats, times: float) -> Floats:
    """Chances of guesses so many times as wide."""
    return accept if times == 1.0 else _scaled(accept, times)


def _scaled(accept: Floats, times: float | Floats) -> Floats:
    return np.asarray((1 - (1 - accept) * times**-STEEP).clip(0.0, 1.0))
