"""Drafters' own passes as one replay beside their plain twins: asked twice in every round, they guess the same.

Runs where `test_fast.py` does. On a card also in bf16, where the two round here and there in another order, so that near
ties may go the other way.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from outrider.bench import tiny
from outrider.config import SamplingParams
from outrider.errors import OutriderWarning
from outrider.models import climbs, replay
from outrider.types import Batch, Budget, Proposal

from .. import heads
from .test_fast import CUDA, OPTIONS, World, anchored, decoder, pytestmark

__all__ = ["anchored", "pytestmark"]

KINDS: dict[str, dict[str, Any]] = {
    "three": {},
    "few": {"vocab": 20},
    "switches": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "one": {"version": 1},
}


class Twice:
    """Lets a drafter propose without and with its captured form, each first in turn, and notes both. `attribute` is where that
    form is."""

    def __init__(self, drafter: Any, attribute: str = "climbs") -> None:
        self.drafter, self.attribute, self.propose = drafter, attribute, drafter.propose
        self.pairs: list[tuple[Proposal, Proposal]] = []
        self.turn = True
        drafter.propose = self

    def __call__(self, batch: Batch, budget: Budget) -> Proposal:
        form = getattr(self.drafter, self.attribute)
        assert form is not None and not form.replays.off
        made = {}
        for replayed in (self.turn, not self.turn):  # whoever is first reads what is new
            setattr(self.drafter, self.attribute, form if replayed else None)
            made[replayed] = self._copied(self.propose(batch, budget))
        setattr(self.drafter, self.attribute, form)
        self.turn = not self.turn
        self.pairs.append((made[False], made[True]))
        return made[True]

    @staticmethod
    def _copied(made: Proposal) -> Proposal:
        return replace(made, tokens=made.tokens.clone(), parents=made.parents.clone(), sizes=made.sizes.clone())

    def same(self) -> None:
        """All of them agree, and there were some."""
        assert sum(any(p.widths) for p, _ in self.pairs) > 2
        for plain, replayed in self.pairs:
            assert plain.widths == replayed.widths and plain.linear == replayed.linear
            for b, width in enumerate(plain.widths):
                size = int(plain.sizes[b])
                rows = [torch.stack([p.tokens[b, :size], p.parents[b, :size]]) for p in (plain, replayed)]
                assert not width or (size == int(replayed.sizes[b]) and torch.equal(*rows))

    def shared(self) -> float:
        """Share of the guesses, as paths from the root, that both made."""
        both = [(paths(plain, b), paths(replayed, b)) for plain, replayed in self.pairs for b in range(len(plain.widths))]
        return sum(len(one & two) for one, two in both) / sum(len(one) for one, _ in both)


def paths(made: Proposal, b: int) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(made.tokens[b, : int(made.sizes[b])].tolist(), made.parents[b].tolist(), strict=False):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def guesses(drafter: Any, params: SamplingParams, attribute: str = "climbs") -> Twice:
    twice = Twice(drafter, attribute)
    World(decoder("llama", True, layers=3)).run(drafter, params)
    return twice


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_chains(kind: str, name: str) -> None:
    drafter = heads.eagle(width=1, depth=3, **KINDS[kind])
    twice = guesses(drafter, OPTIONS[name])
    twice.same()
    assert drafter.climbs is not None and drafter.climbs.replays._made


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_trees(kind: str, name: str) -> None:
    twice = guesses(heads.eagle(width=3, depth=3, nodes=9, **KINDS[kind]), OPTIONS[name])
    twice.same()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("options", [{}, {"nodes": 3}, {"vocab": 20, "nodes": 7}], ids=["tree", "chain", "few"])
def test_heads(options: dict[str, Any], name: str) -> None:
    drafter = heads.medusa(**options)
    twice = guesses(drafter, OPTIONS[name], "replays")
    twice.same()
    assert drafter.replays is not None and drafter.replays.replays._made


def test_preempted_requests() -> None:
    world = World(decoder("llama", True, layers=3), blocks=4)
    drafter = heads.eagle(width=1, depth=3)
    twice = Twice(drafter)
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    world.serve(drafter, [tiny.request(p, params, seed=i, limit=200) for i, p in enumerate(tiny.prompts(3, 3, 60, 60))])
    twice.same()


def test_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory for a graph the guesses are made launch by launch, and somebody says so."""

    def none(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(climbs.Strand, "__init__", none)
    drafter = heads.eagle(width=1, depth=3)
    with pytest.warns(OutriderWarning, match="eagle is not captured"):
        requests = World(decoder("llama", True, layers=3)).run(drafter, OPTIONS["greedy"], 1)
    assert drafter.climbs is not None and drafter.climbs.replays.off and requests[0].stats.drafted


class TestReplays:
    def made(self) -> replay.Replays[str]:
        return replay.Replays(World(decoder("llama", True)).target.stage, "somebody")

    def test_of_too_many_the_one_longest_unused_goes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replay, "MOST", 2)
        made = self.made()
        assert [made.get(s, lambda: "new") for s in (1, 2, 1, 3)] == ["new"] * 4
        assert [made.get(s, lambda: "other") for s in (1, 2)] == ["new", "other"]

    def test_what_cannot_be_captured(self) -> None:
        def make() -> str:
            raise RuntimeError("not permitted when stream is capturing")

        made = self.made()
        with pytest.warns(OutriderWarning, match="somebody is not captured"):
            assert made.get(1, make) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert made.get(2, lambda: "never") is None

    def test_memory_that_can_be_had(self) -> None:
        made, tries = self.made(), []

        def make() -> str:
            tries.append(1)
            if len(tries) == 1:
                raise torch.OutOfMemoryError("no memory")
            return "new"

        assert made.get(1, make) == "new"


if CUDA:

    @pytest.mark.parametrize("width", [1, 3])
    def test_low_precision(width: int) -> None:
        drafter = heads.eagle(width=width, depth=3)
        twice = Twice(drafter)
        World(decoder("llama", True, layers=3, dtype=torch.bfloat16)).run(drafter, OPTIONS["sampled"])
        assert twice.shared() > 0.9
