"""Random lives of several requests, against a dictionary; and seeded bugs, which that must catch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor

from outrider.cache import PagedCache, SlotCache
from outrider.cache.pool import AttachedPool
from outrider.config import SamplingParams
from outrider.protocols import KVNeed
from outrider.types import Request

LAYERS = [(1, 2), (2, 1), (1, 2)]
SIZE, BLOCKS, SEQUENCES, MAX_LEN = 4, 8, 3, 18
OWNERS = [Request(i, [1], 1, SamplingParams(), key=i, seed=i) for i in range(4)]
owners, lengths, indices = st.sampled_from(OWNERS), st.integers(0, 22), st.integers(0, 21)
holders = st.integers(0, len(OWNERS) - 1)  # which of those that hold memory, counted round
Any = PagedCache | SlotCache


class Life(RuleBasedStateMachine):
    """`known[owner]` maps virtual indices to the value written there; `room` is what was reserved."""

    make: Callable[[], Any]
    cache: Any
    pool: AttachedPool

    @initialize()
    def start(self) -> None:
        self.cache = type(self).make()
        self.pool = self.cache.attach(KVNeed(1, 2, 1))
        self.known: dict[int, dict[int, float]] = {}
        self.room: dict[int, int] = {}
        self.counter = 0.0

    def stacks(self) -> list[tuple[Any | AttachedPool, int, int, int]]:
        return [(self.cache, i, *shape) for i, shape in enumerate(LAYERS)] + [(self.pool, 0, 2, 1)]

    def put(self, slots: Tensor, values: Tensor) -> None:
        for number, (pool, layer, heads, dim) in enumerate(self.stacks()):
            tokens = values[:, None, None].expand(-1, heads, dim) * (number + 1)
            pool.write(layer, slots, tokens, -tokens)

    def holder(self, pick: int) -> Request:
        held = [owner for owner in OWNERS if owner.id in self.room] or OWNERS
        return held[pick % len(held)]

    def blocks(self, length: int) -> int:
        return -(-length // SIZE)

    @rule(owner=owners, length=lengths)
    def reserve(self, owner: Request, length: int) -> None:
        self.keep_room(owner, length)

    def keep_room(self, owner: Request, length: int) -> None:
        new, old = owner.id not in self.room, self.room.get(owner.id, 0)
        if isinstance(self.cache, PagedCache):
            used = sum(map(self.blocks, self.room.values()))
            fits = max(0, self.blocks(length) - self.blocks(old)) <= BLOCKS - used
        else:
            fits = length <= MAX_LEN and (length == 0 or not new or len(self.room) < SEQUENCES)
        assert self.cache.reserve(owner, length) == fits
        if fits and max(old, length):
            self.room[owner.id] = max(old, length)
            if new:
                self.known[owner.id] = dict.fromkeys(range(length), 0.0)

    @rule(pick=holders, by=st.integers(1, 6))
    def grow(self, pick: int, by: int) -> None:
        owner = self.holder(pick)
        self.keep_room(owner, self.room.get(owner.id, 0) + by)

    @rule(pick=holders, length=lengths)
    def trim(self, pick: int, length: int) -> None:
        owner = self.holder(pick)
        self.cache.trim(owner, length)
        if owner.id in self.room:
            self.room[owner.id] = min(self.room[owner.id], length)
            self.known[owner.id] = {i: v for i, v in self.known[owner.id].items() if i < length}
            if length == 0:
                del self.room[owner.id], self.known[owner.id]

    @rule(owner=owners)
    def release(self, owner: Request) -> None:
        self.cache.release(owner)
        self.room.pop(owner.id, None)
        self.known.pop(owner.id, None)

    @rule(pick=holders, start=indices, count=st.integers(1, 24), bad=st.booleans())
    def write(self, pick: int, start: int, count: int, bad: bool) -> None:
        owner = self.holder(pick)
        room = self.room.get(owner.id, 0)
        if room:
            start %= room
            end = min(start + count, room)
            values = [math.nan if bad else self.counter + i for i in range(1, end - start + 1)]
            self.counter += count
            self.put(self.cache.slots(owner, start, end), torch.tensor(values))
            self.known[owner.id].update(zip(range(start, end), values, strict=True))

    @rule(pick=holders, picks=st.lists(indices, min_size=1, max_size=5), start=indices)
    def move(self, pick: int, picks: list[int], start: int) -> None:
        owner = self.holder(pick)
        known, room = self.known.get(owner.id, {}), self.room.get(owner.id, 0)
        if known and len(picks) <= room:
            choices = sorted(known)
            source = [choices[i % len(choices)] for i in picks]
            self.carry(owner, source, start % (room - len(source) + 1))

    @rule(pick=holders, first=st.integers(0, 9), count=st.integers(2, 6), by=st.integers(-2, 3))
    def shift(self, pick: int, first: int, count: int, by: int) -> None:
        owner = self.holder(pick)
        source, room = list(range(first, first + count)), self.room.get(owner.id, 0)
        if set(source) <= set(self.known.get(owner.id, {})) and 0 <= first + by <= room - count:
            self.carry(owner, source, first + by)

    def carry(self, owner: Request, source: list[int], start: int) -> None:
        known = self.known[owner.id]
        self.cache.move(owner, torch.tensor(source), start)
        known.update({start + n: value for n, value in enumerate([known[i] for i in source])})

    @rule(pick=holders)
    def scrub(self, pick: int) -> None:
        owner = self.holder(pick)
        self.cache.scrub(owner)
        if owner.id in self.room:
            self.known[owner.id] = dict.fromkeys(range(self.room[owner.id]), 0.0)

    @rule()
    def pad(self) -> None:
        self.put(torch.tensor([self.cache.scratch_slot]), torch.tensor([math.nan]))

    @invariant()
    def everything_reads_as_written(self) -> None:
        for owner in (o for o in OWNERS if self.known.get(o.id)):
            known, length = self.known[owner.id], self.room[owner.id]
            for number, (pool, layer, heads, dim) in enumerate(self.stacks()):
                keys, values = pool.view(layer, owner, length)
                assert keys.shape == values.shape == (length, heads, dim)
                at, told = list(known), [v * (number + 1) for v in known.values()]
                expected = np.broadcast_to(np.array(told, np.float32)[:, None, None], (len(at), heads, dim))
                assert np.array_equal(keys.numpy()[at], expected, equal_nan=True)
                assert np.array_equal(values.numpy()[at], -expected, equal_nan=True)

    @invariant()
    def nothing_is_shared_or_leaked(self) -> None:
        table = self.cache.table(OWNERS)
        held = [int(block) for row in table for block in row if block]
        assert len(held) == len(set(held))
        for row, owner in zip(table, OWNERS, strict=True):
            i = torch.arange(self.room.get(owner.id, 0))
            assert torch.equal(self.cache.slots(owner, 0, len(i)), row[i // SIZE] * SIZE + i % SIZE)
        if isinstance(self.cache, PagedCache):
            assert len(held) == sum(map(self.blocks, self.room.values()))
            assert self.cache.free() == self.cache.capacity - SIZE * len(held)
        else:
            assert self.cache.free() == self.cache.capacity - MAX_LEN * len(self.room)
        free = torch.ones(self.cache.keys(0).shape[0] // SIZE, dtype=torch.bool)
        free[[0, *held]] = False
        free = free.repeat_interleave(SIZE)
        if isinstance(self.cache, PagedCache):
            if self.counter % 2:  # what was given back may lie there for a while
                return
            self.cache.wash()
        for pool, layer, _, _ in self.stacks():
            assert (pool.keys(layer)[free] == 0).all() and (pool.values(layer)[free] == 0).all()


def life_of(factory: Callable[[], Any]) -> type[Life]:
    return type("LifeOfOne", (Life,), {"make": staticmethod(factory)})


def paged() -> PagedCache:
    return PagedCache(LAYERS, BLOCKS, SIZE)


def contiguous() -> SlotCache:
    return SlotCache(LAYERS, SEQUENCES, MAX_LEN, block_size=SIZE)


class Scattered(PagedCache):
    """Hands out blocks in the worst order, so that nearly every request must be gathered."""

    def _take(self, count: int, last: int) -> tuple[int, ...]:
        taken = [block for block in range(BLOCKS, 0, -1) if self._map[block]][:count]
        for block in taken:
            self._map[block] = 0
        self._left -= count
        return tuple(taken)


QUICK = settings(max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
HUNT = settings(QUICK, max_examples=300, derandomize=True, database=None, phases=[Phase.generate])


@pytest.mark.parametrize("make", [paged, contiguous, lambda: Scattered(LAYERS, BLOCKS, SIZE)])
def test_lives(make: Callable[[], Any]) -> None:
    run_state_machine_as_test(life_of(make), settings=QUICK)


class Unwashed(PagedCache):
    """Gives blocks back as they are."""

    def _zero(self, blocks: object) -> None:
        pass


class OneByOne(PagedCache):
    """Moves token by token, reading what it has just written."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        for i in range(len(source)):
            super().copy(source[i : i + 1], target[i : i + 1])


class Forgetful(PagedCache):
    """Moves the target's layers, but not the drafter's."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        self._stores[0].copy(source, target)


class Greedy(PagedCache):
    """Frees, on trim, also the block that is still partly in use."""

    def trim(self, request: Request, length: int) -> None:
        super().trim(request, length)
        blocks = self._records.get(request.id, self._none).blocks
        if length % SIZE and blocks:
            self._map[blocks[-1]] = 1


class Hasty(PagedCache):
    """Takes what is left when there is too little."""

    def reserve(self, request: Request, length: int) -> bool:
        return super().reserve(request, length) or (super().reserve(request, self.free()) and False)


class Stale(PagedCache):
    """Never looks at its table again."""

    def table(self, requests: object) -> Tensor:
        kept = self._table
        table = super().table(OWNERS)
        self._table = kept or self._table
        return kept[1] if kept else table

    def _assign(self, request: Request, blocks: tuple[int, ...], room: int) -> None:
        kept = self._table
        super()._assign(request, blocks, room)
        self._table = kept


class Straight(Scattered):
    """Reads every request as if its blocks were one run."""

    def _assign(self, request: Request, blocks: tuple[int, ...], room: int) -> None:
        super()._assign(request, blocks, room)
        if blocks:
            self._records[request.id] = replace(self._records[request.id], run=min(room, (BLOCKS + 1 - blocks[0]) * SIZE))


@pytest.mark.parametrize("bug", [Straight, Unwashed, OneByOne, Forgetful, Greedy, Hasty, Stale])
def test_a_life_finds_planted_bugs(bug: type[PagedCache]) -> None:
    with pytest.raises((AssertionError, IndexError)):
        run_state_machine_as_test(life_of(lambda: bug(LAYERS, BLOCKS, SIZE)), settings=HUNT)


def test_what_was_given_back_is_zero_when_it_is_handed_out() -> None:
    """Freed blocks are washed together, not one launch each; those that were scattered, too."""
    cache, washed = paged(), list[int]()
    zero = cache._zero
    cache._zero = lambda blocks: washed.append(len(blocks)) or zero(blocks)  # type: ignore[func-returns-value, method-assign]
    first, second = OWNERS[:2]
    assert cache.reserve(first, 2 * SIZE) and cache.reserve(second, SIZE)
    cache.keys(0)[:] = torch.nan
    cache.release(first)
    cache.release(second)
    assert not washed and cache.free() == cache.capacity
    assert cache.reserve(first, cache.capacity) and washed == [3]
    assert int((cache.keys(0) == 0).all(dim=(1, 2)).sum()) == 3 * SIZE


@pytest.mark.parametrize("few", [0, 99])
def test_many_runs_are_zeroed_at_once(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cache.pool.FEW", few)
    cache = paged()
    for pool in (cache, Scattered(LAYERS, BLOCKS, SIZE)):
        for layer in range(len(LAYERS)):
            pool.keys(layer)[:] = 1
            pool.values(layer)[:] = 1
        some = list(range(1, BLOCKS + 1, 2))
        pool._zero(some)
        empty = torch.zeros(pool.keys(0).shape[0] // SIZE, dtype=torch.bool)
        empty[some] = True
        for layer in range(len(LAYERS)):
            for memory in (pool.keys(layer), pool.values(layer)):
                assert torch.equal((memory == 0).all(dim=(1, 2)), empty.repeat_interleave(SIZE))


def test_what_could_not_be_zeroed_is_not_forgotten() -> None:
    cache, zero = paged(), PagedCache._zero
    assert cache.reserve(OWNERS[0], SIZE)
    cache.keys(0)[:] = torch.nan
    cache.release(OWNERS[0])

    def fails(blocks: object) -> None:
        raise torch.OutOfMemoryError("none left")

    cache._zero = fails  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        cache.reserve(OWNERS[1], SIZE)
    cache._zero = lambda blocks: zero(cache, blocks)  # type: ignore[method-assign]
    assert cache.reserve(OWNERS[1], SIZE) and (cache.view(0, OWNERS[1], SIZE)[0] == 0).all()
