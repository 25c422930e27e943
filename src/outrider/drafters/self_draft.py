"""The target drafts for itself: no gain, but a test that finds most bugs. Every round must commit N + 1 tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import BadInput
from ..protocols import Drafter, Needs, Start
from ..registry import register
from ..types import Batch, Budget, Proposal


@register("self")
class SelfDraft(Drafter):
    """Runs all layers of the target, one token at a time, writing KV where verification will overwrite it."""

    needs = Needs(target=True)

    @dataclass(frozen=True, slots=True)
    class Config:
        """`depth`: tokens guessed per round."""

        depth: int = 4

    def __init__(self, config: Config) -> None:
        if config.depth < 1:
            raise BadInput(f"self needs depth >= 1, got {config.depth}")
        self.depth = self.nodes = config.depth

    def start(self, start: Start) -> None:
        assert start.view is not None
        self._view = start.view

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        view, depth = self._view, max(budget.depth)
        layers = range(view.num_layers)
        nodes = Proposal.empty(len(batch), view.device)
        for level in range(depth):
            out = view.run(batch, nodes, layers, start=level)
            if out.logits is None or out.slots is None:
                break
            nodes = _grow(nodes, view.sampler.choose(out.logits, out.slots), out.slots.request, budget.depth)
        return view.sampler.attach(batch, nodes)


def _grow(nodes: Proposal, choice: torch.Tensor, request: torch.Tensor, depth: tuple[int, ...]) -> Proposal:
    """One more node at the end of every chain that may still grow; `choice` comes for the requests in `request`."""
    level, device = nodes.columns, nodes.tokens.device
    column = torch.zeros(len(depth), 1, dtype=torch.int64, device=device)
    column[request, 0] = choice
    widths = tuple(min(d, level + 1) for d in depth)
    return Proposal(
        torch.cat([nodes.tokens, column.clamp(min=0)], dim=1),
        torch.arange(-1, level, device=device).expand(len(depth), level + 1),
        torch.tensor(widths, device=device),
        torch.zeros(len(depth), level + 1, dtype=torch.int64, device=device),
        widths,
        linear=True,
    )
