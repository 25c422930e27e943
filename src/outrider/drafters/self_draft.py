"""The target drafts for itself: no gain, but a test that finds most bugs. Every round must commit N + 1 tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BadInput
from ..protocols import Drafter, Needs, Start
from ..registry import register
from ..types import Batch, Budget, Proposal
from ._chain import Writer


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
        view = self._view
        return Writer(view, range(view.num_layers)).write(batch, budget)[0]
