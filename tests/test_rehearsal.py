"""Before the first request: what guesses take is known, nothing is left behind, and texts are what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.control import Goodput
from outrider.control.costs import bucket
from outrider.control.probes import TRIED
from outrider.control.rates import Rates
from outrider.control.shelf import Known
from outrider.drafters.hybrid import Hybrid
from outrider.drafters.ngram import NGram
from outrider.drafters.suffix import Suffix
from outrider.protocols import Drafter, Learning
from outrider.rehearsal import PLAIN, ROUNDS, SIZES, Drill, Rehearsal
from outrider.types import Batch, Budget, Proposal

from . import heads, tiny
from .test_seat import PARAMS, STORY, llm

__all__ = ["llm"]


def staged(drafter: Drafter, world: tiny.World, known: Known | None = None, most: int = 64, **scheduling: Any) -> Rehearsal:
    """A rehearsal of a drafter on the tiny target."""
    drill = Drill(drafter, known or Known(drafter.depth))
    world.control = lambda drafter: drill
    return Rehearsal(world.engine(drafter, **scheduling), drill, tiny.prompts(1, seed=3, low=20)[0], most)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    monkeypatch.setattr("outrider.rehearsal.SIZES", (1, 4))
    monkeypatch.setattr("outrider.rehearsal.SECONDS", 1e9)
    return 1, 4


@pytest.mark.parametrize("make", [lambda: tiny.draft_model(2), lambda: heads.eagle(nodes=8, depth=2)])
def test_what_guesses_take_is_known_and_nothing_is_left(
    make: Callable[[], Drafter], sizes: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    drafter, world = make(), tiny.World()
    known, free = Known(drafter.depth), world.cache.free()
    rehearsal = staged(drafter, world, known)
    assert rehearsal.whole() == len(sizes)
    assert known.costs.measured and known.costs.tried and known.plain == {bucket(n) for n in sizes}
    assert {(bucket(n), d) for n in sizes for d in range(1, drafter.depth + 1)} == set(known.stalls.met)
    assert not any(known.stalls.met.values())
    assert all(known.costs.draft(n, d) > 0 for n in sizes for d in range(1, drafter.depth + 1))
    assert world.cache.free() == free and rehearsal.engine.scheduler.idle
    assert known.chances(1).accept.everybody() == Known(drafter.depth).chances(1).accept.everybody(), (
        "how often made-up guesses came true says nothing"
    )
    assert not caplog.records, "nor is it told that they lose"


def test_every_width_of_trees_is_played(sizes: tuple[int, ...]) -> None:
    drafter, asked = heads.eagle(nodes=8, depth=2), set[tuple[int, int, int]]()
    propose = drafter.propose

    def seen(batch: Batch, budget: Budget) -> Proposal:
        asked.add((len(batch), max(budget.depth), max(budget.nodes)))
        return propose(batch, budget)

    drafter.propose = seen  # type: ignore[method-assign]
    staged(drafter, tiny.World()).whole()
    assert asked == {(n, d, d * w) for n in sizes for d in (1, 2) for w in (1, 2, 4)}


def test_again_means_what_was_used_since(sizes: tuple[int, ...]) -> None:
    drafter, rounds = tiny.draft_model(3), list[tuple[int, int]]()
    rehearsal = staged(drafter, tiny.World())
    rehearsal.whole()
    rehearsal.drill.known.stalls.use(3, 2)
    rehearsal.engine.sinks.append(lambda event: rounds.append((len(event.committed), max(event.depths))))
    least = {(n, d) for n in sizes for d in (0, 1)}
    assert rehearsal.again() == len(sizes) and set(rounds) == {*least, (4, 2)} and len(rounds) <= len(sizes) * (PLAIN + ROUNDS)


def test_again_goes_to_all_depths_where_the_drafter_paces_itself(sizes: tuple[int, ...]) -> None:
    hybrid, asked = Hybrid.of([Suffix(Suffix.Config(depth=3)), heads.eagle(nodes=8, depth=2)]), set[tuple[int, int]]()
    rehearsal = staged(hybrid, tiny.World())
    rehearsal.whole()
    rehearsal.drill.known.stalls.use(1, 2)
    rehearsal.engine.sinks.append(lambda event: asked.add((len(event.committed), max(event.depths))))
    assert rehearsal.again() == len(sizes) and {(1, d) for d in (1, 2, 3)} <= asked and all(n == 1 or d < 2 for n, d in asked)


def test_where_memory_was_short_nothing_counts_as_captured(sizes: tuple[int, ...]) -> None:
    drafter, failed = tiny.draft_model(2), list[int]()
    propose = drafter.propose

    def starve(batch: Batch, budget: Budget) -> Proposal:
        if len(batch) == 4 and not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("no memory")
        return propose(batch, budget)

    drafter.propose = starve  # type: ignore[method-assign]
    world = tiny.World()
    rehearsal, free = staged(drafter, world), world.cache.free()
    assert rehearsal.whole() == 1 and not rehearsal.sound and not rehearsal.drill.known.stalls.met
    assert world.cache.free() == free and rehearsal.engine.drafter.working


def test_prompts_that_take_several_passes_are_read_before_guesses_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.rehearsal.SIZES", (16,))
    drafter, events = tiny.draft_model(2), list[tuple[int, int, int]]()
    rehearsal = staged(drafter, tiny.World(), max_rows=8, separate=True)
    rehearsal.engine.sinks.append(lambda e: events.append((len(e.committed), e.prefill, max(e.depths, default=0))))
    assert rehearsal.whole() == 1
    first = next(i for i, (_, _, depth) in enumerate(events) if depth)
    assert sum(prefill > 0 for _, prefill, _ in events) > 1 and not any(prefill for _, prefill, _ in events[first:])
    assert bucket(16) in rehearsal.drill.known.plain and all(n == 16 for n, _, _ in events[first:])


def test_whoever_has_no_room_is_not_rehearsed(sizes: tuple[int, ...]) -> None:
    world = tiny.World(tokens=96)
    free = world.cache.free()
    assert staged(tiny.draft_model(2), world).whole() <= 1 and world.cache.free() == free


def test_a_drafter_that_fails_in_rehearsal_is_off_before_the_first_request(sizes: tuple[int, ...]) -> None:
    class Breaks(NGram):
        def propose(self, batch: Batch, budget: Budget) -> Proposal:
            raise ZeroDivisionError("oops")

    rehearsal = staged(Breaks(NGram.Config()), tiny.World())
    with pytest.warns(UserWarning, match="oops"):
        rehearsal.whole()
    assert rehearsal.engine.drafter.reason is not None and rehearsal.engine.scheduler.idle


def test_it_takes_no_longer_than_it_may(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.rehearsal.SECONDS", 0.0)
    rehearsal = staged(tiny.draft_model(2), tiny.World())
    assert rehearsal.whole() == 0 and rehearsal.engine.scheduler.idle


def test_no_larger_batch_is_played_than_there_will_be() -> None:
    drafter = tiny.draft_model(2)
    made = {most: staged(drafter, tiny.World(), most=most).sizes for most in (1, 3, 64)}
    assert made == {1: [1], 3: [1, 4, 2], 64: list(SIZES)}


@pytest.mark.slow
def test_a_seat_rehearses_whoever_has_passes_of_its_own(
    llm: LLM, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, played = llm.chat(STORY, PARAMS), list[str]()
    ready, whole = list[tuple[int, int]](), Rehearsal.whole
    monkeypatch.setattr(llm.engine.target, "prepare", lambda most, tried: ready.append((most, tried)))
    monkeypatch.setattr(Rehearsal, "whole", lambda self: (played.append(self.engine.drafter.name), whole(self))[1])
    monkeypatch.setattr(llm._seat, "rehearses", 4)
    for draft in ("eagle", "ngram", "none"):
        llm.switch(draft, control="goodput")
        assert llm.chat(STORY, PARAMS).token_ids == plain.token_ids
    assert played == ["eagle"], "a lookup has nothing to capture"
    assert ready == [(4, TRIED)] * 2, "but what is there for all"
    llm.switch("layer_skip", control="goodput")
    assert played == ["eagle"], "what cannot forget the texts of a rehearsal is not rehearsed"
    controller = llm.engine.controller
    llm.switch("eagle", control="goodput")
    assert played == ["eagle"] and llm.engine.controller is not controller, "what is known is known"
    made = llm.engine.controller
    assert isinstance(made, Goodput) and made.costs.tried
    assert llm.generate("Bread is", SamplingParams(temperature=0.0, max_tokens=12)) is not None
    llm.switch("none", control="fixed")


def test_a_drafter_that_suffers_in_rehearsal_gives_way_to_a_new_one(
    llm: LLM, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, seen = llm.chat(STORY, PARAMS), list[object]()
    monkeypatch.setattr(Rehearsal, "whole", lambda self: seen.append(self.engine.drafter) or 0)
    monkeypatch.setattr(Rehearsal, "sound", False)
    monkeypatch.setattr(llm._seat, "rehearses", 4)
    groups = len(llm.engine.target.cache.groups())
    llm.switch("eagle:depth=2", control="goodput")
    assert len(seen) == 1 and llm.engine.drafter is not seen[0] and llm.engine.drafter.working
    assert len(llm.engine.target.cache.groups()) == groups + 1, "the first one's memory is given back"
    assert llm.chat(STORY, PARAMS).token_ids == plain.token_ids
    llm.switch("none", control="fixed")
    assert len(llm.engine.target.cache.groups()) == groups


def test_a_switch_that_fails_in_rehearsal_leaves_all_as_it_was(
    llm: LLM, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.switch("eagle:depth=3", control="goodput")
    before, groups = llm.engine, len(llm.engine.target.cache.groups())
    plain = llm.chat(STORY, PARAMS)

    def breaks(self: Rehearsal) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Rehearsal, "whole", breaks)
    monkeypatch.setattr(llm._seat, "rehearses", 4)
    with pytest.raises(KeyboardInterrupt):
        llm.switch("eagle:depth=2,width=2", control="goodput")
    after = llm.chat(STORY, PARAMS)
    assert llm.engine is before and len(llm.engine.target.cache.groups()) == groups and after.token_ids == plain.token_ids
    assert after.stats.drafted > 0
    llm.switch("none", control="fixed")


def test_what_members_take_and_how_often_they_are_right_outlives_a_renewal() -> None:
    """As a controller's knowledge does. Of requests and texts nothing is kept."""
    hybrid, world = Hybrid.of([Suffix(Suffix.Config()), heads.eagle()]), tiny.World()
    world.run(hybrid, [tiny.request(p) for p in tiny.prompts(2, seed=1)])
    model = hybrid.members[1]
    paces, rates = [m.pace.seconds for m in hybrid.members], model.rates.everybody()
    assert hybrid.renew() and hybrid.members[1] is model and not any(m.records or m.texts or m.stands for m in hybrid.members)
    assert [m.pace.seconds for m in hybrid.members] == paces and hybrid.members[0].pace.sure
    assert model.rates.everybody() == rates != Rates(model.drafter.depth, 0.6).everybody()
    assert hybrid._beats.timed and hybrid._rounds == 0


def test_levels_that_only_lookups_reach_are_rehearsed_once() -> None:
    hybrid = Hybrid.of([Suffix(Suffix.Config()), heads.eagle(depth=3, nodes=6)])
    assert staged(hybrid, tiny.World()).depths == [1, 2, 3, 16]
    assert staged(heads.eagle(depth=3, nodes=6), tiny.World()).depths == [1, 2, 3]


def test_what_was_learned_can_be_put_back() -> None:
    hybrid, world = Hybrid.of([Suffix(Suffix.Config()), heads.eagle()]), tiny.World()
    assert isinstance(hybrid, Learning) and not isinstance(heads.eagle(), Learning)
    before = hybrid.learned()
    world.run(hybrid, [tiny.request(p) for p in tiny.prompts(2, seed=1)])
    seen = [m.rates.common.lately.tests[0] for m in hybrid.members]
    assert max(seen) > 0 and hybrid.members[0].common
    hybrid.relearn(before)
    assert not any(m.rates.common.lately.tests[0] or m.common for m in hybrid.members)


def test_of_a_rehearsal_a_hybrid_learns_nothing_but_seconds(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm._seat, "rehearses", 2)
    llm.switch("hybrid:members=suffix+eagle(depth=2;width=2)", control="goodput")
    hybrid = llm.engine.drafter.drafter
    assert hybrid.members[1].pace.seconds and not any(m.rates.common.lately.tests[0] for m in hybrid.members)
    llm.chat(STORY, PARAMS)
    learned = [m.rates.everybody() for m in hybrid.members]
    assert any(m.rates.common.lately.tests[0] for m in hybrid.members)
    llm.switch("none", control="fixed")
    llm.switch("hybrid:members=suffix+eagle(depth=2;width=2)", control="goodput")
    assert llm.engine.drafter.drafter is hybrid and [m.rates.everybody() for m in hybrid.members] == learned
    llm.switch("none", control="fixed")


def test_what_lies_before_a_renewal_is_no_time_of_a_pass() -> None:
    """The first guess after it follows on none: time since the machine was switched on would count as that of a pass."""
    hybrid, world = Hybrid.of([Suffix(Suffix.Config()), heads.eagle()]), tiny.World()
    for seed in range(5):
        world.run(hybrid, [tiny.request(p) for p in tiny.prompts(1, seed=seed)])
        assert hybrid.renew()
    costs = [usual.costs for usual in hybrid._beats._passes.values()]
    passes = [cell for c in costs for curve in c._verify[0].values() for cell in curve.cells.values()]
    assert passes and all(cell.size > 0 and max(cell.samples) < 5.0 for cell in passes)


def test_a_member_is_known_apart_for_few_and_for_many() -> None:
    hybrid, world = Hybrid.of([Suffix(Suffix.Config()), heads.eagle()]), tiny.World()
    world.run(hybrid, [tiny.request(p) for p in tiny.prompts(2, seed=1)])
    model = hybrid.members[1]
    few = model.rates.everybody()
    hybrid._counted(True)
    assert model.rates.everybody() == few, "as long as nothing else is known"
    model.rates.learn([(model.rates.track(), 0, 1)] * 20)
    assert model.rates.everybody()[0] < few[0]
    hybrid._counted(False)
    assert model.rates.everybody() == few
