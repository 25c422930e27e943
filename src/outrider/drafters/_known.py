"""Draft KV of known tokens: made at once, or owed until somebody needs it, or until much is owed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..models.climbs import Climbs
from ..models.eagle_net import EagleNet
from ..models.rounds import LENGTHS, bucket
from ..protocols import PoolView
from ..types import Request
from ._past import Chunk, Past, in_a_row, together

WIDE = 4096
"""Tokens of several requests that are read together."""
KEPT = 128 << 20
"""Bytes of states that wait to be read, at most."""


class KnownKV:
    """Of an EAGLE network `net` in a `pool`: a single layer's KV is made of states and tokens alone. `climbs`: its fused form."""

    def __init__(self, net: EagleNet, pool: PoolView, climbs: Climbs | None) -> None:
        self.net, self.pool, self.climbs = net, pool, climbs
        self._owed: dict[int, Chunk] = {}

    @torch.inference_mode()
    def make(self, chunks: Sequence[Chunk]) -> None:
        """KV of these tokens, those of several requests in a row."""
        for some in together(chunks, WIDE):
            self._store(some)

    def owe(self, owed: Sequence[tuple[Request, Past, int]]) -> None:
        """What was not read of these requests' states before a position will be before it is needed. Where they would fill too
        much memory, as many as are read together are read, of the oldest: launching that takes long, for few or for many, and is
        for nothing where nobody is given guesses."""
        for request, past, end in owed:
            states = past.rows(past.computed, end) if past.computed < end else None
            if states is not None:
                self._owed[request.id] = request, states, end
            past.read(end)
        while self._kept() > KEPT:
            self._settle(next(together(list(self._owed.values()), WIDE)))

    def _kept(self) -> int:
        """Bytes that what is owed keeps: states of several requests lie in one table."""
        tables = (states.untyped_storage() for _, states, _ in self._owed.values())
        return sum({table.data_ptr(): table.nbytes() for table in tables}.values())

    def pay(self, requests: Sequence[Request]) -> None:
        """Make what is owed for these."""
        if self._owed:
            self._settle([self._owed[r.id] for r in requests if r.id in self._owed])

    def pay_for(self, request: Request) -> None:
        """Make what is owed for this one, and for as many others as are read together: each alone would take as long."""
        if request.id in self._owed:
            first = sorted(self._owed.values(), key=lambda chunk: chunk[0] is not request)
            self._settle(next(together([chunk for chunk in first if _stands(chunk)], WIDE), []))

    def _settle(self, chunks: Sequence[Chunk]) -> None:
        """Make these; if that fails, they are owed still. Whoever gave way in the meantime has no memory, and begins anew."""
        self.make([chunk for chunk in chunks if _stands(chunk)])
        for request, _, _ in chunks:
            del self._owed[request.id]

    def made(self, request: Request, computed: int) -> int:
        """Up to which position there is KV, of the first `computed`."""
        chunk = self._owed.get(request.id)
        return computed if chunk is None else min(computed, chunk[2] - len(chunk[1]))

    def drop(self, request: Request) -> None:
        """What is owed will not be needed."""
        self._owed.pop(request.id, None)

    def _store(self, chunks: Sequence[Chunk]) -> None:
        requests, size = [request for request, _, _ in chunks], self.pool.block_size
        kind = self.pool.keys(0).dtype
        tokens, position, owner = torch.from_numpy(in_a_row(chunks)).to(self.pool.keys(0).device, non_blocking=True)
        states = torch.cat([states for _, states, _ in chunks])
        slot = self.pool.table(requests)[owner, position // size] * size + position % size
        longest = bucket(max(end for _, _, end in chunks), LENGTHS)
        if self.climbs is not None and longest is not None:
            self.climbs.net.store(states, tokens, (position, slot), longest)
            return
        x, _ = self.net.enter(self.net.fuse(states), tokens)
        _, key, value = self.net.project(x[None], position[None])
        self.pool.write(0, slot, key[0].to(kind), value[0].to(kind))


def _stands(chunk: Chunk) -> bool:
    """Whether the request that these are states of has come to their end, and so has memory for their KV."""
    request, _, end = chunk
    return request.computed >= end
