"""The token of every row from fp32 scores, bit for bit as `sampling.TextSampler` chooses it where no processor edits them.

token = first argmax over v of score_v + T * gumbel(key, position, v), over what top-k, top-p and min-p leave (`search.py`). Rows
are cut into chunks, a program each; a row's options come from its lane, so one captured graph serves every request, and no
launch waits for the host. Noise is Philox4x64-10 as in `noise.py` (Salmon et al. 2011).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .noise import gumbel
from .rounds import Lanes
from .search import EDGES, filters_of, gather, place_of, settle, survey, top_of, weight_of

CHUNK = 1024
"""Scores per program."""
GATHERED = 2048
"""Tokens of a window that can be gathered."""
_TILE = 256
_NOBODY = tl.constexpr(2147483647)


@triton.jit
def _perturbed(z, start, key, position, heat, CH: tl.constexpr):
    """z + heat * noise for the CH scores from id `start` on; multiplied and added with a rounding each (no fused operation)."""
    noise = gumbel(key, start // 4 + 1 + tl.arange(0, CH // 4), position.to(tl.int64))
    return z + noise * heat


@triton.jit
def _scan(
    Z, LANE, POSITION, HEAT, KEY, TOP_K, TOP_P, MIN_P, RAW, TOP, BEST, BAD, SUMS, FOUND, stride, usable, CHUNKS,
    FILTERS: tl.constexpr, DRAW: tl.constexpr, CH: tl.constexpr,
):  # fmt: skip
    """Per chunk: the best score, whether one is invalid, and the best with noise where no filter comes first."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    v = chunk * CH + tl.arange(0, CH)
    z = tl.load(Z + row * stride + v, mask=v < usable, other=float("-inf"))
    at = row * CHUNKS + chunk
    lane = tl.load(LANE + row)
    heat = tl.load(HEAT + lane)
    tl.store(BAD + at, tl.max(((z != z) | (z == float("inf"))).to(tl.int32), 0))
    tl.store(RAW + at, tl.max(z, 0))
    if FILTERS:
        top_k, top_p = filters_of(TOP_K, TOP_P, lane, usable)
        if (heat > 0) & ((top_k > 0) | (top_p < 1) | (tl.load(MIN_P + lane) > 0)):
            if chunk == 0:
                tl.store(FOUND + row, 0)
                tl.store(SUMS + row * (4 * EDGES) + tl.arange(0, 4 * EDGES), tl.zeros((4 * EDGES,), tl.int64))
            return
    if DRAW:
        if heat > 0:
            z = _perturbed(z, chunk * CH, tl.load(KEY + lane), tl.load(POSITION + row), heat, CH)
        top = tl.max(z, 0)
        tl.store(TOP + at, top)
        tl.store(BEST + at, tl.min(tl.where(z == top, v, _NOBODY), 0))


@triton.jit
def _survivors(z, v, row, lane, heat, MIN_P, RAW, LAST, CHUNKS, CP: tl.constexpr):
    place = place_of(z, v, top_of(RAW, row, CHUNKS, CP), heat)
    return (place < tl.load(LAST + row)) & (weight_of(place) >= tl.load(MIN_P + lane))


@triton.jit
def _draw(
    Z, LANE, POSITION, HEAT, KEY, TOP_K, TOP_P, MIN_P, RAW, TOP, BEST, LAST, stride, usable, CHUNKS,
    CP: tl.constexpr, CH: tl.constexpr,
):  # fmt: skip
    """Per chunk of filtered rows: the best survivor, with noise."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    lane = tl.load(LANE + row)
    heat = tl.load(HEAT + lane)
    top_k, top_p = filters_of(TOP_K, TOP_P, lane, usable)
    if heat <= 0:
        return
    if (top_k == 0) & (top_p >= 1) & (tl.load(MIN_P + lane) <= 0):
        return
    v = chunk * CH + tl.arange(0, CH)
    z = tl.load(Z + row * stride + v, mask=v < usable, other=float("-inf"))
    kept = _survivors(z, v, row, lane, heat, MIN_P, RAW, LAST, CHUNKS, CP)
    at = row * CHUNKS + chunk
    if tl.max(kept.to(tl.int32), 0) == 0:
        tl.store(TOP + at, float("-inf"))
        tl.store(BEST + at, _NOBODY)
        return
    z = _perturbed(z, chunk * CH, tl.load(KEY + lane), tl.load(POSITION + row), heat, CH)
    z = tl.where(kept, z, float("-inf"))
    top = tl.max(z, 0)
    tl.store(TOP + at, top)
    tl.store(BEST + at, tl.min(tl.where(z == top, v, _NOBODY), 0))


@triton.jit
def _pick(TOP, BEST, BAD, OUT, CHUNKS, CP: tl.constexpr):
    """A program per row: the first maximum of all chunks, or -1."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, CP)
    there = i < CHUNKS
    top = tl.load(TOP + row * CHUNKS + i, mask=there, other=float("-inf"))
    best = tl.load(BEST + row * CHUNKS + i, mask=there, other=_NOBODY)
    bad = tl.max(tl.load(BAD + row * CHUNKS + i, mask=there, other=0), 0)
    most = tl.max(top, 0)
    found = tl.min(tl.where(top == most, best, _NOBODY), 0).to(tl.int64)
    tl.store(OUT + row, tl.where((bad == 0) & (most > float("-inf")), found, -1))


@triton.jit
def _write(
    Z, LANE, POSITION, HEAT, KEY, TOP_K, TOP_P, MIN_P, RAW, BAD, LAST, OUT, stride, out_stride, usable, vocab, CHUNKS,
    FILTERS: tl.constexpr, CP: tl.constexpr, CH: tl.constexpr,
):  # fmt: skip
    """Per chunk: perturbed scores of the tokens that may be chosen, -inf for others, NaN in rows with an invalid score."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    lane = tl.load(LANE + row)
    heat = tl.load(HEAT + lane)
    v = chunk * CH + tl.arange(0, CH)
    z = tl.load(Z + row * stride + v, mask=v < usable, other=float("-inf"))
    i = tl.arange(0, CP)
    bad = tl.max(tl.load(BAD + row * CHUNKS + i, mask=i < CHUNKS, other=0), 0)
    if heat > 0:
        kept = v < usable
        if FILTERS:
            top_k, top_p = filters_of(TOP_K, TOP_P, lane, usable)
            if (top_k > 0) | (top_p < 1) | (tl.load(MIN_P + lane) > 0):
                kept = _survivors(z, v, row, lane, heat, MIN_P, RAW, LAST, CHUNKS, CP)
        if tl.max(kept.to(tl.int32), 0) > 0:
            z = _perturbed(z, chunk * CH, tl.load(KEY + lane), tl.load(POSITION + row), heat, CH)
        z = tl.where(kept, z, float("-inf"))
    z = tl.where((bad != 0) & (v < usable), float("nan"), z)
    tl.store(OUT + row * out_stride + v, z, mask=v < vocab)


@dataclass(frozen=True, slots=True)
class Work:
    """Scratch for up to as many rows of `usable` ids as it was made for; ids from there on cannot be chosen. `filters` says
    that lanes may have top-k, top-p or min-p; without, those are ignored and five launches saved."""

    usable: int
    filters: bool
    raw: Tensor
    top: Tensor
    best: Tensor
    bad: Tensor
    sums: Tensor
    found: Tensor
    places: Tensor
    last: Tensor

    @classmethod
    def make(cls, rows: int, usable: int, device: torch.device | str, filters: bool = True) -> Work:
        if usable >= 1 << 23:
            raise ValueError(f"a vocabulary of {usable} ids; {(1 << 23) - 1} is the most")

        def some(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        chunks = triton.cdiv(usable, CHUNK)
        single, whole, double = torch.float32, torch.int32, torch.int64
        partials = (some(single, chunks), some(single, chunks), some(whole, chunks), some(whole, chunks))
        return cls(
            usable, filters, *partials, some(double, 64), some(whole), some(double, GATHERED if filters else 1), some(double)
        )


@dataclass(frozen=True, slots=True)
class Asked:
    """Which tokens are to be chosen: `lane [S]` and `position [S]` int32 (the position of the token itself)."""

    lane: Tensor
    position: Tensor


def choose(logits: Tensor, asked: Asked, lanes: Lanes, work: Work, out: Tensor) -> None:
    """`out [S]` int64: the token of every row of `logits [S, V]` fp32; -1 where a score that counts is NaN or +inf, or no token
    is allowed. V is at least `work.usable`."""
    count, shape = len(logits), _shape(work)
    chunks, stride, draws = shape["CHUNKS"], logits.stride(0), {"CH": CHUNK, "enable_fp_fusion": False}
    _begin(logits, asked, lanes, work, True)
    if work.filters:
        _draw[(count, chunks)](
            logits, asked.lane, asked.position, lanes.heat, lanes.key, lanes.top_k, lanes.top_p, lanes.min_p,
            work.raw, work.top, work.best, work.last, stride, work.usable, **shape, **draws,
        )  # fmt: skip
    _pick[(count,)](work.top, work.best, work.bad, out, **shape, num_warps=1)


def scores(logits: Tensor, asked: Asked, lanes: Lanes, work: Work, out: Tensor) -> None:
    """Perturbed scores, `out [S, V]` fp32: what `choose` takes the first maximum of, as `TextSampler.scores` gives them: -inf
    where a token cannot be chosen, NaN in rows with an invalid score."""
    vocab, shape = logits.shape[1], _shape(work)
    _begin(logits, asked, lanes, work, False)
    _write[(len(logits), triton.cdiv(vocab, CHUNK))](
        logits, asked.lane, asked.position, lanes.heat, lanes.key, lanes.top_k, lanes.top_p, lanes.min_p,
        work.raw, work.bad, work.last, out, logits.stride(0), out.stride(0), work.usable, vocab, **shape,
        FILTERS=work.filters, CH=CHUNK, enable_fp_fusion=False,
    )  # fmt: skip


def _shape(work: Work) -> dict[str, Any]:
    chunks = triton.cdiv(work.usable, CHUNK)
    return {"CHUNKS": chunks, "CP": triton.next_power_of_2(chunks)}


def _begin(logits: Tensor, asked: Asked, lanes: Lanes, work: Work, draw: bool) -> None:
    """All that comes before the filtered rows' noise."""
    count, shape = len(logits), _shape(work)
    chunks, stride, row = shape["CHUNKS"], logits.stride(0), (logits, asked.lane)
    filters = (lanes.top_k, lanes.top_p)
    _scan[(count, chunks)](
        *row, asked.position, lanes.heat, lanes.key, *filters, lanes.min_p,
        work.raw, work.top, work.best, work.bad, work.sums, work.found, stride, work.usable, chunks,
        FILTERS=work.filters, DRAW=draw, CH=CHUNK, enable_fp_fusion=False,
    )  # fmt: skip
    if not work.filters:
        return
    size = {"CH": CHUNK, "enable_fp_fusion": False}
    for turn in range(2):
        survey[(count, chunks)](
            *row, lanes.heat, *filters, work.raw, work.sums, stride, work.usable,
            **shape, **size, SURVEY=turn, TILE=_TILE,
        )  # fmt: skip
    gather[(count, chunks)](
        *row, lanes.heat, *filters, work.raw, work.sums, work.found, work.places, stride, work.usable,
        **shape, **size, CAP=GATHERED,
    )  # fmt: skip
    settle[(count,)](
        *row, lanes.heat, *filters, work.raw, work.sums, work.places, work.last, stride, work.usable,
        **shape, CAP=GATHERED, TILE=_TILE, enable_fp_fusion=False,
    )  # fmt: skip
