"""Products with weights of 8 or 4 bits: few bytes to read, and one order of sums for a row, however many rows there are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW, MANY = 16, 64
"""Rows of a program: a decoding pass's, and a prompt's."""


@triton.jit
def _linear8(
    X, W, S, B, OUT, rows, N, K, sX, sW, sO,
    BIAS: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x = X + r.to(tl.int64)[None, :] * sX + k[:, None]
    w = W + n.to(tl.int64)[:, None] * sW + k[None, :]
    acc = tl.zeros((BN, BR), tl.float32)
    for start in range(0, K, BK):
        left = k + start < K
        q = tl.load(w, mask=(n < N)[:, None] & left[None, :], other=0)
        a = tl.load(x, mask=left[:, None] & (r < rows)[None, :], other=0.0)
        acc = tl.dot(q.to(a.dtype), a, acc, input_precision="ieee" if EXACT else "tf32")
        x += BK
        w += BK
    acc *= tl.load(S + n, mask=n < N, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = OUT + r.to(tl.int64)[None, :] * sO + n[:, None]
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=(n < N)[:, None] & (r < rows)[None, :])


@triton.jit
def _linear4(
    X, W, S, B, OUT, rows, N, K, sX, sW, sO,
    BIAS: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, HALF: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, HALF)
    x = X + r.to(tl.int64)[None, :] * sX + k[:, None]
    w = W + n.to(tl.int64)[:, None] * sW + k[None, :]
    s = S + n.to(tl.int64) * (K // (2 * HALF))
    acc = tl.zeros((BN, BR), tl.float32)
    step = tl.load(s, mask=n < N, other=0.0)
    for start in range(0, K, 2 * HALF):
        ahead = tl.load(s + 1, mask=(n < N) & (start + 2 * HALF < K), other=0.0)
        q = tl.load(w, mask=(n < N)[:, None], other=0)
        low = tl.load(x, mask=(r < rows)[None, :], other=0.0)
        high = tl.load(x + HALF, mask=(r < rows)[None, :], other=0.0)
        part = tl.dot(((q & 15).to(tl.int8) - 8).to(low.dtype), low, input_precision="ieee" if EXACT else "tf32")
        part = tl.dot(((q >> 4).to(tl.int8) - 8).to(low.dtype), high, part, input_precision="ieee" if EXACT else "tf32")
        acc += part * step[:, None]
        step = ahead
        x += 2 * HALF
        w += HALF
        s += 1
    if BIAS:
        acc += tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = OUT + r.to(tl.int64)[None, :] * sO + n[:, None]
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=(n < N)[:, None] & (r < rows)[None, :])


def linear(
    x: Tensor,
    weight: tuple[Tensor, Tensor],
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tile: int | None = None,
) -> Tensor:
    """`x [R, K] @ W [N, K].T + bias` in `dtype` (default: that of `x`), summed in fp32 along K in one order for every R.

    `weight`: values and scales, as `models.quantize.Quantized` keeps them. `tile`: rows of a program, which decides how often
    weights are read (default: by R). The tiles of weights are the first operand of every product, so that a row's sums are the
    same instructions whatever the tile; the caller checks that a card sees it so."""
    values, scale = weight
    (rows, inner), wide = x.shape, values.shape[0]
    out = torch.empty(rows, wide, dtype=dtype or x.dtype, device=x.device)
    if x.stride(1) != 1:
        x = x.contiguous()
    tile = tile or (FEW if rows <= 48 else MANY)
    columns = 32 if wide <= 8192 else 64
    exact = x.dtype is torch.float32
    grid = (triton.cdiv(rows, tile), triton.cdiv(wide, columns))
    numbers = (x, values, scale, x if bias is None else bias, out, rows, wide, inner)
    common = {"BIAS": bias is not None, "BR": tile, "BN": columns, "EXACT": exact, "num_warps": 4, "enable_fp_fusion": False}
    strides = x.stride(0), values.stride(0), out.stride(0)
    if values.dtype is torch.uint8:
        half = inner // scale.shape[1] // 2
        stages = 2 if exact else 6 if tile == FEW else 4
        _linear4[grid](*numbers, *strides, HALF=half, num_stages=stages, **common)
    else:
        stages = 2 if exact else 5 if tile == FEW else 3
        _linear8[grid](*numbers, *strides, BK=32 if exact else 256 if columns == 32 else 128, num_stages=stages, **common)
    return out
