"""Matrix tiles of attention, for kernels: whose rows their lines are, what is loaded for them and where results go.

Line i of a tile is query head `i % G` of its group, of row `first + i // G`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turn(TILES, HALF: tl.constexpr, TURNS: tl.constexpr):
    """The request, first row and number of rows of a program, which takes what `Where.tiles` names whole or one half of it."""
    t = tl.program_id(0) // TURNS * 3
    skipped = tl.program_id(0) % TURNS * HALF
    count = tl.load(TILES + t + 2) - skipped
    if TURNS > 1:
        count = tl.minimum(count, HALF)
    return tl.load(TILES + t), tl.load(TILES + t + 1) + skipped, count


@triton.jit
def load_lines(
    Q, POS, first, count, kvh, sQ, sQh, d, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """A matrix tile of the rows first..first + count - 1: queries and positions, -1 where a line is nobody's."""
    i = tl.arange(0, TILE)
    mine = (i // G < count) & (i % G < GROUP)
    pos = tl.load(POS + first + i // G, mask=mine, other=-1)
    at = (first + i // G).to(tl.int64) * sQ + (kvh * GROUP + i % G) * sQh
    q = tl.load(Q + at[:, None] + d[None, :], mask=(pos >= 0)[:, None] & (d < D)[None, :], other=0.0)
    return q, pos


@triton.jit
def lowest(pos, pos2):
    """The least position of any row there is."""
    return tl.minimum(tl.min(tl.where(pos < 0, 2147483647, pos), 0), tl.min(tl.where(pos2 < 0, 2147483647, pos2), 0))


@triton.jit
def store_part(
    O, PM, PL, state, pos, first, kvh, s, NS, d, KVH: tl.constexpr, G: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Partial softmax `s` of a tile's rows."""
    i = tl.arange(0, TILE)
    at = (((first + i // G).to(tl.int64) * KVH + kvh) * NS + s) * G + i % G
    tl.store(PM + at, state[0], mask=pos >= 0)
    tl.store(PL + at, state[1], mask=pos >= 0)
    tl.store(O + at[:, None] * DP + d[None, :], state[2], mask=(pos >= 0)[:, None])


@triton.jit
def store_rows(
    OUT, state, first, count, kvh, sO, sOh, d, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The output of a tile's rows; zero for those that do not exist."""
    i = tl.arange(0, TILE)
    mine = (i // G < count) & (i % G < GROUP)
    out = state[2] / tl.where(state[1] > 0, state[1], 1.0)[:, None]
    at = (first + i // G).to(tl.int64) * sO + (kvh * GROUP + i % G) * sOh
    tl.store(OUT + at[:, None] + d[None, :], out.to(OUT.dtype.element_ty), mask=mine[:, None] & (d < D)[None, :])
