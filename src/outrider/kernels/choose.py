"""The token of every row, from fp32 scores: temperature, top-k, top-p, min-p, Gumbel noise, first maximum. No sort, no host sync.

Equal to `sampling.TextSampler` for requests whose scores no processor edits. Rows are cut into chunks, a program each. What
filters need of a whole row is found by `threshold`. Philox4x64-10 as in `noise.py`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .rounds import Lanes
from .threshold import Size, Work, best_of, distance, find, log

CHUNK = 2048


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
    return (0.0 - log(0.0 - log(u))).to(tl.float32)


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
    top = best_of(RAW, row, CHUNKS, CP)
    v = c * CH + tl.arange(0, CH)
    z = tl.load(Z + row * sZ + v, mask=v < usable, other=float("-inf"))
    far, weight = distance(z, top, tl.maximum(heat, 1.1754943508222875e-38))
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


def choose(z: Tensor, rows: Any, lanes: Lanes, usable: int, out: Tensor, filters: int = 0) -> Tensor:
    """`out [S]` int64: the token of every row of `z [S, V]` fp32, -1 where there is no valid one. `rows.lane [S]` names the row's
    lane, `rows.attend [S]` its own position (the token's is one more). `filters`: which of `TOP_P`, `TOP_K`, `MIN_P` (see
    `threshold`) any lane uses."""
    size = Size(min(usable, z.shape[1]), CHUNK, filters)
    count, chunks = z.shape[0], size.chunks
    work = Work.make(count, chunks, z.device)
    of = (lanes.heat, lanes.key, lanes.top_k, lanes.top_p, lanes.min_p)
    raw = work.raw if filters else work.top
    _scan[(count, chunks)](
        z, rows.lane, rows.attend, *of, raw, work.best, work.bad, z.stride(0), size.usable, chunks, FILTERS=filters, CH=CHUNK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if filters:
        work.top.copy_(raw)
        find(z, rows.lane, lanes, work, size)
        limit, keep, ties = work.row[2], work.row[3], work.chunk[1]
        _draw[(count, chunks)](
            z, rows.lane, rows.attend, *of, raw, work.top, work.best, limit, keep, ties, z.stride(0), size.usable, chunks,
            **size.part,
        )  # fmt: skip
    _pick[(count,)](work.top, work.best, work.bad, out, chunks, **size.whole)
    return out
