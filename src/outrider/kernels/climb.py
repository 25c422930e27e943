"""Guessing level by level on the device: where rows of a draft network stand, what it reads, how its scores become guesses.

B requests, M rows of known tokens each (right-aligned), k nodes fed per level, D levels. What the host tells is one int64 table
`given [B, HEAD + M]`: lane, known tokens L (0: nobody), how many of the M rows are in use, address of their states, levels and
nodes allowed, then the M tokens. Row r reads the state at position L - 1 - M + r and the token after it. Where L is -1, states
and tokens of what was not read yet are in the lane's ring (`ring.py`); known tokens are then in place of the address, and where
that is 0 the device knows better: the lane has the length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import BLOCK
from .ring import PLACES, Ring
from .rounds import Lanes

HEAD = 6
"""Numbers before the tokens in a row of `given`."""
_HEAD = tl.constexpr(HEAD)
_PART = 1024


@dataclass(frozen=True, slots=True)
class Stand:
    """Rows of a climb. Known ones, `[B M]`: `token`, `write` int64, `attend` (-1: no such row), `position` int32. Fed nodes,
    `[D - 1, B k]`: `node_write`, `node_attend`, `node_position`. `known [B]`: positions with committed KV; `lane [B k]`; `asked
    [D, B k]`: positions of the tokens to be chosen."""

    token: Tensor
    write: Tensor
    attend: Tensor
    position: Tensor
    node_write: Tensor
    node_attend: Tensor
    node_position: Tensor
    known: Tensor
    lane: Tensor
    asked: Tensor

    @classmethod
    def make(cls, requests: int, rows: int, width: int, depth: int, device: torch.device) -> Stand:
        """Buffers, zero at first."""

        def some(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        wide, fed, many = torch.int64, depth - 1, requests * width
        return cls(
            some(requests * rows, dtype=wide), some(requests * rows, dtype=wide), some(requests * rows), some(requests * rows),
            some(fed, many, dtype=wide), some(fed, many), some(fed, many), some(requests), some(many), some(depth, many),
        )  # fmt: skip


@triton.jit
def _slot(TABLE, lane, virtual, NB, there, BLOCK: tl.constexpr):
    block = tl.load(TABLE + lane * NB + virtual // BLOCK, mask=there & (virtual // BLOCK < NB), other=0).to(tl.int64)
    return tl.where(there & (block > 0), block * BLOCK + virtual % BLOCK, 0)


@triton.jit(do_not_specialize=["B", "M", "D"])
def _stand(
    GIVEN, LENGTH, TABLE, RTOKEN, UPTO, TOKEN, WRITE, ATTEND, POS, NWRITE, NATTEND, NPOS, KNOWN, LANE, ASKED, NB, sG, B, M, D,
    MP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    given = GIVEN + b.to(tl.int64) * sG
    lane = tl.load(given)
    length = tl.load(given + 1)
    fresh = tl.load(given + 2)
    r = tl.arange(0, MP)
    mine = r < M
    token = tl.load(given + _HEAD + r, mask=mine, other=0)
    if RING:
        if length < 0:
            length = tl.load(given + 3)
            if length == 0:  # the host has not read how far the request is
                length = tl.load(LENGTH + lane).to(tl.int64)
            fresh = tl.minimum(tl.maximum(length - 1 - tl.load(UPTO + lane), 1), P)
            at = tl.maximum(length - 1 - M + r, 0)
            token = tl.load(RTOKEN + lane * P + at % P, mask=mine, other=0).to(tl.int64)
        if length > 0:
            tl.store(UPTO + lane, (length - 1).to(tl.int32))
    place = length - 1 - M + r
    there = mine & (r >= M - fresh) & (place >= 0)
    tl.store(TOKEN + b * M + r, token, mask=mine)
    tl.store(WRITE + b * M + r, _slot(TABLE, lane, tl.maximum(place, 0), NB, there, BLOCK), mask=mine)
    tl.store(ATTEND + b * M + r, tl.where(there, place, -1).to(tl.int32), mask=mine)
    tl.store(POS + b * M + r, tl.where(there, place, 0).to(tl.int32), mask=mine)
    tl.store(KNOWN + b, tl.maximum(length - 1, 0).to(tl.int32))
    i = tl.arange(0, KP)
    own = i < K
    at = b * K + i
    zero = tl.zeros((KP,), tl.int32)
    tl.store(LANE + at, zero + lane.to(tl.int32), mask=own)
    tl.store(ASKED + at, zero + length.to(tl.int32), mask=own)
    for level in range(1, D):
        row = (level - 1) * B * K + at
        live = own & (length > 1)
        virtual = length - 1 + (level - 1) * K + i
        position = zero + (length - 2 + level).to(tl.int32)
        tl.store(NWRITE + row, _slot(TABLE, lane, virtual, NB, live, BLOCK), mask=own)
        tl.store(NATTEND + row, tl.where(live, position, -1), mask=own)
        tl.store(NPOS + row, tl.where(live, position, 0), mask=own)
        tl.store(ASKED + level * B * K + at, zero + (length + level).to(tl.int32), mask=own)


def stand(given: Tensor, lanes: Lanes, ring: Ring | None, width: int, out: Stand) -> None:
    """Fill `out` from `given`, the lanes and the ring, and note in that what is being read; without one the host tells all. Node
    i of level l (from 1) has virtual index L - 1 + (l - 1) k + i, and its KV the slot of that."""
    requests, rows, table = given.shape[0], given.shape[1] - HEAD, lanes.table
    tokens, upto = (lanes.last, lanes.length) if ring is None else (ring.tokens, ring.upto)
    _stand[(requests,)](
        given, lanes.length, table, tokens, upto, out.token, out.write, out.attend, out.position, out.node_write, out.node_attend,
        out.node_position, out.known, out.lane, out.asked, table.shape[1], given.stride(0), requests, rows, len(out.asked),
        MP=triton.next_power_of_2(rows), K=width, KP=triton.next_power_of_2(width), BLOCK=BLOCK, P=PLACES, RING=ring is not None,
        num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _collect(GIVEN, ATTEND, RING, OUT, sG, M, W: tl.constexpr, CH: tl.constexpr, P: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * CH + tl.arange(0, CH)
    given = GIVEN + row // M * sG
    place = tl.load(ATTEND + row).to(tl.int64)
    there = (i < W) & (place >= 0)
    if tl.load(given + 1) < 0:
        states = RING + (tl.load(given) * P + place % P) * W
        x = tl.load(states + i, mask=there, other=0.0)
    else:
        at = row % M - (M - tl.load(given + 2))
        states = tl.load(given + 3).to(tl.pointer_type(OUT.dtype.element_ty))
        x = tl.load(states + at * W + i, mask=there, other=0.0)
    tl.store(OUT + row * W + i, x, mask=i < W)


def collect(given: Tensor, attend: Tensor, ring: Ring, out: Tensor) -> None:
    """`out [B M, W]`: the states of the rows at positions `attend [B M]` (-1: zeros), from the addresses in `given`, where they
    lie row after row and of the type of `out`, or from the ring."""
    rows, width = out.shape
    _collect[(rows, triton.cdiv(width, _PART))](
        given, attend, ring.states, out, given.stride(0), rows // given.shape[0], W=width, CH=_PART, P=PLACES, num_warps=4
    )


@triton.jit
def _scaled(x, w, eps, N: tl.constexpr):
    f = x.to(tl.float32)
    return (f * (1.0 / tl.sqrt_rn(tl.sum(f * f, 0) / N + eps)) * w.to(tl.float32)).to(x.dtype)


@triton.jit
def _enter(
    ROWS, TOKEN, STATES, FROM, WE, WS, X, RES, sE, sS, eps, vocab,
    NORM: tl.constexpr, NORMED: tl.constexpr, PICK: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, NP)
    have = i < N
    token = tl.minimum(tl.maximum(tl.load(TOKEN + row), 0), vocab - 1)
    source = row
    if PICK:
        source = tl.load(FROM + row).to(tl.int64)
    e = tl.load(ROWS + token * sE + i, mask=have, other=0.0)
    s = tl.load(STATES + source * sS + i, mask=have, other=0.0)
    if NORM:
        e = _scaled(e, tl.load(WE + i, mask=have, other=0.0), eps, N)
        normed = _scaled(s, tl.load(WS + i, mask=have, other=0.0), eps, N)
        if NORMED:
            s = normed
        tl.store(RES + row * N + i, s, mask=have)
        s = normed
    tl.store(X + row * 2 * N + i, e, mask=have)
    tl.store(X + row * 2 * N + N + i, s, mask=have)


def enter(
    embeddings: Tensor,
    token: Tensor,
    states: Tensor,
    source: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    how: tuple[float, bool],
) -> tuple[Tensor, Tensor]:
    """`[R, 2 d]`: embeddings of the tokens beside the states `[., d]` (row r's: `source[r]`), normed if there are `norms`; and
    the residual `[R, d]`, which is the normed state if `how` (epsilon, that) says so."""
    rows, width = token.shape[0], states.shape[1]
    x = torch.empty(rows, 2 * width, dtype=states.dtype, device=states.device)
    residual = torch.empty(rows, width, dtype=states.dtype, device=states.device)
    first, second = norms or (states, states)
    _enter[(rows,)](
        embeddings, token, states, token if source is None else source, first, second, x, residual,
        embeddings.stride(0), states.stride(0), how[0], embeddings.shape[0],
        NORM=norms is not None, NORMED=how[1], PICK=source is not None, N=width, NP=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return x, residual


@triton.jit
def _spread(Z, IDS, OUT, sZ, sO, n, wide, NAMED: tl.constexpr, CH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * CH + tl.arange(0, CH)
    have = i < n
    z = tl.load(Z + row * sZ + i, mask=have, other=0.0).to(tl.float32)
    to = i.to(tl.int64)
    if NAMED:
        to = tl.load(IDS + i, mask=have, other=0)
    tl.store(OUT + row * sO + to, z, mask=have & (to < wide))


def spread(logits: Tensor, ids: Tensor | None, out: Tensor) -> None:
    """Write scores `[R, n]` of the tokens `ids [n]` (None: of the first n) to their places in `out [R, V]` fp32."""
    rows, count = logits.shape
    _spread[(rows, triton.cdiv(count, _PART))](
        logits, logits if ids is None else ids, out, logits.stride(0), out.stride(0), count, out.shape[1],
        NAMED=ids is not None, CH=_PART, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["B", "D"])
def _chain(GIVEN, CHOSEN, TOKENS, SIZES, sG, B, D, DP: tl.constexpr):
    b = tl.program_id(0)
    given = GIVEN + b.to(tl.int64) * sG
    i = tl.arange(0, DP)
    token = tl.load(CHOSEN + i * B + b, mask=i < D, other=-1)
    most = tl.minimum(tl.load(given + 4), tl.load(given + 5))
    size = tl.minimum(tl.min(tl.where(token < 0, i, DP), 0).to(tl.int64), most)
    tl.store(TOKENS + b * D + i, tl.where(i < size, token, 0), mask=i < D)
    tl.store(SIZES + b, size)


def chain(given: Tensor, chosen: Tensor, tokens: Tensor, sizes: Tensor) -> None:
    """`tokens [B, D]` and `sizes [B]`, both int64, of the chains `chosen [D, B]`, which end before the first -1."""
    depth, requests = chosen.shape
    _chain[(requests,)](
        given, chosen, tokens, sizes, given.stride(0), B=requests, D=depth, DP=triton.next_power_of_2(depth), num_warps=1
    )
