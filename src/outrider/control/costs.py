"""What a round costs, in seconds, learned from the rounds that were run: tables of medians, with lines in between.

Verifying n rows for B requests is a curve over n, one per size class of B; drafting K levels is a curve over K that begins at
nothing. Points that were seen are robust means of their last few samples; between them lines are drawn; beyond them the fitted
line `a + b * size` goes on. What was measured long ago moves with what is measured now (a growing context or a busy machine slows
all sizes alike), so that comparisons between sizes stay fair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Mean = Callable[[Sequence[float]], float]

WINDOW = 24
MANY = 16
"""Samples of which the larger ones are no chance."""
CROWD = 8
"""Requests beyond which a batch is a large one: it seldom stays as it is, and looking at each takes time."""
FIRM = 24
"""Samples of a size before its changes are taken for those of all sizes: until then they are its own noise settling."""
OLD = 2000
"""Samples of a curve after which a size that was not met again is forgotten."""
DOUBT = 1.25
"""A single sample counts for at most this much of what its neighbours let expect: first passes of a shape are slow."""
HOPE = 0.1
"""Share of the rise between two sizes that is believed to come before the larger one is almost reached."""
ALIKE = 4.0
"""Samples that the line through all depths is worth where one depth is measured."""
DAMPED, STILL = 0.5, 0.0
"""Exponent of a change of one size, for others, on a device whose passes take what they take; and where others stay the same."""
LIKE = 4.0
"""Times that a curve may lie above or below the one whose shape it borrows."""
REACH = 1.2
"""Times the largest size of a curve that another's must be to tell what lies beyond."""
SLOPE = 0.02
"""Share that one more row is believed to add to a pass before there is more than one size to compare."""


def robust(values: Iterable[float]) -> float:
    """The mean of the middle half; the least of one or two, since what disturbs a measurement makes it longer."""
    ordered = sorted(values)
    if len(ordered) < 3:
        return ordered[0]
    cut = max(1, len(ordered) // 4)
    middle = ordered[cut:-cut]
    return sum(middle) / len(middle)


def frequent(values: Sequence[float]) -> float:
    """The mean of all but the largest eighth: what happens often counts, though it be the lesser part, and a stall does not. Of
    few, as `robust`."""
    if len(values) < MANY:
        return robust(values)
    few = sorted(values)[: len(values) - len(values) // 8]
    return sum(few) / len(few)


def grain(size: int, up: bool = False) -> int:
    """Sizes that share a cell: exact up to 16, then eight to an octave, the nearest or (`up`) the next."""
    if size <= 16:
        return size
    step = 1 << (size.bit_length() - 4)
    return (size + (step - 1 if up else step // 2)) // step * step


def bucket(batch: int) -> int:
    """Size class of a batch: 1, 2, 3 to 4, 5 to 8, ..."""
    return max(0, batch - 1).bit_length()


@dataclass(slots=True)
class Cell:
    """Samples of sizes near `size`, their mean; `drift` is the curve's when they were last up to date."""

    samples: deque[float] = field(default_factory=lambda: deque[float](maxlen=WINDOW))
    drift: float = 1.0
    met: int = 0
    value: float = 0.0
    size: float = 0.0

    def add(self, size: int, seconds: float, drift: float, mean: Mean) -> float:
        """Take in a sample; by which factor the value, their `mean`, moved."""
        if drift != self.drift:
            factor = drift / self.drift
            self.samples = deque((s * factor for s in self.samples), maxlen=WINDOW)
            self.value *= factor
        before, firm = self.value, len(self.samples) >= FIRM
        self.samples.append(seconds)
        self.size += (size - self.size) / len(self.samples)
        self.value, self.drift = mean(self.samples), drift
        return min(1.25, max(0.8, self.value / before)) if firm and before > 0 else 1.0


class Curve:
    """Seconds by size. `anchored`: size 0 takes no time; `mean`: of the samples of one size."""

    def __init__(self, anchored: bool = False, mean: Mean = robust) -> None:
        self.anchored, self.mean = anchored, mean
        self.cells: dict[int, Cell] = {}
        self.drift, self._met = 1.0, 0
        self._points: tuple[Floats, Floats] | None = None

    def add(self, size: int, seconds: float, moves: float = 1.0) -> float:
        """One measurement of a size; if it has changed, others have, too: by that change to the power of `moves`, which is
        returned."""
        self._met += 1
        cell = self.cells.setdefault(grain(size), Cell(drift=self.drift))
        cell.met = self._met
        moved: float = cell.add(size, seconds, self.drift, self.mean) ** moves
        self.drift *= moved
        cell.drift, self._points = self.drift, None
        if self._met % 64 == 0:
            self.cells = {key: c for key, c in self.cells.items() if self._met - c.met < OLD}
        return moved

    def move(self, factor: float) -> None:
        """All that was measured before takes so many times as long now."""
        self.drift *= factor
        if self._points is not None:
            self._points = self._points[0], self._points[1] * factor

    def points(self) -> tuple[Floats, Floats]:
        """Sizes seen and their seconds, in order of size."""
        if self._points is None:
            start = [(0.0, 0.0, 1e9)] if self.anchored else []
            cells = [(c.size, c.value * self.drift / c.drift, len(c.samples)) for c in self.cells.values()]
            firm = start + sorted((x, y, float(n)) for x, y, n in cells if n > 1)
            loose = [(x, y, 1.0) for x, y, n in cells if n == 1]
            if len(firm) > len(start):
                xs, ys = _arrays([(x, y) for x, y, _ in firm])
                loose = [(x, min(y, DOUBT * float(_read(xs, ys, np.array([x]))[0])), 1.0) for x, y, _ in loose]
            found = firm + loose
            points = _rising(sorted(_straightened(found) if self.anchored else found))
            self._points = _arrays(points if self.anchored else _hopeful(points))
        return self._points

    def read(self, sizes: Floats) -> Floats:
        """Seconds of each size. Before anything was measured: nothing where anchored, else 1 and a little more per row."""
        if not self.cells:
            return np.zeros_like(sizes) if self.anchored else 1.0 + SLOPE * (sizes - 1.0)
        return _read(*self.points(), sizes)


Point = tuple[float, float]
Sample = tuple[float, float, float]


def _rising(points: list[Sample]) -> list[Point]:
    """From sizes, seconds and weights the nearest curve that never falls: more work takes no less time, whatever was measured, so
    neighbours that do are pooled."""
    pools: list[tuple[float, float, list[float]]] = []
    for size, value, weight in points:
        sizes = [size]
        while pools and pools[-1][0] > value:
            other, more, before = pools.pop()
            value = (value * weight + other * more) / (weight + more)
            weight, sizes = weight + more, before + sizes
        pools.append((value, weight, sizes))
    return [(size, value) for value, _, sizes in pools for size in sizes]


def _straightened(points: list[Sample]) -> list[Sample]:
    """Sizes, seconds and weights of drafting, those measured seldom moved towards the line through all but the anchor: levels
    are much alike, and one that was unlucky must not look dearer than its neighbours."""
    seen = [p for p in points if p[0] > 0]
    if len(seen) < 3:
        return points
    weight = sum(n for _, _, n in seen)
    x, y = sum(x * n for x, _, n in seen) / weight, sum(y * n for _, y, n in seen) / weight
    slope = sum(n * (a - x) * (b - y) for a, b, n in seen) / max(1e-12, sum(n * (a - x) ** 2 for a, _, n in seen))
    line = [(a, (n * b + ALIKE * (y + slope * (a - x))) / (n + ALIKE), n) for a, b, n in seen]
    return [p for p in points if p[0] <= 0] + line


def _hopeful(points: list[Point]) -> list[Point]:
    """Between sizes far apart the curve may stay low for long (a GPU's does until it is busy): believed, until it is measured."""
    found = points[:1]
    for (left, low), (right, high) in pairwise(points):
        if right - left > max(2.0, left / 4):
            found.append((right - max(1.0, right / 8), low + HOPE * (high - low)))
        found.append((right, high))
    return found


def _arrays(points: list[Point]) -> tuple[Floats, Floats]:
    return np.array([k for k, _ in points]), np.array([v for _, v in points])


def _read(xs: Floats, ys: Floats, sizes: Floats) -> Floats:
    """Lines between the points, the fitted slope (never a falling one) outside."""
    slope = SLOPE * ys[0] if len(xs) == 1 else max(0.0, (ys[-1] - ys[0]) / (xs[-1] - xs[0]))
    found = np.interp(sizes, xs, ys)
    found += slope * np.maximum(0.0, sizes - xs[-1])
    below = np.minimum(slope * np.maximum(0.0, xs[0] - sizes), 0.5 * ys[0])
    return np.asarray(found - below, dtype=np.float64)


class Costs:
    """Curves by size class of the batch: of verifying, of drafting, and of all that a round does besides. `ahead`: plain rounds
    are launched before the one before was read, which hides most of the rest: then only those tell what it takes. Rounds with
    guesses of the host cannot be: what they wait for grows with the whole batch, however few are drafted for. `steady`: passes
    take what they take, by a device's own clock: one size tells less of another (a few rows more may mean a larger graph), and
    passes without guesses, which have graphs of their own, tell nothing of those with few. `chain`: of a drafter of trees,
    guesses that are chains, which may be made in another way; where little is known of one kind, the other's holds for both."""

    def __init__(self) -> None:
        self._plain: dict[int, Curve] = {}
        self._verify: tuple[dict[int, Curve], dict[int, Curve]] = {}, {}
        self._draft: tuple[dict[int, Curve], dict[int, Curve]] = {}, {}
        self._other: dict[int, deque[float]] = {}
        self._wait: tuple[dict[int, Curve], dict[int, Curve]] = {}, {}
        self.ahead = self.steady = False

    def add_verify(self, batch: int, rows: int, seconds: float, chain: bool = False) -> None:
        size, own = bucket(batch), self._plain if self.steady and rows <= batch else self._verify[chain and self.steady]
        moved = own.setdefault(size, Curve()).add(rows, seconds, DAMPED if self.steady else 1.0)
        for others in (self._plain, *self._verify):
            if size in others and others is not own:
                others[size].move(moved)

    def add_draft(self, batch: int, depth: int, seconds: float, chain: bool = False) -> None:
        """`batch`: how many requests were drafted for, `depth`: levels asked for."""
        self._draft[chain].setdefault(bucket(batch), Curve(anchored=True)).add(depth, seconds)

    def add_other(self, batch: int, seconds: float, ahead: bool = False) -> None:
        if ahead and not self.ahead:
            self._other.clear()
            self.ahead = True
        self._other.setdefault(bucket(batch), deque(maxlen=WINDOW)).append(seconds)

    def add_wait(self, batch: int, depth: int, seconds: float, chain: bool = False) -> None:
        """What a round with guesses to this depth took outside drafting and verifying, beyond a plain one. In crowds somebody
        ends every few rounds, after which none can be launched ahead. It is nothing in most rounds, so that many times as much at
        one depth says nothing of others."""
        mean = frequent if batch > CROWD else robust
        self._wait[chain].setdefault(bucket(batch), Curve(mean=mean)).add(depth, seconds, STILL)

    def verify(self, batch: int, rows: Floats, chain: bool = False) -> Floats:
        """Seconds of passes over `rows` rows (fractions are averages) for a batch of this size."""
        size, wide = bucket(batch), _either(self._verify, chain)
        if not self._plain or not wide:
            return _borrowed(wide or self._plain, size, rows)
        plain = _borrowed(self._plain, size, np.minimum(rows, batch))
        if rows.max(initial=0.0) <= batch:
            return plain
        guessing = _borrowed(wide, size, rows)
        if size not in wide:  # another's shape, which begins where plain passes are
            ends = np.array([float(batch)])
            guessing *= _borrowed(self._plain, size, ends) / _borrowed(wide, size, ends)
        return np.where(rows <= batch, plain, np.maximum(plain, guessing))

    def plain(self, batch: int, rows: int, chain: bool = False) -> float:
        """Seconds of one pass."""
        return float(self.verify(batch, np.array([float(rows)]), chain)[0])

    def drafts(self, batch: int, depths: Floats, chain: bool = False) -> Floats:
        """Seconds of drafting so many levels for `batch` requests; 0 while nothing is known."""
        curves = _either(self._draft, chain)
        return _borrowed(curves, bucket(batch), depths) if curves else np.zeros_like(depths)

    def draft(self, batch: int, depth: int, chain: bool = False) -> float:
        """The same for one depth."""
        return float(self.drafts(batch, np.array([float(depth)]), chain)[0]) if depth > 0 and batch > 0 else 0.0

    def other(self, batch: int) -> float:
        """Seconds of a round outside drafting and verifying."""
        if not self._other:
            return 0.0
        return robust(self._other[min(self._other, key=lambda k: abs(k - bucket(batch)))])

    def waits(self, batch: int, depths: Floats, chain: bool = False) -> Floats:
        """Seconds that guesses to such depths add beside drafting and verifying; of larger batches than any seen, more in
        proportion."""
        curves = _either(self._wait, chain)
        if not curves:
            return np.zeros_like(depths)
        size = bucket(batch)
        nearest = min(curves, key=lambda k: abs(k - size))
        return np.maximum(0.0, curves[nearest].read(depths)) * 2.0 ** max(0, size - nearest) * (depths > 0)

    def wait(self, batch: int, depth: int, chain: bool = False) -> float:
        """The same for one depth."""
        return float(self.waits(batch, np.array([float(depth)]), chain)[0])

    def guessing(self, batch: int, drafted: int, depth: int, chain: bool = False) -> float:
        """Seconds that guesses to this depth for `drafted` of `batch` requests add beside their rows."""
        return self.draft(drafted, depth, chain) + self.wait(batch, depth, chain) if drafted else 0.0

    def working(self, batch: int, rows: int, drafted: int, depth: int, chain: bool = False) -> float:
        """Seconds of one pass and of guesses to this depth for `drafted` of `batch` requests."""
        return self.plain(batch, rows, chain) + self.guessing(batch, drafted, depth, chain)

    @property
    def measured(self) -> bool:
        """Whether it is known what verifying takes, at least for some size."""
        return bool(self._plain or any(self._verify))

    @property
    def tried(self) -> bool:
        """Whether it is known what drafting takes, at least for some depth."""
        return any(self._draft)


def _either(tables: tuple[dict[int, Curve], dict[int, Curve]], chain: bool) -> dict[int, Curve]:
    """The curves of one kind, and the other's for sizes of which it has hardly any."""
    own, others = tables[chain], tables[not chain]
    if not own or not others:
        return own or others
    known = {size: len(curve.cells) for size, curve in others.items()}
    return others | {size: c for size, c in own.items() if len(c.cells) > 1 or known.get(size, 0) <= len(c.cells)}


def _borrowed(curves: dict[int, Curve], size: int, at: Floats) -> Floats:
    """A curve's seconds. One with fewer than two points has the shape of its neighbour, at its own height; and so has any beyond
    the largest size it has seen, where a neighbour has seen larger ones."""
    own = curves.get(size)
    others = [k for k, c in curves.items() if k != size and len(c.cells) > 1]
    if own is None or not own.cells:
        near = others or list(curves)
        return (curves[min(near, key=lambda k: abs(k - size))] if near else Curve()).read(at)
    xs, ys = own.points()
    seen = len(own.cells) > 1
    further = [k for k in others if not seen or max(curves[k].cells) > REACH * xs[-1]]
    if not further or (seen and at.max(initial=0.0) <= xs[-1]):
        return own.read(at)
    shape = curves[min(further, key=lambda k: abs(k - size))]
    scale = float(ys[-1]) / max(1e-12, float(shape.read(xs[-1:])[0]))
    borrowed = np.maximum(ys[-1], shape.read(at) * min(LIKE, max(1 / LIKE, scale))) if seen else shape.read(at) * scale
    return np.where(at <= xs[-1], own.read(at), borrowed) if seen else borrowed
