"""The ends of a captured round: rows from lanes and guesses, and the coupled rule that moves the lanes on.

Both run one program per request, and no request's work depends on another's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import Finish, Proposal
from . import BLOCK, STOPS

_PAD = -2
"""Padding of stop tokens: a token nobody writes."""
SPAN = 256
"""Rows that nobody owns are blanked so many at a time, however many there are: another size would be another kernel."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """State of running requests, a row each; the last lane is padding (`done` from the start). `key` int64; `heat`, `min_p`
    fp32; `top_p` fp64; `top_k` int32 (0: off); `stops [L, 8]`; `last`, `previous`: the last known tokens; `length`: known
    tokens; `room`: tokens still allowed; `done`: 0 or a `Finish`; `table [L, blocks]`: KV blocks of 64. All int32 where nothing
    is said."""

    key: Tensor
    heat: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    stops: Tensor
    last: Tensor
    previous: Tensor
    length: Tensor
    room: Tensor
    done: Tensor
    table: Tensor

    @classmethod
    def make(cls, count: int, blocks: int, device: torch.device | str) -> Lanes:
        """`count` lanes, all of them done."""

        def some(dtype: torch.dtype, *shape: int, fill: float = 0) -> Tensor:
            return torch.full((count, *shape), fill, dtype=dtype, device=device)

        whole, single = torch.int32, torch.float32
        return cls(
            some(torch.int64), some(single), some(whole), some(torch.float64, fill=1), some(single),
            some(whole, STOPS, fill=_PAD), some(whole), some(whole), some(whole, fill=1), some(whole),
            some(whole, fill=Finish.ABORT), some(whole, blocks),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RoundRows:
    """Rows of a round: `token`, `write [R]` int64; `position` (within the context), `attend` (the true position; -1: no such
    row), `lane`, `depth [R]` int32; `known [B]`; `path [R, N + 1]`, of trees only."""

    token: Tensor
    position: Tensor
    attend: Tensor
    write: Tensor
    lane: Tensor
    depth: Tensor
    known: Tensor
    path: Tensor


_GUESSES = ["LANE", "FIRST", "SIZES", "TOKENS", "PARENTS"]
_NUMBERS = ["LAST", "PREV", "LENGTH", "ROOM"]
_ADMITTED = ["gTOKENS", "gPARENTS", "gSOURCE", "gSIZES", "FIRST", "SIZES", "TOKENS", "PARENTS", "SOURCE"]
_STEPS = ["sT", "sP", "sS", "tT", "tP", "tS"]
_ROWS = ["TOKEN", "POS", "ATTEND", "WRITE", "ROWLANE", "DEPTH"]
"""Slices of buffers: where they start differs by shape, which must not ask for another kernel."""


@triton.jit(do_not_specialize=["NB", "B", "N", "R"], do_not_specialize_on_alignment=[*_GUESSES, *_NUMBERS, *_ROWS])
def _prepare(
    LANE, FIRST, SIZES, LAST, PREV, LENGTH, ROOM, TOKENS, PARENTS, lLAST, lPREV, lLENGTH, lROOM, lDONE, TABLE,
    TOKEN, POS, ATTEND, WRITE, ROWLANE, DEPTH, KNOWN, PATH, NB, vocab, max_len, B, N, R,
    NP: tl.constexpr, SPAN: tl.constexpr, TREE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    if b == B:  # rows nobody owns
        for start in range(tl.load(FIRST + B), R, SPAN):
            r = start + tl.arange(0, SPAN)
            free = r < R
            tl.store(TOKEN + r, tl.zeros((SPAN,), tl.int64), mask=free)
            tl.store(POS + r, tl.zeros((SPAN,), tl.int32), mask=free)
            tl.store(ATTEND + r, tl.full((SPAN,), -1, tl.int32), mask=free)
            tl.store(WRITE + r, tl.zeros((SPAN,), tl.int64), mask=free)
            tl.store(ROWLANE + r, tl.zeros((SPAN,), tl.int32) + tl.load(LANE + B - 1), mask=free)
            tl.store(DEPTH + r, tl.zeros((SPAN,), tl.int32), mask=free)
        return
    lane = tl.load(LANE + b)
    first = tl.load(FIRST + b)
    rows = tl.load(FIRST + b + 1) - first
    given = tl.load(LENGTH + b)
    if given >= 0:  # the host knows better
        tl.store(lLAST + lane, tl.load(LAST + b))
        tl.store(lPREV + lane, tl.load(PREV + b))
        tl.store(lLENGTH + lane, given)
        tl.store(lROOM + lane, tl.load(ROOM + b))
        tl.store(lDONE + lane, 0)
        last = tl.load(LAST + b)
        length = given
    else:
        last = tl.load(lLAST + lane)
        length = tl.load(lLENGTH + lane)
    running = (given >= 0) | (tl.load(lDONE + lane) == 0)
    tl.store(KNOWN + b, length)
    size = tl.load(SIZES + b)
    s = tl.arange(0, NP)  # slot; node s - 1
    own = s < rows
    node = s - 1
    alive = own & running & (node < size)
    token = tl.load(TOKENS + b * N + node, mask=own & (node >= 0) & (node < N), other=0)
    token = tl.minimum(tl.maximum(tl.where(s == 0, last, token), 0), vocab - 1)
    if TREE:
        depth = tl.zeros((NP,), tl.int32)
        up = tl.load(PARENTS + b * N + node, mask=own & (node >= 0) & (node < N), other=-1)
        up = tl.where(node >= 0, tl.minimum(tl.maximum(up, -1), node - 1), -2)  # a parent comes first; -2: the root's own
        climb = tl.where(own, node, -1)  # nothing is read past a request's columns
        for _ in range(N):
            depth += (climb >= 0).to(tl.int32)
            above = tl.load(PARENTS + b * N + climb, mask=climb >= 0, other=-1)
            climb = tl.where(climb >= 0, tl.minimum(tl.maximum(above, -1), climb - 1), -1)
        climb = tl.where(own, node, -1)
        place = depth - 1
        row = (first + s).to(tl.int64) * (N + 1)
        for _ in range(N):
            tl.store(PATH + row + place, length + climb, mask=own & (climb >= 0))
            above = tl.load(PARENTS + b * N + climb, mask=climb >= 0, other=-1)
            climb = tl.where(climb >= 0, tl.minimum(tl.maximum(above, -1), climb - 1), -1)
            place -= 1
    else:
        depth = s
    position = length - 1 + depth
    virtual = length - 1 + s
    block = tl.load(TABLE + lane.to(tl.int64) * NB + virtual // BLOCK, mask=alive & (virtual // BLOCK < NB), other=0)
    slot = tl.where(alive & (block > 0), block.to(tl.int64) * BLOCK + virtual % BLOCK, 0)
    at = first + s
    tl.store(TOKEN + at, token.to(tl.int64), mask=own)
    tl.store(POS + at, tl.minimum(position, max_len - 1), mask=own)
    tl.store(ATTEND + at, tl.where(alive, position, -1), mask=own)
    tl.store(WRITE + at, slot, mask=own)
    tl.store(ROWLANE + at, tl.zeros((NP,), tl.int32) + lane, mask=own)
    tl.store(DEPTH + at, depth.to(tl.int32), mask=own)


def prepare(lanes: Lanes, given: Any, rows: int, limits: tuple[int, int], tree: bool) -> RoundRows:
    """Rows of a round from `given` (`models.rounds.Fields` on the device); `limits`: vocabulary and context. Numbers the host
    gives enter the lanes first. A token outside the vocabulary and a parent that does not come first are put right, not
    believed."""
    requests, columns = given.tokens.shape
    device = lanes.last.device
    whole = torch.empty(4, rows, dtype=torch.int32, device=device)
    double = torch.empty(2, rows, dtype=torch.int64, device=device)
    known = torch.empty(requests, dtype=torch.int32, device=device)
    path = torch.zeros(rows, columns + 1 if tree else 0, dtype=torch.int32, device=device)
    _prepare[(requests + 1,)](
        given.lane, given.first, given.sizes, given.last, given.previous, given.length, given.room, given.tokens, given.parents,
        lanes.last, lanes.previous, lanes.length, lanes.room, lanes.done, lanes.table,
        double[0], whole[0], whole[1], double[1], whole[2], whole[3], known, path, lanes.table.shape[1], *limits,
        requests, columns, rows,
        NP=triton.next_power_of_2(columns + 1), SPAN=SPAN, TREE=tree, BLOCK=BLOCK,
    )  # fmt: skip
    return RoundRows(double[0], whole[0], whole[1], double[1], whole[2], whole[3], known, path)


@triton.jit(do_not_specialize=[*_STEPS, "n", "N", "vocab"], do_not_specialize_on_alignment=_ADMITTED)
def _admit(
    gTOKENS, gPARENTS, gSOURCE, gSIZES, FIRST, SIZES, TOKENS, PARENTS, SOURCE, sT, sP, sS, tT, tP, tS, n, N, vocab,
    NP: tl.constexpr, LINEAR: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    most = tl.minimum(tl.load(FIRST + b + 1) - tl.load(FIRST + b) - 1, n)
    c = tl.arange(0, NP)
    have = c < tl.minimum(n, N)
    token = tl.load(gTOKENS + b * sT + c * tT, mask=have, other=0)
    above = c - 1
    if not LINEAR:
        above = tl.load(gPARENTS + b * sP + c * tP, mask=have, other=-1).to(tl.int32)
        above = tl.minimum(tl.maximum(above, -1), c - 1)
    source = tl.maximum(tl.load(gSOURCE + b * sS + c * tS, mask=have, other=0), -1)
    at = b * N + c
    tl.store(TOKENS + at, tl.minimum(tl.maximum(token, 0), vocab - 1).to(tl.int32), mask=have)
    tl.store(PARENTS + at, above, mask=have)
    tl.store(SOURCE + at, source.to(tl.int32), mask=have)
    tl.store(SIZES + b, tl.minimum(tl.maximum(tl.load(gSIZES + b), 0), most).to(tl.int32))


def admit(proposal: Proposal, given: Any, vocab: int) -> None:
    """Guesses on the device into `given` (`models.rounds.Fields` on the device), whose rows are settled: put right where they
    could not be, so that nobody has to look. Of two equal siblings the second will never be found."""
    tokens, parents, source, columns = proposal.tokens, proposal.parents, proposal.source, given.tokens.shape[1]
    _admit[(len(proposal.widths),)](
        tokens, parents, source, proposal.sizes.contiguous(), given.first, given.sizes, given.tokens, given.parents, given.source,
        *(table.stride(i) for i in (0, 1) for table in (tokens, parents, source)), tokens.shape[1], columns, vocab,
        NP=triton.next_power_of_2(max(columns, 1)), LINEAR=proposal.linear, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=_GUESSES)
def _decide(
    LANE, FIRST, SIZES, TOKENS, PARENTS, CHOICE, RESULT, lLAST, lPREV, lLENGTH, lROOM, lDONE, STOPS_, N,
    NP: tl.constexpr, TREE: tl.constexpr, W: tl.constexpr, STOP: tl.constexpr, LENGTH: tl.constexpr,
    ERROR: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    lane = tl.load(LANE + b)
    first = tl.load(FIRST + b)
    size = tl.load(SIZES + b)
    room = tl.load(lROOM + lane)
    s = tl.arange(0, NP)
    stops = tl.load(STOPS_ + lane * W + tl.arange(0, W))
    drafted = tl.load(TOKENS + b * N + s, mask=s < size, other=-3)
    parents = s - 1
    if TREE:
        parents = tl.load(PARENTS + b * N + s, mask=s < size, other=-1)
        parents = tl.minimum(tl.maximum(parents, -1), s - 1)  # put right as the rows were
    out = RESULT + b * (3 + 2 * (N + 1))
    tl.store(out + 3 + s, tl.full((NP,), -1, tl.int32), mask=s <= N)
    tl.store(out + 4 + N + s, tl.full((NP,), -1, tl.int32), mask=s <= N)
    count = 0
    accepted = 0
    finish = 0
    at = -1  # column of the node the next token follows; -1: the root
    going = (tl.load(lDONE + lane) == 0).to(tl.int32)
    if (going > 0) & (room <= 0):
        finish = LENGTH
        going = 0
    last = tl.load(lLAST + lane)
    before = tl.load(lPREV + lane)
    while going > 0:
        token = tl.load(CHOICE + first + at + 1).to(tl.int32)
        if token < 0:
            finish = ERROR
            going = 0
        else:
            tl.store(out + 3 + count, token)
            count += 1
            before = last
            last = token
            hit = (drafted == token) & (parents == at) & (s < size)
            child = tl.min(tl.where(hit, s, NP), 0)
            if child < NP:
                tl.store(out + 4 + N + accepted, child)
                accepted += 1
                at = child
            else:
                going = 0
            if tl.sum((stops == token).to(tl.int32), 0) > 0:
                finish = STOP
                going = 0
            elif count >= room:
                finish = LENGTH
                going = 0
    tl.store(out, accepted)
    tl.store(out + 1, count)
    tl.store(out + 2, finish)
    tl.store(lLAST + lane, last)
    tl.store(lPREV + lane, before)
    tl.store(lLENGTH + lane, tl.load(lLENGTH + lane) + count)
    tl.store(lROOM + lane, room - count)
    if finish > 0:
        tl.store(lDONE + lane, finish)


def decide(lanes: Lanes, given: Any, choice: Tensor, result: Tensor, tree: bool) -> None:
    """The coupled rule (`accept.coupled`) on `choice [R]`, into `result [B, 3 + 2 (N + 1)]`: accepted, count, finish, N + 1
    tokens, N columns of the path and one spare, padded with -1. The lanes move on; one that is done stays as it is."""
    requests, columns = given.tokens.shape
    _decide[(requests,)](
        given.lane, given.first, given.sizes, given.tokens, given.parents, choice, result,
        lanes.last, lanes.previous, lanes.length, lanes.room, lanes.done, lanes.stops, columns,
        NP=triton.next_power_of_2(columns + 1), TREE=tree, W=STOPS,
        STOP=int(Finish.STOP), LENGTH=int(Finish.LENGTH), ERROR=int(Finish.ERROR), num_warps=1,
    )  # fmt: skip
