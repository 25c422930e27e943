"""What only the paged pool does: placing blocks, and reading scattered ones."""

from __future__ import annotations

import torch

from outrider.cache import PagedCache
from outrider.config import SamplingParams
from outrider.types import Request


def request(number: int) -> Request:
    return Request(number, [1], 1, SamplingParams(), key=number, seed=number)


def pool(blocks: int) -> PagedCache:
    return PagedCache([(1, 2)], blocks, block_size=4)


def ids(cache: PagedCache, owner: Request) -> list[int]:
    return [i for i in cache.table([owner]).tolist()[0] if i]


def zero_copy(cache: PagedCache, owner: Request, length: int) -> bool:
    return cache.view(0, owner, length)[0].untyped_storage().data_ptr() == cache.keys(0).untyped_storage().data_ptr()


def test_room_is_counted_in_blocks() -> None:
    cache, a = pool(5), request(1)
    assert cache.capacity == cache.free() == 20
    assert cache.reserve(a, 5) and cache.free() == 12
    assert cache.reserve(a, 8) and cache.free() == 12
    assert cache.reserve(a, 9) and cache.free() == 8
    cache.trim(a, 5)
    assert cache.free() == 12
    cache.trim(a, 4)
    assert cache.free() == 16
    assert not cache.reserve(a, 21) and cache.free() == 16
    assert cache.reserve(a, 20) and cache.free() == 0


def test_a_request_grows_behind_itself() -> None:
    cache, a = pool(8), request(1)
    for length in range(1, 33):
        assert cache.reserve(a, length)
    assert ids(cache, a) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert zero_copy(cache, a, 32)


def test_newcomers_leave_room_for_their_neighbours() -> None:
    cache, a, b = pool(16), request(1), request(2)
    for length in range(1, 29):
        assert cache.reserve(a, length) and cache.reserve(b, length)
    assert zero_copy(cache, a, 28) and zero_copy(cache, b, 28)


def test_a_newcomer_that_fits_in_one_run_gets_one() -> None:
    cache, a, b = pool(8), request(1), request(2)
    cache.reserve(a, 4)
    assert cache.reserve(b, 28)
    assert zero_copy(cache, b, 28)


def test_a_trimmed_block_is_taken_again() -> None:
    cache, a = pool(8), request(1)
    cache.reserve(a, 12)
    before = ids(cache, a)
    cache.trim(a, 7)
    cache.reserve(a, 12)
    assert ids(cache, a) == before


def test_scattered_blocks_are_gathered() -> None:
    cache, owners = pool(6), [request(i) for i in range(6)]
    for owner in owners:
        assert cache.reserve(owner, 4)
    assert cache.free() == 0
    by_block = {ids(cache, owner)[0]: owner for owner in owners}
    for block in (2, 5, 6):
        cache.release(by_block[block])
    a = by_block[3]
    assert cache.reserve(a, 16)
    assert sorted(ids(cache, a)) == [2, 3, 5, 6]
    ramp = torch.arange(16.0)[:, None, None].expand(-1, 1, 2)
    cache.write(0, cache.slots(a, 0, 16), ramp, -ramp)
    keys, values = cache.view(0, a, 16)
    assert torch.equal(keys, ramp) and torch.equal(values, -ramp)
    assert not zero_copy(cache, a, 16)
    assert zero_copy(cache, a, 4)  # the first run alone is still a plain slice
    cache.move(a, torch.tensor([14, 7, 15]), 3)  # across block borders
    assert cache.view(0, a, 16)[0][:, 0, 0].tolist() == [0, 1, 2, 14, 7, 15, *range(6, 16)]
    for block in (1, 4):
        other = cache.view(0, by_block[block], 4)
        assert (other[0] == 0).all() and (other[1] == 0).all()
