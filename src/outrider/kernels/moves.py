"""After a tree's round: the accepted path's KV to where the sequence continues."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from . import BLOCK


@triton.jit(do_not_specialize=["sR", "NB", "N"])
def _move(X, TABLE, KNOWN, RESULT, sL, sK, sS, sR, NB, N, W: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr):
    """One request's path in one layer's keys or values, in order of depth. A node's column is never less than its depth, so
    nothing is overwritten before it is read."""
    b = tl.program_id(0)
    pair = tl.program_id(1)
    base = X + (pair // 2).to(tl.int64) * sL + (pair % 2).to(tl.int64) * sK
    i = tl.arange(0, WP)
    accepted = tl.load(RESULT + b * sR)
    known = tl.load(KNOWN + b)
    for at in range(accepted):
        source = known + tl.load(RESULT + b * sR + 4 + N + at)
        target = known + at
        if source != target:
            from_block = tl.load(TABLE + b * NB + source // BLOCK).to(tl.int64)
            to_block = tl.load(TABLE + b * NB + target // BLOCK).to(tl.int64)
            x = tl.load(base + (from_block * BLOCK + source % BLOCK) * sS + i, mask=i < W)
            tl.store(base + (to_block * BLOCK + target % BLOCK) * sS + i, x, mask=i < W)


def move_path(groups: Sequence[Tensor], table: Tensor, known: Tensor, result: Tensor, columns: int) -> None:
    """In every layer of `groups` (`[layers, 2, slots, heads, dim]`), copy virtual `known[b] + path[b, i]` to `known[b] + i` for
    the accepted nodes i of request b; `result [B, 3 + 2 (N + 1)]` is that of `rounds.decide`, `table [B, blocks]`."""
    for group in groups:
        width = group.shape[3] * group.shape[4]
        _move[(result.shape[0], group.shape[0] * 2)](
            group, table, known, result, group.stride(0), group.stride(1), group.stride(2), result.stride(0), table.shape[1],
            columns, W=width, WP=triton.next_power_of_2(width), BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


@triton.jit
def _arrange(
    X, REQUEST, POSITION, SLOT, PATH, SHIFT, OUT, sX, sP, total,
    N: tl.constexpr, NP: tl.constexpr, W: tl.constexpr, CH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(REQUEST + row).to(tl.int64)
    slot = tl.load(SLOT + row)
    p = tl.arange(0, NP)
    column = tl.load(PATH + request * sP + p, mask=p < N, other=-1)
    kept = (slot <= 0) | (tl.max((column == slot - 1).to(tl.int32), 0) > 0)
    place = tl.load(POSITION + row).to(tl.int64) + tl.load(SHIFT + request)
    i = tl.program_id(1) * CH + tl.arange(0, CH)
    there = (i < W) & kept & (place >= 0) & (place < total)
    tl.store(OUT + place * W + i, tl.load(X + row * sX + i, mask=there), mask=there)


def arrange(states: Tensor, rows: tuple[Tensor, Tensor, Tensor], path: Tensor, shift: Tensor, out: Tensor) -> None:
    """Copy the states `[R, W]` of rows (request, position, slot, `[R]` each) that are known or on their request's `path [B, N]`
    of columns to `out[position + shift[request]]`, where `out [total, W]` has such a place. `shift [B]` int64."""
    count, width = states.shape
    chunk, columns = 1024, path.shape[1]
    rows = (rows[0].contiguous(), rows[1].contiguous(), rows[2].contiguous())  # they may be columns of one table
    _arrange[(count, triton.cdiv(width, chunk))](
        states, *rows, path, shift, out, states.stride(0), path.stride(0), out.shape[0],
        N=columns, NP=triton.next_power_of_2(max(columns, 1)), W=width, CH=chunk, num_warps=4,
    )  # fmt: skip
