"""Chains that the target drafts itself, one token at a time, with some of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from ..models.part_chains import PartChains, supports
from ..models.replay import Replays
from ..protocols import TargetView
from ..types import Batch, Budget, Part, PassOutput, Proposal

Layers = Sequence[int | Part]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Writer:
    """Drafts with `layers` of the target, KV going where `kv` says. `floor` (0: off): a chain ends where the likeliest token's
    probability, before temperature and filters, falls below it. Guesses that are draws keep the token of that place: how many
    there are must not depend on what they are. `chains`: how it is captured."""

    view: TargetView
    layers: Layers
    kv: Literal["scratch", "shared"] = "scratch"
    floor: float = 0.0
    chains: PartChains | None = None

    @classmethod
    def of(cls, view: TargetView, layers: Layers, kv: Literal["scratch", "shared"], floor: float, name: str) -> Writer:
        """A writer for the drafter `name`, whose chains are captured where they can be: there nothing is shared."""
        stage = view.stage
        chains = PartChains(Replays(stage, name), floor) if supports(stage) else None
        return cls(view, layers, kv, floor, chains)

    def write(self, batch: Batch, budget: Budget) -> tuple[Proposal, tuple[PassOutput, ...]]:
        """Chains within `budget` for those who have one, and the runs that made them. Nothing is read on the host if there is no
        floor."""
        view = self.view
        chosen = [b for b in range(len(batch)) if budget.depth[b] and budget.nodes[b]]
        parts: list[PassOutput] = []
        if not chosen:
            return Proposal.empty(len(batch), view.device), ()
        some, rooms = _some(batch, chosen), [min(budget.depth[b], budget.nodes[b]) for b in chosen]
        replayed = None if self.chains is None else self.chains.write(some, self.layers, rooms)
        if replayed is not None:
            return spread(_linear(*replayed, tuple(rooms)), chosen, len(batch)), ()
        nodes = Proposal.empty(len(some), view.device)
        for level in range(max(rooms)):
            out = view.run(some, nodes, self.layers, start=level, kv=self.kv)
            if out.logits is None or out.slots is None:
                break
            parts.append(out)
            if self.floor:
                rooms = self._sure(some, out, rooms, level)
                if not any(room > level for room in rooms):
                    break
            nodes = grow(nodes, view.sampler.choose(out.logits, out.slots), out.slots.request, rooms)
            if max(rooms) == level + 1:
                break
        return view.sampler.attach(batch, spread(nodes, chosen, len(batch))), tuple(parts)

    def _sure(self, batch: Batch, out: PassOutput, rooms: list[int], level: int) -> list[int]:
        """Rooms for chains, cut where the draft is not sure of the token it is about to choose."""
        assert out.logits is not None and out.slots is not None
        best = out.logits.amax(1) - out.logits.logsumexp(1)
        cut = list(rooms)
        for b, chance in zip(out.slots.request.tolist(), best.exp().tolist(), strict=True):
            if not chance >= self.floor:
                cut[b] = min(rooms[b], level + batch.requests[b].sampled)
        return cut


def grow(nodes: Proposal, choice: Tensor, request: Tensor, rooms: Sequence[int]) -> Proposal:
    """One more node at the end of every chain that may still grow; `choice` comes for the requests in `request`."""
    level, device = nodes.columns, nodes.tokens.device
    column = torch.zeros(len(rooms), 1, dtype=torch.int64, device=device)
    column[request, 0] = choice
    widths = tuple(min(room, level + 1) for room in rooms)
    return Proposal(
        torch.cat([nodes.tokens, column.clamp(min=0)], dim=1),
        torch.arange(-1, level, device=device).expand(len(rooms), level + 1),
        torch.tensor(widths).to(device, non_blocking=True),
        torch.zeros(len(rooms), level + 1, dtype=torch.int64, device=device),
        widths,
        linear=True,
    )


def _linear(tokens: Tensor, sizes: Tensor, widths: tuple[int, ...]) -> Proposal:
    """Chains `[B, N]` of `sizes [B]`, at most `widths`."""
    parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
    return Proposal(tokens, parents, sizes, torch.zeros_like(tokens), widths, linear=True)


def spread(nodes: Proposal, chosen: Sequence[int], count: int) -> Proposal:
    """Chains of the `chosen` requests as a proposal for all `count` of a batch."""
    if len(chosen) == count:
        return nodes
    at = torch.tensor(chosen).to(nodes.tokens.device, non_blocking=True)
    tokens = nodes.tokens.new_zeros(count, nodes.columns).index_copy_(0, at, nodes.tokens)
    sizes = nodes.sizes.new_zeros(count).index_copy_(0, at, nodes.sizes)
    widths = [0] * count
    for b, width in zip(chosen, nodes.widths, strict=True):
        widths[b] = width
    parents = nodes.parents[:1].expand(count, nodes.columns)
    return replace(nodes, tokens=tokens, parents=parents, sizes=sizes, source=torch.zeros_like(tokens), widths=tuple(widths))


def _some(batch: Batch, chosen: Sequence[int]) -> Batch:
    if len(chosen) == len(batch):
        return batch

    def of(field: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(field[b] for b in chosen)

    return Batch(of(batch.requests), of(batch.pending), of(batch.ready), of(batch.room))
