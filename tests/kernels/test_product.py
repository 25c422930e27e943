"""The product whose rows do not care how many they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from outrider.kernels.product import linear
from tests.kernels.places import CARD, DEVICE, DTYPES, near, same

SHAPES = [(40, 96), (130, 70)] + ([(576, 1536), (49152, 576), (6144, 4096)] if CARD else [])
"""Outputs and inputs, also such as no tile divides."""
ROWS = (1, 3, 64, 70) + ((256, 1024) if CARD else ())
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def some(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@dtypes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("wide", "inner"), SHAPES)
def test_the_product(wide, inner, bias, dtype):
    x, weight = some(ROWS[-1], inner, dtype=dtype), some(wide, inner, dtype=dtype, seed=1)
    b = some(wide, dtype=dtype, seed=2) if bias else None
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    near(linear(x, weight, b), exact, dtype)
    scores = linear(x, weight, b, torch.float32)
    near(scores, exact, torch.float32)
    assert scores.dtype is torch.float32


@dtypes
@pytest.mark.parametrize(("wide", "inner"), SHAPES)
def test_rows_do_not_care_how_many_they_are(wide, inner, dtype):
    x, weight = some(ROWS[-1], inner, dtype=dtype), some(wide, inner, dtype=dtype, seed=1)
    whole = linear(x, weight, dtype=torch.float32)
    for rows in ROWS:
        same(linear(x[:rows], weight, dtype=torch.float32), whole[:rows])
    last = linear(x[-1:], weight, dtype=torch.float32)
    same(last, whole[-1:])
    assert not torch.allclose(last, whole[:1], atol=0.1)


def test_rows_and_weights_may_be_views():
    x, weight = some(96, 5, dtype=torch.float32), some(40, 200, dtype=torch.float32, seed=1)
    near(linear(x.T, weight[:, 50:146]), x.T.double() @ weight[:, 50:146].double().T, torch.float32)
