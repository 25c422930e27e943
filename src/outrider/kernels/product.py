"""A matrix product that never splits the inner dimension: whatever else is in the pass, a row's sums run in one order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64


@triton.jit
def _linear(
    X, W, B, OUT, rows, N, K, sX, sW, sO,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x = X + r.to(tl.int64)[:, None] * sX + k[None, :]
    w = W + n.to(tl.int64)[None, :] * sW + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        left = k + start < K
        a = tl.load(x, mask=(r < rows)[:, None] & left[None, :], other=0.0)
        b = tl.load(w, mask=(n < N)[None, :] & left[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee" if EXACT else "tf32")
        x += BK
        w += BK
    if BIAS:
        acc += tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    out = OUT + r.to(tl.int64)[:, None] * sO + n[None, :]
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=(r < rows)[:, None] & (n < N)[None, :])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """`x [R, K] @ weight [N, K].T + bias` in `dtype` (default: that of `x`), summed in fp32 along K in one order for every R."""
    rows, inner = x.shape
    wide = weight.shape[0]
    out = torch.empty(rows, wide, dtype=dtype or x.dtype, device=x.device)
    if x.stride(1) != 1:
        x = x.contiguous()
    columns = 32 if wide <= 8192 else 128
    exact = x.dtype is torch.float32
    _linear[(triton.cdiv(wide, columns), triton.cdiv(rows, _ROWS))](
        x, weight, x if bias is None else bias, out, rows, wide, inner, x.stride(0), weight.stride(0), out.stride(0),
        BIAS=bias is not None, BM=_ROWS, BN=columns, BK=32 if exact else 128, EXACT=exact, num_warps=4,
        num_stages=3 if exact else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
