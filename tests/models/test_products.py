"""Products whose rows do not care how many they are, over a library whose rows do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from outrider.models import products
from outrider.models.products import NARROW, Products


@pytest.fixture(params=[frozenset({1}), frozenset({3, 17, 33, 96}), frozenset({1, 2, 48, 64, 1024}), frozenset(range(17, 200))])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> frozenset[int]:
    """Row counts at which the library sums in another order."""
    bad: frozenset[int] = request.param

    def library(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        half = x.shape[1] // 2
        rows = [(weight * row).sum(1) for row in x] if x.shape[0] not in bad else [
            (weight[:, half:] * row[half:]).sum(1) + (weight[:, :half] * row[:half]).sum(1) for row in x
        ]  # fmt: skip
        return torch.stack(rows).to(dtype)

    monkeypatch.setattr(products, "_vendor", library)
    monkeypatch.setattr(products, "TRIED", (*range(1, NARROW + 1), 64, 96, 128))
    return bad


def some() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(150, 97, generator=generator), torch.randn(5, 97, generator=generator)


def test_what_differs_is_found(splits: frozenset[int]) -> None:
    _, weight = some()
    made = Products()
    [trust] = made.check([(weight, None, torch.float32)]).values()
    assert trust.rows == (set(products.TRIED) - splits) | {16}
    assert not trust.kernel


@pytest.mark.parametrize("invariant", [False, True])
def test_rows_have_the_same_bits_at_every_count_that_matters(splits: frozenset[int], invariant: bool) -> None:
    x, weight = some()
    made = Products(invariant)
    made.check([(weight, None, torch.float32)])
    right = torch.cat([made(part, weight) for part in torch.split(x, 16)])
    counts = range(1, 151) if invariant else range(1, NARROW + 1)
    assert [rows for rows in counts if not torch.equal(made(x[:rows], weight), right[:rows])] == []
    assert all(torch.equal(made(x[40 : 40 + rows], weight), right[40 : 40 + rows]) for rows in (1, 2, 17, 48))


def test_the_library_is_one_whose_rows_care(splits: frozenset[int]) -> None:
    """Without the check, the tests above fail."""
    x, weight = some()
    made = Products(invariant=True)
    right = torch.cat([made(part, weight) for part in torch.split(x, 16)])
    assert any(not torch.equal(made(x[:rows], weight), right[:rows]) for rows in range(1, 151))


def test_rows_that_differ_at_the_end_of_a_wide_pass_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries split what is left over for the last wave of tiles."""

    def library(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        out = (weight[None] * x[:, None]).sum(2)
        return torch.cat([out[:500], out[500:] + 1]).to(dtype)

    monkeypatch.setattr(products, "_vendor", library)
    made, (_, weight) = Products(invariant=True), some()
    [trust] = made.check([(weight, None, torch.float32)]).values()
    assert trust.rows == {rows for rows in products.TRIED if rows <= 500}


GROWTH = """
import torch
from outrider.models.products import PackedLinear, few_plans
few_plans()
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4 // 1024
modules = [PackedLinear(torch.nn.Linear(576, width)) for width in (192, 576, 1536)]
x = torch.randn(400, 576)
before = resident()
for rows in range(1, 401):
    for module in modules:
        module(x[:rows])
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="tells how much memory a process has on Linux only")
def test_products_of_many_sizes_do_not_fill_memory() -> None:
    """In a process of its own: the bound is read once."""
    grown = {}
    for most in ("1024", None):
        set_ = {} if most is None else dict.fromkeys(products._BOUNDS, most)
        done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, env={**os.environ, **set_})
        grown[most] = int(done.stdout)
    assert grown[None] < 0.6 * grown["1024"], grown
