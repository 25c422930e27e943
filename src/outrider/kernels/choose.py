"""The token of every row, from fp32 scores: temperature, top-k, top-p, min-p, Gumbel noise, first maximum. No sort, no host sync.

Equal to `sampling.TextSampler` for requests whose scores no processor edits. Rows are cut into chunks, a program each. What filters
need of a whole row they learn by search: a threshold is the worst score that is still kept, found in eight passes of four bits over
the scores' integer images; each pass counts (top-k) or adds integer masses (top-p) at fifteen thresholds at once, so that no order
of summation can matter. Ties at the threshold go to the lowest ids. Philox4x64-10 as in `noise.py`.
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

CHUNK = 2048
_STEPS = tl.constexpr(16)
_PASSES = 8
_MASS = tl.constexpr(2.0**40)
_BEYOND = tl.constexpr(0x7F800000)

TOP_P, TOP_K, MIN_P = 1, 2, 4
"""Which filters a batch uses: a graph holds the passes of just those."""

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _exp(x):
    """`expf` as torch has it on the card."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def _log(x):
    if INTERPRETED:
        return tl.log(x)
    else:
        return libdevice.log(x)


@triton.jit
def _key(z, top, heat):
    """How far below the best a score is, tempered, as an integer that orders like it (0: the best), and its weight."""
    tempered = tl.div_rn(z - top, heat)
    far = (0.0 - tempered).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return far, _exp(tempered)


@triton.jit
def _mass(weight):
    return (weight.to(tl.float64) * _MASS).to(tl.int64)


@triton.jit
def _noise(key, block, position):
    """Four words of Philox4x64-10 per block, as Gumbel noise in fp32, in order of the vocabulary."""
    c0 = block.to(tl.uint64)
    zero = c0 * 0
    c1 = zero + position.to(tl.uint64)
    c2 = zero
    c3 = zero
    k0 = zero + key.to(tl.uint64, bitcast=True)
    k1 = zero
    m0 = zero + 0xD2E7470EE14C6C93
    m1 = zero + 0xCA5A826395121157
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, m0)
        high2 = tl.umulhi(c2, m1)
        low0 = c0 * m0
        low2 = c2 * m1
        c0 = high2 ^ c1 ^ k0
        c1 = low2
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + 0x9E3779B97F4A7C15
        k1 = k1 + 0xBB67AE8584CAA73B
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    words = tl.reshape(words, (words.shape[0] * 4,))
    u = ((words >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return (0.0 - _log(0.0 - _log(u))).to(tl.float32)


@triton.jit
def _filtered(K, P, M, lane):
    return (tl.load(K + lane) > 0) | (tl.load(P + lane) < 1) | (tl.load(M + lane) > 0)


@triton.jit
def _first(score, v):
    """The greatest score of a chunk and the lowest id that has it."""
    top = tl.max(score, 0)
    return top, tl.min(tl.where(score == top, v, 2147483647), 0)


@triton.jit
def _scan(
    Z, LANE, ATTEND, HEAT, KEY, K, P, M, TOP, BEST, BAD, sZ, usable, CHUNKS, FILTERS: tl.constexpr, CH: tl.constexpr
):  # fmt: skip
    """Per chunk: whether a score is invalid; the best score and its place, with noise unless a filter must come first."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    v = c * CH + tl.arange(0, CH)
    z = tl.load(Z + row * sZ + v, mask=v < usable, other=float("-inf"))
    at = row * CHUNKS + c
    lane = tl.load(LANE + row)
    heat = tl.load(HEAT + lane)
    bad = (z != z) | (z == float("inf"))
    tl.store(BAD + at, tl.max(bad.to(tl.int32), 0))
    if heat > 0:
        late = False
        if FILTERS > 0:
            late = _filtered(K, P, M, lane)
        if not late:
            block = (c * CH) // 4 + 1 + tl.arange(0, CH // 4)
            noise = _noise(tl.load(KEY + lane), block, (tl.load(ATTEND + row) + 1).to(tl.int64))
            z = z + noise * heat
    top, best = _first(z, v)
    tl.store(TOP + at, top)
    tl.store(BEST + at, best)


@triton.jit
def _top(TOP, row, CHUNKS, CP: tl.constexpr):
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
    Z, LANE, HEAT, K, P, TOP, IN, OUT, LOWIN, LOWOUT, TOTAL, LIMIT, sZ, usable, CHUNKS,
    PASS: tl.constexpr, MASS: tl.constexpr, CP: tl.constexpr, CH: tl.constexpr, SUB: tl.constexpr,
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
    if PASS < 8:
        top = _top(TOP, row, CHUNKS, CP)
        k = tl.arange(0, _STEPS)
        edge = low + k.to(tl.int64) * (1 << (4 * (7 - PASS)))
        found = tl.zeros((_STEPS, SUB), tl.int64)
        for part in range(CH // SUB):
            v = c * CH + part * SUB + tl.arange(0, SUB)
            z = tl.load(Z + row * sZ + v, mask=v < usable, other=float("-inf"))
            far, weight = _key(z, top, tl.maximum(heat, 1.1754943508222875e-38))
            finite = z > float("-inf")
            value = finite.to(tl.int64)
            if MASS:
                value = tl.where(finite, _mass(weight), 0)
            found += tl.where(far.to(tl.int64)[None, :] < edge[:, None], value[None, :], 0)
        tl.store(OUT + (row * CHUNKS + c) * _STEPS + k, tl.sum(found, 1))


@triton.jit
def _settle_k(
    Z, LANE, HEAT, K, TOP, LOW, LIMIT, COUNT, TIES, MASSES, sZ, usable, CHUNKS, HAS_K: tl.constexpr, CP: tl.constexpr, CH: tl.constexpr
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
    top = _top(TOP, row, CHUNKS, CP)
    v = c * CH + tl.arange(0, CH)
    z = tl.load(Z + row * sZ + v, mask=v < usable, other=float("-inf"))
    far, weight = _key(z, top, tl.maximum(heat, 1.1754943508222875e-38))
    far = far.to(tl.int64)
    finite = z > float("-inf")
    at = row * CHUNKS + c
    before = finite & (far < limit)
    tl.store(COUNT + at, tl.sum(before.to(tl.int64), 0))
    tl.store(TIES + at, tl.sum((finite & (far == limit)).to(tl.int64), 0))
    tl.store(MASSES + at, tl.sum(tl.where(before, _mass(weight), 0), 0))
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
    return tl.sum(_mass(_exp(value)), 0)


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
    top = _top(TOP, row, CHUNKS, CP)
    v = c * CH + tl.arange(0, CH)
    z = tl.load(Z + row * sZ + v, mask=v < usable, other=float("-inf"))
    far, weight = _key(z, top, tl.maximum(heat, 1.1754943508222875e-38))
    far = far.to(tl.int64)
    finite = z > float("-inf")
    at = row * CHUNKS + c
    tl.store(MASSES + at, tl.sum(tl.where(finite & (far < limit), _mass(weight), 0), 0))
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


@triton.jit
def _draw(
    Z, LANE, ATTEND, HEAT, KEY, K, P, M, RAW, TOP, BEST, LIMIT, KEEP, TIES, sZ, usable, CHUNKS, CP: tl.constexpr, CH: tl.constexpr
):  # fmt: skip
    """Per chunk of filtered rows: the best survivor, with noise."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    lane = tl.load(LANE + row)
    heat = tl.load(HEAT + lane)
    if heat <= 0:
        return
    if not _filtered(K, P, M, lane):
        return
    top = _top(RAW, row, CHUNKS, CP)
    v = c * CH + tl.arange(0, CH)
    z = tl.load(Z + row * sZ + v, mask=v < usable, other=float("-inf"))
    far, weight = _key(z, top, tl.maximum(heat, 1.1754943508222875e-38))
    far = far.to(tl.int64)
    limit = tl.load(LIMIT + row)
    finite = z > float("-inf")
    tie = finite & (far == limit)
    i = tl.arange(0, CP)
    earlier = tl.sum(tl.load(TIES + row * CHUNKS + i, mask=i < c, other=0), 0)
    rank = earlier + tl.cumsum(tie.to(tl.int32), 0).to(tl.int64)
    kept = (finite & (far < limit)) | (tie & (rank <= tl.load(KEEP + row)))
    kept = kept & (weight >= tl.load(M + lane))
    block = (c * CH) // 4 + 1 + tl.arange(0, CH // 4)
    noise = _noise(tl.load(KEY + lane), block, (tl.load(ATTEND + row) + 1).to(tl.int64))
    best, place = _first(tl.where(kept, z + noise * heat, float("-inf")), v)
    at = row * CHUNKS + c
    tl.store(TOP + at, best)
    tl.store(BEST + at, place)


@triton.jit
def _pick(TOP, BEST, BAD, OUT, CHUNKS, CP: tl.constexpr):
    """A program per row: the first maximum over chunks; -1 where there is none, or a score was invalid."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, CP)
    top = tl.load(TOP + row * CHUNKS + i, mask=i < CHUNKS, other=float("-inf"))
    place = tl.load(BEST + row * CHUNKS + i, mask=i < CHUNKS, other=2147483647)
    bad = tl.max(tl.load(BAD + row * CHUNKS + i, mask=i < CHUNKS, other=0), 0)
    best = tl.max(top, 0)
    found = tl.min(tl.where(top == best, place, 2147483647), 0).to(tl.int64)
    valid = (bad == 0) & (best > float("-inf"))
    tl.store(OUT + row, tl.where(valid, found, -1))


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


def choose(z: Tensor, rows: Any, lanes: Lanes, usable: int, out: Tensor, filters: int = 0) -> Tensor:
    """`out [S]` int64: the token of every row of `z [S, V]` fp32, -1 where there is no valid one. `rows.lane [S]` names the row's lane,
    `rows.attend [S]` its own position (the token's is one more). `filters`: which of `TOP_P`, `TOP_K`, `MIN_P` any lane uses."""
    count, usable = z.shape[0], min(usable, z.shape[1])
    chunks = triton.cdiv(usable, CHUNK)
    padded = triton.next_power_of_2(chunks)
    work = Work.make(count, chunks, z.device)
    grid, shape = (count, chunks), {"CP": padded, "CH": CHUNK, "num_warps": 4, "enable_fp_fusion": False}
    ends: dict[str, Any] = {"CP": padded, "num_warps": 1, "enable_fp_fusion": False}
    of = (lanes.heat, lanes.key, lanes.top_k, lanes.top_p, lanes.min_p)
    raw = work.raw if filters else work.top
    _scan[grid](
        z, rows.lane, rows.attend, *of, raw, work.best, work.bad, z.stride(0), usable, chunks, FILTERS=filters, CH=CHUNK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if filters:
        work.top.copy_(raw)
        _filter(z, rows, lanes, work, (usable, chunks, filters), shape, ends)
        limit, keep = work.row[2], work.row[3]
        _draw[grid](
            z,
            rows.lane,
            rows.attend,
            *of,
            raw,
            work.top,
            work.best,
            limit,
            keep,
            work.chunk[1],
            z.stride(0),
            usable,
            chunks,
            **shape,
        )
    _pick[(count,)](work.top, work.best, work.bad, out, chunks, **ends)
    return out


def _filter(
    z: Tensor, rows: Any, lanes: Lanes, work: Work, sizes: tuple[int, int, int], shape: dict[str, Any], ends: dict[str, Any]
) -> None:
    """Find every filtered row's threshold (`work.row[2]`) and how many ties at it survive (`work.row[3]`)."""
    usable, chunks, filters = sizes
    count, raw, stride = z.shape[0], work.raw, z.stride(0)
    grid = (count, chunks)
    low, limit, keep, total = work.row[:2], work.row[2], work.row[3], work.row[4]
    counts, ties, masses = work.chunk
    for mass, wanted in ((False, TOP_K), (True, TOP_P)):
        if mass:
            has_k, final = bool(filters & TOP_K), low[_PASSES % 2]
            _settle_k[grid](
                z, rows.lane, lanes.heat, lanes.top_k, raw, final, limit, counts, ties, masses, stride, usable, chunks, HAS_K=has_k,
                **shape,
            )  # fmt: skip
            _total[(count,)](rows.lane, lanes.heat, lanes.top_k, limit, counts, ties, masses, keep, total, chunks, **ends)
        if not filters & wanted:
            continue
        for step in range(_PASSES + 1):
            a, b = step % 2, (step + 1) % 2
            _search[grid if step < _PASSES else (count, 1)](
                z, rows.lane, lanes.heat, lanes.top_k, lanes.top_p, raw, work.sums[b], work.sums[a], low[b], low[a], total, limit,
                stride, usable, chunks, PASS=step, MASS=mass, SUB=256, **shape,
            )  # fmt: skip
    if filters & TOP_P:
        final = low[_PASSES % 2]
        _settle_p[grid](z, rows.lane, lanes.heat, lanes.top_p, raw, final, limit, ties, masses, stride, usable, chunks, **shape)
        _cut[(count,)](rows.lane, lanes.heat, lanes.top_p, final, limit, ties, masses, keep, total, chunks, **ends)
