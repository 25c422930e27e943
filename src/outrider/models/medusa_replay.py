"""Guesses of Medusa's heads as one replay of a CUDA graph: all heads on the last states, candidates with the target's noise, a
tree chosen beforehand. After a captured round the last states lie in the lanes' rings (`kernels.ring`), else the host tells where
they lie; it reads nothing of the guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..types import Request
from .lanes import filters, staged
from .medusa_heads import Heads
from .replay import Replays
from .rounds import GUESSING, bucket

FEATURE = "hidden:last"
"""What heads read."""


class Shape(NamedTuple):
    """`requests` B; the tree's nodes: columns above them, ranks among their head's candidates, depths from 1 on; whether it is
    one chain, and whether any request filters."""

    requests: int
    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]
    linear: bool
    filters: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to guess for, and the target's last state of it, `[H]`; None if it is in the ring. `known` tokens, 0 if only the
    device knows."""

    request: Request
    state: Tensor | None
    known: int = 0


class MedusaReplays:
    """Replays of one set of heads. `usable`: ids that can be chosen; `ids [n]`: the target's tokens that they score, None: the
    first."""

    def __init__(self, heads: Heads, replays: Replays[MedusaReplay], usable: int, ids: Tensor | None) -> None:
        self.heads, self.replays, self.usable, self.ids, self.stage = heads, replays, usable, ids, replays.stage
        weight: Any = heads.heads[0].weight
        self.dtype, self.device = weight.dtype, weight.device
        self.ring = self.stage.machine.ring(FEATURE, heads.hidden, self.dtype)
        self.shown = max(usable, len(weight) if ids is None else int(ids.max()) + 1)

    def holds(self, request: Request) -> bool:
        """Whether a request's guesses can be made here, lanes permitting."""
        return not self.replays.off and self.stage.holds(request)

    def guess(self, asked: Sequence[Asked], shape: Shape) -> tuple[Tensor, Tensor, Tensor] | None:
        """Tokens and parents `[C, N]` and sizes `[C]` on the device, which the next guess in this shape overwrites; None where it
        cannot be captured. `shape` with the number and filters of requests left open."""
        requests = [a.request for a in asked]
        count = bucket(len(asked), GUESSING)
        if count is None or not self.stage.book.room(requests):
            return None
        shape = shape._replace(requests=count, filters=any(map(filters, requests)))
        made = self.replays.get(shape, lambda s: MedusaReplay(s, self))
        return None if made is None else made.play(asked, self.stage.book.take(requests))


class MedusaReplay:
    """One captured shape."""

    def __init__(self, shape: Shape, owner: MedusaReplays) -> None:
        from ..kernels.choose import Work
        from ..kernels.climb import HEAD

        self.shape, self.owner, device = shape, owner, owner.device
        b, nodes, self.depth, self.most = shape.requests, len(shape.parents), max(shape.depths), max(shape.ranks) + 1
        self.host = np.zeros((b, HEAD + 1), dtype=np.int64)
        self.host[:, 0] = owner.stage.machine.padding
        self.told: list[tuple[int, int]] = []
        self.given = torch.from_numpy(self.host).to(device)
        self.states = torch.zeros(b, owner.heads.hidden, dtype=owner.dtype, device=device)
        at = [(d - 1) * self.most + r for d, r in zip(shape.depths, shape.ranks, strict=True)]
        self.tree = [torch.tensor(x, dtype=torch.int32).to(device) for x in (at, shape.parents)]
        self.steps = torch.arange(self.depth, device=device)
        self.work = Work.make(b * self.depth, owner.usable, device, filters=shape.filters)
        tokens, parents = (torch.zeros(b, nodes, dtype=torch.int64, device=device) for _ in range(2))
        self.out = tokens, parents, torch.zeros(b, dtype=torch.int64, device=device)
        self.replay = owner.replays.capture(self._work)

    def play(self, asked: Sequence[Asked], lanes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Run it. Nothing waits for the device."""
        known = any(one.state is not None for one in asked)
        told = [(lane, one.known) for lane, one in zip(lanes, asked, strict=True)]
        if known or told != self.told:
            self._tell(asked, lanes)
            self.told = [] if known else told
        self.replay()
        tokens, parents, sizes = (x[: len(asked)] for x in self.out)
        return tokens, parents, sizes

    def _tell(self, asked: Sequence[Asked], lanes: Sequence[int]) -> None:
        """What the host knows, to the device."""
        self.host[:] = 0
        self.host[:, 0] = self.owner.stage.machine.padding
        for row, lane, one in zip(self.host, lanes, asked, strict=False):
            row[:4] = lane, -1, 1, one.known
            if one.state is not None:
                row[1], row[3] = len(one.request.tokens), one.state.data_ptr()
        self.given.copy_(staged(self.host, self.given.device), non_blocking=True)

    @torch.inference_mode()
    def _work(self) -> None:
        """What the graph holds."""
        from ..kernels import branch, choose, climb

        owner, given, (at, above) = self.owner, self.given, self.tree
        lanes = owner.stage.machine.lanes
        told = given[:, 3].where(given[:, 3] > 0, lanes.length.index_select(0, given[:, 0]).long())
        length = told.where(given[:, 1] < 0, given[:, 1])
        climb.collect(given, length.sub(2).int(), owner.ring, self.states)
        logits = owner.heads(self.states)[:, : self.depth].flatten(0, 1)
        scores = torch.full((len(logits), owner.shown), float("-inf"), device=given.device)
        noisy = torch.empty_like(scores)
        climb.spread(logits, owner.ids, scores)
        lane = given[:, :1].expand(-1, self.depth).int().reshape(-1)
        asked = choose.Asked(lane, (length[:, None] + self.steps).int().reshape(-1))
        choose.scores(scores, asked, lanes, self.work, noisy)
        tokens, gain = (x.view(self.shape.requests, -1) for x in branch.children(noisy, self.most))
        branch.place((tokens, gain), (at, above, self.depth), self.out, self.shape.linear)
