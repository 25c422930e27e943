"""The choice without a sort against `TextSampler` as it works on devices: the same token in every row."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from outrider.config import SamplingParams
from outrider.kernels import choose as kernel
from outrider.kernels.rounds import Lanes
from outrider.models.lanes import LaneBook, filters
from outrider.sampling import TextSampler, first_argmax
from outrider.types import NONE, Request, Slots
from tests import tiny
from tests.kernels.places import CARD, DEVICE

VOCAB, USABLE = (4500, 4400) if CARD else (300, 290)
PLAIN = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), SamplingParams(temperature=0.3)]
TOP_P = [
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=0.3),
    SamplingParams(temperature=1e-3, top_p=0.5),
]
TOP_K = [
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=USABLE - 1),
]
MIN_P = [SamplingParams(temperature=0.9, min_p=0.05)]
MIXED = [
    SamplingParams(temperature=1.3, top_k=50, top_p=0.8),
    SamplingParams(temperature=0.9, min_p=0.02, top_k=30, top_p=0.95),
    SamplingParams(temperature=0.9, min_p=0.02, top_p=0.95),
    SamplingParams(temperature=0.9, min_p=0.1, top_k=30),
]
MIXES = {"plain": PLAIN, "top_p": PLAIN + TOP_P, "top_k": PLAIN + TOP_K, "min_p": PLAIN + MIN_P}
MIXES["all"] = PLAIN + TOP_P + TOP_K + MIN_P + MIXED


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """Small chunks, so that even small rows have several, the last of them not full."""
    monkeypatch.setattr(kernel, "CHUNK", 1024 if CARD else 128)


class World:
    """Requests in lanes, in no order, and rows that point at them."""

    def __init__(self, mix: list[SamplingParams], seed: int = 0) -> None:
        rng = random.Random(seed)
        params = [replace(p, ignore_eos=True, seed=seed + i) for i, p in enumerate(mix)]
        self.requests = tuple(tiny.request([1, 2, 3], p) for p in params)
        for r in self.requests:
            r.key = rng.getrandbits(64)
        lanes = Lanes.make(len(mix) + 3, 4, DEVICE)
        book = LaneBook(lanes, SimpleNamespace(blocks=lambda request: ()))
        order = rng.sample(self.requests, len(mix))
        where = dict(zip((r.id for r in order), book.take(order), strict=True))
        self.lanes, self.lane = lanes, [where[r.id] for r in self.requests]
        self.filters = 0
        for r in self.requests:
            self.filters |= filters(r)

    def choose(self, z: Tensor, which: Tensor, position: Tensor) -> Tensor:
        """The kernel's tokens for rows of requests `which`, for tokens at `position`."""
        lane = torch.tensor(self.lane, dtype=torch.int32)[which].to(DEVICE)
        rows = SimpleNamespace(lane=lane, attend=(position - 1).int().to(DEVICE))
        out = torch.full((len(z),), -7, device=DEVICE)
        return kernel.choose(z.to(DEVICE), rows, self.lanes, USABLE, out, self.filters).cpu()

    def expected(self, z: Tensor, which: Tensor, position: Tensor) -> Tensor:
        """The sampler's, by its way of working on devices."""
        empty, none = torch.full((len(z), 0), NONE, device=DEVICE), torch.zeros(len(z), dtype=torch.int64, device=DEVICE)
        slots = Slots(self.requests, which.to(DEVICE), position.to(DEVICE), empty, none)
        sampler = TextSampler(VOCAB, USABLE)
        return first_argmax(sampler._device_scores(sampler._admit(z.to(DEVICE)), slots)).cpu()


def scores(rows: int, kind: str) -> Tensor:
    """Logits with few ties, with many, nearly flat ones, and such as hold what is no number."""
    z = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    if kind == "ties":
        return z.bfloat16().float()
    if kind == "flat":
        return (z * 0.02).bfloat16().float()
    if kind == "broken":
        z[::5, 77] = math.nan
        z[1::5, USABLE - 1] = math.inf
        z[2::5] = -math.inf
        z[3::5, USABLE + 1] = math.nan  # beyond what the tokenizer knows
        z[4::5, : USABLE - 3] = -math.inf
    return z


@pytest.mark.parametrize("kind", ["random", "ties", "flat", "broken"])
@pytest.mark.parametrize("mix", MIXES)
def test_tokens_are_the_samplers(mix, kind):
    world, repeats = World(MIXES[mix]), 20 if CARD else 1
    count = len(MIXES[mix])
    which, position = torch.arange(count * repeats) % count, torch.arange(count * repeats) // count + 3
    z = scores(len(which), kind)
    got = world.choose(z, which, position)
    assert torch.equal(got, world.expected(z, which, position))
    if kind != "broken":
        assert bool(((got >= 0) & (got < USABLE)).all())
    else:
        assert bool((got[:3] == NONE).all())


def test_the_sampler_on_the_host_agrees():
    """The same tokens as on the CPU, where rows have few ties."""
    world = World(MIXES["all"], seed=5)
    which, position = torch.arange(len(MIXES["all"])), torch.full((len(MIXES["all"]),), 9)
    z = scores(len(which), "random")
    none = torch.zeros(len(z), dtype=torch.int64)
    slots = Slots(world.requests, which, position, torch.full((len(z), 0), NONE), none)
    assert torch.equal(world.choose(z, which, position), TextSampler(VOCAB, USABLE).choose(z, slots))


def test_rows_do_not_care_who_shares_the_call():
    world = World(MIXES["all"])
    which, position = torch.arange(len(MIXES["all"])), torch.full((len(MIXES["all"]),), 4)
    z = scores(len(which), "ties")
    together = world.choose(z, which, position)
    for row in range(0, len(z), 3):
        one = slice(row, row + 1)
        assert torch.equal(world.choose(z[one], which[one], position[one]), together[one])


def test_ties_go_to_the_lowest_ids():
    """All scores equal: top-k keeps ids 0, 1 and 2, top-p those that reach the mass, greedy the first."""
    world = World(
        [
            SamplingParams(temperature=1.0, top_k=3),
            SamplingParams(temperature=1.0, top_p=4.5 / USABLE),
            SamplingParams(temperature=0.0),
        ]
    )
    repeats = 8
    which, position = torch.arange(3 * repeats) % 3, torch.arange(3 * repeats) // 3 + 1
    got = world.choose(torch.zeros(len(which), VOCAB), which, position)
    assert set(got[which == 0].tolist()) == {0, 1, 2}
    assert set(got[which == 1].tolist()) <= {0, 1, 2, 3, 4} and len(set(got[which == 1].tolist())) > 2
    assert set(got[which == 2].tolist()) == {0}


@pytest.mark.parametrize("what", ["key", "position", "heat", "top_k"])
def test_what_a_lane_says_matters(what):
    """Negative controls: another key, position, temperature or filter gives other tokens."""
    world = World([SamplingParams(temperature=1.5, top_k=100)])
    rows = 4
    which, position = torch.zeros(rows, dtype=torch.int64), torch.arange(rows) + 3
    z = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2)).expand(rows, -1).contiguous()
    got = world.choose(z, which, position)
    assert torch.equal(got, world.expected(z, which, position))
    lane = world.lane[0]
    if what == "key":
        world.lanes.key[lane] += 1
    elif what == "heat":
        world.lanes.heat[lane] = 0.2
    elif what == "top_k":
        world.lanes.top_k[lane] = 1
    assert not torch.equal(world.choose(z, which, position + (what == "position")), got)


def test_filters_are_numbered_as_lanes_number_them():
    def number(**params) -> int:
        request: Request = tiny.request([1], SamplingParams(**params))
        return filters(request)

    from outrider.kernels.threshold import MIN_P, TOP_K, TOP_P

    assert number(temperature=0.0, top_p=0.5, top_k=3, min_p=0.1) == 0
    assert (number(top_p=0.5), number(top_k=3), number(min_p=0.1)) == (TOP_P, TOP_K, MIN_P)
    assert number(top_p=0.5, top_k=3, min_p=0.1) == TOP_P | TOP_K | MIN_P
