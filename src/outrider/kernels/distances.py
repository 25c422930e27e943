"""Distances between two distributions over a vocabulary, and their gradient: each side's scores are read once from memory, and
nothing of their size is written but the gradient. The plain twin, with the formulas, is `Plain` in `drafters/_losses.py`.

One program per row: it walks the row in tiles, for the draft's maximum, for its sum, and for the distances; a row of scores in
bf16 stays in the cache meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096


@triton.jit
def _rows(GUESS, SCORES, TOTAL, BEST, ROWS, SUMS, N: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    guess = GUESS + row * N
    scores = SCORES + row * N
    i = tl.arange(0, TILE)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    place = tl.zeros((TILE,), tl.int32)
    for start in range(0, N, TILE):
        z = tl.load(guess + start + i, mask=start + i < N, other=float("-inf")).to(tl.float32)
        place = tl.where(z > top, start + i, place)
        top = tl.maximum(top, z)
    peak = tl.max(top, 0)
    said = tl.min(tl.where(top == peak, place, N), 0)
    mass = tl.zeros((TILE,), tl.float32)
    for start in range(0, N, TILE):
        z = tl.load(guess + start + i, mask=start + i < N, other=float("-inf")).to(tl.float32)
        mass += tl.exp(z - peak)
    norm = peak + tl.log(tl.sum(mass, 0))
    total = tl.load(TOTAL + row)
    kl = tl.zeros((TILE,), tl.float32)
    both = tl.zeros((TILE,), tl.float32)
    share = tl.zeros((TILE,), tl.float32)
    below = tl.zeros((TILE,), tl.float32)
    for start in range(0, N, TILE):
        there = start + i < N
        log_q = tl.load(guess + start + i, mask=there, other=0.0).to(tl.float32) - norm
        log_p = tl.load(scores + start + i, mask=there, other=0.0).to(tl.float32) - total
        p = tl.where(there, tl.exp(log_p), 0.0)
        q = tl.where(there, tl.exp(log_q), 0.0)
        kl += p * (log_p - log_q)
        both += tl.minimum(p, q)
        share += p
        below += tl.where(q < p, q, 0.0)
    overlap = tl.sum(both, 0)
    same = tl.where(said.to(tl.int64) == tl.load(BEST + row), 1.0, 0.0)
    tl.store(ROWS + row * 4, tl.sum(kl, 0))
    tl.store(ROWS + row * 4 + 1, 1.0 - overlap)
    tl.store(ROWS + row * 4 + 2, overlap)
    tl.store(ROWS + row * 4 + 3, same)
    tl.store(SUMS + row * 3, norm)
    tl.store(SUMS + row * 3 + 1, tl.sum(share, 0))
    tl.store(SUMS + row * 3 + 2, tl.sum(below, 0))


@triton.jit
def _slope(GRAD, GUESS, SCORES, TOTAL, SUMS, OUT, N: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = at < N
    kl = tl.load(GRAD + row * 4)
    overlap = tl.load(GRAD + row * 4 + 2) - tl.load(GRAD + row * 4 + 1)
    norm = tl.load(SUMS + row * 3)
    share = tl.load(SUMS + row * 3 + 1)
    below = tl.load(SUMS + row * 3 + 2)
    q = tl.exp(tl.load(GUESS + row * N + at, mask=there, other=0.0).to(tl.float32) - norm)
    p = tl.exp(tl.load(SCORES + row * N + at, mask=there, other=0.0).to(tl.float32) - tl.load(TOTAL + row))
    less = tl.where(q < p, 1.0, 0.0)
    slope = q * (kl * share + overlap * (less - below)) - kl * p
    tl.store(OUT + row * N + at, slope.to(OUT.dtype.element_ty), mask=there)


def rows(guess: Tensor, scores: Tensor, total: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """`Plain.rows`."""
    guess, scores, (count, size) = guess.contiguous(), scores.contiguous(), guess.shape
    made = guess.new_zeros(count, 4, dtype=torch.float32)
    sums = guess.new_zeros(count, 3, dtype=torch.float32)
    if count:
        _rows[(count,)](guess, scores, total.float(), best, made, sums, N=size, TILE=_tile(size), num_warps=8)
    return made, sums


def slope(grad: Tensor, guess: Tensor, scores: Tensor, total: Tensor, sums: Tensor) -> Tensor:
    """`Plain.slope`."""
    guess, scores, (count, size) = guess.contiguous(), scores.contiguous(), guess.shape
    out, tile = torch.empty_like(guess), _tile(size)
    if count:
        grid = (count, triton.cdiv(size, tile))
        _slope[grid](grad.float().contiguous(), guess, scores, total.float(), sums, out, N=size, TILE=tile, num_warps=8)
    return out


def _tile(size: int) -> int:
    return int(min(_TILE, max(16, triton.next_power_of_2(size))))
