"""Distances and their gradient, held to the plain twin."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from outrider.drafters._losses import Plain
from outrider.kernels import distances

from .places import CARD, DEVICE, DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 4096, 5000, *([49152] if CARD else [])])
def test_rows_and_slope(size, dtype):
    generator = torch.Generator().manual_seed(size)
    guess, scores = ((3 * torch.randn(9, size, generator=generator)).to(DEVICE, dtype) for _ in range(2))
    guess[0] = scores[0]
    guess[1, [3, 5]] = 40.0  # two favourites: the first counts
    total, best = scores.float().logsumexp(-1) + 0.1, scores.argmax(-1)
    best[1:3] = torch.tensor([3, -1])
    wanted, kept = Plain.rows(guess, scores, total, best)
    found, sums = distances.rows(guess, scores, total, best)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums, kept, rtol=1e-5, atol=1e-5)
    grad = torch.randn(9, 4, generator=generator).to(DEVICE)
    one, other = distances.slope(grad, guess, scores, total, sums), Plain.slope(grad, guess, scores, total, kept)
    assert one.dtype == dtype
    torch.testing.assert_close(one[1:], other[1:], rtol=1e-2 if dtype != torch.float32 else 1e-4, atol=1e-5)


def test_no_rows():
    none = torch.zeros(0, 5, device=DEVICE)
    made, sums = distances.rows(none, none, none[:, 0], none[:, 0].long())
    assert made.shape == (0, 4) and distances.slope(made, none, none, none[:, 0], sums).shape == (0, 5)
