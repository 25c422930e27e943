"""Prefix reuse: random lives of requests that begin alike, against what fresh computation would write; and seeded bugs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from outrider.cache import PagedCache, SlotCache
from outrider.cache import prefix as prefix_module
from outrider.config import SamplingParams
from outrider.protocols import KVNeed
from outrider.types import Request

SIZE, BLOCKS, OWNERS = 2, 9, 4
LAYERS = [(1, 2), (2, 1)]
words = st.lists(st.integers(0, 1), min_size=1, max_size=14)
owners = st.integers(0, OWNERS - 1)


def request(number: int, tokens: list[int]) -> Request:
    return Request(number, list(tokens), len(tokens), SamplingParams(), key=number, seed=number)


def value(tokens: list[int], at: int) -> float:
    """What computation writes for token `at`: it depends on all tokens up to there, and on nothing else."""
    number = 1
    for token in tokens[: at + 1]:
        number = (number * 3 + token + 1) % 65521
    return float(number)


class Life(RuleBasedStateMachine):
    """`alive[n]` is a request and how many of its tokens have KV; what is published of it is final."""

    make: Callable[[], PagedCache] = staticmethod(lambda: PagedCache(LAYERS, BLOCKS, SIZE))
    grain = 1

    @initialize()
    def start(self) -> None:
        self.cache = type(self).make()
        self.alive: dict[int, Request] = {}
        self.final: dict[int, int] = {}
        self.count = 0

    def put(self, own: Request, first: int, values: list[float]) -> None:
        slots = self.cache.slots(own, first, first + len(values))
        for layer, (heads, dim) in enumerate(LAYERS):
            v = torch.tensor(values)[:, None, None].expand(-1, heads, dim) + layer
            self.cache.write(layer, slots, v, -v)

    def compute(self, own: Request) -> None:
        self.put(own, own.computed, [value(own.tokens, i) for i in range(own.computed, len(own.tokens))])
        own.computed = len(own.tokens)

    @rule(owner=owners, tokens=words)
    def begin(self, owner: int, tokens: list[int]) -> None:
        """A new request: takes over what is there, and computes the rest, its last token at least."""
        if owner in self.alive:
            return
        self.count += 1
        own = request(self.count, tokens)
        blocks = self.cache.find(tokens, len(tokens) - 1, self.grain)
        assert len(blocks) * SIZE < len(tokens) and len(blocks) * SIZE % self.grain == 0
        price, free = self.cache.price(own, len(tokens), blocks), self.cache.free()
        self.cache.adopt(own, blocks)
        assert self.cache.reserve(own, len(tokens)) == (price <= free)
        if price > free:
            self.cache.release(own)
            assert self.cache.free() == free
            return
        assert self.cache.free() == free - price
        own.computed = len(blocks) * SIZE
        self.compute(own)
        self.alive[owner], self.final[owner] = own, own.computed // SIZE * SIZE if blocks else 0

    @rule(owner=owners, to=owners)
    def fork(self, owner: int, to: int) -> None:
        """Another sample of the same prompt: full blocks are shared, the rest is copied."""
        if owner not in self.alive or to in self.alive:
            return
        self.count += 1
        source = self.alive[owner]
        own = request(self.count, source.tokens)
        blocks = self.cache.head(source, len(own.tokens) - 1)
        if self.cache.price(own, len(own.tokens), blocks) > self.cache.free():
            return
        self.cache.adopt(own, blocks)
        assert self.cache.reserve(own, len(own.tokens))
        shared, end = len(blocks) * SIZE, len(own.tokens) - 1
        self.cache.copy(self.cache.slots(source, shared, end), self.cache.slots(own, shared, end))
        own.computed = end
        self.compute(own)
        self.alive[to], self.final[to] = own, shared
        self.final[owner] = max(self.final[owner], shared)  # what others look at is never written again

    @rule(owner=owners, tokens=words)
    def write(self, owner: int, tokens: list[int]) -> None:
        own = self.alive.get(owner)
        if own is not None and self.cache.reserve(own, len(own.tokens) + len(tokens)):
            own.tokens += tokens
            self.compute(own)

    @rule(owner=owners, nodes=st.integers(1, 5))
    def guess(self, owner: int, nodes: int) -> None:
        """Guesses write past the known tokens, and so does a path that moves; what was rejected may even be NaN."""
        own = self.alive.get(owner)
        if own is not None and self.cache.reserve(own, len(own.tokens) + nodes):
            self.put(own, own.computed, [math.nan] * nodes)
            self.cache.move(own, torch.arange(own.computed + nodes - 1, own.computed + nodes), own.computed)

    @rule(owner=owners)
    def publish(self, owner: int) -> None:
        own = self.alive.get(owner)
        if own is not None:
            self.cache.publish(own, own.computed)
            self.final[owner] = own.computed

    @rule(owner=owners)
    def trim(self, owner: int) -> None:
        if owner in self.alive:
            self.cache.trim(self.alive[owner], self.alive[owner].computed)

    @rule(owner=owners)
    def release(self, owner: int) -> None:
        if owner in self.alive:
            self.cache.release(self.alive.pop(owner))

    @rule(owner=owners)
    def fail(self, owner: int) -> None:
        """A request goes bad: NaN from its first own token on. Nobody may find any of that."""
        own = self.alive.get(owner)
        if own is None:
            return
        first = self.final[owner]
        if first < own.computed:
            self.put(own, first, [math.nan] * (own.computed - first))
        self.cache.scrub(own)
        self.cache.release(self.alive.pop(owner))

    @precondition(lambda self: self.count % 7 == 3)
    @rule()
    def attach(self) -> None:
        pool = self.cache.attach(KVNeed(1, 1, 1))
        assert self.cache.cached == 0
        if self.count % 2:
            self.cache.detach(pool)
            assert len(self.cache._stores) == 1

    @invariant()
    def everybody_has_what_fresh_computation_gives(self) -> None:
        for own in self.alive.values():
            expected = torch.tensor([value(own.tokens, i) for i in range(own.computed)])
            for layer in range(len(LAYERS)):
                keys, values = self.cache.view(layer, own, own.computed)
                assert (keys == (expected + layer)[:, None, None]).all() and (values == -(expected + layer)[:, None, None]).all()

    @invariant()
    def what_can_be_found_is_what_was_asked_for(self) -> None:
        for entry in self.cache._prefixes._by_block.values():
            chain, at = [], entry
            while at is not None:
                chain.append(at)
                at = at.parent
            tokens = [token for one in reversed(chain) for token in one.tokens]
            first = entry.block * SIZE
            expected = torch.tensor([value(tokens, i) for i in range(len(tokens) - SIZE, len(tokens))])
            assert (self.cache.keys(0)[first : first + SIZE] == expected[:, None, None]).all(), (
                "a block is not what it is said to be"
            )

    @invariant()
    def every_block_is_free_idle_or_owned(self) -> None:
        cache = self.cache
        held = [block for own in self.alive.values() for block in cache.blocks(own)]
        assert cache._owners[1:] == [held.count(block) for block in range(1, BLOCKS + 1)]
        idle, free = set(cache._prefixes.idle), {b for b in range(1, BLOCKS + 1) if cache._map[b]}
        assert not idle & set(held) and not free & (idle | set(held)) and len(free) == cache._left
        assert idle | set(held) | free == set(range(1, BLOCKS + 1)), "a block leaked"
        assert all(block in cache._prefixes for block in idle)
        assert cache.free() == (len(free) + len(idle)) * SIZE
        for block in free - set(cache._dirty):
            for group in cache.groups():
                assert (group[:, :, block * SIZE : (block + 1) * SIZE] == 0).all()
        assert set(cache._adopted) | set(cache._prefixes._done) <= {own.id for own in self.alive.values()}


QUICK = settings(max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
HUNT = settings(QUICK, max_examples=400, derandomize=True, database=None, phases=[Phase.generate])


def life_of(make: Callable[[], PagedCache], grain: int = 1) -> type[Life]:
    return type("LifeOfOne", (Life,), {"make": staticmethod(make), "grain": grain})


@pytest.mark.parametrize("grain", [1, 4, 3])
def test_lives(grain: int) -> None:
    run_state_machine_as_test(life_of(lambda: PagedCache(LAYERS, BLOCKS, SIZE), grain), settings=QUICK)


def test_lives_under_a_hash_that_always_collides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_module, "_key", lambda parent, tokens, group: bytes([len(tokens)]))
    run_state_machine_as_test(life_of(lambda: PagedCache(LAYERS, BLOCKS, SIZE)), settings=QUICK)


def test_lives_under_a_hash_that_often_collides(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(parent: Any, tokens: tuple[int, ...], group: Any) -> bytes:
        return bytes([(sum(tokens) + (parent.key[0] if parent else 0)) % 3])

    monkeypatch.setattr(prefix_module, "_key", key)
    run_state_machine_as_test(life_of(lambda: PagedCache(LAYERS, BLOCKS, SIZE)), settings=QUICK)


class Careless(PagedCache):
    """Frees what it gives up, whoever else owns it."""

    def _drop(self, blocks: list[int]) -> None:
        self._free([b for b in blocks if b not in self._prefixes])


class Dirty(PagedCache):
    """Hands out idle blocks as they are."""

    def _free(self, blocks: list[int]) -> None:
        for block in blocks:
            self._map[block] = 1
        self._left += len(blocks)


class Trusting(PagedCache):
    """Keeps what a request published that went bad."""

    def scrub(self, request: Request) -> None:
        self._zero((0, *self.blocks(request)))


class Unready(PagedCache):
    """Publishes what has no KV yet."""

    def publish(self, request: Request, length: int) -> None:
        super().publish(request, len(self.blocks(request)) * SIZE)


class Loyal(PagedCache):
    """Keeps prefixes whose blocks hold nothing of the new drafter's."""

    def forget(self) -> None:
        pass


@pytest.mark.parametrize("bug", [Careless, Dirty, Trusting, Unready, Loyal])
def test_a_life_finds_planted_bugs(bug: type[PagedCache]) -> None:
    with pytest.raises((AssertionError, IndexError, KeyError)):
        run_state_machine_as_test(life_of(lambda: bug(LAYERS, BLOCKS, SIZE)), settings=HUNT)


@pytest.mark.parametrize("what", ["tokens", "parent"])
def test_without_comparing_a_collision_gives_anothers_kv(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control for the two comparisons of a hit."""

    def match(self: Any, key: bytes, tokens: tuple[int, ...], group: Any, parent: Any) -> Any:
        entry = self._by_key.get(key)
        fits = entry is not None and (entry.tokens == tokens if what == "parent" else entry.parent is parent)
        return entry if fits else None

    monkeypatch.setattr(
        prefix_module, "_key", lambda parent, tokens, group: bytes([parent is None, *(tokens if what == "parent" else ())])
    )
    monkeypatch.setattr(prefix_module.Prefixes, "_match", match)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(life_of(lambda: PagedCache(LAYERS, BLOCKS, SIZE)), settings=HUNT)


# By example


def filled(cache: PagedCache, number: int, tokens: list[int]) -> Request:
    own = request(number, tokens)
    assert cache.reserve(own, len(tokens))
    cache.publish(own, len(tokens))
    return own


def test_the_least_recently_used_goes_first_and_tails_before_heads() -> None:
    cache = PagedCache(LAYERS, 6, SIZE)
    a, b = filled(cache, 1, [1, 1, 2, 2, 3]), filled(cache, 2, [5, 5, 6, 6, 7])
    cache.release(a)
    cache.release(b)
    assert cache.free() == cache.capacity and cache.cached == 8
    c = request(3, [9] * 6)
    assert cache.reserve(c, 6)
    assert len(cache.find([1, 1, 2, 2], 4, 1)) == 1, "the tail of the older one is gone, its head is not"
    assert len(cache.find([5, 5, 6, 6], 4, 1)) == 2


def test_every_group_has_chains_of_its_own() -> None:
    cache = PagedCache(LAYERS, 12, SIZE)
    tokens = [1, 1, 2, 2]
    for number, group in enumerate([None, "a", "b"], 1):
        own = request(number, tokens)
        own.group = group
        assert cache.find(tokens, 4, 1, group) == (), "what others wrote is not there"
        assert cache.reserve(own, 4)
        cache.publish(own, 4)
    found = [cache.find(tokens, 4, 1, group) for group in (None, "a", "b")]
    assert [len(f) for f in found] == [2, 2, 2] and len({b for f in found for b in f}) == 6
    assert cache.find(tokens, 4, 1, "c") == ()


def test_a_collision_does_not_lead_from_one_group_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_module, "_key", lambda parent, tokens, group: bytes([parent is None, *tokens]))
    cache = PagedCache(LAYERS, 12, SIZE)
    filled(cache, 1, [1, 1, 2, 2])
    assert cache.find([1, 1, 2, 2], 4, 1) and cache.find([1, 1, 2, 2], 4, 1, "a") == ()


def test_hits_are_rounded_down() -> None:
    cache = PagedCache(LAYERS, 8, SIZE)
    filled(cache, 1, list(range(10)))
    lengths = {grain: len(cache.find(list(range(10)), 10, grain)) * SIZE for grain in (1, 2, 3, 4, 8, 16)}
    assert lengths == {1: 10, 2: 10, 3: 6, 4: 8, 8: 8, 16: 0}
    assert len(cache.find(list(range(10)), 9, 1)) == 4 and cache.find([3], 1, 1) == ()


def test_blocks_that_lie_side_by_side_are_read_without_a_copy() -> None:
    cache = PagedCache(LAYERS, 8, SIZE)
    cache.release(filled(cache, 1, [1, 1, 2, 2, 3]))
    again = request(2, [1, 1, 2, 2, 4, 4])
    cache.adopt(again, cache.find(again.tokens, 5, 1))
    assert cache.reserve(again, 6)
    assert cache.view(0, again, 6)[0].untyped_storage().data_ptr() == cache.keys(0).untyped_storage().data_ptr()


def test_only_who_owns_nothing_can_begin_with_anothers_blocks() -> None:
    cache = PagedCache(LAYERS, 8, SIZE)
    own = filled(cache, 1, [1, 1, 2, 2])
    with pytest.raises(ValueError, match="owns nothing"):
        cache.adopt(own, cache.blocks(own))
    plain = SlotCache(LAYERS, 2, 16)
    plain.publish(own, 4)
    assert plain.find(own.tokens, 4, 1) == plain.head(own, 4) == ()
    plain.adopt(own, ())
    with pytest.raises(ValueError, match="does not share"):
        plain.adopt(own, (1,))
