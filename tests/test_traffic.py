"""Many requests at once, in too little memory: each gets the text it gets alone, and everything comes back."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch

from outrider import registry
from outrider.config import SamplingParams
from outrider.errors import OutriderWarning
from outrider.noise import request_key
from outrider.types import Finish, Request

from . import probes, tiny

HEADS = [[2 + (i * 7 + j * j) % 40 for i in range(60)] for j in range(4)]
"""Beginnings that prompts share."""


class Alone:
    """Each request's tokens when nobody else is there, nothing is guessed and memory is no matter; worked out once."""

    def __init__(self) -> None:
        self.world = tiny.World()
        self.seen: dict[tuple[Any, ...], list[int]] = {}

    def __call__(self, request: Request) -> list[int]:
        p, prompt = request.params, tuple(request.tokens[: request.prompt_len])
        where = (prompt, request.key, p.temperature, p.max_tokens, p.stop_token_ids, p.ignore_eos)
        if where not in self.seen:
            twin = tiny.request(prompt, p)
            twin.key = request.key
            self.seen[where] = self.world.run(registry.parse("none"), [twin])[0]
        return self.seen[where]


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone()


def prompt(rng: random.Random, crowd: bool) -> tuple[int, ...]:
    head = rng.choice(HEADS)[: rng.choice((0, 3, 16) if crowd else (0, 0, 3, 16, 17, 40, 60))]
    return (*head, *(rng.randrange(2, 6) for _ in range(rng.choice((1, 1, 2, 5)))))


def group(rng: random.Random, crowd: bool) -> list[Request]:
    """A request, or several samples of one prompt; in a crowd all start small and grow."""
    params = SamplingParams(
        temperature=rng.choice((0.0, 1.0)),
        max_tokens=rng.choice((24, 40) if crowd else (1, 2, 8, 24)),
        stop_token_ids=rng.choice(((), (9, 17, 30))),
        ignore_eos=rng.random() < 0.7,
        seed=rng.randrange(1, 3),
    )
    first = tiny.request(prompt(rng, crowd), params)
    made = [first]
    for index in range(1, rng.choice((1, 1, 1, 1, 3))):
        extra = {"index": index, "twin": first}
        own = tiny.request(first.tokens, params, **extra)
        own.key = request_key(first.seed, first.tokens, index)
        made.append(own)
    return made


class Starved(tiny.World):
    """A world whose passes run out of memory at random, or when they are too wide."""

    def __init__(self, rng: random.Random, often: float, **options: Any) -> None:
        super().__init__(**options)
        self.rng, self.often, self.starved = rng, often, 0
        score = self.target.score

        def starving(batch: Any, proposal: Any) -> Any:
            if len(batch) > 1 and rng.random() < often:
                self.starved += 1
                if rng.random() < 0.5:
                    score(batch, proposal)  # it may have got far
                raise torch.OutOfMemoryError("planted")
            return score(batch, proposal)

        self.target.score = starving  # type: ignore[method-assign]


def drafter_for(rng: random.Random, alone: Alone, made: list[Request]) -> Any:
    kind = rng.choice(("none", "ngram", "replay", "bushy", "owner", "draft"))
    answers = {tuple(r.tokens): alone(r) for r in made}
    if kind == "replay":
        return probes.Replay(answers, depth=rng.randint(1, 6), spoil=0.3, seed=rng.randrange(99))
    if kind in ("bushy", "owner"):
        return (probes.Bushy if kind == "bushy" else probes.Owner)(answers, seed=rng.randrange(99))
    return tiny.draft_model(2, depth=2, width=rng.choice((1, 2))) if kind == "draft" else registry.parse(kind)


def check(engine: Any, world: tiny.World) -> None:
    own, cache = engine.scheduler, world.cache
    assert min(own.preempted, own.hits, own.saved, engine.recovery.retries, cache.free(), cache._left) >= 0
    assert all(count >= 0 for count in cache._owners)
    held = [b for r in own.running for b in cache.blocks(r)]
    assert cache.free() + len(set(held)) * cache.block_size == cache.capacity, "a block leaked"


def traffic(seed: int, count: int, alone: Alone, patch: pytest.MonkeyPatch) -> Any:
    """One engine's life: `count` requests or so, that come, are aborted, and end. Returns the engine."""
    rng = random.Random(seed)
    chunk = rng.choice((8, 16, 16, 512))
    patch.setattr("outrider.scheduler.CHUNK", chunk)
    patch.setattr("outrider.scheduler.REPLAY", rng.choice((1, 3, 16)))
    crowd = rng.random() < 0.4
    late: list[list[Request]] = []
    while sum(map(len, late)) < count:
        late.append(group(rng, crowd))
    made = [r for samples in late for r in samples]
    world = Starved(rng, rng.choice((0.0, 0.1)), tokens=rng.choice((64, 80) if crowd else (104, 136, 300)))
    engine = world.engine(
        drafter_for(rng, alone, made),
        max_requests=rng.choice((2, 4, 12)),
        max_rows=rng.choice((20, 2048)),
        separate=rng.random() < 0.5,
        grain=rng.choice((0, chunk, 8)),
    )
    for _ in range(400 * count):
        while late and (rng.random() < 0.5 or engine.scheduler.idle):
            for request in late.pop(0):
                engine.add(request)
        if rng.random() < 0.02:
            stop_one(engine, rng)
        event = engine.step()
        check(engine, world)
        if event is None and not late:
            break
    assert engine.scheduler.idle and world.cache.free() == world.cache.capacity, "memory leaked"
    assert engine.drafter.working, engine.drafter.reason
    assert not world.sampler._processors
    for r in made:
        assert r.finish not in (Finish.RUNNING, Finish.ERROR) and r.error is None
        assert r.output == alone(r)[: len(r.output)] and (r.finish is Finish.ABORT or r.output == alone(r))
        assert r.stats.tokens == len(r.output) == len(r.origins) and r.stats.accepted <= r.stats.drafted
    engine.aborted = sum(r.finish is Finish.ABORT for r in made)
    engine.starved = world.starved
    return engine


def stop_one(engine: Any, rng: random.Random) -> None:
    """Abort somebody, perhaps between the launch of a round and its reading."""
    someone = [*engine.scheduler.running, *engine.scheduler.waiting]
    if not someone:
        return
    pending = engine.launch() if rng.random() < 0.5 else None
    engine.abort([rng.choice(someone)])
    if pending is not None:
        engine.settle(pending)


def lives(first: int, total: int, alone: Alone, patch: pytest.MonkeyPatch) -> None:
    seen = {"preempted": 0, "hits": 0, "aborted": 0, "starved": 0}
    requests, seed = 0, first
    with warnings.catch_warnings():
        warnings.simplefilter("error", OutriderWarning)
        while requests < total:
            count = 12 + seed % 20
            engine = traffic(seed, count, alone, patch)
            requests, seed = requests + count, seed + 1
            seen["preempted"] += engine.scheduler.preempted
            seen["hits"] += engine.scheduler.hits
            seen["aborted"] += engine.aborted
            seen["starved"] += engine.starved
    assert min(seen.values()) > total // 50, f"the traffic does not exercise everything: {seen}"


def test_traffic(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    lives(0, 300, alone, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_heavy_traffic(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    lives(1000, 10_000, alone, monkeypatch)
