"""Products with quantised weights: the right values, and rows that do not care how many they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")
pytest.importorskip("torchao")
from outrider.kernels.quantized import FEW, MANY, linear
from outrider.models.products import Products
from outrider.models.quantize import Quantized, joined, quantize
from tests.kernels.places import CARD, DEVICE, DTYPES, near, same

SHAPES = [(40, 96), (130, 192)] + ([(1536, 576), (4096, 14336), (28672, 4096)] if CARD else [])
"""Outputs and inputs, also such as no tile divides."""
ROWS = (1, 3, 16, 48, 70) + ((256, 1000) if CARD else ())
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
schemes = pytest.mark.parametrize("scheme", ["int8", "int4"])
shapes = pytest.mark.parametrize(("wide", "inner"), SHAPES)


def some(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def weight_of(wide: int, inner: int, scheme: str) -> Quantized:
    torch.manual_seed(0)
    holder = nn.Sequential(nn.Linear(inner, wide, bias=False).requires_grad_(False))
    quantize(holder, scheme, DEVICE)
    return holder[0].weight


@schemes
@dtypes
@shapes
@pytest.mark.parametrize("tile", [FEW, MANY])
def test_the_product(scheme, wide, inner, dtype, tile):
    x, weight, bias = some(ROWS[-1], inner, dtype=dtype), weight_of(wide, inner, scheme), some(wide, dtype=dtype, seed=2)
    exact = x.double() @ weight.dequantized().double().T
    pair = weight.values, weight.scale
    near(linear(x, pair, None, torch.float32, tile), exact, torch.float32)
    got = linear(x, pair, bias, tile=tile)
    near(got, exact + bias.double(), dtype)
    assert got.dtype is dtype


@schemes
@dtypes
@shapes
def test_rows_do_not_care_how_many_they_are(scheme, wide, inner, dtype):
    x, weight, products = some(ROWS[-1], inner, dtype=dtype), weight_of(wide, inner, scheme), Products(invariant=True)
    products.check([(weight, None, dtype)])
    whole = products(x, weight, None, torch.float32)
    for rows in ROWS:
        same(products(x[:rows], weight, None, torch.float32), whole[:rows])
        same(products(x[-rows:], weight, None, torch.float32), whole[-rows:])
    assert not torch.allclose(whole[-1:], whole[:1], atol=0.01)


def test_inputs_that_no_tile_divides():
    x, weight = some(3, 70, dtype=torch.float32), weight_of(33, 70, "int8")
    near(linear(x, (weight.values, weight.scale)), x.double() @ weight.dequantized().double().T, torch.float32)


@schemes
def test_joined_weights_and_views(scheme):
    parts = [weight_of(wide, 96, scheme) for wide in (40, 24)]
    x, whole = some(96, 5, dtype=torch.float32), joined(parts)
    for part, place in zip(parts, (slice(0, 40), slice(40, 64)), strict=True):
        wanted = x.T.double() @ part.dequantized().double().T
        near(linear(x.T, (whole[place].values, whole[place].scale)), wanted, torch.float32)
