"""Attention anchored at absolute positions, over paged KV: one arithmetic for chains, trees, single rows and prompts.

A row at position p walks positions 0..p in tiles of `BLOCK`, splits of `Tuning.split` positions and stretches of
`Tuning.stretch` splits, all anchored at 0. Every split is an online softmax of its own (Milakov and Gimelshein 2018); splits are
merged in order within their stretch, stretches in order (as in flash decoding, Dao et al. 2023). A program takes a split or a
stretch, and another launch merges what is left to merge: who merges is no part of the arithmetic. Positions not yet part of the
sequence are read through the row's path, so where a tree's KV happens to lie changes no operand and no order. Rows of one request
share a tile of the matrix unit, whose shape is the same for one row and for sixteen: what stands beside a row, how many rows a
pass has, and which of the three kernels ran cannot change a bit of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import BLOCK


@dataclass(frozen=True, slots=True)
class Tuning:
    """`split`: positions per partial softmax. `stretch`: splits merged first. `most`: programs that share one tile's past.
    `ahead`: partial results loaded together. `enough`: programs from which on each takes a stretch instead of a split. `split`,
    `stretch` and `warps` are part of the arithmetic: one choice per card and release."""

    split: int = 128
    stretch: int = 8
    warps: int = 4
    stages: int = 3
    most: int = 64
    ahead: int = 16
    enough: int = 96


TUNING = Tuning()
_MOST = 64
"""Lines of the largest tile."""


@dataclass(frozen=True, slots=True)
class Where:
    """Where rows stand; int32. `position [R]`: absolute, -1 for rows that do not exist (their output is zero). `known [B]`:
    positions below it are read at virtual index = position. `path [R, P]`: position `known + i` of a tree's row has virtual
    index `path[r, i]`. `table [B, blocks]`: virtual index i lies in slot `table[b, i // 64] * 64 + i % 64`. `tiles [T, 3]`:
    (request, first row, rows), none across requests, at most `rows_per_tile` rows each. `longest` bounds position + 1; it sizes
    buffers only."""

    position: Tensor
    known: Tensor
    path: Tensor
    table: Tensor
    tiles: Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class Form:
    """What a layer and a pass ask of attention: a sliding `window` (a row at p sees positions above p - window), a `softcap` of
    the scores, whether rows are a `tree`'s, and whether one program should walk a tile's whole past (`serial`: for many
    rows)."""

    window: int | None = None
    softcap: float | None = None
    tree: bool = False
    serial: bool = False


def lines(group: int) -> int:
    """Lines of a matrix tile, for `group` query heads per KV head: one number for all passes, since in tiles of another shape
    sums along a row go in another order."""
    return max(16, int(triton.next_power_of_2(group)))


def rows_per_tile(group: int) -> int:
    """Rows of one request that share a matrix tile."""
    return lines(group) // int(triton.next_power_of_2(group))


@triton.jit
def _update(q, k, v, ok, m, l, acc, scale, CAP: tl.constexpr, EXACT: tl.constexpr):
    """One tile of positions into a running softmax. A tile that a row does not see leaves its state as it is, to the bit."""
    s = tl.dot(q, k, input_precision="ieee" if EXACT else "tf32") * scale
    if CAP > 0:
        e = tl.exp(-2.0 * tl.abs(s / CAP))
        t = (1.0 - e) / (1.0 + e)
        s = CAP * tl.where(s < 0, -t, t)
    s = tl.where(ok, s, -1e30)
    top = tl.maximum(m, tl.max(s, 1))
    fade = tl.exp(m - top)
    p = tl.where(ok, tl.exp(s - top[:, None]), 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee" if EXACT else "tf32")
    return top, l * fade + tl.sum(p, 1), acc


@triton.jit
def _merge(m, l, acc, m2, l2, acc2):
    """Two partial softmaxes as one. An empty second one changes nothing."""
    top = tl.maximum(m, m2)
    a, b = tl.exp(m - top), tl.exp(m2 - top)
    return top, l * a + l2 * b, acc * a[:, None] + acc2 * b[:, None]


@triton.jit
def _walk(
    q, K, V, PATH, TABLE, kvh, pos, seen, known, lo, hi, sK, sKh, scale, d,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, BT: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, EXACT: tl.constexpr, UNIT: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Positions lo..hi - 1 of a split (`UNIT` 1) or of a stretch, whose splits are merged on the way, for all rows of a tile;
    lo is where a split begins. `DEEP`: all rows are one, and positions from `known` on lie where its `PATH` says."""
    m = tl.full((TILE,), -1e30, tl.float32)
    l = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, DP), tl.float32)
    m0, l0, acc0 = m, l, acc
    for t in range(lo, hi, BT):
        j = t + tl.arange(0, BT)
        have = j < hi
        if DEEP:
            deep = j >= known
            virtual = tl.where(deep, tl.load(PATH + (j - known), mask=have & deep, other=0), j)
            block = tl.load(TABLE + virtual // BT, mask=have, other=0).to(tl.int64)
            at = (block * BT + virtual % BT) * sK + kvh * sKh
        else:
            at = (tl.load(TABLE + t // BT).to(tl.int64) * BT + tl.arange(0, BT)) * sK + kvh * sKh
        k = tl.load(K + at[None, :] + d[:, None], mask=have[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(V + at[:, None] + d[None, :], mask=have[:, None] & (d < D)[None, :], other=0.0)
        ok = seen[:, None] & (j[None, :] <= pos[:, None]) & have[None, :]
        if WINDOW > 0:
            ok = ok & (pos[:, None] - j[None, :] < WINDOW)
        m, l, acc = _update(q, k, v, ok, m, l, acc, scale, CAP, EXACT)
        if UNIT > 1:
            if ((t + BT) % SPLIT == 0) | (t + BT >= hi):
                m0, l0, acc0 = _merge(m0, l0, acc0, m, l, acc)
                m = tl.full((TILE,), -1e30, tl.float32)
                l = tl.zeros((TILE,), tl.float32)
                acc = tl.zeros((TILE, DP), tl.float32)
    if UNIT > 1:
        return m0, l0, acc0
    return m, l, acc


@triton.jit
def _first(lowest, SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    """Where the split begins in which a row at position `lowest` first sees anything."""
    if WINDOW > 0:
        return tl.maximum(lowest - WINDOW + 1, 0) // SPLIT * SPLIT
    return 0


@triton.jit
def _parts(
    Q, K, V, PATH, KNOWN, POS, TABLE, TILES, O, PM, PL, sQ, sQh, sK, sKh, NB, MAXD, NS, scale,
    KVH: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    BT: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr, NSP: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    TREE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Partial softmaxes of `UNIT` splits. Programs 0..NSP - 1 of a tile take them in turn, for all its rows; of trees, programs
    from NSP on take a row each, and its positions from the part on that holds the first one not committed."""
    t0 = tl.program_id(0)
    kvh = tl.program_id(1)
    part = tl.program_id(2)
    b = tl.load(TILES + t0 * 3)
    first = tl.load(TILES + t0 * 3 + 1)
    count = tl.load(TILES + t0 * 3 + 2)
    if count == 0:
        return
    i = tl.arange(0, TILE)
    r = i // G
    g = i % G
    d = tl.arange(0, DP)
    pos = tl.load(POS + first + r, mask=r < count, other=-1)
    seen = (pos >= 0) & (g < GROUP)
    known = tl.load(KNOWN + b)
    begin = part
    step = NSP
    end = tl.max(pos, 0) + 1
    lowest = tl.min(tl.where(pos >= 0, pos, 2147483647), 0)
    if TREE:
        begin = known // (SPLIT * UNIT)
        if part < NSP:
            end = begin * (SPLIT * UNIT)
            begin = part
        else:
            if part - NSP >= count:
                return
            step = 1
            lowest = tl.load(POS + first + part - NSP)
            end = lowest + 1
            seen = seen & (r == part - NSP)
    if begin * (SPLIT * UNIT) >= end:
        return
    low = _first(lowest, SPLIT, WINDOW)
    row = (first + r).to(tl.int64)
    mine = seen & (r < count)
    q = tl.load(
        Q + row[:, None] * sQ + (kvh * GROUP + g)[:, None] * sQh + d[None, :], mask=mine[:, None] & (d < D)[None, :], other=0.0
    )
    path = PATH + (first + part - NSP) * MAXD
    table = TABLE + b * NB
    for s in range(begin, tl.cdiv(end, SPLIT * UNIT), step):
        hi = tl.minimum((s + 1) * (SPLIT * UNIT), end)
        if hi > low:
            lo = tl.maximum(s * (SPLIT * UNIT), low)
            if TREE and part >= NSP:
                m, l, acc = _walk(
                    q, K, V, path, table, kvh, pos, seen, known, lo, hi, sK, sKh, scale, d, D, DP, TILE, BT, SPLIT, WINDOW, CAP,
                    EXACT, UNIT, True,
                )  # fmt: skip
            else:
                m, l, acc = _walk(
                    q, K, V, path, table, kvh, pos, seen, known, lo, hi, sK, sKh, scale, d, D, DP, TILE, BT, SPLIT, WINDOW, CAP,
                    EXACT, UNIT, False,
                )  # fmt: skip
            at = ((row * KVH + kvh) * NS + s) * G + g
            tl.store(PM + at, m, mask=mine)
            tl.store(PL + at, l, mask=mine)
            tl.store(O + at[:, None] * DP + d[None, :], acc, mask=mine[:, None])


@triton.jit
def _combine(
    O, PM, PL, POS, OUT, NS, sO, sOh,
    KVH: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLIT: tl.constexpr,
    UNIT: tl.constexpr, PER: tl.constexpr, WINDOW: tl.constexpr, AHEAD: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Merge a row's partial softmaxes in order, `PER` to a stretch, then stretches in order; `PART` of a head's entries per
    program; those of `AHEAD` stretches are loaded together."""
    row = tl.program_id(0).to(tl.int64)
    kvh = tl.program_id(1)
    g = tl.arange(0, G)
    d = tl.program_id(2) * PART + tl.arange(0, PART)
    pos = tl.load(POS + row)
    m = tl.full((G,), -1e30, tl.float32)
    l = tl.zeros((G,), tl.float32)
    acc = tl.zeros((G, PART), tl.float32)
    low = _first(pos, SPLIT, WINDOW) // (SPLIT * UNIT)
    end = (pos + SPLIT * UNIT) // (SPLIT * UNIT)
    for u0 in range(low // PER, tl.cdiv(end, PER), AHEAD):
        for a in tl.static_range(AHEAD):
            m1 = tl.full((G,), -1e30, tl.float32)
            l1 = tl.zeros((G,), tl.float32)
            acc1 = tl.zeros((G, PART), tl.float32)
            for i in tl.static_range(PER):
                s = (u0 + a) * PER + i
                at = ((row * KVH + kvh) * NS + s) * G + g
                have = (s >= low) & (s < end) & (g < GROUP)
                m2 = tl.load(PM + at, mask=have, other=-1e30)
                l2 = tl.load(PL + at, mask=have, other=0.0)
                acc2 = tl.load(O + at[:, None] * DP + d[None, :], mask=have[:, None], other=0.0)
                m1, l1, acc1 = _merge(m1, l1, acc1, m2, l2, acc2)
            m, l, acc = _merge(m, l, acc, m1, l1, acc1)
    out = acc / tl.where(l > 0, l, 1.0)[:, None]
    where = OUT + row * sO + (kvh * GROUP + g)[:, None] * sOh + d[None, :]
    tl.store(where, out.to(OUT.dtype.element_ty), mask=(g < GROUP)[:, None] & (d < D)[None, :])


@triton.jit
def _serial(
    Q, K, V, POS, TABLE, TILES, OUT, sQ, sQh, sK, sKh, sO, sOh, NB, scale,
    KVH: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    BT: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """For many rows: a program walks all stretches of a tile and merges them as it goes, as `_combine` would."""
    t0 = tl.program_id(0)
    kvh = tl.program_id(1)
    b = tl.load(TILES + t0 * 3)
    first = tl.load(TILES + t0 * 3 + 1)
    count = tl.load(TILES + t0 * 3 + 2)
    if count == 0:
        return
    i = tl.arange(0, TILE)
    r = i // G
    g = i % G
    d = tl.arange(0, DP)
    pos = tl.load(POS + first + r, mask=r < count, other=-1)
    seen = (pos >= 0) & (g < GROUP)
    end = tl.max(pos, 0) + 1
    row = (first + r).to(tl.int64)
    mine = (r < count) & (g < GROUP)
    q = tl.load(
        Q + row[:, None] * sQ + (kvh * GROUP + g)[:, None] * sQh + d[None, :], mask=mine[:, None] & (d < D)[None, :], other=0.0
    )
    m = tl.full((TILE,), -1e30, tl.float32)
    l = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, DP), tl.float32)
    low = _first(tl.min(tl.where(pos >= 0, pos, 2147483647), 0), SPLIT, WINDOW)
    table = TABLE + b * NB
    for u in range(low // (SPLIT * UNIT), tl.cdiv(end, SPLIT * UNIT)):
        lo = tl.maximum(u * (SPLIT * UNIT), low)
        hi = tl.minimum((u + 1) * (SPLIT * UNIT), end)
        m2, l2, acc2 = _walk(
            q, K, V, TABLE, table, kvh, pos, seen, 0, lo, hi, sK, sKh, scale, d, D, DP, TILE, BT, SPLIT, WINDOW, CAP, EXACT,
            UNIT, False,
        )  # fmt: skip
        m, l, acc = _merge(m, l, acc, m2, l2, acc2)
    out = acc / tl.where(l > 0, l, 1.0)[:, None]
    where = OUT + row[:, None] * sO + (kvh * GROUP + g)[:, None] * sOh + d[None, :]
    tl.store(where, out.to(OUT.dtype.element_ty), mask=mine[:, None] & (d < D)[None, :])


def attention(
    q: Tensor,
    pool: tuple[Tensor, Tensor],
    where: Where,
    scale: float,
    form: Form | None = None,
    tuning: Tuning = TUNING,
) -> Tensor:
    """`q [R, H, D]` against keys and values `[slots, KV, D]` of `pool`, to `[R, H, D]`. No host sync; every shape is static.

    Raises `ValueError` for a group or head size no tile has room for."""
    heads, kv = q.shape[1], pool[0].shape[1]
    if heads % kv or heads // kv > _MOST:
        raise ValueError(f"{heads} query heads over {kv} KV heads do not fit a tile of {_MOST} lines")
    form = form or Form()
    run = _in_one if form.serial and not form.tree else _in_parts
    return run(q, pool, where, scale, form, tuning)


def _sizes(q: Tensor, kv: int, form: Form, tuning: Tuning) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile-time arguments of all kernels, and of those that walk positions."""
    heads, dim = q.shape[1:]
    group = heads // kv
    common = {
        "KVH": kv, "GROUP": group, "G": triton.next_power_of_2(group), "D": dim, "DP": max(triton.next_power_of_2(dim), 16),
        "SPLIT": tuning.split, "WINDOW": form.window or 0, "enable_fp_fusion": False,
    }  # fmt: skip
    inner = {
        "BT": BLOCK, "CAP": form.softcap or 0.0, "EXACT": q.dtype is torch.float32,
        "num_warps": tuning.warps, "num_stages": tuning.stages,
    }  # fmt: skip
    return common, inner


def _in_one(q: Tensor, pool: tuple[Tensor, Tensor], where: Where, scale: float, form: Form, tuning: Tuning) -> Tensor:
    """One program walks a tile's whole past."""
    keys, values = pool
    common, inner = _sizes(q, keys.shape[1], form, tuning)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _serial[(where.tiles.shape[0], keys.shape[1])](
        q, keys, values, where.position, where.table, where.tiles, out,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), out.stride(0), out.stride(1), where.table.stride(0), scale,
        TILE=lines(common["GROUP"]), UNIT=tuning.stretch, **common, **inner,
    )  # fmt: skip
    return out


def _in_parts(q: Tensor, pool: tuple[Tensor, Tensor], where: Where, scale: float, form: Form, tuning: Tuning) -> Tensor:
    """Programs share a tile's past, and another launch merges what they found."""
    keys, values = pool
    rows, kv = q.shape[0], keys.shape[1]
    common, inner = _sizes(q, kv, form, tuning)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    unit = _unit(where, kv, tuning)
    parts = triton.cdiv(where.longest, tuning.split * unit)
    share = min(parts, tuning.most)
    partial = torch.empty(rows, kv, parts, common["G"], common["DP"], dtype=torch.float32, device=q.device)
    state = torch.empty(2, rows, kv, parts, common["G"], dtype=torch.float32, device=q.device)
    programs = share + (rows_per_tile(common["GROUP"]) if form.tree else 0)
    _parts[(where.tiles.shape[0], kv, programs)](
        q, keys, values, where.path, where.known, where.position, where.table, where.tiles, partial, state[0], state[1],
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), where.table.stride(0), where.path.shape[1], parts, scale,
        NSP=share, TREE=form.tree, TILE=lines(common["GROUP"]), UNIT=unit, **common, **inner,
    )  # fmt: skip
    entries, per = min(common["DP"], 32), tuning.stretch // unit
    _combine[(rows, kv, common["DP"] // entries)](
        partial, state[0], state[1], where.position, out, parts, out.stride(0), out.stride(1),
        UNIT=unit, PER=per, AHEAD=max(1, tuning.ahead // per), PART=entries, num_warps=4, **common,
    )  # fmt: skip
    return out


def _unit(where: Where, kv: int, tuning: Tuning) -> int:
    """Splits per program: a whole stretch where that leaves programs enough. A function of shapes alone, as graphs want it."""
    stretches = triton.cdiv(where.longest, tuning.split * tuning.stretch)
    return tuning.stretch if where.tiles.shape[0] * kv * stretches >= tuning.enough else 1
