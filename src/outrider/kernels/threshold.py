"""Which scores a row's filters keep, without a sort and without a host sync: a threshold, and how many ties at it survive.

The threshold is the worst score that is still kept, found in eight passes of four bits over the scores' integer images. Each pass
counts (top-k) or adds integer masses (top-p) at fifteen thresholds at once, so that no order of summation can matter. Rows are
cut into chunks, a program each. Ties at the threshold go to the lowest ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rounds import Lanes

try:
    from triton.language.extra import libdevice
except ImportError:  # pragma: no cover
    libdevice = None

_STEPS = tl.constexpr(16)
_PASSES = 8
_MASS = tl.constexpr(2.0**40)
_BEYOND = tl.constexpr(0x7F800000)

TOP_P, TOP_K, MIN_P = 1, 2, 4
"""Which filters a batch uses: a graph holds the passes of just those."""

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def exp(x):
    """`expf` as torch has it on the card."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def log(x):
    if INTERPRETED:
        return tl.log(x)
    else:
        return libdevice.log(x)


@triton.jit
def distance(z, top, heat):
    """How far below the best a score is, tempered, as an integer that orders like it (0: the best), and its weight."""
    tempered = tl.div_rn(z - top, heat)
    far = (0.0 - tempered).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return far, exp(tempered)


@triton.jit
def mass_of(weight):
    return (weight.to(tl.float64) * _MASS).to(tl.int64)


@triton.jit
def best_of(TOP, row, CHUNKS, CP: tl.constexpr):
    i = tl.arange(0, CP)
    return tl.max(tl.load(TOP + row * CHUNKS + i, mask=i < CHUNKS, other=float("-inf")), 0)


@triton.jit
def _bracket(LOW, SUMS, row, goal, CHUNKS, step, CP: tl.constexpr, FIRST: tl.constexpr):
    """Where the search stands: the pass before summed, per chunk, what lies before each of its thresholds."""
    if FIRST:
        return tl.full((), 0, tl.int64)
    i = tl.arange(0, CP)
    k = tl.arange(0, _STEPS)
    sums = tl.load(SUMS + (row * CHUNKS + i)[:, None] * _STEPS + k[None, :], mask=(i < CHUNKS)[:, None], other=0)
    before = tl.sum(sums, 0)
    below = (before.to(tl.float64) < goal) & (k > 0)
    return tl.load(LOW + row) + tl.sum(below.to(tl.int64), 0) * step


@triton.jit
def _search(
    Z, LANE, HEAT, K, P, TOP, IN, OUT, LOWIN, LOWOUT, TOTAL, sZ, usable, CHUNKS,
    PASS: tl.constexpr, MASS: tl.constexpr, CP: tl.constexpr, CH: tl.constexpr,
):  # fmt: skip
    """One pass of the search for a row's threshold: sums of counts or masses before `low + k * step`, k = 1..15."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    lane = tl.load(LANE + row)
    heat = tl.load(HEAT + lane)
    top_k = tl.load(K + lane)
    top_p = tl.load(P + lane)
    if MASS:
        if (heat <= 0) | (top_p >= 1):
            return
        goal = 0.0
        if PASS > 0:
            goal = tl.load(TOTAL + row).to(tl.float64) * top_p
    else:
        if (heat <= 0) | (top_k <= 0):
            return
        goal = top_k.to(tl.float64)
    low = _bracket(LOWIN, IN, row, goal, CHUNKS, 1 << (4 * (8 - PASS)), CP, PASS == 0)
    if c == 0:
        tl.store(LOWOUT + row, low)
    if PASS == 8:
        return
    top = best_of(TOP, row, CHUNKS, CP)
    v = c * CH + tl.arange(0, CH)
    z = tl.load(Z + row * sZ + v, mask=v < usable, other=float("-inf"))
    far, weight = distance(z, top, tl.maximum(heat, 1.1754943508222875e-38))
    finite = z > float("-inf")
    k = tl.arange(0, _STEPS)
    found = tl.zeros((_STEPS,), tl.int64)
    value = finite.to(tl.int64)
    if MASS:
        value = tl.where(finite, mass_of(weight), 0)
    for i in tl.static_range(1, 16):
        edge = low + i * (1 << (4 * (7 - PASS)))
        found = tl.where(k == i, tl.sum(tl.where(far.to(tl.int64) < edge, value, 0), 0), found)
    tl.store(OUT + (row * CHUNKS + c) * _STEPS + k, found)


@triton.jit
def _settle_k(
    Z, LANE, HEAT, K, TOP, LOW, LIMIT, COUNT, TIES, MASSES, sZ, usable, CHUNKS,
    HAS_K: tl.constexpr, CP: tl.constexpr, CH: tl.constexpr,
):  # fmt: skip
    """Per chunk, once top-k's threshold is known: how many lie before it, how many at it, and the mass before it."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    lane = tl.load(LANE + row)
    heat = tl.load(HEAT + lane)
    if heat <= 0:
        return
    limit = tl.full((), _BEYOND - 1, tl.int64)
    if HAS_K:
        if tl.load(K + lane) > 0:
            limit = tl.minimum(tl.load(LOW + row), limit)
    top = best_of(TOP, row, CHUNKS, CP)
    v = c * CH + tl.arange(0, CH)
    z = tl.load(Z + row * sZ + v, mask=v < usable, other=float("-inf"))
    far, weight = distance(z, top, tl.maximum(heat, 1.1754943508222875e-38))
    far = far.to(tl.int64)
    finite = z > float("-inf")
    at = row * CHUNKS + c
    before = finite & (far < limit)
    tl.store(COUNT + at, tl.sum(before.to(tl.int64), 0))
    tl.store(TIES + at, tl.sum((finite & (far == limit)).to(tl.int64), 0))
    tl.store(MASSES + at, tl.sum(tl.where(before, mass_of(weight), 0), 0))
    if c == 0:
        tl.store(LIMIT + row, limit)


@triton.jit
def _sum(X, row, CHUNKS, CP: tl.constexpr):
    i = tl.arange(0, CP)
    return tl.sum(tl.load(X + row * CHUNKS + i, mask=i < CHUNKS, other=0), 0)


@triton.jit
def _weigh(limit):
    """Mass of one entry at a threshold."""
    value = (0.0 - limit.to(tl.int32).to(tl.float32, bitcast=True)) + tl.zeros((1,), tl.float32)
    return tl.sum(mass_of(exp(value)), 0)


@triton.jit
def _total(LANE, HEAT, K, LIMIT, COUNT, TIES, MASSES, KEEP, TOTAL, CHUNKS, CP: tl.constexpr):
    """A program per row: how many ties top-k keeps, and the mass of all it keeps."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.load(LANE + row)
    if tl.load(HEAT + lane) <= 0:
        return
    ties = _sum(TIES, row, CHUNKS, CP)
    keep = ties
    top_k = tl.load(K + lane).to(tl.int64)
    if top_k > 0:
        keep = tl.minimum(ties, top_k - _sum(COUNT, row, CHUNKS, CP))
    tl.store(KEEP + row, keep)
    tl.store(TOTAL + row, _sum(MASSES, row, CHUNKS, CP) + keep * _weigh(tl.load(LIMIT + row)))


@triton.jit
def _settle_p(Z, LANE, HEAT, P, TOP, LOW, LIMIT, TIES, MASSES, sZ, usable, CHUNKS, CP: tl.constexpr, CH: tl.constexpr):
    """Per chunk, once top-p's threshold is known: the mass before it and how many lie at it."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    lane = tl.load(LANE + row)
    heat = tl.load(HEAT + lane)
    if (heat <= 0) | (tl.load(P + lane) >= 1):
        return
    limit = tl.load(LOW + row)
    top = best_of(TOP, row, CHUNKS, CP)
    v = c * CH + tl.arange(0, CH)
    z = tl.load(Z + row * sZ + v, mask=v < usable, other=float("-inf"))
    far, weight = distance(z, top, tl.maximum(heat, 1.1754943508222875e-38))
    far = far.to(tl.int64)
    finite = z > float("-inf")
    at = row * CHUNKS + c
    tl.store(MASSES + at, tl.sum(tl.where(finite & (far < limit), mass_of(weight), 0), 0))
    tl.store(TIES + at, tl.sum((finite & (far == limit)).to(tl.int64), 0))


@triton.jit
def _cut(LANE, HEAT, P, LOW, LIMIT, TIES, MASSES, KEEP, TOTAL, CHUNKS, CP: tl.constexpr):
    """A program per row: top-p's threshold replaces top-k's where it is nearer, with the ties it keeps."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.load(LANE + row)
    top_p = tl.load(P + lane)
    if (tl.load(HEAT + lane) <= 0) | (top_p >= 1):
        return
    low = tl.load(LOW + row)
    limit = tl.load(LIMIT + row)
    if low > limit:
        return
    goal = tl.load(TOTAL + row).to(tl.float64) * top_p
    before = _sum(MASSES, row, CHUNKS, CP)
    ties = _sum(TIES, row, CHUNKS, CP)
    one = _weigh(low)
    keep = ties
    if one > 0:
        keep = tl.minimum(((goal - before.to(tl.float64)) / one.to(tl.float64)).to(tl.int64), ties)
        while (keep > 0) & ((before + (keep - 1) * one).to(tl.float64) >= goal):
            keep -= 1
        while (keep < ties) & ((before + keep * one).to(tl.float64) < goal):
            keep += 1
    if low == limit:
        keep = tl.minimum(keep, tl.load(KEEP + row))
    tl.store(LIMIT + row, low)
    tl.store(KEEP + row, keep)


@dataclass(frozen=True, slots=True)
class Size:
    """How the work is cut: ids that count, ids per chunk, `filters` in use."""

    usable: int
    chunk: int
    filters: int

    @property
    def chunks(self) -> int:
        return -(-self.usable // self.chunk)

    @property
    def whole(self) -> dict[str, Any]:
        """Compile-time arguments of kernels with a program per row."""
        return {"CP": int(triton.next_power_of_2(self.chunks)), "num_warps": 1, "enable_fp_fusion": False}

    @property
    def part(self) -> dict[str, Any]:
        """Those of kernels with a program per chunk."""
        return {**self.whole, "CH": self.chunk, "num_warps": 4}


@dataclass(frozen=True, slots=True)
class Work:
    """Scratch of one call, for `rows` rows of `chunks` chunks."""

    top: Tensor
    best: Tensor
    bad: Tensor
    raw: Tensor
    chunk: Tensor
    sums: Tensor
    row: Tensor

    @classmethod
    def make(cls, rows: int, chunks: int, device: torch.device) -> Work:
        def some(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        flat = (rows, chunks)
        return cls(
            some(torch.float32, *flat), some(torch.int32, *flat), some(torch.int32, *flat), some(torch.float32, *flat),
            some(torch.int64, 3, *flat), some(torch.int64, 2, rows, chunks, 16), some(torch.int64, 5, rows),
        )  # fmt: skip


def find(z: Tensor, lane: Tensor, lanes: Lanes, work: Work, size: Size) -> None:
    """Every filtered row's threshold (`work.row[2]`) and how many ties at it survive (`work.row[3]`). `z [S, V]`, `lane [S]`;
    `work.raw` holds every chunk's best score, without noise where the row is filtered."""
    if size.filters & TOP_K:
        _descend(z, lane, lanes, work, size, False)
    _after_k(z, lane, lanes, work, size)
    if size.filters & TOP_P:
        _descend(z, lane, lanes, work, size, True)
        _after_p(z, lane, lanes, work, size)


def _descend(z: Tensor, lane: Tensor, lanes: Lanes, work: Work, size: Size, mass: bool) -> None:
    """The passes of one search, and one that only writes down where it ended."""
    low, total, count = work.row[:2], work.row[4], z.shape[0]
    for step in range(_PASSES + 1):
        a, b = step % 2, (step + 1) % 2
        _search[(count, size.chunks if step < _PASSES else 1)](
            z, lane, lanes.heat, lanes.top_k, lanes.top_p, work.raw, work.sums[b], work.sums[a], low[b], low[a], total,
            z.stride(0), size.usable, size.chunks, PASS=step, MASS=mass, **size.part,
        )  # fmt: skip


def _after_k(z: Tensor, lane: Tensor, lanes: Lanes, work: Work, size: Size) -> None:
    """What top-k keeps of every row: all, where it is off."""
    low, limit, keep, total = work.row[_PASSES % 2], work.row[2], work.row[3], work.row[4]
    counts, ties, masses = work.chunk
    _settle_k[(z.shape[0], size.chunks)](
        z, lane, lanes.heat, lanes.top_k, work.raw, low, limit, counts, ties, masses, z.stride(0), size.usable, size.chunks,
        HAS_K=bool(size.filters & TOP_K), **size.part,
    )  # fmt: skip
    _total[(z.shape[0],)](lane, lanes.heat, lanes.top_k, limit, counts, ties, masses, keep, total, size.chunks, **size.whole)


def _after_p(z: Tensor, lane: Tensor, lanes: Lanes, work: Work, size: Size) -> None:
    """What top-p keeps of that."""
    low, limit, keep, total = work.row[_PASSES % 2], work.row[2], work.row[3], work.row[4]
    _, ties, masses = work.chunk
    _settle_p[(z.shape[0], size.chunks)](
        z, lane, lanes.heat, lanes.top_p, work.raw, low, limit, ties, masses, z.stride(0), size.usable, size.chunks, **size.part
    )  # fmt: skip
    _cut[(z.shape[0],)](lane, lanes.heat, lanes.top_p, low, limit, ties, masses, keep, total, size.chunks, **size.whole)
