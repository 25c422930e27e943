"""The accepted path's KV moves to where the sequence goes on, and nothing else moves."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from outrider.kernels.moves import move_path
from tests.kernels.places import DEVICE, DTYPES

COLUMNS, BLOCKS = 8, 3


def pools(dtype: torch.dtype) -> list[Tensor]:
    """Two groups of layers, of different widths: `[layers, 2, slots, heads, dim]`."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 2, 64 * 10, kv, dim, generator=generator).to(DEVICE, dtype) for n, kv, dim in ((2, 2, 16), (1, 3, 12))]


def paths(seed: int) -> list[list[int]]:
    """Columns of three requests' accepted nodes: rising, so never less than their depth."""
    rng = random.Random(seed)
    return [sorted(rng.sample(range(COLUMNS), rng.randint(0, COLUMNS))) for _ in range(2)] + [[]]


def result(accepted: list[list[int]]) -> Tensor:
    """What `rounds.decide` writes."""
    rows = [[len(p), len(p) + 1, 0, *[5] * (COLUMNS + 1), *p, *[-1] * (COLUMNS + 1 - len(p))] for p in accepted]
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def moved(groups: list[Tensor], table: list[list[int]], known: list[int], accepted: list[list[int]]) -> list[Tensor]:
    """The same, one position after the other."""
    out = [g.clone() for g in groups]
    for blocks, start, path in zip(table, known, accepted, strict=True):
        for at, column in enumerate(path):
            source, target = (blocks[v // 64] * 64 + v % 64 for v in (start + column, start + at))
            for new, old in zip(out, groups, strict=True):
                new[:, :, target] = old[:, :, source]
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_paths_move(seed, dtype):
    table, known = [[7, 2, 5], [1, 9, 3], [4, 6, 8]], [60 + seed, 128, 9]
    groups, accepted = pools(dtype), paths(seed)
    wanted = moved(groups, table, known, accepted)
    wrong = moved(groups, table, known, [[c + 1 for c in p] for p in accepted])
    move_path(groups, ints(table), ints(known), result(accepted), COLUMNS)
    for got, want, other in zip(groups, wanted, wrong, strict=True):
        assert torch.equal(got, want)
        assert not torch.equal(got, other)


def test_a_straight_path_moves_nothing():
    groups = pools(torch.float32)
    before = [g.clone() for g in groups]
    move_path(groups, ints([[7, 2, 5]]), ints([62]), result([list(range(5))]), COLUMNS)
    assert all(torch.equal(a, b) for a, b in zip(groups, before, strict=True))


def ints(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)
