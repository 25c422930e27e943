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
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import BLOCK
from .softmax import empty, merge, update
from .tiles import load_lines, lowest, store_part, store_rows, turn


@dataclass(frozen=True, slots=True)
class Tuning:
    """`split`: positions per partial softmax. `stretch`: splits merged first. `most`: programs that share one tile's past.
    `enough`: programs from which on each takes a stretch instead of a split. `pair`: matrix tiles that share loads, where
    registers allow. `stages`: loads under way, where shared memory allows. `ahead`: partial results loaded together. `split`,
    `stretch` and `warps` are part of the arithmetic: one choice per card and release."""

    split: int = 128
    stretch: int = 4
    warps: int = 4
    stages: int = 4
    most: int = 64
    ahead: int = 16
    enough: int = 96
    pair: int = 2


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
    """Rows of one request that `Where.tiles` may name together: those of two matrix tiles, or of one where it is a large one."""
    whole = lines(group)
    return whole // int(triton.next_power_of_2(group)) * (2 if whole == 16 else 1)


@triton.jit
def _walk(
    K, V, TABLE, PATH, known, lines, lines2, state, lo, hi, kvh, sK, sKh, scale, d,
    D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, BT: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, EXACT: tl.constexpr, DEEP: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Positions lo..hi - 1, from where a split begins: the softmax of one split (`UNIT` 1), or that of a stretch, whose splits
    are merged into `state` on the way. `DEEP`: all lines are one row's, and positions from `known` on lie where `PATH` says.
    `PAIR`: `lines2` share the loads, from an empty state."""
    part = empty(TILE, DP)
    part2, state2 = part, part
    block = tl.load(TABLE + lo // BT)  # a tile ahead, so that copies need not wait for it
    for t in range(lo, hi, BT):
        j = t + tl.arange(0, BT)
        have = j < hi
        if DEEP:
            deep = j >= known
            virtual = tl.where(deep, tl.load(PATH + (j - known), mask=have & deep, other=0), j)
            page = tl.load(TABLE + virtual // BT, mask=have, other=0).to(tl.int64)
            at = (page * BT + virtual % BT) * sK + kvh * sKh
        else:
            at = (block.to(tl.int64) * BT + tl.arange(0, BT)) * sK + kvh * sKh
            block = tl.load(TABLE + t // BT + 1, mask=t + BT < hi, other=0)
        k = tl.load(K + at[None, :] + d[:, None], mask=have[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(V + at[:, None] + d[None, :], mask=have[:, None] & (d < D)[None, :], other=0.0)
        part = update(lines, k, v, j, have, part, scale, WINDOW, CAP, EXACT)
        if PAIR:
            part2 = update(lines2, k, v, j, have, part2, scale, WINDOW, CAP, EXACT)
        if UNIT > 1:
            if ((t + BT) % SPLIT == 0) | (t + BT >= hi):
                state = merge(state, part)
                part = empty(TILE, DP)
                if PAIR:
                    state2 = merge(state2, part2)
                    part2 = empty(TILE, DP)
    if UNIT > 1:
        return state, state2
    return part, part2


@triton.jit
def _first(lowest, SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    """Where the split begins in which a row at position `lowest` first sees anything."""
    if WINDOW > 0:
        return tl.maximum(lowest - WINDOW + 1, 0) // SPLIT * SPLIT
    return 0


@triton.jit(do_not_specialize=["NB", "MAXD", "NS", "NSP"], do_not_specialize_on_alignment=["TILES", "PM", "PL"])
def _parts(
    Q, K, V, PATH, KNOWN, POS, TABLE, TILES, O, PM, PL, sQ, sQh, sK, sKh, NB, MAXD, NS, NSP, scale,
    KVH: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    BT: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    TREE: tl.constexpr, EXACT: tl.constexpr, PAIR: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Partial softmaxes of `UNIT` splits. Programs 0..NSP - 1 of a tile take them in turn, for all its rows; of trees, programs
    from NSP on take a row each, and its positions from the part on that holds the first one not committed."""
    SIZE: tl.constexpr = SPLIT * UNIT
    HALF: tl.constexpr = TILE // G
    kvh = tl.program_id(1)
    part = tl.program_id(2)
    b, first, count = turn(TILES, HALF, TURNS)
    known = tl.load(KNOWN + b)
    begin = part
    step = NSP
    single = part >= NSP
    if TREE:
        if single:
            begin = known // SIZE
            step = 1
            first += part - NSP
            count = tl.minimum(count - (part - NSP), 1)
    if count <= 0:
        return
    d = tl.arange(0, DP)
    lines = load_lines(Q, POS, first, count, kvh, sQ, sQh, d, GROUP, G, D, TILE)
    lines2 = load_lines(Q, POS, first + HALF, count - HALF, kvh, sQ, sQh, d, GROUP, G, D, TILE)
    end = tl.maximum(tl.max(lines[1], 0), tl.max(lines2[1], 0)) + 1
    shallow = end
    if TREE:
        if single:
            shallow = known // SPLIT * SPLIT
        else:
            end = tl.minimum(end, known // SIZE * SIZE)
    low = _first(lowest(lines[1], lines2[1]), SPLIT, WINDOW)
    both = False
    if PAIR:
        both = count > HALF
    table = TABLE + b * NB
    path = PATH + first * MAXD
    for s in range(begin, tl.cdiv(end, SIZE), step):
        lo = tl.maximum(s * SIZE, low)
        hi = tl.minimum(s * SIZE + SIZE, end)
        if hi > lo:
            if both:
                state, state2 = _walk(
                    K, V, table, path, known, lines, lines2, empty(TILE, DP), lo, hi, kvh, sK, sKh, scale, d,
                    D, DP, TILE, BT, SPLIT, UNIT, WINDOW, CAP, EXACT, False, True,
                )  # fmt: skip
                store_part(O, PM, PL, state2, lines2[1], first + HALF, kvh, s, NS, d, KVH, G, DP, TILE)
            else:
                middle = tl.minimum(tl.maximum(shallow, lo), hi)
                state, state2 = _walk(
                    K, V, table, path, known, lines, lines, empty(TILE, DP), lo, middle, kvh, sK, sKh, scale, d,
                    D, DP, TILE, BT, SPLIT, UNIT, WINDOW, CAP, EXACT, False, False,
                )  # fmt: skip
                if TREE:
                    if middle < hi:
                        state, state2 = _walk(
                            K, V, table, path, known, lines, lines, state, middle, hi, kvh, sK, sKh, scale, d,
                            D, DP, TILE, BT, SPLIT, UNIT, WINDOW, CAP, EXACT, True, False,
                        )  # fmt: skip
            store_part(O, PM, PL, state, lines[1], first, kvh, s, NS, d, KVH, G, DP, TILE)


@triton.jit(do_not_specialize=["NS"], do_not_specialize_on_alignment=["PM", "PL"])
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
    low = _first(pos, SPLIT, WINDOW) // (SPLIT * UNIT)
    end = (pos + SPLIT * UNIT) // (SPLIT * UNIT)
    state = empty(G, PART)
    for u0 in range(low // PER, tl.cdiv(end, PER), AHEAD):
        for a in tl.static_range(AHEAD):
            stretch = empty(G, PART)
            for i in tl.static_range(PER):
                s = (u0 + a) * PER + i
                at = ((row * KVH + kvh) * NS + s) * G + g
                have = (s >= low) & (s < end) & (g < GROUP)
                m = tl.load(PM + at, mask=have, other=-1e30)
                l = tl.load(PL + at, mask=have, other=0.0)
                acc = tl.load(O + at[:, None] * DP + d[None, :], mask=have[:, None], other=0.0)
                stretch = merge(stretch, (m, l, acc))
            state = merge(state, stretch)
    out = state[2] / tl.where(state[1] > 0, state[1], 1.0)[:, None]
    where = OUT + row * sO + (kvh * GROUP + g)[:, None] * sOh + d[None, :]
    tl.store(where, out.to(OUT.dtype.element_ty), mask=(g < GROUP)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["NB"], do_not_specialize_on_alignment=["TILES"])
def _serial(
    Q, K, V, POS, TABLE, TILES, OUT, sQ, sQh, sK, sKh, sO, sOh, NB, scale,
    KVH: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    BT: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, EXACT: tl.constexpr,
    PAIR: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """For many rows: a program walks all stretches of a tile and merges them as it goes, as `_combine` would."""
    SIZE: tl.constexpr = SPLIT * UNIT
    HALF: tl.constexpr = TILE // G
    kvh = tl.program_id(1)
    b, first, count = turn(TILES, HALF, TURNS)
    if count <= 0:
        return
    d = tl.arange(0, DP)
    lines = load_lines(Q, POS, first, count, kvh, sQ, sQh, d, GROUP, G, D, TILE)
    lines2 = load_lines(Q, POS, first + HALF, count - HALF, kvh, sQ, sQh, d, GROUP, G, D, TILE)
    end = tl.maximum(tl.max(lines[1], 0), tl.max(lines2[1], 0)) + 1
    low = _first(lowest(lines[1], lines2[1]), SPLIT, WINDOW)
    state = empty(TILE, DP)
    state2 = state
    for u in range(low // SIZE, tl.cdiv(end, SIZE)):
        lo = tl.maximum(u * SIZE, low)
        hi = tl.minimum(u * SIZE + SIZE, end)
        stretch, stretch2 = _walk(
            K, V, TABLE + b * NB, POS, 0, lines, lines2, empty(TILE, DP), lo, hi, kvh, sK, sKh, scale, d,
            D, DP, TILE, BT, SPLIT, UNIT, WINDOW, CAP, EXACT, False, PAIR,
        )  # fmt: skip
        state = merge(state, stretch)
        if PAIR:
            state2 = merge(state2, stretch2)
    store_rows(OUT, state, first, count, kvh, sO, sOh, d, GROUP, G, D, TILE)
    if PAIR:
        store_rows(OUT, state2, first + HALF, count - HALF, kvh, sO, sOh, d, GROUP, G, D, TILE)


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
        "num_warps": tuning.warps, "num_stages": _stages(q, tuning.stages), "TILE": lines(group),
    }  # fmt: skip
    inner["PAIR"] = tuning.pair > 1 and lines(group) == 16 and q.element_size() == 2 and common["DP"] <= 128
    inner["TURNS"] = 2 if lines(group) == 16 and not inner["PAIR"] else 1
    return common, inner


def _stages(q: Tensor, wanted: int) -> int:
    """As many stages as fit: all but one hold a tile of keys and one of values in shared memory."""
    tile = 2 * BLOCK * max(int(triton.next_power_of_2(q.shape[2])), 16) * q.element_size()
    return max(2, min(wanted, 1 + _room(q.device) // tile))


@cache
def _room(device: torch.device) -> int:
    """Bytes of shared memory for tiles of positions; queries and what warps exchange take the rest."""
    if device.type != "cuda":
        return 0
    card = torch.cuda.get_device_properties(device)
    most: int = getattr(card, "shared_memory_per_block_optin", card.shared_memory_per_block)
    return most * 9 // 10


def _in_one(q: Tensor, pool: tuple[Tensor, Tensor], where: Where, scale: float, form: Form, tuning: Tuning) -> Tensor:
    """One program walks a tile's whole past."""
    keys, values = pool
    common, inner = _sizes(q, keys.shape[1], form, tuning)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)  # rows that only pad a pass are in no tile
    _serial[(where.tiles.shape[0] * inner["TURNS"], keys.shape[1])](
        q, keys, values, where.position, where.table, where.tiles, out,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), out.stride(0), out.stride(1), where.table.stride(0), scale,
        UNIT=tuning.stretch, **common, **inner,
    )  # fmt: skip
    return out


def _in_parts(q: Tensor, pool: tuple[Tensor, Tensor], where: Where, scale: float, form: Form, tuning: Tuning) -> Tensor:
    """Programs share a tile's past, and another launch merges what they found."""
    keys, values = pool
    rows, kv = q.shape[0], keys.shape[1]
    common, inner = _sizes(q, kv, form, tuning)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tiles = where.tiles.shape[0] * inner["TURNS"]
    stretches = triton.cdiv(where.longest, tuning.split * tuning.stretch)
    unit = tuning.stretch if tiles * kv * stretches >= tuning.enough else 1
    parts = triton.cdiv(where.longest, tuning.split * unit)
    share = min(parts, tuning.most)
    partial = torch.empty(rows, kv, parts, common["G"], common["DP"], dtype=torch.float32, device=q.device)
    state = torch.empty(2, rows, kv, parts, common["G"], dtype=torch.float32, device=q.device)
    programs = share + (rows_per_tile(common["GROUP"]) // inner["TURNS"] if form.tree else 0)
    _parts[(tiles, kv, programs)](
        q, keys, values, where.path, where.known, where.position, where.table, where.tiles, partial, state[0], state[1],
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), where.table.stride(0), where.path.shape[1], parts, share, scale,
        TREE=form.tree, UNIT=unit, **common, **inner,
    )  # fmt: skip
    entries, per = min(common["DP"], 32), tuning.stretch // unit
    _combine[(rows, kv, common["DP"] // entries)](
        partial, state[0], state[1], where.position, out, parts, out.stride(0), out.stride(1),
        UNIT=unit, PER=per, AHEAD=max(1, tuning.ahead // per), PART=entries, num_warps=4, **common,
    )  # fmt: skip
    return out
