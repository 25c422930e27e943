"""Chains that the target drafts itself, with some of its layers, as one replay of a CUDA graph.

The draft reads the target's own KV of all that is known but the last token, and writes where verification will write over it.
Chains always have their full length; one that ends sooner (`floor`) says so in its size, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..types import Batch, Part
from .lanes import filters, staged
from .native import Native
from .parts import Layers
from .replay import Replays, Stage
from .rounds import GUESSING, LENGTHS, bucket
from .rows import Rows, tiles_of


class Shape(NamedTuple):
    """`requests` B, `depth` K, which layers run, a bound on sequence lengths, whether any request filters."""

    requests: int
    depth: int
    layers: tuple[int | Part, ...]
    longest: int
    filters: bool


def supports(stage: Stage | None) -> bool:
    """Whether the target is one whose parts can be captured."""
    return stage is not None and isinstance(stage.machine.decoder, Native)


class PartChains:
    """Chains by parts of the target. `floor` (0: off): a chain ends where the likeliest token's probability falls below it."""

    def __init__(self, replays: Replays[PartChain], floor: float) -> None:
        self.replays, self.floor, self.stage = replays, floor, replays.stage

    def write(self, batch: Batch, layers: Layers, rooms: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """Tokens `[B, K]` and sizes `[B]` on the device, which the next call overwrites, of at most `rooms` guesses each; None
        where this cannot be captured. Every request's blocks must have the room."""
        requests, depth = batch.requests, max(rooms)
        count, longest = bucket(len(batch), GUESSING), bucket(max(len(r.tokens) for r in requests) + depth + 1, LENGTHS)
        if count is None or longest is None or self.replays.off or any(p != 1 for p in batch.pending):
            return None
        if not all(map(self.stage.holds, requests)) or not self.stage.book.room(requests):
            return None
        shape = Shape(count, depth, tuple(layers), longest, any(map(filters, requests)))
        made = self.replays.get(shape, lambda s: PartChain(s, self))
        if made is None:
            return None
        self.stage.loans.spoil(batch)
        return made.play(batch, rooms, self.stage.book.take(requests))


class PartChain:
    """One captured shape."""

    def __init__(self, shape: Shape, owner: PartChains) -> None:
        from ..kernels.attention import rows_per_tile
        from ..kernels.choose import Work
        from ..kernels.climb import HEAD, Stand

        self.shape, self.owner, self.machine = shape, owner, owner.stage.machine
        b, device = shape.requests, self.machine.lanes.last.device
        self.host = np.zeros((b, HEAD + 1), dtype=np.int64)
        self.host[:, 0] = self.machine.padding
        self.given = torch.from_numpy(self.host).to(device)
        self.stand = Stand.make(b, 1, 1, shape.depth, device)
        tiles = tiles_of(pairwise(range(b + 1)), rows_per_tile(self.machine.group))
        self.tiles = torch.tensor(tiles, dtype=torch.int32).to(device)
        self.work = Work.make(b, self.machine.usable, device, filters=shape.filters)
        self.chosen = torch.zeros(shape.depth, b, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(b, shape.depth, dtype=torch.int64, device=device)
        self.sizes = torch.zeros(b, dtype=torch.int64, device=device)
        self.nothing = torch.zeros(b, 0, dtype=torch.int32, device=device)
        self.replay = owner.replays.capture(self._work)

    def play(self, batch: Batch, rooms: Sequence[int], lanes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run it. Nothing waits for the device. A row's length counts the token that is chosen first: it is fed what the others
        take for known."""
        self.host[:] = 0
        self.host[:, 0] = self.machine.padding
        for row, lane, room, request in zip(self.host, lanes, rooms, batch.requests, strict=False):
            row[:] = lane, len(request.tokens) + 1, 1, 0, room, room, request.tokens[-1]
        self.given.copy_(staged(self.host, self.given.device), non_blocking=True)
        self.replay()
        return self.tokens[: len(batch), : max(rooms)], self.sizes[: len(batch)]  # what stands in may be deeper

    @torch.inference_mode()
    def _work(self) -> None:
        """What the graph holds."""
        from ..kernels import branch, choose, climb

        machine, stand, floor = self.machine, self.stand, self.owner.floor
        climb.stand(self.given, machine.lanes, None, 1, stand)
        table = machine.table(self.given[:, 0].contiguous())
        token, places, asked = stand.token, (stand.attend, stand.position, stand.write), stand.known
        for level in range(self.shape.depth):
            if level:
                token, at = self.chosen[level - 1].clamp(min=0), level - 1
                places, asked = (stand.node_attend[at], stand.node_position[at], stand.node_write[at]), stand.asked[at]
            logits = self._scores(token, places, table)
            choose.choose(logits, choose.Asked(stand.lane, asked), machine.lanes, self.work, self.chosen[level])
            if floor:
                _, best = branch.children(logits, 1)
                self.chosen[level].masked_fill_(best[:, 0].exp() < floor, -1)
        climb.chain(self.given, self.chosen, self.tokens, self.sizes)

    def _scores(self, token: Tensor, places: tuple[Tensor, Tensor, Tensor], table: Tensor) -> Tensor:
        from ..kernels.attention import Where

        decoder, (attend, position, write), longest = self.machine.decoder, places, self.shape.longest + self.shape.depth
        assert isinstance(decoder, Native)
        where = Where(attend, self.stand.known, self.nothing, table, self.tiles, longest)
        rows = Rows(token, position.clamp(max=self.machine.max_len - 1), write, where, False, False, longest)
        normed, _ = decoder.states(rows, self.machine.cache, self.shape.layers)
        return decoder.logits(normed)
