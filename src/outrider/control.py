"""How far to look ahead."""

from __future__ import annotations

from .protocols import Drafter
from .types import Batch, Budget, StepEvent


class Fixed:
    """Always what the drafter asks for, within what request, context and memory allow; nothing for requests that are still
    reading their prompt or have one token left to write. A request's own `depth` wins."""

    def __init__(self, drafter: Drafter) -> None:
        self._depth, self._nodes = drafter.depth, drafter.nodes

    def budget(self, batch: Batch) -> Budget:
        """The look-ahead of this round."""
        depths, nodes = [], []
        for b, request in enumerate(batch.requests):
            wish = self._depth if request.params.depth is None else request.params.depth
            able = batch.ready[b] and batch.pending[b] == 1 and request.computed >= request.prompt_len
            depth = max(0, min(wish, batch.room[b], request.room - 1)) if able else 0
            depths.append(depth)
            nodes.append(min(max(self._nodes, depth), batch.room[b]) if depth else 0)
        return Budget(tuple(depths), tuple(nodes))

    def observe(self, event: StepEvent) -> None:
        """Nothing to learn."""
