"""Drafters' own passes as one replay beside their plain twins: in the same rounds of the same requests, they guess the same.

Runs where `test_fast.py` does. On a card also in bf16, where the two round here and there in another order, so that near
ties may go the other way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")
from outrider.bench import tiny
from outrider.config import SamplingParams
from outrider.control import Fixed
from outrider.errors import OutriderWarning
from outrider.models import climbs, replay
from outrider.protocols import Drafter, Start
from outrider.types import Batch, Budget, Proposal, Request

from .. import heads
from .test_fast import CUDA, OPTIONS, World, anchored, decoder, pytestmark

__all__ = ["anchored", "pytestmark"]

KINDS: dict[str, dict[str, Any]] = {
    "three": {},
    "few": {"vocab": 20},
    "switches": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "one": {"version": 1},
}


class Guess(NamedTuple):
    """Of request `b` of a proposal, which was to look `depth` levels ahead."""

    b: int
    depth: int
    made: Proposal


class Noting:
    """Lets a drafter propose, with its captured form or without, and notes what for whom. `attribute` is where that form is."""

    def __init__(self, drafter: Any, attribute: str, captured: bool) -> None:
        self.drafter, self.attribute, self.captured = drafter, attribute, captured
        self.start, self.propose = drafter.start, drafter.propose
        self.made: dict[tuple[int, ...], list[Guess]] = {}
        self.ahead = 0
        drafter.start, drafter.propose = self.started, self.proposed

    def started(self, start: Start) -> None:
        self.start(start)
        if not self.captured:
            setattr(self.drafter, self.attribute, None)

    def proposed(self, batch: Batch, budget: Budget) -> Proposal:
        form = getattr(self.drafter, self.attribute)
        assert form is None or not form.replays.off
        made = self.propose(batch, budget)
        self.ahead += batch.blind
        copy = replace(made, tokens=made.tokens.clone(), parents=made.parents.clone(), sizes=made.sizes.clone())
        for b, request in enumerate(batch.requests):
            if copy.widths[b]:
                self.made.setdefault(tuple(request.tokens[: request.prompt_len]), []).append(Guess(b, budget.depth[b], copy))
        return made


class Pausing(Fixed):
    """Guesses in one of several rounds."""

    rounds = 0

    def budget(self, batch: Batch) -> Budget:
        """None but in the last of twelve."""
        self.rounds += 1
        return Budget.none(len(batch)) if self.rounds % 12 else super().budget(batch)


class Twice:
    """The same requests with a drafter's captured form and without it. Rounds that were launched ahead may come on top, and may
    look further ahead than they would have, had the host known that the text is about to end."""

    def __init__(self, drafter: Callable[[], Any], attribute: str = "climbs") -> None:
        self.plain, self.captured = (Noting(drafter(), attribute, captured) for captured in (False, True))

    def run(self, serve: Callable[[Drafter], None]) -> Twice:
        for one in (self.plain, self.captured):
            serve(one.drafter)
        return self

    @property
    def pairs(self) -> list[tuple[Guess, Guess]]:
        one, two = self.plain.made, self.captured.made
        assert one.keys() == two.keys()
        rounds = [zip(one[prompt], two[prompt], strict=False) for prompt in one]
        return [pair for some in rounds for pair in takewhile(lambda pair: pair[0].depth == pair[1].depth, some)]

    def same(self) -> None:
        """All of them agree, and there were some; in most rounds the captured form had not waited for the one before."""
        assert len(self.pairs) > 2 * len(self.plain.made)
        assert self.captured.ahead > 2 and not self.plain.ahead
        for (b, _, plain), (c, _, replayed) in self.pairs:
            size = int(plain.sizes[b])
            rows = [torch.stack([p.tokens[i, :size], p.parents[i, :size]]) for i, p in ((b, plain), (c, replayed))]
            assert plain.linear == replayed.linear and plain.widths[b] == replayed.widths[c]
            assert size == int(replayed.sizes[c]) and torch.equal(*rows)

    def shared(self) -> float:
        """Share of the guesses, as paths from the root, that both made."""
        both = [(paths(plain, b), paths(replayed, c)) for (b, _, plain), (c, _, replayed) in self.pairs]
        return sum(len(one & two) for one, two in both) / sum(len(one) for one, _ in both)


def paths(made: Proposal, b: int) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(made.tokens[b, : int(made.sizes[b])].tolist(), made.parents[b].tolist(), strict=False):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def guesses(drafter: Callable[[], Any], params: SamplingParams, attribute: str = "climbs") -> Twice:
    params = replace(params, max_tokens=12)
    return Twice(drafter, attribute).run(lambda made: World(decoder("llama", True, layers=3)).run(made, params))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_chains(kind: str, name: str) -> None:
    twice = guesses(lambda: heads.eagle(width=1, depth=3, **KINDS[kind]), OPTIONS[name])
    twice.same()
    climbs = twice.captured.drafter.climbs
    assert climbs is not None and climbs.replays._made


def kinds(twice: Twice) -> set[type[climbs.Climb]]:
    """What was captured."""
    own = twice.captured.drafter.climbs
    assert own is not None
    return {shape[-1] for shape in own.replays._made}


@pytest.mark.parametrize("name", OPTIONS)
def test_as_many_nodes_as_levels_are_a_chain(name: str) -> None:
    """Which is fed one node a level, however wide trees may be; short of the end, where there are fewer levels. One request,
    since others might have fewer."""
    params = replace(OPTIONS[name], max_tokens=24, ignore_eos=True)
    twice = Twice(lambda: heads.eagle(width=3, depth=3, nodes=3))
    twice.run(lambda made: World(decoder("llama", True, layers=3)).run(made, params, 1)).same()
    assert climbs.Strand in kinds(twice)
    assert all(made.linear == (depth == 3) for pair in twice.pairs for _, depth, made in pair)


def test_what_came_in_many_rounds_is_read_before_guessing() -> None:
    """A guess has room for what a round like itself leaves unread; after a pause there is more."""

    def pausing(drafter: Drafter) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        requests = [tiny.request(p, params, limit=200) for p in tiny.prompts(2, 3, 9, 30)]
        World(decoder("llama", True, layers=3)).serve(drafter, requests, Pausing)

    twice = Twice(lambda: heads.eagle(width=2, depth=2, nodes=4)).run(pausing)
    twice.same()
    assert climbs.Reading in kinds(twice) and twice.pairs


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_trees(kind: str, name: str) -> None:
    guesses(lambda: heads.eagle(width=3, depth=3, nodes=9, **KINDS[kind]), OPTIONS[name]).same()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("options", [{}, {"nodes": 3}, {"vocab": 20, "nodes": 7}], ids=["tree", "chain", "few"])
def test_heads(options: dict[str, Any], name: str) -> None:
    twice = guesses(lambda: heads.medusa(**options), OPTIONS[name], "replays")
    twice.same()
    replays = twice.captured.drafter.replays
    assert replays is not None and replays.replays._made


def test_preempted_requests() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)

    def serve(drafter: Drafter) -> None:
        world = World(decoder("llama", True, layers=3), blocks=4)
        world.serve(drafter, [tiny.request(p, params, seed=i, limit=200) for i, p in enumerate(tiny.prompts(3, 3, 60, 60))])

    twice = Twice(lambda: heads.eagle(width=1, depth=3)).run(serve)
    assert twice.pairs
    for (b, _, plain), (c, _, replayed) in twice.pairs:
        assert paths(plain, b) == paths(replayed, c)


@pytest.mark.parametrize(("length", "rows"), [(40, {48}), (60, {64}), (64, {64}), (70, set())])
def test_a_prompt_is_read_by_one_replay(length: int, rows: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer one is read launch by launch."""
    monkeypatch.setattr(climbs, "READS", (48, 64))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def serve(drafter: Drafter) -> None:
        [prompt] = tiny.prompts(1, 0, length, length)
        World(decoder("llama", True, layers=3)).serve(drafter, [tiny.request(prompt, params, limit=200)])

    twice = Twice(lambda: heads.eagle(width=2, depth=3, nodes=6)).run(serve)
    twice.same()
    own = twice.captured.drafter.climbs
    assert own is not None and {shape.fresh for shape in own.replays._made if shape.kind is climbs.Reading} == rows
    assert own.reads(climbs.FEW) == 64 and own.reads(climbs.FEW + 1) == 48


@pytest.mark.parametrize(("count", "at_once"), [(2, False), (climbs.FEW + 1, True)])
def test_others_may_begin_with_a_prompt_though_nothing_is_guessed(
    count: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many it is read at once; of few when they have filled a block."""
    world, drafter = World(decoder("llama", True, layers=3)), heads.eagle(width=1, depth=2)
    params, asked = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True), list[tuple[int, int]]()
    requests = [tiny.request(prompt, params, limit=200) for prompt in tiny.prompts(count, 0, 126, 126)]
    shared = drafter.shared

    def noted(request: Request) -> int:
        asked.append((len(request.output), shared(request)))
        return asked[-1][1]

    monkeypatch.setattr(drafter, "shared", noted)
    monkeypatch.setattr(world.cache, "forget", lambda: None)
    world.serve(drafter, requests, Idle, grain=64)
    first, last = ([found for written, found in asked if (written == 1) == now] for now in (True, False))
    assert len(first) == count and all(found == (125 if at_once else 0) for found in first)
    assert len(last) == count and all(found >= 64 for found in last), "asked once a block"
    assert all(world.cache.find(r.tokens, 64, 64) for r in requests)


class Idle(Fixed):
    """Nobody is given guesses."""

    def budget(self, batch: Batch) -> Budget:
        return Budget.none(len(batch))


def test_a_tree_too_wide_for_its_room_is_less_deep() -> None:
    """What is in the ring can be read by captured guesses alone, which must then fit into the memory there is."""
    params = replace(OPTIONS["greedy"], ignore_eos=True)
    noting = Noting(heads.eagle(width=6, depth=4, nodes=8), "climbs", captured=True)
    [request] = World(decoder("llama", True, layers=3)).run(noting.drafter, params, 1)
    assert (
        noting.ahead > 1 and len(noting.made) == 1 and len(next(iter(noting.made.values()))) >= request.stats.rounds - 2
    )  # all but the prompt and the end


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
        assert [made.get((s,), lambda _: "new") for s in "abac"] == ["new"] * 4
        assert [made.get((s,), lambda _: "other") for s in "ab"] == ["new", "other"]

    def test_what_cannot_be_captured(self) -> None:
        def make(shape: object) -> str:
            raise RuntimeError("not permitted when stream is capturing")

        made = self.made()
        with pytest.warns(OutriderWarning, match="somebody is not captured"):
            assert made.get((1,), make) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert made.get((2,), lambda _: "never") is None

    def test_memory_that_can_be_had(self) -> None:
        made, tries = self.made(), []

        def make(shape: object) -> str:
            tries.append(1)
            if len(tries) == 1:
                raise torch.OutOfMemoryError("no memory")
            return "new"

        assert made.get((1,), make) == "new"


if CUDA:

    @pytest.mark.parametrize("width", [1, 3])
    def test_low_precision(width: int) -> None:
        twice = Twice(lambda: heads.eagle(width=width, depth=3))
        own = decoder("llama", True, layers=3, dtype=torch.bfloat16)
        twice.run(lambda made: World(own).run(made, replace(OPTIONS["sampled"], max_tokens=12)))
        assert twice.shared() > 0.9

    @pytest.mark.parametrize("name", OPTIONS)
    def test_rounds_that_are_alike_are_repeated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The guesses are the same as if each round had been looked at. Requests end at different times, and one wants none. On a
        CPU whoever guards guesses hands on copies, and no round is repeated."""
        told, repeat = list[bool](), climbs.Climbs.repeat

        def noting(self: climbs.Climbs, *given: Any) -> bool:
            told.append(repeat(self, *given))
            return told[-1]

        monkeypatch.setattr(climbs.Climbs, "repeat", noting)
        lengths = ((40, None), (26, None), (24, 0))

        def serve(drafter: Drafter) -> None:
            options = [replace(OPTIONS[name], max_tokens=most, depth=depth, ignore_eos=True) for most, depth in lengths]
            prompts = tiny.prompts(3, 3, 2, 12)
            requests = [tiny.request(p, o, seed=i, limit=200) for i, (p, o) in enumerate(zip(prompts, options, strict=True))]
            World(decoder("llama", True, layers=3)).serve(drafter, requests)

        Twice(lambda: heads.eagle(width=2, depth=2, nodes=4)).run(serve).same()
        assert sum(told) > 5
