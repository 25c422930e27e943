"""A draft model's chain of guesses as one replay of a CUDA graph: read the last tokens, then write one token after another.

Nothing of a chain is read by the host: the guesses go from here to the target's round on the device. Every chain reads the last
`guesses + 1` known tokens anew, as many as a round can have added, so that whatever was accepted their KV is right, and what full
acceptance leaves out (the last guess was never fed) is filled in passing. Reading a token twice writes the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels import BLOCK
from ..types import Request
from .graphs import GraphMemory
from .lanes import LaneBook, filters, fits, staged
from .rounds import GUESSING, LENGTHS, bucket
from .rows import Rows, tiles_of

if TYPE_CHECKING:
    from .hf import Decoder

LANES = 256
"""Requests that can have chains at once."""


class Shape(NamedTuple):
    """`requests` B, `guesses` K, a bound on sequence lengths, whether any request filters."""

    requests: int
    guesses: int
    longest: int
    filters: bool


class Chains:
    """Chains of a draft model over its own paged KV. `usable`: ids that the target's tokenizer knows. The draft's scores
    are those of the tokens `ids [n]`, or of all."""

    def __init__(self, decoder: Decoder, cache: Any, usable: int, ids: Tensor | None = None) -> None:
        from ..kernels.rounds import Lanes

        self.decoder, self.cache, self.usable, self.ids = decoder, cache, usable, ids
        self.shown = usable if ids is None else max(usable, int(ids.max()) + 1)
        self.known = int(decoder.model.get_input_embeddings().weight.shape[0])
        blocks = -(-min(decoder.max_len + 64, cache.capacity) // cache.block_size) + 1
        self.lanes = Lanes.make(LANES + 1, blocks, decoder.device)
        self.book = LaneBook(self.lanes, cache)
        self.memory = GraphMemory(decoder.device) if decoder.device.type == "cuda" else None
        self._chains: dict[Shape, Chain] = {}

    def serves(self, requests: Sequence[Request], guesses: int) -> bool:
        """Whether chains can be made for all of these at once."""
        return guesses < GUESSING[-1] and self.book.room(requests) and all(map(fits, requests))

    def write(self, requests: Sequence[Request], guesses: int) -> Tensor:
        """`[B, guesses]` int64 on the device. All but the last `guesses + 1` tokens of every request must have KV, and there must
        be blocks for what is known and guessed."""
        longest = bucket(max(len(r.tokens) for r in requests) + guesses, LENGTHS) or LENGTHS[-1]
        shape = Shape(bucket(len(requests), GUESSING) or len(requests), guesses, longest, any(map(filters, requests)))
        if shape not in self._chains:
            self._chains[shape] = Chain(shape, self)
        return self._chains[shape].play(self.book.take(requests), requests)

    def release(self, request: Request) -> None:
        self.book.release(request)


class Chain:
    """One captured shape. What it is told, a row per request: lane, length, and the last K + 1 tokens, right-aligned."""

    def __init__(self, shape: Shape, owner: Chains) -> None:
        from ..kernels.attention import rows_per_tile
        from ..kernels.choose import Work

        self.shape, self.owner = shape, owner
        device = owner.decoder.device
        self.fed = shape.guesses + 1
        self.host = np.zeros((shape.requests, 2 + self.fed), dtype=np.int32)
        self.host[:, 0] = owner.book.padding
        self.given = torch.from_numpy(self.host).to(device)
        per_tile = rows_per_tile(owner.decoder.group)
        self.tiles = [self._tiles(rows, per_tile, device) for rows in (self.fed, 1)]
        self.out = torch.zeros(shape.requests, shape.guesses, dtype=torch.int64, device=device)
        self.work = Work.make(shape.requests, owner.usable, device, filters=shape.filters)
        self.graph = None if owner.memory is None else owner.memory.capture(self._work)

    def _tiles(self, rows: int, size: int, device: torch.device) -> Tensor:
        ends = range(0, (self.shape.requests + 1) * rows, rows)
        return torch.tensor(tiles_of(pairwise(ends), size), dtype=torch.int32).to(device)

    def play(self, lanes: list[int], requests: Sequence[Request]) -> Tensor:
        self.host[:] = 0
        self.host[:, 0] = self.owner.book.padding
        for row, lane, request in zip(self.host, lanes, requests, strict=False):
            last = request.tokens[-self.fed :]
            row[0], row[1] = lane, len(request.tokens)
            row[-len(last) :] = last
        self.given.copy_(staged(self.host, self.given.device), non_blocking=True)
        if self.graph is None:
            self._work()
        else:
            self.graph.replay()
        return self.out[: len(requests)]

    def _work(self) -> None:
        """What the graph holds: one pass over the last known tokens, then one per guess but the last."""
        from ..kernels.choose import Asked, choose

        owner, fed = self.owner, self.fed
        lane, length, tokens = flat(self.given[:, :1]), flat(self.given[:, 1:2]), self.given[:, 2:]
        table = owner.lanes.table.index_select(0, lane)
        steps = torch.arange(-fed, self.shape.guesses - 1, dtype=torch.int32, device=lane.device)
        place = length[:, None] + steps  # [B, K + 1 + K - 1] positions of all that is fed
        there = (place >= 0) & (length > 0)[:, None]
        block = table.gather(1, (place.clamp(min=0) // BLOCK).clamp(max=table.shape[1] - 1).long())
        write = torch.where(there & (block > 0), block.long() * BLOCK + place % BLOCK, 0)
        attend = torch.where(there, place, -1)
        ends = torch.arange(1, self.shape.requests + 1, device=lane.device) * fed - 1
        token = tokens.reshape(-1).long().clamp(0, owner.known - 1)
        wanted: Tensor | None = ends
        part, at = slice(0, fed), self.tiles[0]
        for k in range(self.shape.guesses):
            rows = self._rows(token, (flat(attend[:, part]), flat(write[:, part])), table, at)
            logits = owner.decoder.scored(rows, owner.cache, wanted)
            logits = logits if owner.ids is None else spread(logits, owner.shown, owner.ids)
            chosen = self.out[:, k].contiguous()
            choose(logits, Asked(lane, length + k), owner.lanes, self.work, chosen)
            self.out[:, k].copy_(chosen)
            token, wanted = chosen.clamp(0, owner.usable - 1), None
            part, at = slice(fed + k, fed + k + 1), self.tiles[1]

    def _rows(self, token: Tensor, places: tuple[Tensor, Tensor], table: Tensor, tiles: Tensor) -> Rows:
        from ..kernels.attention import Where

        attend, write = places
        nothing = torch.zeros(token.shape[0], 0, dtype=torch.int32, device=token.device)
        where = Where(attend, self.given[:, 1], nothing, table, tiles, self.shape.longest)
        position = attend.clamp(0, self.owner.decoder.max_len - 1)
        return Rows(token, position, write, where, False, False, self.shape.longest)


def spread(logits: Tensor, vocab: int, ids: Tensor) -> Tensor:
    """Logits `[R, n]` of the tokens `ids` over a vocabulary `[R, vocab]`; the others are impossible."""
    whole = logits.new_full((len(logits), vocab), float("-inf"))
    return whole.index_copy_(1, ids, logits)


def flat(table: Tensor) -> Tensor:
    """All entries in a row, one beside the other: kernels know no strides here."""
    return table.contiguous().view(-1)
