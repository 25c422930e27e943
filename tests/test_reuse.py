"""Turns, admission, and the reuse of prompts' beginnings, as the scheduler sees to them."""

from __future__ import annotations

from typing import Any

import pytest

from outrider import LLM, registry
from outrider.choice import Choice
from outrider.config import SamplingParams
from outrider.errors import OutriderError
from outrider.protocols import Drafter, KVNeed, Needs
from outrider.scheduler import CHUNK, Scheduler
from outrider.types import Finish, Request

from . import probes, tiny
from .contract.test_state import assert_fresh
from .models.tiny_gguf import Tiny
from .test_scheduler import Pool, play, request, scheduler

HEAD = [2 + (i * 7) % 40 for i in range(100)]
PARAMS = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=5)
NONE = registry.parse("none")


# Turns


def work(own: Scheduler) -> tuple[list[str], list[Request]]:
    """One round: what each request's rows were, and who ran."""
    batch = own.next()
    kinds = [
        "write" if p == 1 else "prompt" if r.computed < r.prompt_len else "replay"
        for r, p in zip(batch.requests, batch.pending, strict=True)
    ]
    counts = [int(ready) for ready in batch.ready]
    own.advance(batch, [0] * len(batch), counts, [[5]] * len(batch))
    return kinds, list(batch.requests)


def test_prompts_and_writing_take_turns() -> None:
    own, writers, long = scheduler(separate=True), [request(3, 50), request(4, 50)], request(4 * CHUNK, 50)
    for r in writers:
        own.add(r)
    assert work(own)[0] == ["prompt"] * 2
    own.add(long)
    replayed = request(3, 90)
    replayed.tokens += [5] * 40
    own.add(replayed)
    rounds = [work(own)[0] for _ in range(14)]
    assert all(len(set(kinds)) == 1 for kinds in rounds), "one kind of work in a pass"
    order = [kinds[0] for kinds in rounds]
    assert order == ["write", *["prompt", "replay", "write"] * 3, "prompt", "write", "write", "write"]


def test_without_separation_everybody_is_in_every_pass() -> None:
    own = scheduler()
    for r in (request(3, 50), request(2 * CHUNK, 50)):
        own.add(r)
        work(own)
    assert work(own)[0] == ["write", "prompt"]


def test_a_round_ahead_is_only_for_those_who_were_all_in_the_last() -> None:
    own = scheduler(separate=True)
    for r in (request(3, 50), request(3, 50)):
        own.add(r)
    work(own)
    batch = own.next()
    own.launched(batch, (0, 0))
    assert own.calm(batch)
    own.running.append(request(9))
    assert not own.calm(batch), "who is not in flight is not known to the device"


@pytest.mark.parametrize("separate", [False, True])
def test_passes_after_want_of_memory_are_narrow_and_serve_the_oldest(separate: bool) -> None:
    own, made = scheduler(separate=separate), [request(3, 4) for _ in range(5)]
    for r in made:
        own.add(r)
    own.most = 2
    assert work(own)[1] == made[:2]
    for _ in range(99):
        for r in [r for r in own.running if r.room == 0]:
            own.remove(r)
            own.cache.release(r)
        if own.idle:
            break
        assert len(work(own)[1]) <= 2
    assert own.idle and all(len(r.output) == 4 for r in made)


# Admission


def test_nobody_is_admitted_at_the_cost_of_anothers_next_round() -> None:
    own = scheduler(capacity=20, lookahead=0)
    made = [request(8, 9), request(11, 9)]
    for r in made:
        own.add(r)
    assert [i for i, _, _ in play(own)] == [made[0].id], "8 + 11 fit, but then neither could go on"
    own = scheduler(capacity=21, lookahead=0)
    made = [request(8, 9), request(11, 9)]
    for r in made:
        own.add(r)
    assert [i for i, _, _ in play(own)] == [r.id for r in made]


@pytest.mark.parametrize("accepted", [0, 1, 4])
@pytest.mark.parametrize("block", [1, 4])
def test_who_is_admitted_runs_at_least_twice(block: int, accepted: int) -> None:
    """And so do all who were there before: no thrash, and all come to an end."""
    own = scheduler(capacity=64, lookahead=4)
    own.cache.block = block
    made = [request(3 + i % 5, 20 + i % 7) for i in range(30)]
    for r in made:
        own.add(r)
    since: dict[int, int] = {}
    for _ in range(2000):
        before = list(own.running)
        if play(own, accepted=accepted) is None:
            break
        gone = [r for r in before if r not in own.running]
        assert all(since[r.id] >= 2 for r in gone), "admitted, and sent away before its second round"
        since = {r.id: since.get(r.id, 0) + 1 for r in own.running}
        for r in [r for r in own.running if r.room <= 0]:
            own.remove(r)
            own.cache.release(r)
    assert own.idle and all(r.room <= 0 for r in made) and own.cache.free() == 64
    assert own.preempted > 0, "memory was never short"


def test_guesses_give_back_their_room_before_anybody_gives_way() -> None:
    own = scheduler(capacity=20, lookahead=8)
    made = [request(4, 12), request(4, 12)]
    for r in made:
        own.add(r)
    assert [room for _, _, room in play(own)] == [8, 0]
    made[1].tokens += [5] * 5  # the second has got ahead, in passes that the first was not in
    batch = own.next()
    assert own.preempted == 0 and batch.requests == tuple(made) and batch.room[0] == 0


# Reuse


def run(world: tiny.World, made: list[Request], drafter: Drafter = NONE, **options: Any) -> Any:
    """The engine after all have ended; every round the KV of everybody is that of a fresh computation."""
    engine = world.engine(drafter, **{"grain": CHUNK, **options})
    go(engine, world, made)
    return engine


def go(engine: Any, world: tiny.World, made: list[Request]) -> None:
    for r in made:
        engine.add(r)
    engine.prefill = 0
    while (event := engine.step()) is not None:
        engine.prefill += event.prefill
        for r in made:
            if r.finish is Finish.RUNNING and r.computed:
                assert_fresh(world, r)
    assert engine.drafter.working, engine.drafter.reason
    assert world.cache.free() == world.cache.capacity


def alone(made: Request) -> list[int]:
    twin = tiny.request(made.tokens[: made.prompt_len], made.params)
    twin.key = made.key
    return tiny.World().run(NONE, [twin])[0]


@pytest.fixture
def chunk(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("outrider.scheduler.CHUNK", 32)
    return 32


def test_whole_chunks_are_taken_over(chunk: int) -> None:
    world = tiny.World()
    first = tiny.request(HEAD, PARAMS)
    run(world, [first], grain=chunk)
    made = [tiny.request(HEAD[:n] + [7, 7], PARAMS) for n in (100, 70, 32, 29, 30)]
    engine = run(world, made, grain=chunk)
    assert [alone(r) for r in made] == [r.output for r in made]
    assert engine.scheduler.hits == 3 and engine.scheduler.saved == 96 + 64 + 32
    assert engine.prefill == sum(r.prompt_len for r in made) - engine.scheduler.saved


def test_the_last_prompt_token_is_always_read(chunk: int) -> None:
    world = tiny.World()
    for _ in range(2):
        made = [tiny.request(HEAD[:96], PARAMS)]
        engine = run(world, made, grain=chunk)
        assert made[0].output == alone(made[0])
    assert engine.scheduler.saved == 64


def test_what_a_chunk_did_not_fill_is_not_kept(chunk: int) -> None:
    world = tiny.World()
    run(world, [tiny.request(HEAD[:63], PARAMS)], grain=chunk)
    assert world.cache.cached == 32, "the second chunk was cut short by the end of the prompt"


def test_answers_are_taken_over_where_bits_do_not_depend_on_the_pass() -> None:
    world = tiny.World()
    first = tiny.request(HEAD[:10], PARAMS)
    run(world, [first], grain=8)
    more = tiny.request([*first.tokens, 9, 9], PARAMS)
    engine = run(world, [more], grain=8)
    assert more.output == alone(more) and engine.scheduler.saved == 16, "all but the last token of 22 had KV, in blocks of 8"


@pytest.mark.parametrize("drafter", ["bushy", "replay", "draft", "owner"])
def test_guesses_never_get_into_what_is_shared(drafter: str) -> None:
    prompts = [HEAD[:n] + [3] for n in (40, 40, 25, 17, 9)]
    answers = {tuple(p): tuple(alone(tiny.request(p, PARAMS))) for p in prompts}
    world = tiny.World(tokens=200)
    kinds = {"bushy": probes.Bushy, "replay": probes.Replay, "owner": probes.Owner}
    guess = tiny.draft_model(2, depth=3, width=2) if drafter == "draft" else kinds[drafter](answers)
    engine = world.engine(guess, grain=8)
    for _ in range(2):
        made = [tiny.request(p, PARAMS) for p in prompts]
        go(engine, world, made)
        assert [tuple(r.output) for r in made] == [answers[tuple(p)] for p in prompts]
        assert sum(r.stats.drafted for r in made) > 0
    assert engine.scheduler.saved > 0


def test_who_wants_the_prompts_scores_reads_it_all() -> None:
    world = tiny.World()
    run(world, [tiny.request(HEAD[:40], PARAMS)], grain=8)
    params = SamplingParams(temperature=1.0, max_tokens=4, seed=5, prompt_logprobs=1)
    made = tiny.request(HEAD[:40], params)
    engine = run(world, [made], grain=8)
    assert engine.scheduler.saved == 0 and len(made.prompt_logprobs) == 39


def test_samples_share_blocks() -> None:
    world, prompt = tiny.World(), HEAD[:44]
    first = tiny.request(prompt, PARAMS)
    made = [first, *(tiny.request(prompt, PARAMS, twin=first, index=i) for i in (1, 2, 3))]
    engine = world.engine(NONE)
    for r in made:
        engine.add(r)
    engine.step()
    engine.step()
    tables = [world.cache.blocks(r) for r in made]
    assert all(table[:5] == tables[0][:5] for table in tables) and len({b for t in tables for b in t[5:]}) == 4
    while engine.step() is not None:
        for r in made:
            if r.finish is Finish.RUNNING:
                assert_fresh(world, r)
    assert all(r.output == alone(r) for r in made) and world.cache.free() == world.cache.capacity


def test_a_preempted_request_finds_its_prompt_again(chunk: int) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=5)
    made = [tiny.request(HEAD[:40], params), tiny.request([5] * 40, params)]
    world = tiny.World(tokens=160)
    engine = run(world, made, grain=chunk)
    assert engine.scheduler.preempted > 0 and engine.scheduler.saved >= 32
    assert all(r.output == alone(r) for r in made)


def test_a_drafters_memory_is_found_again() -> None:
    """The draft's own cache: a second round of the same prompts feeds it little, and its guesses are as good."""
    drafter, fed = tiny.draft_model(3, depth=3), []
    engine = tiny.World().engine(drafter)
    feed = drafter._run

    def counted(batch: Any, nodes: Any, start: Any, computed: Any) -> Any:
        fed.append(sum(batch.pending) if start == 0 else 0)
        return feed(batch, nodes, start, computed)

    drafter._run = counted  # type: ignore[method-assign]
    totals = []
    for _ in range(2):
        made = tiny.request(HEAD, PARAMS)
        engine.add(made)
        while engine.step() is not None:
            pass
        assert made.output == alone(made) and made.stats.accepted == made.stats.drafted > 0
        totals.append(sum(fed))
        fed.clear()
    assert totals[1] <= totals[0] - 96, "the prompt was fed again"


def test_a_drafter_that_lags_is_asked_when_it_may_have_caught_up() -> None:
    """Once a block, and after rounds with guesses until its memory is whole: with many requests a question a round is dear."""
    made, asked, published, ready = request(10, 80), 0, list[int](), 0
    own = Scheduler(Shelf(10_000, block=16), 4, grain=16)  # type: ignore[arg-type]

    def shared(one: Request) -> int:
        nonlocal asked
        asked += 1
        return ready

    own.shared, own.sharing, own.cache.publish = shared, True, lambda one, length: published.append(length)  # type: ignore[method-assign]
    own.add(made)

    def rounds(count: int, guessed: bool) -> int:
        nonlocal asked
        asked = 0
        for _ in range(count):
            batch = own.next()
            assert batch is not None
            own.advance(batch, [0], [1], [[5]], guessed)
        return asked

    assert rounds(1 + 32, False) == 1 + 2, "the prompt, and two blocks that are full"
    assert rounds(2, True) == 2 and published[-1] == 0, "it lags"
    ready = made.computed
    assert rounds(1, True) == 1 and published[-1] == made.computed - 1
    assert rounds(2, True) == 0, "there is nothing to ask for"


def test_who_has_gone_is_asked_for_no_more() -> None:
    made = request(10, 80)
    own = Scheduler(Shelf(10_000, block=16), 4, grain=16)  # type: ignore[arg-type]
    own.shared, own.sharing, own.cache.publish = lambda one: 0, True, lambda one, length: None  # type: ignore[method-assign]
    own.add(made)
    for _ in range(20):
        batch = own.next()
        assert batch is not None
        own.advance(batch, [0], [1], [[5]], False)
    assert own._behind == {made.id}
    own.remove(made)
    assert not own._behind


def test_the_scheduler_is_told_which_rounds_had_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    told, seen, advance = list[bool](), list[bool](), Scheduler.advance

    def spy(self: Scheduler, *args: Any) -> None:
        told.append(args[4])
        advance(self, *args)

    monkeypatch.setattr(Scheduler, "advance", spy)
    engine = tiny.World().engine(tiny.draft_model(3, depth=3), grain=CHUNK)
    engine.add(tiny.request(HEAD[:20], PARAMS))
    while (event := engine.step()) is not None:
        seen.append(any(event.depths))
    assert told == seen and {True, False} <= set(told), "a prompt has none"


class Shelf(Pool):
    """A pool in which nothing is ever found."""

    def find(self, tokens: Any, most: int, grain: int, group: str | None = None) -> tuple[int, ...]:
        return ()


# Through the facade


class Keeper(Drafter):
    """Wants memory in the pool, and does nothing with it."""

    name = "keeper"
    needs = Needs(kv=KVNeed(2, 1, 4))

    def propose(self, batch: Any, budget: Any) -> Any:
        raise AssertionError("it is never asked: depth 0")

    depth = nodes = 0


class Broken(Keeper):
    name = "broken"

    def start(self, start: Any) -> None:
        raise OutriderError("no")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models")
    Tiny().write(folder / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
        yield str(folder / "tiny.gguf")


def test_switching_gives_back_the_old_drafters_memory(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(model, draft="none", dtype="float64", kv_tokens=256)
    cache = llm._target.cache
    assert len(cache._stores) == 1
    made = {"keeper": Keeper, "broken": Broken}
    find = Choice.drafter
    monkeypatch.setattr(Choice, "drafter", lambda self, spec: made[spec]() if spec in made else find(self, spec))
    for spec, stores in (("keeper", 2), ("keeper", 2), ("none", 1), ("keeper", 2)):
        llm.switch(spec)
        assert len(cache._stores) == stores
    with pytest.raises(OutriderError, match="no"):
        llm.switch("broken")
    assert len(cache._stores) == 2 and llm.drafter_name == "keeper"


def test_the_prefix_cache_can_be_switched_off(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.scheduler.CHUNK", 64)
    monkeypatch.setattr("outrider.loading.CHUNK", 64)
    params = SamplingParams(temperature=1.0, max_tokens=6, seed=1, ignore_eos=True)
    prompt, texts = [3 + i % 90 for i in range(100)], []
    for on in (True, False):
        llm = LLM(model, draft="ngram", dtype="float64", kv_tokens=512, prefix_cache=on)
        texts += [llm.generate([prompt], params)[0].token_ids for _ in range(2)]
        assert (llm.engine.scheduler.hits, llm.engine.scheduler.saved) == ((1, 64) if on else (0, 0))
    assert len(set(texts)) == 1


def test_a_drafter_that_wants_every_row_gets_every_row(model: str) -> None:
    llm = LLM(model, draft="none", dtype="float64", kv_tokens=256)
    drafter = probes.Reader()
    drafter.needs = Needs(features=("hidden:last",))
    llm.engine = llm._seat.take("probe", drafter, llm.accept, "fixed")
    assert llm.engine.scheduler.grain == 0 and llm.prepare([3, 4], SamplingParams(n=2))[1].twin is None


def test_one_that_can_do_without_shares_beginnings_and_samples(model: str) -> None:
    llm = LLM(model, draft="none", dtype="float64", kv_tokens=256)
    drafter = probes.Reader()
    drafter.needs = Needs(features=("hidden:last",), gaps=True)
    llm.engine = llm._seat.take("probe", drafter, llm.accept, "fixed")
    first, second = llm.prepare([3, 4], SamplingParams(n=2))
    assert llm.engine.scheduler.grain == CHUNK and second.twin is first


def test_a_stream_closed_in_the_middle_leaves_nothing(model: str) -> None:
    llm = LLM(model, draft="self", dtype="float64", kv_tokens=512)
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=1, ignore_eos=True, n=2)
    for rounds in range(4):
        stream = llm.stream([10, 20, 30], params)
        for _ in range(rounds):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert llm.engine.scheduler.idle and llm._target.cache.free() == llm._target.cache.capacity
        assert not llm._inboxes and not llm._target.sampler._processors
