"""Chains by parts of the target, as one replay beside their plain twin. Runs where `test_fast.py` does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from outrider import registry
from outrider.types import Batch, Budget, Proposal

from .test_fast import OPTIONS, World, anchored, decoder, pytestmark

__all__ = ["anchored", "pytestmark"]


class Twice:
    """Lets a drafter propose once without and once with its captured form, and compares the chains."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.propose, self.lengths = drafter, drafter.propose, list[int]()
        drafter.propose = self

    def __call__(self, batch: Batch, budget: Budget) -> Proposal:
        writer = self.drafter._writer
        self.drafter._writer = replace(writer, chains=None)
        plain = self.propose(batch, budget)
        self.drafter._writer = writer
        replayed = self.propose(batch, budget)
        assert writer.chains is not None and not writer.chains.replays.off and replayed.resume is None
        for b, size in enumerate(plain.sizes.tolist()):
            assert size == int(replayed.sizes[b])
            assert torch.equal(plain.tokens[b, :size], replayed.tokens[b, :size])
            self.lengths.append(size)
        return replayed


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    "spec",
    ["layer_skip:attention=1,mlp=none,depth=3,floor=0", "layer_skip:attention=1,depth=3,floor=0.3", "early_exit:exit=2,floor=0"],
)
def test_the_same_chains(spec: str, name: str) -> None:
    own, drafter = decoder("llama", True, layers=3), registry.parse(spec)
    twice = Twice(drafter)
    World(own).run(drafter, OPTIONS[name], 2)
    assert any(twice.lengths) and (drafter.depth in twice.lengths or "0.3" in spec)
    expected = [r.output for r in World(own).run(registry.parse("none"), OPTIONS[name], 2)]
    assert [r.output for r in World(own).run(registry.parse(spec), OPTIONS[name], 2)] == expected


def test_all_of_the_target_is_always_right() -> None:
    own, drafter = decoder("llama", True), registry.parse("layer_skip:attention=none,mlp=none,depth=3,floor=0")
    requests = World(own).run(drafter, replace(OPTIONS["sampled"], max_tokens=9, ignore_eos=True), 2)
    assert all(r.stats.accepted == r.stats.drafted > 0 for r in requests)
