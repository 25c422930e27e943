"""Fused norms, rotations and gates against plain torch, in the model's own rounding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")
from outrider.kernels.layers import add_rms_norm, gate, rope_write
from tests.kernels.places import DEVICE, DTYPES, near

EPS = 1e-5
WIDTHS = [16, 100, 576]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def some(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def plain_norm(h: Tensor, weight: Tensor, gemma: bool = False) -> Tensor:
    f = h.float()
    f = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + EPS)
    return (f * (1 + weight.float())).to(h.dtype) if gemma else weight * f.to(h.dtype)


@dtypes
@pytest.mark.parametrize("gemma", [False, True], ids=["llama", "gemma"])
@pytest.mark.parametrize("width", WIDTHS)
def test_norm(width, gemma, dtype):
    x, residual, weight = some(3, width, dtype=dtype), some(3, width, dtype=dtype, seed=1), some(width, dtype=dtype, seed=2)
    total = residual + x
    alone = add_rms_norm(None, total.clone(), weight, EPS, gemma)
    out = add_rms_norm(x, residual, weight, EPS, gemma)
    assert torch.equal(residual, total)
    assert torch.equal(out, alone)
    near(out, plain_norm(total, weight, gemma), dtype)
    assert out.dtype is dtype


def test_a_norm_reads_what_it_is_given():
    """Negative control: the two families differ, and so do weights."""
    x, weight = some(2, 64), some(64, seed=1)
    out = add_rms_norm(None, x.clone(), weight, EPS)
    assert not torch.allclose(out, add_rms_norm(None, x.clone(), weight, EPS, gemma=True), atol=1e-2)
    assert not torch.allclose(out, add_rms_norm(None, x.clone(), weight.roll(1), EPS), atol=1e-2)


@dtypes
def test_a_row_does_not_care_who_shares_the_pass(dtype):
    x, weight = some(5, 100, dtype=dtype), some(100, dtype=dtype, seed=1)
    together, gated = add_rms_norm(None, x.clone(), weight, EPS), gate(x)
    for row in range(5):
        one = x[row : row + 1].clone()
        assert torch.equal(add_rms_norm(None, one.clone(), weight, EPS)[0], together[row])
        assert torch.equal(gate(one)[0], gated[row])


@dtypes
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed heads"])
@pytest.mark.parametrize(("heads", "kv", "dim"), [(4, 2, 16), (3, 1, 64), (2, 2, 96)])
def test_rope_and_write(heads, kv, dim, normed, dtype):
    count, slots = 5, 64
    qkv = some(count, (heads + 2 * kv) * dim, dtype=dtype)
    frequency = 100.0 ** (-torch.arange(0, dim, 2, device=DEVICE) / dim)
    angle = torch.arange(40, device=DEVICE)[:, None] * frequency
    angles = torch.cat([angle.cos()] * 2, 1), torch.cat([angle.sin()] * 2, 1)
    position = torch.tensor([0, 7, 39, 7, 3], dtype=torch.int32, device=DEVICE)
    write = torch.tensor([9, 63, 1, 30, 31], device=DEVICE)
    pool = some(slots, kv, dim, dtype=dtype, seed=1), some(slots, kv, dim, dtype=dtype, seed=2)
    before = pool[0].clone(), pool[1].clone()
    weights = (some(dim, dtype=dtype, seed=3), some(dim, dtype=dtype, seed=4)) if normed else (None, None)
    rows = SimpleNamespace(position=position, write=write)
    out = rope_write(qkv, angles, rows, pool, weights, EPS)
    q, k, v = qkv.split([heads * dim, kv * dim, kv * dim], 1)
    near(out, rotated(q.view(count, heads, dim), weights[0], angles, position), dtype)
    near(pool[0][write], rotated(k.view(count, kv, dim), weights[1], angles, position), dtype)
    assert torch.equal(pool[1][write], v.view(count, kv, dim))
    rest = [s for s in range(slots) if s not in write.tolist()]
    assert torch.equal(pool[0][rest], before[0][rest])
    assert torch.equal(pool[1][rest], before[1][rest])
    elsewhere = SimpleNamespace(position=position.roll(1), write=write)
    assert not torch.allclose(rope_write(qkv, angles, elsewhere, before, weights, EPS), out, atol=1e-2)


def rotated(x: Tensor, weight: Tensor | None, angles: tuple[Tensor, Tensor], position: Tensor) -> Tensor:
    """A head's halves rotate together: `x cos + [-second, first] sin`, in fp32."""
    x = x if weight is None else plain_norm(x, weight)
    cos, sin = (a[position.long()][:, None] for a in angles)
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


@dtypes
@pytest.mark.parametrize("width", [16, 1100])
def test_gate(width, dtype):
    x = some(3, 2 * width, dtype=dtype) * 3
    first, second = x.chunk(2, 1)
    near(gate(x), F.silu(first) * second, dtype)
    near(gate(x, tanh=True), F.gelu(first, approximate="tanh") * second, dtype)
    assert not torch.allclose(gate(x), gate(x, tanh=True), atol=1e-2)
