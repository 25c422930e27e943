"""The accepted path's KV moves to where the sequence goes on, and nothing else moves."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from outrider.kernels.moves import arrange, move_path
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


@pytest.mark.parametrize("columns", [0, 5])
def test_states_of_committed_rows_are_put_in_order(columns):
    """Known rows and those on the path go to their positions; what lies outside stays away."""
    rng = random.Random(columns)
    known, computed = [3, 1, 6], [10, 0, 64]
    paths = [sorted(rng.sample(range(columns), min(columns, k))) for k in (3, 0, 1)]
    rows, wanted, start = [], {}, [0, 0, 0]
    for b, count in enumerate(known):
        start[b] = sum(known[i] + columns for i in range(b)) - computed[b]
        base = computed[b] + count
        rows += [(b, computed[b] + i, 0 if i == count - 1 else -1) for i in range(count)]
        rows += [(b, base + (paths[b].index(c) if c in paths[b] else 0), c + 1) for c in range(columns)]
    states = torch.randn(len(rows), 1030, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    for row, (b, position, slot) in enumerate(rows):
        if slot <= 0 or slot - 1 in paths[b]:
            wanted[start[b] + position] = states[row]
    table = torch.tensor([p + [-1] * (columns - len(p)) for p in paths], dtype=torch.int32).reshape(3, columns).to(DEVICE)
    out = torch.zeros(sum(known) + 3 * columns, 1030, device=DEVICE)
    request, position, slot = torch.tensor(rows).to(DEVICE).unbind(1)  # columns of one table, as a pass has them
    arrange(states, (request, position, slot), table, torch.tensor(start).to(DEVICE), out)
    for place, row in enumerate(out):
        assert torch.equal(row, wanted.get(place, torch.zeros_like(row)))
