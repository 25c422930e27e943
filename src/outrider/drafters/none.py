"""No drafter: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocols import Drafter
from ..registry import register
from ..types import Batch, Budget, Proposal, Request


@register("none")
class NoDrafter(Drafter):
    """Proposes nothing."""

    depth = 0
    nodes = 0

    def __init__(self, config: None = None) -> None:
        pass

    def follows(self, requests: Sequence[Request], guessing: bool = True) -> bool:
        return True

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        return Proposal.empty(len(batch))
