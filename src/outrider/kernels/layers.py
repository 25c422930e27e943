"""The small kernels of a decoder layer, fused: norm with residual, rotation with the write to the KV pool, gate. One program
per row (or row and head), fp32 inside, so a row's bits depend on nothing else in the pass."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _norm(
    X, RES, W, OUT, sX, sR, sO, eps, offset, ADD: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr, NP: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, NP)
    have = i < N
    w = tl.load(W + i, mask=have, other=0.0).to(tl.float32) + offset
    h = tl.load(RES + row * sR + i, mask=have, other=0.0)
    if ADD:
        x = tl.load(X + row * sX + i, mask=have, other=0.0)
        h = (h.to(tl.float32) + x.to(tl.float32)).to(RES.dtype.element_ty)
        tl.store(RES + row * sR + i, h, mask=have)
    f = h.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(f * f, 0) / N + eps)
    if WIDE:
        y = f * scale * w
    else:
        y = (f * scale).to(OUT.dtype.element_ty).to(tl.float32) * w
    tl.store(OUT + row * sO + i, y.to(OUT.dtype.element_ty), mask=have)


def add_rms_norm(
    x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, gemma: bool = False, once: bool = False
) -> Tensor:
    """`residual += x` in place (where there is an `x`), then its root mean square norm times the weight: `[R, N]`. Llama rounds
    before the weight is applied; with `gemma` the weight counts from one and is applied before rounding; `once`: before rounding,
    as it is."""
    rows, width = residual.shape
    out = torch.empty(rows, width, dtype=residual.dtype, device=residual.device)
    first = residual if x is None else x
    _norm[(rows,)](
        first, residual, weight, out, first.stride(0), residual.stride(0), out.stride(0), eps, 1.0 if gemma else 0.0,
        ADD=x is not None, WIDE=gemma or once, N=width, NP=triton.next_power_of_2(width), num_warps=4 if width < 4096 else 8,
    )  # fmt: skip
    return out


@triton.jit
def _rotate(
    QKV, COS, SIN, POS, WRITE, QN, KN, Q, K, V, sX, sC, sQ, sP, sPh, eps, offset,
    H: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One head of one row: query heads are rotated, key heads rotated and written, value heads written."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, HALF)
    have = i < D // 2
    x = QKV + row * sX + head * D + i
    a = tl.load(x, mask=have, other=0.0)
    b = tl.load(x + D // 2, mask=have, other=0.0)
    kind = K.dtype.element_ty
    slot = tl.load(WRITE + row)
    if head >= H + KVH:
        to = V + slot * sP + (head - H - KVH) * sPh + i
        tl.store(to, a.to(kind), mask=have)
        tl.store(to + D // 2, b.to(kind), mask=have)
        return
    if NORM:
        fa = a.to(tl.float32)
        fb = b.to(tl.float32)
        scale = 1.0 / tl.sqrt_rn((tl.sum(fa * fa, 0) + tl.sum(fb * fb, 0)) / D + eps)
        w = QN
        if head >= H:
            w = KN
        wa = tl.load(w + i, mask=have, other=0.0).to(tl.float32) + offset
        wb = tl.load(w + D // 2 + i, mask=have, other=0.0).to(tl.float32) + offset
        if WIDE:
            a = (fa * scale * wa).to(a.dtype)
            b = (fb * scale * wb).to(b.dtype)
        else:
            a = ((fa * scale).to(a.dtype).to(tl.float32) * wa).to(a.dtype)
            b = ((fb * scale).to(b.dtype).to(tl.float32) * wb).to(b.dtype)
    at = tl.load(POS + row).to(tl.int64) * sC + i
    cos = tl.load(COS + at, mask=have, other=0.0)
    sin = tl.load(SIN + at, mask=have, other=0.0)
    fa = a.to(tl.float32)
    fb = b.to(tl.float32)
    ra = (fa * cos - fb * sin).to(kind)
    rb = (fb * cos + fa * sin).to(kind)
    if head < H:
        to = Q + row * sQ + head * D + i
    else:
        to = K + slot * sP + (head - H) * sPh + i
    tl.store(to, ra, mask=have)
    tl.store(to + D // 2, rb, mask=have)


def rope_write(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    rows: Any,
    pool: tuple[Tensor, Tensor],
    norms: tuple[Tensor | None, Tensor | None] = (None, None),
    eps: float = 0.0,
) -> Tensor:
    """Split `qkv [R, (H + 2 KV) D]`, normalise query and key heads where `norms` has weights, rotate them by the angles
    (`[length, D]` fp32, cosine and sine) of `rows.position`, write keys and values to the slots `rows.write` of `pool`
    (`[slots, KV, D]`). Returns queries `[R, H, D]`. The halves of a head rotate together (Su et al. 2021, as transformers lays
    it out)."""
    keys, values = pool
    kv, dim = keys.shape[1], keys.shape[2]
    count = qkv.shape[0]
    heads = qkv.shape[1] // dim - 2 * kv
    out = torch.empty(count, heads, dim, dtype=qkv.dtype, device=qkv.device)
    first = qkv if norms[0] is None else norms[0]
    second = qkv if norms[1] is None else norms[1]
    _rotate[(count, heads + 2 * kv)](
        qkv, *angles, rows.position, rows.write, first, second, out, keys, values, qkv.stride(0), angles[0].stride(0),
        out.stride(0), keys.stride(0), keys.stride(1), eps, 0.0,
        H=heads, KVH=kv, D=dim, HALF=triton.next_power_of_2(dim // 2), NORM=norms[0] is not None, WIDE=False, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _gate(X, OUT, sX, sO, F: tl.constexpr, TANH: tl.constexpr, CH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * CH + tl.arange(0, CH)
    have = i < F
    kind = OUT.dtype.element_ty
    g = tl.load(X + row * sX + i, mask=have, other=0.0).to(tl.float32)
    u = tl.load(X + row * sX + F + i, mask=have, other=0.0).to(tl.float32)
    if TANH:
        a = 0.5 * g * (1.0 + _tanh(0.7978845608028654 * (g + 0.044715 * g * g * g)))
    else:
        a = g / (1.0 + tl.exp(-g))
    tl.store(OUT + row * sO + i, (a.to(kind).to(tl.float32) * u).to(kind), mask=have)


def gate(gate_up: Tensor, tanh: bool = False) -> Tensor:
    """`[R, 2 F]` to `[R, F]`: silu (or tanh-approximated gelu) of the first half times the second."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    chunk = 1024
    _gate[(rows, triton.cdiv(width, chunk))](
        gate_up, out, gate_up.stride(0), out.stride(0), F=width, TANH=tanh, CH=chunk, num_warps=4
    )
    return out
