"""The paged pool: requests own blocks, grow and shrink by blocks, and share those that hold the same tokens.

Idea: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention". Blocks are
placed so that a request usually owns one run, which plain code can read without a copy.

A block is free (nobody's, and zero when it is handed out), owned (by one request, or by several that begin alike), or idle:
nobody's, but its content is kept for whoever begins alike. Idle blocks count as free memory; they are zeroed when they are
needed for something else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import torch

from ..types import Request
from .pool import Pool
from .prefix import Prefixes

_FREE_RUN = re.compile(b"\x01+")
LONG = 64
"""Blocks from which on a free run is remembered."""


class PagedCache(Pool):
    """A `protocols.Cache` of `blocks` blocks of `block_size` tokens (a scratch page comes on top).

    `layers` gives (KV heads, head dim) per layer. `capacity` is in tokens.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        blocks: int,
        block_size: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(layers, blocks, block_size, dtype, device)
        self.capacity = blocks * block_size
        # One byte per block, 1 = free. Sentinels: block 0 (scratch) and the one past the end are never free.
        self._map = bytearray(b"\x00" + b"\x01" * blocks + b"\x00")
        self._left = blocks
        self._dirty: list[int] = []
        self._runs: list[tuple[int, int, int]] = []  # runs that were free when last looked: a heap of -length, start, end
        self._owners = [0] * (blocks + 1)
        self._adopted: dict[int, int] = {}
        self._prefixes = Prefixes(block_size)

    def reserve(self, request: Request, length: int) -> bool:
        """Make room for virtual indices below `length`; False, and nothing changed, if the pool has too few blocks."""
        record = self._records.get(request.id, self._none)
        if length <= record.room:
            return True
        count = -(-length // self.block_size) - len(record.blocks)
        if count > self._left + len(self._prefixes.idle):
            return False
        if count > self._left:
            self._free(self._prefixes.oldest(count - self._left))
        if self._dirty:
            self.wash()
        fresh = self._take(count, record.blocks[-1] if record.blocks else 0)
        for block in fresh:
            self._owners[block] = 1
        blocks = record.blocks + fresh
        self._assign(request, blocks, len(blocks) * self.block_size)
        return True

    def trim(self, request: Request, length: int) -> None:
        """Give back the blocks that lie wholly at or past virtual index `length`. What others own, too, stays as it is."""
        blocks = self.blocks(request)
        kept = -(-length // self.block_size)
        if kept < len(blocks):
            self._assign(request, blocks[:kept], kept * self.block_size)
        if not kept:
            self._prefixes.leave(request.id)
            self._adopted.pop(request.id, None)

    def release(self, request: Request) -> None:
        """Give back all that a request owns; nothing happens if it owns nothing."""
        self.trim(request, 0)

    def free(self) -> int:
        """Tokens in blocks that nobody owns."""
        return (self._left + len(self._prefixes.idle)) * self.block_size

    def price(self, request: Request, length: int, blocks: tuple[int, ...] = ()) -> int:
        """Tokens of free memory that `reserve` would take, after `blocks` were adopted."""
        have = len(self.blocks(request)) or len(blocks)
        idle = sum(block in self._prefixes.idle for block in blocks)
        return (max(0, -(-length // self.block_size) - have) + idle) * self.block_size

    @property
    def cached(self) -> int:
        """Tokens whose KV could be shared now."""
        return len(self._prefixes) * self.block_size

    def find(self, tokens: Sequence[int], most: int, grain: int, group: str | None = None) -> tuple[int, ...]:
        """See `Pool.find`; in whole blocks, so a multiple of both."""
        step = math.lcm(grain, self.block_size)
        blocks = self._prefixes.find(tokens, most // step * step, group)
        return blocks[: len(blocks) * self.block_size // step * step // self.block_size]

    def head(self, request: Request, length: int) -> tuple[int, ...]:
        """See `Pool.head`."""
        return self.blocks(request)[: length // self.block_size]

    def adopt(self, request: Request, blocks: tuple[int, ...]) -> None:
        """See `Pool.adopt`. Raises `ValueError` for a request that owns something."""
        if not blocks:
            return
        if self.blocks(request):
            raise ValueError("only a request that owns nothing can begin with another's blocks")
        for block in blocks:
            self._owners[block] += 1
            self._prefixes.idle.pop(block, None)
        self._adopted[request.id] = len(blocks)
        self._assign(request, blocks, len(blocks) * self.block_size)

    def publish(self, request: Request, length: int) -> None:
        """See `Pool.publish`."""
        self._free(self._prefixes.add(request, self.blocks(request), length))

    def forget(self) -> None:
        """See `Pool.forget`."""
        self._free(self._prefixes.clear())

    def scrub(self, request: Request) -> None:
        """See `Pool.scrub`. What the request published is forgotten; what it adopted was another's work, and stays."""
        blocks = self.blocks(request)
        for block in blocks[self._adopted.get(request.id, 0) :]:
            self._prefixes.forget(block)
        self._prefixes.leave(request.id)
        self._zero((0, *(b for b in blocks if self._owners[b] == 1 and b not in self._prefixes)))

    def _drop(self, blocks: list[int]) -> None:
        """A request gives up `blocks`: the last owner's are kept if they can be found again (the first of them longest), else
        they are free."""
        free = []
        for block in reversed(blocks):
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if block in self._prefixes:
                self._prefixes.idle[block] = None
            else:
                free.append(block)
        self._free(free)

    def wash(self) -> None:
        """Zero what was given back. All at once, before any of it is handed out: on a GPU each launch takes its time."""
        self._zero(sorted(self._dirty))
        self._dirty = []

    def _free(self, blocks: list[int]) -> None:
        self._dirty += blocks
        for block in blocks:
            self._map[block] = 1
        self._left += len(blocks)

    def _take(self, count: int, last: int) -> tuple[int, ...]:
        """`count` free blocks, starting right after `last` (0: nothing to continue) if that is free."""
        taken: list[int] = []
        following = last + 1 if last else 0
        while len(taken) < count:
            if not self._map[following]:
                following = self._place(count - len(taken))
            self._map[following] = 0
            taken.append(following)
            following += 1
        self._left -= count
        return tuple(taken)

    def _place(self, count: int) -> int:
        """Where to start a new run: in the middle of the longest free one, so that its neighbour can grow as well, unless
        there is no neighbour or `count` blocks would not fit behind the middle."""
        start, end = self._longest(count)
        at = start if start == 1 else start + max(0, min((end - start) // 2, end - start - count))
        for left, right in ((start, at), (at + count, end)):
            if right - left >= LONG:
                heappush(self._runs, (left - right, left, right))
        return at

    def _longest(self, count: int) -> tuple[int, int]:
        """The longest free run; in a large pool one that is free and was among the longest when all blocks were looked at."""
        while self._runs:
            length, start, end = heappop(self._runs)
            if -length >= max(LONG, 2 * count) and self._map.find(0, start, end) < 0:
                return start, end
        found = [m.span() for m in _FREE_RUN.finditer(self._map)]
        self._runs = [(start - end, start, end) for start, end in found if end - start >= LONG]
        heapify(self._runs)
        return max(found, key=lambda span: span[1] - span[0])
