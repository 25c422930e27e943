"""Enumeration of everything a randomised function can come to, and Pearson's test for what cannot be enumerated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..accept.plain import Law

T = TypeVar("T")
Word = tuple[int, ...]
Key = tuple[int, ...]


class Chance:
    """One branch of an enumeration: follows `script`, then takes the first way open and lists the others in `open`."""

    def __init__(self, script: Sequence[int], open_: list[tuple[int, ...]]) -> None:
        self.script, self._open = list(script), open_
        self.mass, self._step = 1.0, 0
        self._where: dict[Key, tuple[float, float]] = {}

    def split(self, key: Key, ends: Sequence[float]) -> int:
        """In which of the intervals that end at `ends` (ascending, the last at 1) the uniform called `key` falls."""
        low, high = self._where.get(key, (0.0, 1.0))
        parts = [(max(low, a), min(high, b)) for a, b in zip([0.0, *ends[:-1]], ends, strict=True)]
        if self._step == len(self.script):
            ways = [i for i, (a, b) in enumerate(parts) if b > a]
            self._open += [(*self.script, i) for i in ways[1:]]
            self.script.append(ways[0])
        way = self.script[self._step]
        self._step += 1
        a, b = parts[way]
        self.mass *= (b - a) / (high - low)
        self._where[key] = (a, b)
        return way


def outcomes(run: Callable[[Chance], T]) -> Iterator[tuple[float, T]]:
    """Everything `run` can come to, with its probability."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        chance = Chance(scripts.pop(), scripts)
        value = run(chance)
        yield chance.mass, value


@dataclass(frozen=True)
class Keyed:
    """The `Source` of one round on an enumeration; `round_` keeps rounds apart. Numbers of drafts are keyed alike."""

    chance: Chance
    round_: int

    def below(self, purpose: int, slot: int, share: float, whole: float) -> bool:
        odds = min(max(share / whole, 0.0), 1.0)
        return self.chance.split((self.round_, purpose, slot), [odds, 1.0]) == 0

    def pick(self, purpose: int, slot: int, weights: Law) -> int:
        return self.draw((self.round_, purpose, slot), weights)

    def draw(self, key: Key, weights: Law) -> int:
        ends = list(itertools.accumulate(weights))
        return self.chance.split(key, [*(e / ends[-1] for e in ends[:-1]), 1.0])


@dataclass(frozen=True)
class Worst:
    """A source whose every number is 0: with it, a test that should be strict shows that it is not."""

    def below(self, purpose: int, slot: int, share: float, whole: float) -> bool:
        return share > 0

    def pick(self, purpose: int, slot: int, weights: Law) -> int:
        return next(v for v, w in enumerate(weights) if w > 0)


def tail(statistic: float, degrees: int) -> float:
    """P(chi-squared with `degrees` degrees of freedom >= `statistic`)."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chi_squared(counts: Mapping[Word, int], law: Mapping[Word, float], least: float = 5.0) -> float:
    """P-value of Pearson's test; texts expected fewer than `least` times are taken together. 0 if the impossible was seen."""
    total = sum(counts.values())
    if any(law.get(word, 0.0) <= 0 for word, n in counts.items() if n):
        return 0.0
    cells = [(counts.get(word, 0), total * p) for word, p in law.items() if p > 0]
    rare = [c for c in cells if c[1] < least]
    cells = [c for c in cells if c[1] >= least]
    if rare:
        cells.append((sum(n for n, _ in rare), sum(e for _, e in rare)))
    return tail(sum((n - e) ** 2 / e for n, e in cells), max(len(cells) - 1, 1))
