"""The Gumbel noise of text, bit for bit as `noise.py` makes it, by Philox4x64-10 (Salmon et al. 2011)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from .search import INTERPRETED

_CHUNK = 1024
"""Entries per program."""


@triton.jit
def _log(x):
    if INTERPRETED:
        return tl.log(x)
    else:
        return libdevice.log(x)


@triton.jit
def _gumbel(words):
    u = ((words >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return (0.0 - _log(0.0 - _log(u))).to(tl.float32)


@triton.jit
def gumbel(key, block, position):
    """Gumbel noise of four tokens for each of `block` (v // 4 + 1), in order of the vocabulary: `[4 n]` fp32."""
    c0 = block.to(tl.uint64)
    zero = c0 * 0
    c1 = zero + position.to(tl.uint64)
    c2 = zero
    c3 = zero
    k0 = zero + key.to(tl.uint64, bitcast=True)
    k1 = zero
    first = zero + 0xD2E7470EE14C6C93
    second = zero + 0xCA5A826395121157
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, first)
        high2 = tl.umulhi(c2, second)
        low0 = c0 * first
        low2 = c2 * second
        c0 = high2 ^ c1 ^ k0
        c1 = low2
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + 0x9E3779B97F4A7C15
        k1 = k1 + 0xBB67AE8584CAA73B
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    return _gumbel(tl.reshape(words, (words.shape[0] * 4,)))


@triton.jit
def _rows(KEY, POSITION, OUT, stride, vocab, CH: tl.constexpr):
    """A program per row and chunk."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * CH
    v = start + tl.arange(0, CH)
    found = gumbel(tl.load(KEY + row), start // 4 + 1 + tl.arange(0, CH // 4), tl.load(POSITION + row))
    tl.store(OUT + row * stride + v, found, mask=v < vocab)


def rows(keys: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """fp32 noise `[S, vocab]` for `keys [S]` and `positions [S]`, int64, in one launch where tensor operations take a hundred and
    fifty."""
    out = torch.empty(len(keys), vocab, dtype=torch.float32, device=keys.device)
    if out.numel():
        _rows[(len(keys), triton.cdiv(vocab, _CHUNK))](
            keys.contiguous(), positions.long().contiguous(), out, out.stride(0), vocab, CH=_CHUNK, enable_fp_fusion=False
        )
    return out
