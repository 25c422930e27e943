"""Which guesses are worth their rows: expected tokens per second of the whole batch, maximised (goodput, arXiv:2406.14066).

A guess at depth j of a request is worth its chance to be committed, and costs the rows it is expected to add. For every limit on
the depth (which sets what drafting costs) guesses are admitted in falling order of their chance, and the prefix with the most
tokens per second wins. A request's chances fall with depth, so a prefix is a depth for each request.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from .costs import Costs, Floats, bucket

Ints = NDArray[np.int64]
Way = tuple[int, NDArray[np.intp], int]
"""A limit on depth, guesses in the order in which they are admitted, and how many of them are free."""
MANY = 32
"""Requests from which on not every depth is weighed."""
FREE = 2
"""Requests at most for whom a paced drafter is left to itself; for more, who share a pass, it is told how far to go at most."""


@dataclass(frozen=True, slots=True)
class Load:
    """A round before anyone guesses. `batch` requests share the pass, `ready` of them get a token, with `rows` rows. Of the N
    requests that may look ahead, `accept [N, D]` and `offer [N, D]` are conditional chances by position; `low` and `high [N]`
    bound the depth. A level of guesses is `width` rows. `reach [N, D]`: the chance that a position is offered given that those
    before it were accepted, where it is known apart from `offer` (who offers much mostly knows why). `paced`: the
    drafter itself goes no deeper than it pays, so that it is let or not, and many at once up to a common limit. `chain`: of a
    drafter of trees, guesses are to be chains. `fresh`: nobody has a record
    yet, so that all have the same chances."""

    batch: int
    ready: int
    rows: int
    accept: Floats
    offer: Floats
    low: Ints
    high: Ints
    width: float = 1.0
    reach: Floats | None = None
    paced: bool = False
    chain: bool = False
    fresh: bool = False

    @property
    def free(self) -> bool:
        """Whether the drafter is left to itself, as deep as it may go."""
        return self.paced and self.batch <= FREE


@dataclass(frozen=True, slots=True)
class Plan:
    """A depth for each of the N requests, and the tokens per second expected of it."""

    depths: tuple[int, ...]
    speed: float


class Planner:
    """The arithmetic for one load."""

    def __init__(self, load: Load, costs: Costs) -> None:
        self.load, self.costs = load, costs
        positions = load.accept.shape[1]
        offered = np.cumprod(load.offer, axis=1)
        value = np.minimum(offered, np.cumprod(load.accept * (load.offer if load.reach is None else load.reach), axis=1))
        self._given = np.minimum.accumulate(value / np.maximum(offered, 1e-9), axis=1)  # a prefix has to be a depth
        self._value, self._rows = value.ravel(), offered.ravel()
        self._level, self._levels = np.arange(positions), np.arange(positions + 1.0)
        self._other = costs.other(load.batch)
        self._plans = dict[int, Plan]()

    @cached_property
    def _order(self) -> NDArray[np.intp]:
        """All guesses in falling order of their chance."""
        return np.argsort(-self._given.ravel(), kind="stable")

    @cached_property
    def drafting(self) -> Floats:
        """Seconds `[size classes of those drafted for, D + 1]` that guesses add beside their rows, by depth."""
        classes, load = range(bucket(len(self.load.high)) + 1), self.load
        table = np.stack([self.costs.drafts(1 << k, self._levels, load.chain) for k in classes])
        return table * (self._levels > 0) + self.costs.waits(load.batch, self._levels, load.chain)

    def best(self, open_: Collection[int] | None = None) -> Plan:
        """The depths with most tokens per second, of those that may be used at all (None: any). Forced depths (`low`) are always
        in."""
        high = self.load.high
        if len(high) == 1 and not self.load.low[0]:
            return self._alone(int(high[0]), open_)
        if self._hopeless:
            return self.least
        most = int(high.max(initial=0))
        worth = limits(most, len(high)) if open_ is None else open_
        allowed = sorted(({most} if self.load.free else set(range(1, most + 1))).intersection(worth))
        self._weigh([limit for limit in allowed if limit not in self._plans])
        return max((self.least, *(self._plans[limit] for limit in allowed)), key=lambda plan: plan.speed)

    @cached_property
    def least(self) -> Plan:
        """No more than forced depths."""
        return self.value(self.load.low)

    @cached_property
    def _hopeless(self) -> bool:
        """Whether a glance tells that no guesses pay."""
        return self._even and alike(self.load, self.costs) <= self.least.speed

    def _weigh(self, worth: Sequence[int]) -> None:
        """The best plans with these limits on the depth."""
        ways = {limit: way for limit in worth if (way := self._way(limit)) is not None}
        totals = self._totals([order for _, order, _ in ways.values()])
        self._plans |= dict.fromkeys(worth, self.least)
        self._plans |= {limit: self._along(way, *some) for (limit, way), some in zip(ways.items(), totals, strict=True)}

    @property
    def _even(self) -> bool:
        """Whether there are many of whom nothing is known that would tell them apart."""
        load = self.load
        return load.fresh and len(load.high) > MANY and not load.low.any()

    def value(self, depths: Ints) -> Plan:
        """What given depths are worth."""
        order = np.flatnonzero((self._level < depths[:, None]).ravel())
        [(tokens, seconds)] = self._totals([order])
        deepest, chain = int(depths.max(initial=0)), self.load.chain
        drafting = self.costs.guessing(self.load.batch, int((depths > 0).sum()), deepest, chain)
        return Plan(tuple(depths.tolist()), float(tokens[-1] / (seconds[-1] + drafting)))

    def _alone(self, high: int, open_: Collection[int] | None) -> Plan:
        """One free request: its depths in a row."""
        [(tokens, seconds)] = self._totals([np.arange(high)])
        levels = np.arange(high + 1.0)
        chain = self.load.chain
        speed = tokens / (seconds + self.costs.drafts(1, levels, chain) + self.costs.waits(1, levels, chain))
        if open_ is not None:
            speed = np.where([k == 0 or k in open_ for k in range(high + 1)], speed, 0.0)
        depth = int(speed.argmax())
        return Plan((high if depth and self.load.free else depth,), float(speed[depth]))

    def _way(self, limit: int) -> Way | None:
        """In which order guesses are admitted whose depths are at most `limit`; None where none are free."""
        load = self.load
        forced = (self._level < load.low[:, None]).ravel()
        free = (self._level < np.minimum(load.high, limit)[:, None]).ravel() & ~forced
        chosen = self._order[free[self._order]]
        return (limit, np.concatenate([np.flatnonzero(forced), chosen]), len(chosen)) if len(chosen) else None

    def _along(self, way: Way, tokens: Floats, seconds: Floats) -> Plan:
        """The best plan on the way, of whose prefixes tokens and seconds are known."""
        (limit, order, free), load = way, self.load
        count, positions = load.accept.shape
        chosen, start = order[len(order) - free :], len(order) - free + 1
        deepest = max(limit, int(load.low.max(initial=0)))
        fresh = (chosen % positions == 0) & (load.low[chosen // positions] == 0)
        drafted = int((load.low > 0).sum()) + np.cumsum(fresh)
        size = np.ceil(np.log2(np.maximum(1, drafted))).astype(np.int64)
        speed = tokens[start:] / (seconds[start:] + self.drafting[size, deepest])
        at = int(speed.argmax())
        taken = np.bincount(order[: start + at] // positions, minlength=count)
        if load.paced:
            return self.value(np.where(taken > 0, np.maximum(load.low, np.minimum(load.high, limit)), load.low))
        return Plan(tuple(taken.tolist()), float(speed[at]))

    def _totals(self, orders: Sequence[NDArray[np.intp]]) -> list[tuple[Floats, Floats]]:
        """Expected tokens, and seconds without drafting, of every prefix of the guesses in each of `orders` (the empty one
        first)."""
        if not orders:
            return []
        load, none = self.load, [0.0]
        tokens = [load.ready + np.concatenate([none, np.cumsum(self._value[order])]) for order in orders]
        if load.batch == 1:  # rows are offered or not: an average over pass times, not the time of an average pass
            fulls = [self.costs.verify(1, load.rows + load.width * np.arange(len(o) + 1.0), load.chain) for o in orders]
            pairs = zip(orders, fulls, strict=True)
            passes = [f[0] + np.concatenate([none, np.cumsum(self._rows[order] * np.diff(f))]) for order, f in pairs]
        else:
            rows = [np.concatenate([none, np.cumsum(self._rows[order])]) for order in orders]
            ends = list(accumulate(map(len, rows)))[:-1]
            whole = load.rows + load.width * np.concatenate(rows)
            passes = np.split(self.costs.verify(load.batch, whole, load.chain), ends)
        return [(some, seconds + self._other) for some, seconds in zip(tokens, passes, strict=True)]


def alike(load: Load, costs: Costs) -> float:
    """Tokens per second if all, or some eighths of them, looked as far ahead as pays best, and were like their mean."""
    most = min(load.accept.shape[1], max(1, int(load.high.max(initial=0))))
    levels = np.arange(1.0, most + 1)
    offered = np.cumprod(load.offer.mean(axis=0)[:most])
    reached = load.accept * (load.offer if load.reach is None else load.reach)
    value = np.minimum(offered, np.cumprod(reached.mean(axis=0)[:most]))
    counts = sorted({-(-len(load.high) * part // 8) for part in range(1, 9)})
    each = {bucket(count): costs.drafts(count, levels, load.chain) for count in counts}
    gains, rows = np.cumsum(value), load.width * np.cumsum(offered)
    drafting = np.stack([each[bucket(count)] for count in counts])
    beside = costs.waits(load.batch, levels, load.chain) + costs.other(load.batch)
    many = np.array(counts, dtype=np.float64)[:, None]
    passes = costs.verify(load.batch, (load.rows + many * rows).ravel(), load.chain).reshape(drafting.shape)
    return float(((load.ready + many * gains) / (passes + drafting + beside)).max())


def limits(most: int, requests: int = 1) -> list[int]:
    """Depths worth trying as a limit: all up to 8, then every fourth, and the largest; for many requests, where each takes long
    to weigh, powers of two."""
    few = requests > MANY
    return [d for d in range(1, most + 1) if d == most or (d & (d - 1) == 0 if few else d <= 8 or d % 4 == 0)]
