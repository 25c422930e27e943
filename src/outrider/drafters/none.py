"""No drafter: plain decoding."""

from __future__ import annotations

from ..protocols import Drafter
from ..registry import register
from ..types import Batch, Budget, Proposal


@register("none")
class NoDrafter(Drafter):
    """Proposes nothing."""

    depth = 0
    nodes = 0
    blind = True

    def __init__(self, config: None = None) -> None:
        pass

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        return Proposal.empty(len(batch))
