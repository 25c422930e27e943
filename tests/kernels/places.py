"""Where the kernels can run, and what can be asked of them there."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CARD = torch.cuda.is_available() and not INTERPRETED
if not (CARD or INTERPRETED):
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cuda" if CARD else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if CARD else (torch.float32,)
"""The interpreter's bf16 is of no use."""
ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative error that rounding to a type may leave."""


def same(a: Tensor, b: Tensor) -> None:
    """Equal to the bit on a card. The interpreter multiplies with numpy, whose sums depend on where in a tile a row stands."""
    if CARD:
        assert torch.equal(a, b)
    else:
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def near(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """`got` is `wanted` up to what rounding to `dtype` leaves, over the whole tensor."""
    error = (got.double() - wanted.double()).norm() / wanted.double().norm()
    assert float(error) < ERROR[dtype]
