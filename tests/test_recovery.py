"""Out of memory, NaN and cancellation in the middle of traffic: who can run ends as if alone, the rest ends with a reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider import registry
from outrider.config import SamplingParams
from outrider.errors import OutriderWarning, out_of_memory
from outrider.recovery import PATIENCE, half
from outrider.types import Batch, Finish, Proposal, Request

from . import probes, tiny

PROMPTS = tiny.prompts(6, seed=8, low=4, high=20)
PARAMS = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, seed=2)


def requests(params: SamplingParams = PARAMS) -> list[Request]:
    return [tiny.request(p, params) for p in PROMPTS]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return tiny.World().run(registry.parse("none"), requests())


def replay(plain: list[list[int]]) -> probes.Replay:
    return probes.Replay({tuple(p): tuple(a) for p, a in zip(PROMPTS, plain, strict=True)}, depth=4)


Planted = Callable[[Batch, Proposal], bool]


def starve(world: tiny.World, when: Planted, error: BaseException, part: str = "score") -> None:
    """Let a part of the target fail where `when` says so, after it did its work."""
    whole = getattr(world.target, part)

    def failing(batch: Batch, proposal: Proposal, *rest: Any) -> Any:
        out = whole(batch, proposal, *rest)
        if when(batch, proposal):
            raise error
        return out

    setattr(world.target, part, failing)


def play(engine: Any, made: list[Request]) -> list[Any]:
    for r in made:
        engine.add(r)
    events = []
    while (event := engine.step()) is not None:
        events.append(event)
        assert len(events) < 2000
    return events


GPU, HOST = torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")


@pytest.mark.parametrize("error", [GPU, HOST, MemoryError()])
@pytest.mark.parametrize("part", ["score", "keep"])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_passes_that_are_too_wide_are_halved(part: str, most: int, error: BaseException, plain: list[list[int]]) -> None:
    world = tiny.World()
    starve(world, lambda batch, proposal: len(batch) > most, error, part)
    engine, made = world.engine(replay(plain)), requests()
    play(engine, made)
    assert [r.output for r in made] == plain and all(r.finish is Finish.LENGTH for r in made)
    assert 1 <= engine.recovery.retries <= 3 and engine.scheduler.most <= most, "it is remembered"
    assert world.cache.free() == world.cache.capacity and engine.drafter.working


def test_guesses_are_left_out_before_a_request_is_given_up(plain: list[list[int]]) -> None:
    world = tiny.World()
    starve(world, lambda batch, proposal: proposal.columns > 0, GPU)
    engine, made = world.engine(replay(plain)), requests()
    play(engine, made)
    assert [r.output for r in made] == plain and all(r.stats.drafted == 0 for r in made)


def test_a_request_that_cannot_run_alone_ends_with_a_reason(plain: list[list[int]]) -> None:
    world, made = tiny.World(), requests()
    starve(world, lambda batch, proposal: made[2] in batch.requests and len(made[2].output) >= 5, GPU)
    engine = world.engine(replay(plain))
    events = play(engine, made)
    bad = made[2]
    assert bad.finish is Finish.ERROR and "too little memory" in bad.error and "kv_tokens or max_model_len" in bad.error
    assert bad.output == plain[2][: len(bad.output)] and len(bad.output) >= 5
    others = [i for i in range(6) if i != 2]
    assert [made[i].output for i in others] == [plain[i] for i in others]
    told = [item for event in events for item in event.committed if item.finish is not Finish.RUNNING]
    assert sorted(item.request.id for item in told) == [r.id for r in made], "everybody's end is told, once"
    assert world.cache.free() == world.cache.capacity and engine.scheduler.idle


def test_nobody_can_run(plain: list[list[int]]) -> None:
    world, made = tiny.World(), requests()
    starve(world, lambda batch, proposal: True, GPU)
    engine = world.engine(replay(plain))
    events = play(engine, made)
    assert all(r.finish is Finish.ERROR and r.error for r in made)
    assert sum(len(e.committed) for e in events) == len(made)
    assert world.cache.free() == world.cache.capacity


def test_other_errors_pass_through(plain: list[list[int]]) -> None:
    world = tiny.World()
    starve(world, lambda batch, proposal: True, RuntimeError("a bug"))
    engine = world.engine(replay(plain))
    engine.add(requests()[0])
    with pytest.raises(RuntimeError, match="a bug"):
        engine.step()
    assert not out_of_memory(RuntimeError("a bug")) and out_of_memory(HOST) and out_of_memory(GPU)


def test_passes_grow_again() -> None:
    world, params = tiny.World(), SamplingParams(temperature=0.0, max_tokens=3 * PATIENCE, ignore_eos=True)
    wide = [True]
    starve(world, lambda batch, proposal: len(batch) > 1 and bool(wide) and bool(wide.pop()), GPU)
    engine, made = world.engine(registry.parse("none"), max_requests=4), [tiny.request(p, params) for p in PROMPTS[:4]]
    for r in made:
        engine.add(r)
    seen = [engine.scheduler.most]
    while engine.step() is not None:
        if engine.scheduler.most != seen[-1]:
            seen.append(engine.scheduler.most)
    assert seen == [4, 2, 4]


def test_half() -> None:
    made = requests()
    batch = Batch(tuple(made[:5]), (1, 2, 3, 4, 5), (True, False, True, False, True), (0, 1, 2, 3, 4))
    assert half(batch) == Batch(tuple(made[:2]), (1, 2), (True, False), (0, 1))


# Drafters


class Hungry(probes.Replay):
    """Runs out of memory in the calls that it is told."""

    name = "hungry"
    calls = 0
    where = "propose"
    bad: frozenset[int] = frozenset()

    def _maybe(self, where: str) -> None:
        if where == self.where:
            self.calls += 1
            if self.calls in self.bad:
                raise torch.OutOfMemoryError("planted")

    def propose(self, batch: Batch, budget: Any) -> Proposal:
        self._maybe("propose")
        return super().propose(batch, budget)

    def observe(self, *args: Any) -> None:
        self._maybe("observe")

    def release(self, request: Request) -> None:
        self.forgotten = [*getattr(self, "forgotten", []), request.id]


def hungry(plain: list[list[int]], where: str, bad: set[int]) -> Hungry:
    made = Hungry({tuple(p): tuple(a) for p, a in zip(PROMPTS, plain, strict=True)}, depth=2)
    made.where, made.bad = where, frozenset(bad)
    return made


@pytest.mark.parametrize("where", ["propose", "observe"])
def test_a_drafter_that_is_short_of_memory_once_goes_on(where: str, plain: list[list[int]]) -> None:
    drafter, made = hungry(plain, where, {2, 5}), requests()
    with warnings.catch_warnings():
        warnings.simplefilter("error", OutriderWarning)
        engine = tiny.World().engine(drafter)
        play(engine, made)
    assert engine.drafter.working and [r.output for r in made] == plain
    assert sum(r.stats.accepted for r in made) > 0
    assert len(drafter.forgotten) > len(made), "what it kept of the round may be half-written: it forgets those requests"


@pytest.mark.parametrize("where", ["propose", "observe"])
def test_a_drafter_that_is_short_of_memory_again_is_switched_off(where: str, plain: list[list[int]]) -> None:
    made = requests()
    engine = tiny.World().engine(hungry(plain, where, set(range(3, 99))))
    with pytest.warns(OutriderWarning, match="'hungry' was switched off.*OutOfMemoryError"):
        play(engine, made)
    assert not engine.drafter.working and [r.output for r in made] == plain


def test_a_draft_model_recovers_its_own_memory(plain: list[list[int]]) -> None:
    drafter, made = tiny.draft_model(3, depth=3), requests()
    engine = tiny.World().engine(drafter)
    run, calls = drafter._run, [0]

    def failing(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] in (3, 8):
            raise torch.OutOfMemoryError("planted")
        return run(*args)

    drafter._run = failing  # type: ignore[method-assign]
    play(engine, made)
    assert engine.drafter.working and [r.output for r in made] == plain
    assert all(r.stats.accepted == r.stats.drafted > 0 for r in made), "the target's twin is always right: nothing stale was used"
    assert drafter.cache.free() == drafter.cache.capacity and not drafter._memory


# NaN


@pytest.mark.parametrize("where", ["kv", "logits"])
def test_nan_in_one_request_ends_it_alone_and_is_never_found(
    where: str, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = tiny.World()
    engine, made = world.engine(replay(plain), grain=8), requests()
    poisoned = made[1]
    forward = world.decoder.forward

    def broken(layout: Any, *args: Any, **options: Any) -> Any:
        rows = (layout.rows.request[layout.scored] == spot(layout)).nonzero()[:, 0]
        if where == "kv" and len(rows):
            for layer in range(3):
                world.cache.keys(layer)[world.cache.slots(poisoned, 0, 9)] = torch.nan
        out = forward(layout, *args, **options)
        if where == "logits":
            with torch.inference_mode():
                out.logits[rows] = torch.nan
        return out

    def spot(layout: Any) -> int:
        spans = [s.index for s in layout.spans if s.request is poisoned]
        return spans[0] if spans and len(poisoned.output) >= 7 else -1

    monkeypatch.setattr(world.decoder, "forward", broken)
    play(engine, made)
    assert poisoned.finish is Finish.ERROR and "not finite" in poisoned.error and len(poisoned.output) >= 7
    assert [r.output for r in made if r is not poisoned] == [a for i, a in enumerate(plain) if i != 1]
    assert world.cache.free() == world.cache.capacity
    assert world.cache.find(poisoned.tokens, len(poisoned.tokens), 8) == (), "a failed request's blocks can be found"
    assert world.cache.find(made[0].tokens, len(made[0].tokens), 8) != ()
    assert all(group.isfinite().all() for group in world.cache.groups())
    again = tiny.request(PROMPTS[1], PARAMS)
    poisoned = tiny.request([2])
    assert world.run(replay(plain), [again], grain=8) == [plain[1]]


# Ends and cancellation


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 7])
def test_the_context_ends_inside_an_accepted_block(limit: int, plain: list[list[int]]) -> None:
    made = [tiny.request(p, PARAMS, limit=limit) for p in PROMPTS]
    world = tiny.World()
    engine = world.engine(replay(plain))
    play(engine, made)
    assert [r.output for r in made] == [a[:limit] for a in plain] and all(r.finish is Finish.LENGTH for r in made)
    assert world.cache.free() == world.cache.capacity
    assert limit < 3 or sum(r.stats.accepted for r in made) > 0


def test_a_draft_with_a_shorter_context(plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, made = tiny.draft_model(3, depth=3), requests()
    world = tiny.World()
    engine = world.engine(drafter)
    monkeypatch.setattr(drafter.decoder, "max_len", 24)
    play(engine, made)
    assert engine.drafter.working and [r.output for r in made] == plain
    for r in made:
        assert (r.stats.drafted > 0) == (r.prompt_len + 1 + 3 <= 24), "guesses as far as the draft's context goes"
    assert not drafter._memory and drafter.cache.free() == drafter.cache.capacity


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("name", ["none", "draft"])
def test_abort_between_launch_and_reading(rounds: int, name: str, plain: list[list[int]]) -> None:
    drafter = tiny.draft_model(2, depth=3, width=2) if name == "draft" else registry.parse(name)
    world, made = tiny.World(), requests()
    engine = world.engine(drafter, grain=8)
    for r in made:
        engine.add(r)
    for _ in range(rounds):
        engine.step()
    before = [list(r.output) for r in made]
    pending = engine.launch()
    engine.abort(made[::2])
    engine.settle(pending)
    assert [r.output for r in made[::2]] == before[::2] and all(r.finish is Finish.ABORT for r in made[::2])
    while engine.step() is not None:
        pass
    assert [r.output for r in made[1::2]] == plain[1::2]
    assert world.cache.free() == world.cache.capacity and not world.sampler._processors
    world.cache.wash()
    assert all(group[:, :, 8 * b : 8 * b + 8].eq(0).all() for group in world.cache.groups() for b in free_blocks(world))
    if name == "draft":
        assert not drafter._memory and drafter.cache.free() == drafter.cache.capacity


def free_blocks(world: tiny.World) -> list[int]:
    return [b for b in range(1, world.cache.capacity // 8 + 1) if world.cache._map[b]]
