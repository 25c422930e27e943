"""Kernels that grow trees of guesses, against plain torch and the plain form of the same search."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from outrider.drafters import _climb
from outrider.kernels import branch, climb
from outrider.kernels.ring import Ring
from tests.kernels.places import DEVICE, DTYPES, near

INF = float("inf")


def scores(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)).to(DEVICE) * 3


@pytest.mark.parametrize("vocab", [5, 1024, 2500])
def test_children(vocab):
    z = scores(4, vocab)
    z[1, 2:] = -INF  # fewer than are asked for
    z[2] = torch.nan
    tokens, gain = branch.children(z, 3)
    best = z.topk(3)
    wanted = best.values - z.logsumexp(1, keepdim=True)
    for row in (0, 3):
        assert tokens[row].tolist() == best.indices[row].tolist()
    torch.testing.assert_close(gain[[0, 3]], wanted[[0, 3]], atol=1e-5, rtol=1e-5)
    assert gain[1].isfinite().tolist() == [True, True, False] and not gain[2].isfinite().any()


@pytest.mark.parametrize("most", [1, 6, 40])
def test_what_is_kept(most):
    width, depth, count = 3, 4, 3
    generator = torch.Generator().manual_seed(1)
    nodes = width + (depth - 1) * width**2
    tokens = torch.arange(count * nodes).reshape(count, nodes)
    parents = torch.full((count, nodes), -1)
    totals = -torch.rand(count, nodes, generator=generator)
    for column in range(width, nodes):
        level = (column - width) // width**2
        low = 0 if level == 0 else width + (level - 1) * width**2
        high = width + level * width**2
        parents[:, column] = torch.randint(low, high, (count,), generator=generator)
        totals[:, column] += totals.gather(1, parents[:, column : column + 1])[:, 0]
    totals[1, 5:] = -INF
    totals[2] = totals[2].round(decimals=1)  # ties
    limits = [most, max(1, most - 1), most]
    wanted = _climb._kept(tokens, parents, _climb._chosen(totals, limits), limits)
    given = torch.zeros(count, climb.HEAD + 1, dtype=torch.int64)
    given[:, 5] = torch.tensor(limits)
    given = given.to(DEVICE)
    whole = [x.to(DEVICE, torch.int32) for x in (tokens, parents)]
    offered = branch.Offered(*whole, totals.to(DEVICE), torch.zeros_like(whole[0]))
    out = [torch.full((count, nodes), 7, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    sizes = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    branch.keep(given, offered, *out, sizes)
    columns = wanted[0].shape[1]
    assert torch.equal(out[0][:, :columns].cpu(), wanted[0]) and torch.equal(out[1][:, :columns].cpu(), wanted[1])
    assert torch.equal(sizes.cpu(), wanted[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_a_network_reads(dtype):
    """Embedding and state side by side, normed as torch does, from rows chosen by index."""

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).to(DEVICE, dtype)

    rows, states, weights = some(9, 40), some(6, 40), (some(40), some(41)[:40])
    token, source = torch.tensor([3, 8, -1]).to(DEVICE), torch.tensor([5, 0, 5]).to(DEVICE)
    for normed in (False, True):
        x, residual = climb.enter(rows, token, states, source, weights, (1e-5, normed))
        read = zip((rows[token.clamp(min=0)], states[source]), weights, strict=True)
        parts = [torch.nn.functional.rms_norm(a, (40,), w, 1e-5) for a, w in read]
        near(x, torch.cat(parts, 1), dtype)
        near(residual, parts[1] if normed else states[source], dtype)
    x, _ = climb.enter(rows, token, states, None, None, (1e-5, False))
    assert torch.equal(x, torch.cat([rows[token.clamp(min=0)], states[:3]], 1))


def test_states_at_addresses():
    given = torch.zeros(3, climb.HEAD + 4, dtype=torch.int64)
    states = [scores(n, 20) + n for n in (2, 4)]
    for row, mine in zip(given, states, strict=False):
        row[2], row[3] = len(mine), mine.data_ptr()
    out = torch.ones(12, 20, device=DEVICE)
    attend = torch.tensor([-1, -1, 3, 4, 5, 6, 7, 8, -1, -1, -1, -1], dtype=torch.int32).to(DEVICE)
    climb.collect(given.to(DEVICE), attend, Ring.make(1, 20, torch.float32, torch.device(DEVICE)), out)
    assert not out[:2].any() and not out[8:].any()
    assert torch.equal(out[2:4], states[0]) and torch.equal(out[4:8], states[1])


def test_a_chain_ends_before_the_first_gap():
    given = torch.zeros(3, climb.HEAD + 1, dtype=torch.int64)
    given[:, 4], given[:, 5] = torch.tensor([3, 2, 3]), 8
    chosen = torch.tensor([[5, 6, 7], [8, 9, -1], [4, 3, 2]]).to(DEVICE)
    tokens, sizes = torch.ones(3, 3, dtype=torch.int64, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    climb.chain(given.to(DEVICE), chosen, tokens, sizes)
    assert tokens.tolist() == [[5, 8, 4], [6, 9, 0], [7, 0, 0]] and sizes.tolist() == [3, 2, 1]
