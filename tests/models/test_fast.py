"""Captured rounds and fused decoders beside their plain twins: the same tokens, whatever drafts.

Runs on a card, or on CPU under Triton's interpreter (`TRITON_INTERPRET=1`), where rounds are played kernel by kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider import registry
from outrider.accept import PerRequest
from outrider.bench import tiny
from outrider.cache.paged import PagedCache
from outrider.config import SamplingParams
from outrider.control import Fixed
from outrider.drafters import draft_model
from outrider.drafters.draft_model import DraftModel
from outrider.engine import Engine
from outrider.guard import Guard
from outrider.loading import start_for
from outrider.models import fields, hf, rounds, rows
from outrider.models.quantize import quantize
from outrider.protocols import Controller, Drafter, Needs
from outrider.sampling import TextSampler
from outrider.scheduler import Scheduler
from outrider.types import Batch, Finish, Proposal, Request, Scores, Verdict

from .. import heads

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)

OPTIONS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=8, seed=7),
    "sampled": SamplingParams(temperature=1.0, max_tokens=8, seed=7, top_p=0.8, top_k=12),
}


@pytest.fixture(autouse=True)
def anchored(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU, too, KV is read by the anchored kernels."""
    if not CUDA:
        for module in (rows, hf, draft_model):
            monkeypatch.setattr(module, "anchors", lambda cache: True)
        monkeypatch.setattr(hf, "pack", lambda model: 0)


def decoder(family: str, fused: bool, scheme: str = "none", layers: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    from outrider.models.native import Native

    made = tiny.model(family, dtype=dtype, num_hidden_layers=layers, intermediate_size=64).to(DEVICE)
    quantize(made, scheme, DEVICE)
    return (Native if fused else hf.Decoder)(made, family)


class World:
    """A fast target around a decoder, its requests, and how many rounds were captured shapes."""

    def __init__(self, own: Any, blocks: int = 24) -> None:
        from outrider.models.fast import FastTarget

        self.decoder = own
        self.cache = PagedCache(own.layers, blocks, 64, own.dtype, DEVICE)
        self.target = FastTarget(own, self.cache, TextSampler(own.vocab_size), 256, lanes=8)

    def run(self, drafter: Drafter, params: SamplingParams, count: int = 3) -> list[Request]:
        requests = [tiny.request(p, params, seed=i, limit=200) for i, p in enumerate(tiny.prompts(count, 3, 2, 12))]
        self.serve(drafter, requests)
        return requests

    def serve(
        self, drafter: Drafter, requests: list[Request], control: Callable[[Drafter], Controller] = Fixed, grain: int = 0
    ) -> None:
        scheduler = Scheduler(self.cache, drafter.nodes, separate=True, grain=grain)
        guard = Guard(drafter, self.decoder.vocab_size)
        guard.start(start_for(self.target, drafter, "tiny", None))
        engine = Engine(self.target, guard, scheduler, PerRequest(), control(drafter))
        for request in requests:
            engine.add(request)
        while engine.step() is not None:
            pass
        assert guard.working, guard.reason
        assert all(r.finish is not Finish.RUNNING and r.flying == 0 for r in requests)
        assert self.cache.free() == self.cache.capacity


def drafting(own: Any, **config: int) -> DraftModel:
    made = DraftModel(DraftModel.Config(path="tiny", **config))
    made.start = lambda start: made.bind(own, start)  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(("family", "fused"), [("llama", True), ("qwen3", True), ("mistral", False)])
@pytest.mark.parametrize("name", OPTIONS)
def test_texts_are_those_of_plain_passes(family: str, fused: bool, name: str) -> None:
    """Whether rounds are captured, whatever drafts: one text."""
    params, own = OPTIONS[name], decoder(family, fused)
    plain = World(own)
    plain.target.steady = lambda batch: False  # type: ignore[method-assign]
    expected = [r.output for r in plain.run(registry.parse("none"), params)]
    assert not plain.target.machine.shapes
    for drafter in (
        registry.parse("none"),
        registry.parse("ngram:min=1"),
        drafting(own, depth=3),
        drafting(own, depth=2, width=2),
    ):
        world = World(own)
        assert [r.output for r in world.run(drafter, params)] == expected, drafter.name
        assert world.target.machine.shapes


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_texts_of_quantised_models(scheme: str) -> None:
    """The fused decoder's joined weights give the text of transformers' own layers, whatever drafts."""
    pytest.importorskip("torchao")
    params = OPTIONS["sampled"]
    own, plain = decoder("qwen3", True, scheme=scheme), World(decoder("qwen3", False, scheme=scheme))
    expected = [r.output for r in plain.run(registry.parse("none"), params)]
    assert len(own.products.tiles) == 4 and own.stack[0].qkv.bits == int(scheme[3:])
    for spec in ("none", "ngram:min=1"):
        assert [r.output for r in World(own).run(registry.parse(spec), params)] == expected


def test_the_target_as_its_own_draft_is_always_right() -> None:
    """A chain that is one replay, and full acceptance, which leaves the last guess without KV."""
    own = decoder("llama", True)
    drafter = drafting(decoder("llama", True), depth=3)
    requests = World(own).run(drafter, SamplingParams(temperature=0.0, max_tokens=13, seed=7, ignore_eos=True))
    assert drafter.chains is not None
    assert all(r.stats.accepted == r.stats.drafted > 0 for r in requests)
    assert all(r.stats.tokens == r.stats.rounds + r.stats.accepted for r in requests)


def test_requests_that_lanes_cannot_hold_share_a_batch_with_others() -> None:
    own = decoder("llama", True)
    params = SamplingParams(temperature=0.0, max_tokens=8, seed=7, repetition_penalty=1.3)
    plain = World(own)
    plain.target.steady = lambda batch: False  # type: ignore[method-assign]
    expected = [r.output for r in plain.run(registry.parse("none"), params)]
    assert [r.output for r in World(own).run(registry.parse("ngram:min=1"), params)] == expected


@pytest.mark.parametrize("draft", ["none", "ngram:min=1", "tree"])
def test_passes_that_are_replayed(draft: str) -> None:
    """Where rounds cannot be captured: the same texts and features, launch by launch and as one replay."""
    own = decoder("llama", True)
    params = SamplingParams(temperature=0.0, max_tokens=8, seed=7, repetition_penalty=1.3)
    told, seen = [], []
    for replayed in (False, True):
        world = World(own)
        if not replayed:
            own.passes = None
        watcher = watching(own, draft)
        told.append([r.output for r in world.run(watcher, params)])
        seen.append(torch.cat(watcher.seen))
        assert bool(world.target.machine._kept) == replayed
    assert told[0] == told[1]
    assert torch.equal(*seen) if CUDA else torch.allclose(*seen, atol=1e-5)


@pytest.mark.parametrize("draft", ["none", "ngram:min=1", "tree"])
def test_states_of_captured_rounds(draft: str) -> None:
    """What a drafter is shown of the target's states, and where they belong: the same in captured rounds as in plain passes."""
    own, told = decoder("llama", True), []
    for captured in (False, True):
        world = World(own)
        if not captured:
            world.target.steady = lambda batch: False  # type: ignore[method-assign]
        watcher = watching(own, draft)
        texts = [r.output for r in world.run(watcher, OPTIONS["greedy"])]
        assert any(shape.features for shape in world.target.machine.shapes) == captured
        told.append((texts, watcher))
    assert told[0][0] == told[1][0]
    (_, one), (_, two) = told
    for mine, theirs in zip(one.stands, two.stands, strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(one.seen, two.seen, strict=True):
        assert torch.equal(mine, theirs) if CUDA else torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("made", [heads.medusa, heads.eagle])
def test_heads_on_captured_rounds(made: Any, name: str) -> None:
    """Drafters that read the target's states: the text of plain decoding, in as many rounds as with plain passes. Where the host
    does not wait, it learns late that a text is about to end, and guesses for more."""
    own, params = decoder("llama", True, layers=3), OPTIONS[name]
    expected = [r.output for r in World(own).run(registry.parse("none"), params)]
    found = []
    for captured in (False, True):
        world = World(own)
        if not captured:
            world.target.steady = lambda batch: False  # type: ignore[method-assign]
        requests = world.run(made(), params)
        assert [r.output for r in requests] == expected
        assert any(shape.features for shape in world.target.machine.shapes) == captured
        found.append([(r.stats.rounds, r.stats.drafted > 0) for r in requests])
    assert found[0] == found[1]


def watching(own: Any, draft: str) -> Watcher:
    return Watcher(drafting(own, depth=2, width=2) if draft == "tree" else registry.parse(draft))


class Watcher(Drafter):
    """Guesses as another does, and keeps what it is shown."""

    name = "watcher"
    needs = Needs(features=("hidden:0,last",))

    def __init__(self, other: Drafter) -> None:
        self.other, self.depth, self.nodes = other, other.depth, other.nodes
        self.seen: list[torch.Tensor] = []
        self.stands: list[torch.Tensor] = []
        self.start, self.propose, self.release = other.start, other.propose, other.release

    def observe(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        rows, states = scores.rows, scores.features["hidden:0,last"]
        there = rows.position >= 0
        self.seen.append(states[there].clone())
        self.stands.append(torch.stack([rows.request, rows.position, rows.virtual, rows.slot])[:, there].clone())
        self.other.observe(batch, proposal, verdict, scores)


class TestWhatIsKept:
    def test_the_one_longest_unused_goes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = World(decoder("llama", True)).target.machine
        monkeypatch.setattr(rounds, "MOST", 2)
        for shape in ((1,), (2,), (1,), (3,)):
            assert machine.kept(shape, lambda: "new") == "new"
        assert machine.kept((1,), lambda: "other") == "new"
        assert machine.kept((2,), lambda: "other") == "other"

    def test_all_go_where_memory_ends(self) -> None:
        machine = World(decoder("llama", True)).target.machine
        machine.kept((1,), lambda: "old")
        tries = []

        def make() -> str:
            tries.append(1)
            if len(tries) == 1:
                raise torch.OutOfMemoryError("no memory")
            return "new"

        assert machine.kept((2,), make) == "new"
        assert machine.kept((1,), lambda: "again") == "again"

    def test_the_next_roomier_shape_plays_for_one_seldom_wanted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = World(decoder("llama", True)).target.machine
        monkeypatch.setattr(rounds, "Round", lambda shape, owner: shape)
        room, small = fields.Shape(8, 8, 0, False, 1024), fields.Shape(4, 4, 0, False, 1024)
        tree, longer = fields.Shape(4, 8, 16, False, 1024), fields.Shape(4, 4, 0, False, 2048)
        assert machine.round(room) == room
        assert machine.round(fields.Shape(2, 2, 0, False, 1024)) == (2, 2, 0, False, 1024, False, ())
        assert [machine.round(shape) for shape in (tree, longer)] == [tree, longer]
        assert [machine.round(small) for _ in range(rounds.PATIENCE)] == [longer] * rounds.PATIENCE
        assert machine.round(small) == small

    def test_it_is_told_which_rounds_could_be_had_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target = World(decoder("llama", True)).target
        monkeypatch.setattr(rounds, "Round", lambda shape, owner: shape)
        monkeypatch.setattr(target.machine, "graphs", False)
        assert target.captured(1, 5), "without graphs there is nothing to wait for"
        monkeypatch.setattr(target.machine, "graphs", True)
        assert not target.captured(1, 5)
        target.machine.round(fields.Shape(1, 16, 16, False, 1024))
        assert target.captured(1, 5) and target.captured(1, 9), "in eight rows or in sixteen"
        assert not target.captured(1, 16) and not target.captured(2, 2)
        target.machine.round(fields.Shape(4, 16, 16, False, 1024))
        assert target.captured(3, 3) and not target.captured(3, 5), "all three of them would have 18 rows"

    def test_quiet_rounds_are_made_ready_beforehand(self, monkeypatch: pytest.MonkeyPatch) -> None:
        target, made = World(decoder("llama", True)).target, list[fields.Shape]()
        monkeypatch.setattr(rounds, "Round", lambda shape, owner: made.append(shape) or shape)
        target.prepare(3, 8)
        assert not made, "without graphs there is nothing to make"
        monkeypatch.setattr(target.machine, "graphs", True)
        target.prepare(3, 8)
        target.prepare(2, 8)
        assert [s.requests for s in made] == [1, 2, 4] and all(s.rows == s.requests and not s.columns for s in made)
        assert target.machine.patient, "from now on what is roomier stands in again"
        with target.machine.exact():
            target.prepare(2, 8)
            assert not target.machine.patient, "but where nothing is to stand in for anything"
        monkeypatch.setattr(target.machine, "kept", lambda shape, make: _no_memory())
        target.prepare(1000, 8)

    def test_want_of_memory_with_nothing_to_drop_is_raised(self) -> None:
        machine = World(decoder("llama", True)).target.machine
        with pytest.raises(torch.OutOfMemoryError):
            machine.kept((1,), _no_memory)


def _no_memory() -> None:
    raise torch.OutOfMemoryError("no memory")
