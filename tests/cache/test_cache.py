"""One suite for both caches: what `protocols.Cache` promises, by example."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.cache import PagedCache, SlotCache
from outrider.config import SamplingParams
from outrider.protocols import Cache, KVNeed, PoolView
from outrider.types import Request

LAYERS = [(2, 4), (1, 8), (2, 4)]  # two shapes, interleaved
Any = PagedCache | SlotCache
Make = Callable[[], Any]


def paged() -> PagedCache:
    return PagedCache(LAYERS, blocks=8, block_size=4)


def contiguous() -> SlotCache:
    return SlotCache(LAYERS, sequences=2, max_len=15, block_size=4)


@pytest.fixture(params=[paged, contiguous])
def cache(request: pytest.FixtureRequest) -> Any:
    make: Make = request.param
    return make()


def request(number: int) -> Request:
    return Request(number, [1], 1, SamplingParams(), key=number, seed=number)


def fill(cache: Any, owner: Request, start: int, values: list[float]) -> None:
    """Write `values`, one per token: v to keys, v + 0.5 to values, plus 100 per layer."""
    slots = cache.slots(owner, start, start + len(values))
    for layer, (heads, dim) in enumerate(LAYERS):
        v = torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, heads, dim) + 100 * layer
        cache.write(layer, slots, v, v + 0.5)


def content(cache: Any, owner: Request, length: int) -> list[float]:
    """What `fill` wrote, after checking that layers, keys, values, heads and dims agree."""
    seen: list[Tensor] = []
    for layer, (heads, dim) in enumerate(LAYERS):
        keys, values = cache.view(layer, owner, length)
        assert keys.shape == values.shape == (length, heads, dim)
        assert (keys == keys[:, :1, :1]).all()
        assert torch.equal(values, keys + 0.5)
        seen.append(keys[:, 0, 0] - 100 * layer)
    assert all(torch.equal(s, seen[0]) for s in seen)
    return seen[0].tolist()


def test_is_a_cache(cache: Any) -> None:
    as_cache: Cache = cache  # for the type checker
    assert as_cache.capacity == cache.free() > 0


def test_written_tokens_are_read_back(cache: Any) -> None:
    a, b = request(1), request(2)
    assert cache.reserve(a, 9) and cache.reserve(b, 6)
    fill(cache, a, 0, [1, 2, 3, 4, 5])
    fill(cache, b, 0, [10, 20])
    fill(cache, a, 5, [6, 7, 8, 9])
    assert content(cache, a, 9) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert content(cache, a, 3) == [1, 2, 3]
    assert content(cache, b, 2) == [10, 20]


def test_the_pool_starts_at_zero(cache: Any) -> None:
    cache.reserve(request(1), 8)
    assert all((t == 0).all() for layer in range(3) for t in (*cache.view(layer, request(1), 8), cache.keys(layer)))


def test_slots_follow_the_table_and_avoid_the_scratch_page(cache: Any) -> None:
    a, b, stranger = request(1), request(2), request(3)
    cache.reserve(a, 9)
    cache.reserve(b, 3)
    table = cache.table([b, stranger, a])
    assert table.dtype == torch.int64 and table.shape[0] == 3
    assert (table[1] == 0).all()
    size = cache.block_size
    for row, owner, length in ((0, b, 3), (2, a, 9)):
        slots = cache.slots(owner, 0, length)
        assert slots.dtype == torch.int64
        assert slots.tolist() == [int(table[row, i // size]) * size + i % size for i in range(length)]
        assert (slots >= size).all()
    assert cache.scratch_slot < size
    assert cache.slots(a, 2, 7).tolist() == cache.slots(a, 0, 9).tolist()[2:7]


def test_the_table_is_fresh_after_every_change(cache: Any) -> None:
    a, b = request(1), request(2)
    assert cache.table([a]).tolist() == [[0]]
    cache.reserve(a, 1)
    before = cache.table([a]).tolist()
    assert before[0][0] != 0
    cache.reserve(b, 9)
    assert cache.table([b, a]).tolist()[1][: len(before[0])] == before[0]
    cache.release(a)
    assert set(cache.table([b, a]).tolist()[1]) == {0}
    assert cache.table([]).shape[0] == 0


def test_reserve_is_all_or_nothing(cache: Any) -> None:
    a, b, c = request(1), request(2), request(3)
    assert cache.reserve(a, 9)
    fill(cache, a, 0, [1, 2, 3])
    left, slots = cache.free(), cache.slots(a, 0, 9).tolist()
    assert not cache.reserve(a, 1000)
    assert not cache.reserve(b, 1000)
    assert (cache.free(), cache.slots(a, 0, 9).tolist()) == (left, slots)
    assert content(cache, a, 3) == [1, 2, 3]
    assert cache.reserve(b, 15)
    assert not cache.reserve(c, 8)  # both caches are too full for this one now
    with pytest.raises(IndexError, match="reserve first"):
        cache.slots(c, 0, 1)


def test_reserve_never_shrinks(cache: Any) -> None:
    a = request(1)
    cache.reserve(a, 9)
    left = cache.free()
    assert cache.reserve(a, 2) and cache.free() == left
    assert cache.slots(a, 8, 9).numel() == 1


def test_reading_past_the_reserved_room_is_refused(cache: Any) -> None:
    a = request(1)
    cache.reserve(a, 4)
    with pytest.raises(IndexError):
        cache.slots(a, 0, 17)
    with pytest.raises(IndexError):
        cache.view(0, a, 17)
    with pytest.raises(IndexError):
        cache.move(a, torch.tensor([0, 1]), 16)
    assert cache.slots(request(2), 0, 0).numel() == 0


def test_release_frees_everything_once(cache: Any) -> None:
    a, b = request(1), request(2)
    cache.reserve(a, 10)
    cache.reserve(b, 5)
    cache.release(a)
    cache.release(a)
    cache.release(b)
    assert cache.free() == cache.capacity
    assert cache.reserve(a, 15) and cache.reserve(b, 15)
    assert not set(cache.slots(a, 0, 15).tolist()) & set(cache.slots(b, 0, 15).tolist())


def test_trim_keeps_what_is_below_and_never_costs_room(cache: Any) -> None:
    a = request(1)
    cache.reserve(a, 13)
    fill(cache, a, 0, [float(i) for i in range(13)])
    left = cache.free()
    cache.trim(a, 5)
    assert cache.free() >= left
    assert content(cache, a, 5) == [0, 1, 2, 3, 4]
    cache.trim(a, 14)
    assert cache.reserve(a, 15)
    assert content(cache, a, 5) == [0, 1, 2, 3, 4]
    cache.trim(a, 0)
    assert cache.free() == cache.capacity


@pytest.mark.parametrize(
    ("source", "start", "expected"),
    [
        ([4, 6], 3, [0, 1, 2, 4, 6, 5, 6, 7]),  # an accepted path, compacted
        ([1, 2, 3], 2, [0, 1, 1, 2, 3, 5, 6, 7]),  # overlapping upwards: 1 must not be copied on and on
        ([5, 4, 3], 3, [0, 1, 2, 5, 4, 3, 6, 7]),
        ([3, 4, 5], 3, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([], 3, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_move_reads_everything_before_it_writes(cache: Any, source: list[int], start: int, expected: list[int]) -> None:
    a, b = request(1), request(2)
    cache.reserve(a, 8)
    cache.reserve(b, 8)
    fill(cache, a, 0, [float(i) for i in range(8)])
    fill(cache, b, 0, [float(i) for i in range(50, 58)])
    cache.move(a, torch.tensor(source, dtype=torch.int64), start)
    assert content(cache, a, 8) == expected
    assert content(cache, b, 8) == list(range(50, 58))


def test_copy_moves_a_whole_batch(cache: Any) -> None:
    a, b = request(1), request(2)
    for owner, base in ((a, 0), (b, 50)):
        cache.reserve(owner, 4)
        fill(cache, owner, 0, [float(base + i) for i in range(4)])
    cache.copy(torch.cat([cache.slots(a, 2, 3), cache.slots(b, 3, 4)]), torch.cat([cache.slots(a, 1, 2), cache.slots(b, 0, 1)]))
    assert content(cache, a, 4) == [0, 2, 2, 3]
    assert content(cache, b, 4) == [53, 51, 52, 53]


def test_attached_memory_shares_slots_and_moves_along(cache: Any) -> None:
    a, b = request(1), request(2)
    pool = cache.attach(KVNeed(layers=2, heads=1, dim=3))
    as_view: PoolView = pool  # for the type checker
    cache.reserve(a, 6)
    cache.reserve(b, 6)
    assert as_view.slots(a, 1, 4).tolist() == cache.slots(a, 1, 4).tolist()
    ramp = torch.arange(6.0)[:, None, None].expand(-1, 1, 3)
    pool.write(1, pool.slots(a, 0, 6), ramp, -ramp)
    assert (pool.view(0, a, 6)[0] == 0).all() and (pool.view(1, b, 6)[0] == 0).all()
    cache.move(a, torch.tensor([3, 5]), 1)
    keys, values = pool.view(1, a, 6)
    assert keys[:, 0, 0].tolist() == [0, 3, 5, 3, 4, 5]
    assert torch.equal(values, -keys)
    held = pool.keys(1)[cache.slots(a, 0, 6)], pool.values(1)[cache.slots(a, 0, 6)]
    assert torch.equal(held[0], keys) and torch.equal(held[1], values)
    cache.release(a)
    assert cache.reserve(a, 6)
    assert (pool.keys(1) == 0).all() and (pool.values(1) == 0).all()


@pytest.mark.parametrize("way", ["release", "trim", "scrub"])
def test_nan_of_one_owner_never_reaches_another(cache: Any, way: str) -> None:
    a, b = request(1), request(2)
    pool = cache.attach(KVNeed(layers=1, heads=1, dim=1))
    assert cache.reserve(a, 15)
    fill(cache, a, 0, [math.nan] * 15)
    bad = torch.full((15, 1, 1), math.nan)
    pool.write(0, pool.slots(a, 0, 15), bad, bad)
    cache.write(0, torch.zeros(1, dtype=torch.int64), torch.full((1, 2, 4), math.nan), torch.zeros(1, 2, 4))
    if way == "trim":
        cache.trim(a, 0)
    elif way == "release":
        cache.release(a)
    else:
        cache.scrub(a)
        assert (cache.view(0, a, 15)[0] == 0).all()
        assert all((cache.keys(layer) == 0).all() for layer in range(3))  # the scratch page as well
        cache.release(a)
    assert cache.reserve(b, 15)
    everything = [t for layer in range(3) for t in cache.view(layer, b, 15)] + list(pool.view(0, b, 15))
    assert all((t == 0).all() for t in everything)


def test_nan_in_a_neighbour_never_shows(cache: Any) -> None:
    a, b = request(1), request(2)
    cache.reserve(a, 7)
    cache.reserve(b, 7)
    fill(cache, a, 0, [math.nan] * 7)
    fill(cache, b, 0, [5.0] * 7)
    assert content(cache, b, 7) == [5.0] * 7
    cache.scrub(a)
    assert content(cache, b, 7) == [5.0] * 7


def test_a_run_is_viewed_without_a_copy(cache: Any) -> None:
    a = request(1)
    cache.reserve(a, 10)
    keys, values = cache.view(1, a, 10)
    assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() == cache.keys(1).untyped_storage().data_ptr()


def test_pools_without_room_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        PagedCache(LAYERS, blocks=0)
    with pytest.raises(ValueError, match="at least one block"):
        SlotCache(LAYERS, sequences=0, max_len=10)


def test_requests_begin_far_apart_in_a_large_pool() -> None:
    """Each where it can grow for long, also after many have come and gone; blocks are nobody else's."""
    cache = PagedCache([(1, 1)], 4096, 4)
    for _ in range(3):
        made = [request(i) for i in range(32)]
        assert all(cache.reserve(r, 4) for r in made)
        for length in range(4, 161, 4):
            assert all(cache.reserve(r, length) for r in made)
        held = [block for r in made for block in cache.blocks(r)]
        assert len(held) == len(set(held)) == 32 * 40
        assert all(b == tuple(range(b[0], b[0] + 40)) for b in map(cache.blocks, made)), "in one run each"
        for r in made:
            cache.release(r)
        assert cache.free() == cache.capacity
    assert cache.reserve(request(1), cache.capacity) and not cache.reserve(request(2), 1)
