"""A dynamic tree of guesses on the device (EAGLE-2: Li et al. 2024, arXiv 2406.16858): the best children of every row, the best
nodes of a level as the next to be fed, and in the end the best of all that were offered.

B requests, m rows of each (1, or the k nodes of a level), k children per row, M nodes offered in all, D levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024
_TILE = 64
_NOBODY = tl.constexpr(2147483647)


@dataclass(frozen=True, slots=True)
class Front:
    """Nodes about to be fed, `[B k]`: `token`, `row` (of the pass that offered them) int64, `column` int32 and summed score
    `total` fp32; `path [B k, D - 1]` int32, virtual indices from the first level down to themselves."""

    token: Tensor
    row: Tensor
    column: Tensor
    total: Tensor
    path: Tensor

    @classmethod
    def make(cls, count: int, depth: int, device: torch.device) -> Front:
        def some(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(count, *shape, dtype=dtype, device=device)

        return cls(
            some(torch.int64), some(torch.int64), some(torch.int32), some(torch.float32), some(torch.int32, max(1, depth - 1))
        )


@dataclass(frozen=True, slots=True)
class Offered:
    """All nodes, `[B, M]`: `token`, `parent` int32 (a column, or -1), `total` fp32, `kept` int32."""

    token: Tensor
    parent: Tensor
    total: Tensor
    kept: Tensor

    @classmethod
    def make(cls, requests: int, nodes: int, device: torch.device) -> Offered:
        whole = [torch.zeros(requests, nodes, dtype=torch.int32, device=device) for _ in range(3)]
        return cls(whole[0], whole[1], torch.zeros(requests, nodes, device=device), whole[2])


@triton.jit
def _tops(S, TOP, ID, MOST, SUM, sS, wide, CHUNKS, K: tl.constexpr, CH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    i = tl.arange(0, CH)
    v = chunk * CH + i
    x = tl.load(S + row * sS + v, mask=v < wide, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    at = row * CHUNKS + chunk
    most = tl.max(x, 0)
    tl.store(MOST + at, most)
    tl.store(SUM + at, tl.sum(tl.where(x > float("-inf"), tl.exp(x - most), 0.0), 0))
    for j in tl.static_range(K):
        top = tl.max(x, 0)
        best = tl.min(tl.where(x == top, i, CH), 0)
        tl.store(TOP + at * K + j, top)
        tl.store(ID + at * K + j, chunk * CH + best)
        x = tl.where(i == best, float("-inf"), x)


@triton.jit
def _merge(TOP, ID, MOST, SUM, TOKEN, GAIN, CHUNKS, K: tl.constexpr, CP: tl.constexpr, NP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CP)
    here = tl.load(MOST + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    part = tl.load(SUM + row * CHUNKS + c, mask=c < CHUNKS, other=0.0)
    most = tl.max(here, 0)
    whole = most + tl.log(tl.sum(tl.where(here > float("-inf"), part * tl.exp(here - most), 0.0), 0))
    n = tl.arange(0, NP)
    have = n < CHUNKS * K
    x = tl.load(TOP + row * CHUNKS * K + n, mask=have, other=float("-inf"))
    ids = tl.load(ID + row * CHUNKS * K + n, mask=have, other=_NOBODY)
    for j in tl.static_range(K):
        top = tl.max(x, 0)
        best = tl.min(tl.where((x == top) & have, ids, _NOBODY), 0)
        tl.store(TOKEN + row * K + j, best)
        tl.store(GAIN + row * K + j, tl.where(top > float("-inf"), tl.minimum(top - whole, 0.0), float("-inf")))
        x = tl.where(ids == best, float("-inf"), x)


def children(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Of perturbed scores `[R, V]` (-inf: impossible, NaN: the whole row) the best `width` tokens of every row `[R, width]` int32
    and their log-probabilities, fp32."""
    rows, wide = scores.shape
    device, chunks = scores.device, triton.cdiv(wide, _CHUNK)
    single = torch.empty(rows * chunks * (width + 2), device=device)
    top, most, total = torch.split(single, [rows * chunks * width, rows * chunks, rows * chunks])
    ids = torch.empty(rows * chunks * width, dtype=torch.int32, device=device)
    token = torch.empty(rows, width, dtype=torch.int32, device=device)
    gain = torch.empty(rows, width, device=device)
    _tops[(rows, chunks)](scores, top, ids, most, total, scores.stride(0), wide, chunks, K=width, CH=_CHUNK, num_warps=4)
    _merge[(rows,)](
        top, ids, most, total, token, gain, chunks,
        K=width, CP=triton.next_power_of_2(chunks), NP=triton.next_power_of_2(chunks * width), num_warps=4,
    )  # fmt: skip
    return token, gain


@triton.jit(do_not_specialize=["level", "first", "M", "P"])
def _select(
    GIVEN, KNOWN, TOKEN, GAIN, fTOTAL, fCOLUMN, fPATH, aTOKEN, aPARENT, aTOTAL, nTOKEN, nROW, nCOLUMN, nTOTAL, nPATH, sG, level,
    first, M, P, ROWS: tl.constexpr, K: tl.constexpr, IP: tl.constexpr, PP: tl.constexpr, ROOT: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    i = tl.arange(0, IP)
    have = i < ROWS * K
    above = i // K
    token = tl.load(TOKEN + b * ROWS * K + i, mask=have, other=0)
    total = tl.load(GAIN + b * ROWS * K + i, mask=have, other=float("-inf"))
    parent = tl.full((IP,), -1, tl.int32)
    if not ROOT:
        parent = tl.load(fCOLUMN + b * K + above, mask=have, other=0)
        total += tl.load(fTOTAL + b * K + above, mask=have, other=0.0)
    allowed = tl.load(GIVEN + b.to(tl.int64) * sG + 4)
    total = tl.where(level < allowed, total, float("-inf"))
    tl.store(aTOKEN + b * M + first + i, token, mask=have)
    tl.store(aPARENT + b * M + first + i, parent, mask=have)
    tl.store(aTOTAL + b * M + first + i, total, mask=have)
    known = tl.load(KNOWN + b)
    p = tl.arange(0, PP)
    for j in tl.static_range(K):
        top = tl.max(tl.where(have, total, float("-inf")), 0)
        best = tl.min(tl.where(have & (total == top), i, IP), 0)
        to = b * K + j
        tl.store(nTOKEN + to, tl.sum(tl.where(i == best, token, 0), 0).to(tl.int64))
        tl.store(nROW + to, (b * ROWS + best // K).to(tl.int64))
        tl.store(nCOLUMN + to, first + best)
        tl.store(nTOTAL + to, top)
        line = tl.load(fPATH + (b * K + best // K) * P + p, mask=p < level, other=0)
        tl.store(nPATH + to * P + p, tl.where(p == level, known + level * K + j, line), mask=(p <= level) & (p < P))
        have = have & (i != best)


def select(
    given: Tensor, known: Tensor, found: tuple[Tensor, Tensor], level: int, front: tuple[Front, Front], all_: Offered
) -> None:
    """Enter a level's children `found` (tokens, log-probabilities: `[B m, k]`) into `all_`, and make the best k of them the
    second `front`; the first is where they hang (unused at level 0). `given`, `known` as in `climb.stand`."""
    requests, width = given.shape[0], found[0].shape[1]
    many, (old, new) = found[0].shape[0] // requests, front
    first = width + (level - 1) * width**2 if level else 0
    depth = old.path.shape[1]
    _select[(requests,)](
        given, known, *found, old.total, old.column, old.path, all_.token, all_.parent, all_.total,
        new.token, new.row, new.column, new.total, new.path, given.stride(0), level, first, all_.token.shape[1], depth,
        ROWS=many, K=width, IP=triton.next_power_of_2(many * width), PP=triton.next_power_of_2(depth), ROOT=level == 0,
        num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _rank(GIVEN, TOTAL, KEPT, sG, M, T: tl.constexpr):
    b = tl.program_id(0)
    c = tl.program_id(1) * T + tl.arange(0, T)
    mine = tl.load(TOTAL + b * M + c, mask=c < M, other=float("-inf"))
    rank = tl.zeros((T,), tl.int32)
    for start in range(0, M, T):
        j = start + tl.arange(0, T)
        other = tl.load(TOTAL + b * M + j, mask=j < M, other=float("-inf"))
        ahead = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & (j[None, :] < c[:, None]))
        rank += tl.sum(ahead.to(tl.int32), 1)
    most = tl.load(GIVEN + b.to(tl.int64) * sG + 5)
    tl.store(KEPT + b * M + c, ((rank < most) & (mine > float("-inf"))).to(tl.int32), mask=c < M)


@triton.jit(do_not_specialize=["M"])
def _keep(TOKEN, PARENT, KEPT, TOKENS, PARENTS, SIZES, M, T: tl.constexpr):
    b = tl.program_id(0)
    c = tl.program_id(1) * T + tl.arange(0, T)
    mine = tl.load(KEPT + b * M + c, mask=c < M, other=0)
    parent = tl.load(PARENT + b * M + c, mask=c < M, other=-1)
    place = tl.zeros((T,), tl.int32)
    above = tl.zeros((T,), tl.int32)
    size = 0
    for start in range(0, M, T):
        j = start + tl.arange(0, T)
        kept = tl.load(KEPT + b * M + j, mask=j < M, other=0)
        size += tl.sum(kept, 0)
        place += tl.sum(tl.where(j[None, :] < c[:, None], kept[None, :], 0), 1)
        above += tl.sum(tl.where(j[None, :] < parent[:, None], kept[None, :], 0), 1)
    token = tl.load(TOKEN + b * M + c, mask=c < M, other=0).to(tl.int64)
    tl.store(TOKENS + b * M + place, token, mask=mine > 0)
    tl.store(PARENTS + b * M + place, tl.where(parent < 0, -1, above).to(tl.int64), mask=mine > 0)
    idle = (c >= size) & (c < M)
    tl.store(TOKENS + b * M + c, tl.zeros((T,), tl.int64), mask=idle)
    tl.store(PARENTS + b * M + c, tl.full((T,), -1, tl.int64), mask=idle)
    tl.store(SIZES + b, size)


def keep(given: Tensor, all_: Offered, tokens: Tensor, parents: Tensor, sizes: Tensor) -> None:
    """`tokens` and `parents [B, M]` and `sizes [B]`, int64: the nodes of `all_` that are worth most, as many as `given` allows,
    in the order in which they were offered. What leads to a kept node is kept: it is worth no less, and came before."""
    requests, nodes = tokens.shape
    grid = (requests, triton.cdiv(nodes, _TILE))
    _rank[grid](given, all_.total, all_.kept, given.stride(0), nodes, T=_TILE, num_warps=4)
    _keep[grid](all_.token, all_.parent, all_.kept, tokens, parents, sizes, nodes, T=_TILE, num_warps=4)


@triton.jit
def _place(
    TOKEN, GAIN, AT, ABOVE, TOKENS, PARENTS, SIZES, C, N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, CHAIN: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0)
    c = tl.arange(0, NP)
    have = c < N
    parent = tl.load(ABOVE + c, mask=have, other=-1)
    alive = have
    up = tl.where(have, c, -1)
    for _ in range(D):
        at = tl.load(AT + up, mask=up >= 0, other=0)
        alive = alive & ((up < 0) | (tl.load(GAIN + b * C + at, mask=up >= 0, other=0.0) > float("-inf")))
        up = tl.load(ABOVE + up, mask=up >= 0, other=-1)
    kept = alive.to(tl.int32)
    size = tl.sum(kept, 0)
    place = c
    above = parent
    if not CHAIN:
        place = tl.sum(tl.where(c[None, :] < c[:, None], kept[None, :], 0), 1)
        above = tl.where(parent < 0, -1, tl.sum(tl.where(c[None, :] < parent[:, None], kept[None, :], 0), 1))
    token = tl.load(TOKEN + b * C + tl.load(AT + c, mask=have, other=0), mask=have, other=0)
    tl.store(TOKENS + b * N + place, token.to(tl.int64), mask=alive)
    tl.store(PARENTS + b * N + place, above.to(tl.int64), mask=alive)
    idle = have & (c >= size)
    tl.store(TOKENS + b * N + c, tl.zeros((NP,), tl.int64), mask=idle)
    if not CHAIN:
        parent = tl.full((NP,), -1, tl.int32)
    tl.store(PARENTS + b * N + c, parent.to(tl.int64), mask=idle)
    tl.store(SIZES + b, size)


def place(
    found: tuple[Tensor, Tensor], shape: tuple[Tensor, Tensor, int], out: tuple[Tensor, Tensor, Tensor], chain: bool
) -> None:
    """A tree chosen beforehand, of candidates `found` (tokens, log-probabilities: `[B, C]`): node n is candidate `at[n]` and
    hangs under `above[n]` (-1: the root), at most `depth` levels deep (`shape`: these three). Nodes that cannot be, and what
    hangs under them, are left out. `out`: tokens and parents `[B, N]` and sizes `[B]`, int64."""
    requests, nodes = out[0].shape
    at, above, depth = shape
    _place[(requests,)](
        *found, at, above, *out, found[0].shape[1],
        N=nodes, NP=triton.next_power_of_2(nodes), D=depth, CHAIN=chain, num_warps=4,
    )  # fmt: skip
