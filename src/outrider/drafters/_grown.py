"""Trees of guesses on the device: static shapes chosen beforehand, dead nodes taken out, a part of a batch put in its place.

C requests of a part, B of the batch, N columns.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import tree
from ..types import ROOT, Batch, Budget, Proposal
from ._joint import constant


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree chosen beforehand: per node, parents first, the column above it, its rank among its parent's candidates
    (0 is the best), and its depth from 1 on."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def linear(self) -> bool:
        """Whether it is one chain."""
        return all(parent == column - 1 for column, parent in enumerate(self.parents))


def sparse(chances: Sequence[Sequence[float]], nodes: int, depth: int) -> Shape:
    """The `nodes` likeliest nodes of at most `depth` levels, the likeliest first (Medusa, section 2.3.3). `chances[d][r]`: how
    often the candidate of rank r is right at depth d + 1, given that all above it are."""
    levels = [_falling(row) for row in chances[:depth]]
    parents: list[int] = []
    ranks: list[int] = []
    depths: list[int] = []
    heap: list[tuple[float, int, int, int, float]] = []  # (-chance, order, parent, rank, chance of the parent)
    depth_of = {ROOT: 0}

    def offer(parent: int, rank: int, above: float) -> None:
        level = depth_of[parent]
        if level < len(levels) and rank < len(levels[level]):
            heapq.heappush(heap, (-above * levels[level][rank], len(heap) + 1000 * len(parents), parent, rank, above))

    offer(ROOT, 0, 1.0)
    while heap and len(parents) < nodes:
        chance, _, parent, rank, above = heapq.heappop(heap)
        column = len(parents)
        parents.append(parent)
        ranks.append(rank)
        depths.append(depth_of[parent] + 1)
        depth_of[column] = depths[-1]
        offer(parent, rank + 1, above)
        offer(column, 0, -chance)
    return Shape(tuple(parents), tuple(ranks), tuple(depths))


def _falling(row: Sequence[float]) -> list[float]:
    return sorted((max(0.0, float(x)) for x in row), reverse=True)


def compact(tokens: Tensor, parents: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and parents `[C, N]` without nodes that are not `live [C, N]` or hang under such a node, and the sizes `[C]`.
    What stays keeps its order."""
    return gathered(tokens, parents, (live[:, None, :] | ~tree.ancestors(parents)).all(2))


def gathered(tokens: Tensor, parents: Tensor, alive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same where `alive [C, N]` has every node's parent in it, too."""
    place = alive.cumsum(1) - 1
    above = pad(place, (1, 0), value=ROOT).gather(1, parents + 1)
    order = alive.long().argsort(dim=1, descending=True, stable=True)
    there = alive.gather(1, order)
    return tokens.gather(1, order).where(there, 0), above.gather(1, order).where(there, ROOT), alive.sum(1)


def prefix(live: Tensor) -> Tensor:
    """How many of the first columns of `live [C, N]` are live without a gap: `[C]`."""
    return live.long().cumprod(1).sum(1)


@dataclass(frozen=True, slots=True)
class Part:
    """Guesses for some requests of a batch: `members` their indices, `tokens` and `parents [C, N]`, `sizes [C]`, and host bounds
    `widths` of the sizes."""

    members: tuple[int, ...]
    tokens: Tensor
    parents: Tensor
    sizes: Tensor
    widths: tuple[int, ...]
    linear: bool


def joined(parts: Sequence[Part], count: int, device: torch.device) -> Proposal:
    """The parts as one proposal for a batch of `count` requests."""
    if not parts:
        return Proposal.empty(count, device)
    widths = [0] * count
    for part in parts:
        for b, width in zip(part.members, part.widths, strict=True):
            widths[b] = width
    columns = max(widths)
    linear = all(part.linear for part in parts)
    if len(parts) == 1 and parts[0].members == tuple(range(count)):
        part = parts[0]
        cut = (part.tokens[:, :columns], part.parents[:, :columns])
        return Proposal(*cut, part.sizes, constant(0, device).expand_as(cut[0]), tuple(widths), linear)
    tokens = torch.zeros(count, columns, dtype=torch.int64, device=device)
    parents = torch.full_like(tokens, ROOT)
    if linear:
        parents = torch.arange(-1, columns - 1, device=device).repeat(count, 1)
    sizes = torch.zeros(count, dtype=torch.int64, device=device)
    for part in parts:
        at = torch.tensor(part.members).to(device, non_blocking=True)
        width = min(columns, part.tokens.shape[1])
        tokens[:, :width] = tokens[:, :width].index_copy(0, at, part.tokens[:, :width])
        parents[:, :width] = parents[:, :width].index_copy(0, at, part.parents[:, :width])
        sizes.index_copy_(0, at, part.sizes)
    return Proposal(tokens, parents, sizes, torch.zeros_like(tokens), tuple(widths), linear)


def groups(batch: Batch, budget: Budget, able: Sequence[int], deepest: int) -> dict[tuple[int, int, bool], list[int]]:
    """Those of the requests `able` that may have guesses, by (nodes, depth, whether guesses are draws)."""
    found: dict[tuple[int, int, bool], list[int]] = {}
    for b in able:
        nodes, depth = budget.nodes[b], min(budget.depth[b], deepest)
        if nodes > 0 and depth > 0:
            found.setdefault((nodes, depth, batch.requests[b].sampled), []).append(b)
    return found
