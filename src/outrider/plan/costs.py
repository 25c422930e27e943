"""What the steps of a round cost, in seconds: a table that was measured, which can be written down and read again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..errors import BadInput

Points = tuple[tuple[float, float], ...]
"""(size, seconds), in order of size."""
ENOUGH = 5
"""Samples from which on the slowest one in fifty (at least one) is taken for a stall."""
FAR = 1.5
"""Beyond a measured size by more than this factor, or at another batch, a reading is a guess."""


class Costs(Protocol):
    """Seconds of a round's parts for `batch` requests, and of what comes before the first round of a text."""

    @property
    def measured(self) -> bool: ...
    @property
    def asked(self) -> bool: ...
    def verify(self, batch: int, rows: float) -> float: ...
    def plain(self, batch: int) -> float: ...
    def draft(self, batch: int, depth: float) -> float: ...
    def other(self, batch: int, depth: float) -> float: ...
    def reading(self, batch: int) -> float: ...
    def begin(self, batch: int) -> float: ...
    def nodes(self, batch: int, depth: float) -> float: ...
    def beyond(self, batch: int, depth: float) -> float: ...
    def knows(self, batch: int, rows: float) -> bool: ...


def typical(seconds: Iterable[float]) -> float:
    """The mean without stalls: sums are to be foretold, so the slow half counts as it is."""
    ordered = sorted(seconds)
    if len(ordered) >= ENOUGH:
        ordered = ordered[: len(ordered) - max(1, len(ordered) // 50)]
    return sum(ordered) / len(ordered)


Curves = dict[int, Points]
PARTS = ("verify", "plain", "draft", "other", "reading", "begin", "nodes", "beyond")
RISING = frozenset({"verify", "draft"})
"""More rows and more levels never take less: where few samples say so, it is noise."""


@dataclass(slots=True)
class Samples:
    """Rounds as they were measured: each part by batch and size (see `Table`); `resumed`: rows and seconds of passes that went on
    from states of the draft, by batch and depth."""

    parts: dict[str, dict[tuple[int, int], list[float]]] = field(
        default_factory=lambda: {name: defaultdict(list) for name in PARTS}
    )
    contexts: list[int] = field(default_factory=list)
    resumed: dict[tuple[int, int], list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, part: str, batch: int, size: int, seconds: float) -> None:
        """One measurement."""
        self.parts[part][batch, size].append(seconds)

    def read(self, batch: int, without: Iterable[float]) -> None:
        """What reading took `without` a drafter: what it took more with one, that one's reading took."""
        seen, alone = self.parts["reading"][batch, 0], list(without)
        more = typical(seen) - typical(alone)
        self.parts["begin"][batch, 0] = [b + more for b in self.parts["begin"].get((batch, 0), [0.0])]
        self.parts["reading"][batch, 0] = alone

    def table(self, asked: bool) -> Table:
        """Typical values of all."""
        curves = {name: _curves(found, name in RISING) for name, found in self.parts.items()}
        for batch, ((_, plain),) in curves["plain"].items():  # where none of as many rows was drafted for
            points = dict(curves["verify"].get(batch, ()))
            curves["verify"][batch] = tuple(sorted(({float(batch): plain} | points).items()))
        context = (min(self.contexts), max(self.contexts)) if self.contexts else (0, 0)
        table = Table(curves, asked, context)
        for (batch, depth), passes in sorted(self.resumed.items()):
            more = sum(seconds - table.verify(batch, rows) for rows, seconds in passes) / len(passes)
            curves["beyond"][batch] = (*curves["beyond"].get(batch, ()), (float(depth), more))
        return table


def merged(many: Iterable[Samples]) -> Samples:
    """All of them together."""
    total = Samples()
    for one in many:
        for part, found in one.parts.items():
            for (batch, size), seconds in found.items():
                total.parts[part][batch, size] += seconds
        for key, passes in one.resumed.items():
            total.resumed[key] += passes
        total.contexts += one.contexts
    return total


def _curves(samples: Mapping[tuple[int, int], list[float]], rising: bool = False) -> Curves:
    found: dict[int, list[tuple[float, float, int]]] = defaultdict(list)
    for (batch, size), seconds in sorted(samples.items()):
        found[batch].append((float(size), typical(seconds), len(seconds)))
    curves = {}
    for batch, points in found.items():
        sizes, seconds_, counts = zip(*points, strict=True)
        curves[batch] = tuple(zip(sizes, ascending(seconds_, counts) if rising else seconds_, strict=True))
    return curves


def ascending(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The values that never fall and are nearest to these in weighted squares (pool adjacent violators, Barlow et al. 1972)."""
    blocks = list[tuple[float, float, int]]()
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            before, weighs, many = blocks.pop()
            mean = (before * weighs + mean * total) / (weighs + total)
            total, count = total + weighs, count + many
        blocks.append((mean, total, count))
    return [mean for mean, _, count in blocks for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Table:
    """Measured curves by size of the batch. `verify`: over rows of the pass, in rounds that were drafted for, if there were any
    like it; `plain`: a pass of the others, at 0 (one drafted for in vain may go on from the draft's states); `draft`: over
    levels (`asked` for, else those that were offered); `other`: over the same, 0 for plain rounds; `reading` until the first
    token and `begin` (the drafter's own reading of the prompt) at 0; `nodes`: no seconds, but guesses of a request by levels
    asked for, where they are trees; `beyond`: by levels asked for, what passes that go on from states of the draft take more than
    others of as many rows (or less, as each level spares them something). `context`: shortest and longest text it was measured
    on, in tokens."""

    parts: Mapping[str, Curves]
    asked: bool = True
    context: tuple[int, int] = (0, 0)
    measured: bool = True

    def verify(self, batch: int, rows: float) -> float:
        """A pass over so many rows, of all requests together."""
        return self._read("verify", batch, rows)

    def plain(self, batch: int) -> float:
        """A pass of a round that was not drafted for."""
        return self._read("plain", batch, 0.0) if self.parts.get("plain") else self.verify(batch, batch)

    def draft(self, batch: int, depth: float) -> float:
        """Drafting so many levels for `batch` requests; being asked and staying silent costs something, too."""
        return self._read("draft", batch, depth, anchored=True)

    def other(self, batch: int, depth: float) -> float:
        """The rest of a round. There is a step at 0: plain rounds may be launched ahead."""
        return self._read("other", batch, depth if depth <= 0 else max(depth, self._shallowest(batch)))

    def reading(self, batch: int) -> float:
        """From the request to its first token."""
        return self._read("reading", batch, 0.0)

    def nodes(self, batch: int, depth: float) -> float:
        """Guesses of one request in a pass, where they are trees; 0 where that is not known."""
        return self._read("nodes", batch, depth, anchored=True)

    def beyond(self, batch: int, depth: float) -> float:
        """What a pass takes more or less because of how deep was drafted before it."""
        return self._read("beyond", batch, depth)

    def begin(self, batch: int) -> float:
        """What the first drafting of a text takes more than the others."""
        return max(0.0, self._read("begin", batch, 0.0))

    def knows(self, batch: int, rows: float) -> bool:
        """Whether passes like this were measured, or ones close to it."""
        points = self.parts["verify"].get(batch, ())
        return bool(points) and rows <= FAR * points[-1][0]

    def _read(self, part: str, batch: int, size: float, anchored: bool = False) -> float:
        """Lines between the measured points of the nearest batch, the last slope beyond them, never less than nothing."""
        curves = self.parts.get(part, {})
        if not curves:
            return 0.0
        points = curves[min(curves, key=lambda b: abs(b - batch))]
        points = ((0.0, 0.0), *points) if anchored and points[0][0] > 0 else points
        xs, ys = zip(*points, strict=True)
        if size <= xs[-1] or len(xs) == 1:
            return float(np.interp(size, xs, ys))
        slope = max(0.0, (ys[-1] - ys[0]) / (xs[-1] - xs[0]))
        return float(ys[-1] + slope * (size - xs[-1]))

    def _shallowest(self, batch: int) -> float:
        """The least look-ahead that was measured."""
        curves = self.parts.get("other", {})
        points = curves[min(curves, key=lambda b: abs(b - batch))] if curves else ()
        return min((size for size, _ in points if size > 0), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """For a file: `{part: {batch: [[size, seconds], ...]}}` and how it was measured."""
        curves = {n: {str(b): [list(p) for p in points] for b, points in c.items()} for n, c in self.parts.items()}
        return {**curves, "asked": self.asked, "context": list(self.context)}

    @classmethod
    def of_json(cls, found: Any) -> Table:
        """What `as_json` gave. `BadInput` for anything else."""
        try:
            parts = {name: {int(b): _points(p) for b, p in found.get(name, {}).items()} for name in PARTS}
            low, high = found.get("context", (0, 0))
            table = cls(parts, bool(found.get("asked", True)), (int(low), int(high)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BadInput(f"the measured costs cannot be read ({error!r:.80}); measure again with outrider bench") from None
        if not table.parts["verify"]:
            raise BadInput("the measured costs hold no pass of the model; measure again with outrider bench")
        return table


def _points(rows: Any) -> Points:
    points = tuple(sorted((float(size), float(seconds)) for size, seconds in rows))
    if not points or not all(np.isfinite(v) for p in points for v in p):
        raise ValueError("no finite points")
    return points
