"""The paged pool: requests own blocks, and grow and shrink by blocks.

Idea: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention". Blocks are
placed so that a request usually owns one run, which plain code can read without a copy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from ..types import Request
from .pool import Pool

_FREE_RUN = re.compile(b"\x01+")


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

    def reserve(self, request: Request, length: int) -> bool:
        """Make room for virtual indices below `length`; False, and nothing changed, if the pool has too few blocks."""
        record = self._records.get(request.id, self._none)
        if length <= record.room:
            return True
        count = -(-length // self.block_size) - len(record.blocks)
        if count > self._left:
            return False
        blocks = record.blocks + self._take(count, record.blocks[-1] if record.blocks else 0)
        self._assign(request, blocks, len(blocks) * self.block_size)
        return True

    def trim(self, request: Request, length: int) -> None:
        """Give back the blocks that lie wholly at or past virtual index `length`."""
        blocks = self._records.get(request.id, self._none).blocks
        kept = -(-length // self.block_size)
        if kept >= len(blocks):
            return
        for block in blocks[kept:]:
            self._map[block] = 1
        self._left += len(blocks) - kept
        self._assign(request, blocks[:kept], kept * self.block_size)

    def release(self, request: Request) -> None:
        """Give back all that a request owns; nothing happens if it owns nothing."""
        self.trim(request, 0)

    def free(self) -> int:
        """Tokens in blocks that nobody owns."""
        return self._left * self.block_size

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
        start, end = max((m.span() for m in _FREE_RUN.finditer(self._map)), key=lambda span: span[1] - span[0])
        if start == 1:
            return start
        return start + max(0, min((end - start) // 2, end - start - count))
