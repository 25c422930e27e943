"""Partial softmaxes of attention, for kernels: (the largest score `[L]`, the sum of exponentials `[L]`, the sum of values
`[L, D]`), fp32, of L lines (Milakov and Gimelshein 2018)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def empty(LINES: tl.constexpr, WIDE: tl.constexpr):
    """A softmax of nothing."""
    return tl.full((LINES,), -1e30, tl.float32), tl.zeros((LINES,), tl.float32), tl.zeros((LINES, WIDE), tl.float32)


@triton.jit
def merge(one, other):
    """Two partial softmaxes as one. An empty second one changes nothing."""
    m, l, acc = one
    m2, l2, acc2 = other
    top = tl.maximum(m, m2)
    a, b = tl.exp(m - top), tl.exp(m2 - top)
    return top, l * a + l2 * b, acc * a[:, None] + acc2 * b[:, None]


@triton.jit
def update(lines, k, v, j, have, state, scale, WINDOW: tl.constexpr, CAP: tl.constexpr, EXACT: tl.constexpr):
    """One tile of positions `j` into a running softmax. What a row does not see leaves its state as it is, to the bit."""
    q, pos = lines
    m, l, acc = state
    ok = (j[None, :] <= pos[:, None]) & have[None, :]
    if WINDOW > 0:
        ok = ok & (pos[:, None] - j[None, :] < WINDOW)
    s = tl.dot(q, k, input_precision="ieee" if EXACT else "tf32") * scale
    if CAP > 0:
        e = tl.exp(-2.0 * tl.abs(s / CAP))
        t = (1.0 - e) / (1.0 + e)
        s = CAP * tl.where(s < 0, -t, t)
    s = tl.where(ok, s, -1e30)
    top = tl.maximum(m, tl.max(s, 1))
    fade = tl.exp(m - top)
    p = tl.where(ok, tl.exp(s - top[:, None]), 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee" if EXACT else "tf32")
    return top, l * fade + tl.sum(p, 1), acc
