"""The contiguous reference: every sequence owns one run of `max_len` slots, and there is nothing else to know."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..types import Request
from .pool import Pool


class SlotCache(Pool):
    """A `protocols.Cache` for up to `sequences` requests of up to `max_len` tokens each.

    Runs start on multiples of `block_size`, so block tables work as they do for the paged pool. `capacity` is in tokens.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        sequences: int,
        max_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        block_size: int = 64,
    ) -> None:
        self._span = -(-max_len // block_size)
        super().__init__(layers, sequences * self._span, block_size, dtype, device)
        self.capacity = sequences * max_len
        self.max_len = max_len
        self._idle = list(range(sequences))

    def reserve(self, request: Request, length: int) -> bool:
        """Make room for virtual indices below `length`; False if all runs are taken or `length` exceeds `max_len`."""
        if length <= self._records.get(request.id, self._none).room:
            return True
        if length > self.max_len or not self._idle:
            return False
        first = 1 + self._idle.pop(0) * self._span
        self._assign(request, tuple(range(first, first + self._span)), self.max_len)
        return True

    def trim(self, request: Request, length: int) -> None:
        """A run is given back whole or not at all: by `release`, or here if nothing is to be kept."""
        if length <= 0:
            self.release(request)

    def release(self, request: Request) -> None:
        """Give back a request's run; nothing happens if it owns none."""
        blocks = self._records.get(request.id, self._none).blocks
        if blocks:
            self._idle.append((blocks[0] - 1) // self._span)
            self._assign(request, (), 0)

    def price(self, request: Request, length: int, blocks: tuple[int, ...] = ()) -> int:
        """Tokens of free memory that `reserve` would take: a whole run, or nothing."""
        return 0 if self.blocks(request) else max(length, self.max_len)

    def free(self) -> int:
        """Tokens in runs that nobody owns."""
        return len(self._idle) * self.max_len
