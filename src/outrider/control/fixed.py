"""Always the same look-ahead."""

from __future__ import annotations

from ..protocols import Drafter
from ..types import Batch, Budget, StepEvent
from .limits import bounds
from .plain import Plain


class Fixed(Plain):
    """Always what the drafter asks for, within what request, context and memory allow; nothing for requests that are still
    reading their prompt or have one token left to write. A request's own `depth`, `max_depth` and `draft` win."""

    name = "fixed"

    def __init__(self, drafter: Drafter) -> None:
        self._depth, self._nodes = drafter.depth, drafter.nodes

    def budget(self, batch: Batch) -> Budget:
        """The look-ahead of this round."""
        if not self._nodes:
            return Budget.none(len(batch))
        depths = [bounds(batch, b, self._depth)[1] for b in range(len(batch))]
        nodes = [min(max(self._nodes, d), room) if d else 0 for d, room in zip(depths, batch.room, strict=True)]
        return Budget(tuple(depths), tuple(nodes))

    def observe(self, event: StepEvent) -> None:
        """Nothing to learn."""

    def explain(self) -> str:
        return f"fixed: depth {self._depth}"
