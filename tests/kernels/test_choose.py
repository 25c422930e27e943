"""Choosing without a sort against `TextSampler`'s tensor path, bit for bit: filters, ties, noise, invalid rows."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from outrider.config import SamplingParams
from outrider.kernels import search
from outrider.kernels.choose import CHUNK, GATHERED, Asked, Work, choose, scores
from outrider.kernels.noise import rows as noise_rows
from outrider.kernels.rounds import Lanes
from outrider.noise import gumbel_rows, key_tensor, tensor_rows
from outrider.sampling import TextSampler, first_argmax
from outrider.types import NONE, Slots
from tests import tiny

INF = math.inf
FILTERS = [
    {"top_k": k, "top_p": p, "min_p": m}
    for k, p, m in itertools.product((0, 1, 20, 2200, 10**6), (1.0, 0.95, 0.3, 1e-9), (0.0, 0.02))
]


def lanes_of(params, device):
    """A lane per entry and padding, and the requests they stand for."""
    requests = tuple(tiny.request([1, 2, i], replace(p, seed=i + 1)) for i, p in enumerate(params))
    lanes = Lanes.make(len(params) + 1, 2, device)
    for i, r in enumerate(requests):
        lanes.key[i] = r.key - 2**64 if r.key >= 2**63 else r.key
        lanes.heat[i], lanes.top_k[i] = r.params.temperature, max(r.params.top_k, 0)
        lanes.top_p[i], lanes.min_p[i] = r.params.top_p, r.params.min_p
    return lanes, requests


def compute(z, params, device, usable=None, filters=True):
    """For rows `z [S, V]`, row s by `params[s % len(params)]`: tokens, perturbed scores, and the sampler's own."""
    usable = usable or z.shape[1]
    z = z.to(device)
    lanes, requests = lanes_of(params, device)
    which, position = torch.arange(len(z), device=device) % len(params), torch.arange(len(z), device=device) // len(params) + 3
    asked = Asked(which.int(), position.int())
    nothing = torch.full((len(z), 0), NONE, device=device)
    sampler = TextSampler(z.shape[1], usable)
    wanted = sampler._device_scores(sampler._admit(z), Slots(requests, which, position, nothing, torch.zeros_like(which)))
    work, out, full = Work.make(len(z), usable, device, filters), torch.full_like(which, -7), torch.empty_like(z)
    scores(z, asked, lanes, work, full)
    choose(z, asked, lanes, work, out)
    return out, full, wanted


def agree(*args, **options):
    """Hold the tokens and scores equal; the tokens."""
    got, full, wanted = compute(*args, **options)
    usable = wanted.shape[1]
    assert got.tolist() == first_argmax(wanted).tolist()
    assert torch.equal(full[:, :usable].nan_to_num(nan=123.0), wanted.nan_to_num(nan=123.0))
    assert bool((full[:, usable:] == -INF).all())
    return got


def rows(count, vocab, spread, seed=0):
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("spread", [6.0, 1.0, 0.0])
def test_every_combination_of_filters(device, temperature, spread):
    filters = FILTERS if device.type == "cuda" else FILTERS[int(10 * temperature + spread) % 13 :: 13]
    params = [SamplingParams(temperature=temperature, **f) for f in filters]
    z = rows(len(params), 2300, spread, seed=int(spread))
    agree(z, params, device)
    agree((z * 0.3).bfloat16().float(), params, device)  # ties


def test_greedy_rows_and_plain_noise_without_the_passes_for_filters(device):
    params = [SamplingParams(temperature=t) for t in (0.0, 1.0, 0.3)]
    z = rows(12, 2100, 2.0)
    with_passes = agree(z, params, device)
    assert agree(z, params, device, filters=False).tolist() == with_passes.tolist()


def test_ties_of_the_best_go_to_the_lowest_id(device):
    z = torch.zeros(2, 2500)
    z[:, [7, 1500, 2400]] = 4.0
    assert agree(z, [SamplingParams(temperature=0.0)], device).tolist() == [7, 7]


def test_ids_beyond_the_usable_ones_cannot_be_chosen(device):
    z = rows(6, 2 * CHUNK + 9, 1.0)
    usable = CHUNK + 3
    z[:, usable:] = 50.0
    z[2, usable + 1] = math.nan
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9)]
    assert max(agree(z, params, device, usable=usable).tolist()) < usable


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40}])
def test_rows_without_a_valid_choice_choose_nothing(device, options):
    z = rows(5, 1500, 2.0)
    z[0, 1400], z[1, 3], z[2, :], z[3, :1499] = math.nan, INF, -INF, -INF
    got = agree(z, [SamplingParams(**options)], device).tolist()
    assert got[:3] == [NONE] * 3 and got[3] == 1499 and got[4] >= 0


def test_windows_too_full_to_gather_are_searched_in_the_row(device):
    vocab = GATHERED + 900
    z = torch.zeros(4, vocab)
    z[1] = torch.linspace(0, 1e-3, vocab)
    z[2, ::2] = 1e-6
    z[3, 5] = 30.0
    params = [SamplingParams(temperature=1.0, top_p=p, top_k=k) for p, k in ((0.5, 0), (1.0, vocab - 5), (0.9, GATHERED + 50))]
    for rotated in (params, params[1:] + params[:1], params[2:] + params[:2]):
        agree(z, rotated, device)


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 50.0])
def test_extreme_temperatures(device, temperature):
    params = [SamplingParams(temperature=temperature, top_p=0.9), SamplingParams(temperature=temperature, top_k=5, min_p=0.1)]
    agree(rows(4, 1200, 3.0), params, device)


def test_another_share_chooses_other_tokens(device):
    """The control: what is compared above depends on top-p, top-k, the noise's position and its key."""
    z = rows(1, 1200, 1.0).repeat(12, 1)
    plain = SamplingParams(temperature=1.0)
    texts = [compute(z, [replace(plain, **f)], device)[0].tolist() for f in ({}, {"top_p": 0.2}, {"top_k": 8})]
    assert len({tuple(t) for t in texts}) == 3
    assert all(len(set(t)) > 3 for t in texts)  # twelve positions of one row
    assert len(set(compute(z, [plain] * 12, device)[0].tolist())) > 3  # twelve keys at one position


def test_vocabularies_that_do_not_fit_a_place_are_refused(device):
    assert search.END.value > (0x7F7FFFFF << 23) + (1 << 23) - 1
    with pytest.raises(ValueError, match="vocabulary"):
        Work.make(1, 1 << 23, device)


@pytest.mark.parametrize("vocab", [1, 5, CHUNK, 49152, 50001])
def test_rows_of_noise_are_those_of_tensor_operations(device, vocab):
    keys, positions = key_tensor([3, 2**63 + 5, 2**64 - 1], device), torch.tensor([0, 7, 2**31 + 5], device=device)
    made = noise_rows(keys, positions, vocab)
    assert torch.equal(made, tensor_rows(keys, positions, vocab))
    assert torch.equal(made[::2], noise_rows(keys[::2], positions[::2], vocab)), "whatever shares the call"
    assert torch.equal(made, gumbel_rows(keys, positions, vocab, device))
    assert noise_rows(keys[:0], positions[:0], vocab).shape == (0, vocab)
