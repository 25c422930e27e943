"""The target's states of the last known tokens, kept on the device: drafters go on from them before the host has read a round.

Every lane has a ring of `PLACES` places, in which the state at position p lies at p modulo `PLACES`, beside the token after it.
Captured rounds write it; a drafter's captured work reads it. `upto` is the drafter's own mark: it has read all positions below.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PLACES = 32
"""Positions that are kept."""
_PART = 1024


@dataclass(frozen=True, slots=True)
class Ring:
    """`states [L, PLACES, W]`; `tokens [L, PLACES]` and `upto [L]` int32, for L lanes."""

    states: Tensor
    tokens: Tensor
    upto: Tensor

    @classmethod
    def make(cls, lanes: int, width: int, dtype: torch.dtype, device: torch.device) -> Ring:
        """An empty one."""
        numbers = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((lanes, PLACES), (lanes,)))
        return cls(torch.zeros(lanes, PLACES, width, dtype=dtype, device=device), *numbers)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["LANE", "FIRST", "KNOWN", "RESULT"])
def _post(X, LANE, FIRST, KNOWN, RESULT, RING, TOKENS, sX, N, W: tl.constexpr, CH: tl.constexpr, P: tl.constexpr):
    b = tl.program_id(0)
    part = tl.program_id(1)
    lane = tl.load(LANE + b).to(tl.int64)
    first = tl.load(FIRST + b)
    out = RESULT + b * (3 + 2 * (N + 1))
    accepted = tl.load(out)
    count = tl.load(out + 1)
    place = tl.load(KNOWN + b) - 1
    i = part * CH + tl.arange(0, CH)
    row = first
    for at in range(tl.minimum(accepted + 1, count)):
        if at > 0:
            row = first + 1 + tl.load(out + 4 + N + at - 1)
        to = lane * P + (place + at) % P
        x = tl.load(X + row.to(tl.int64) * sX + i, mask=i < W)
        tl.store(RING + to * W + i, x, mask=i < W)
        if part == 0:
            tl.store(TOKENS + to, tl.load(out + 3 + at))


def post(states: Tensor, lane: Tensor, first: Tensor, known: Tensor, result: Tensor, ring: Ring) -> None:
    """Put the `states [R, W]` of what a round committed into the ring: of each request the last known token's, then those of the
    accepted nodes. `lane`, `known [B]` (the position after the last known token), `first [B + 1]` rows, `result` as of
    `rounds.decide`."""
    width = states.shape[1]
    requests, columns = result.shape[0], (result.shape[1] - 3) // 2 - 1
    _post[(requests, triton.cdiv(width, _PART))](
        states, lane, first, known, result, ring.states, ring.tokens, states.stride(0), columns,
        W=width, CH=_PART, P=PLACES, num_warps=4,
    )  # fmt: skip
