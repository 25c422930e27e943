"""Depth by acceptance alone: as deep as guesses have a fair chance, whatever they cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate
from operator import mul

from ..protocols import Drafter
from ..types import Batch, Budget, StepEvent
from .book import Book, State
from .limits import Shape, bounds
from .plain import Plain
from .rates import estimate
from .shelf import Known
from .story import Story

FAIR = 0.3
"""Chance of being accepted that the deepest guess must have."""
HOPELESS = 0.1
"""Chance of the first guess below which none is made."""
PROBE_EVERY = 16
"""Rounds without guesses after which one is tried."""


class Adaptive(Plain):
    """Per request, from its own recent acceptance by position, shrunk to everybody's (which is all that is known of a new
    request). The depth grows and shrinks by one level a round."""

    name = "adaptive"

    def __init__(self, drafter: Drafter, clock: Callable[[], float] = time.perf_counter) -> None:
        self._shape = Shape(drafter)
        self._book = Book(Known(drafter.depth))
        self._story = Story(self.name, clock)

    def budget(self, batch: Batch) -> Budget:
        """The look-ahead of this round, from the rounds before."""
        beliefs = self._book.known.chances(len(batch)).accept.beliefs()
        depths, free, firsts = [], [], []
        for b, request in enumerate(batch.requests):
            low, high = bounds(batch, b, self._shape.depth)
            if high > low:
                state = self._book.state(request)
                chances = estimate(state.accept, beliefs)
                low = min(high, self._next(state, chances))
                free.append(low)
                firsts.append(chances[0])
            depths.append(low)
        self._book.ask(batch, depths)
        if free:
            self._story.count(free)
            self._story.change(sum(free) / len(free), lambda: f"first guess accepted {sum(firsts) / len(firsts):.0%}")
        return self._shape.budget(batch, depths)

    def observe(self, event: StepEvent) -> None:
        """Learn which guesses were accepted."""
        self._book.settle(event)

    @property
    def reason(self) -> str:
        """Why the depth was last changed."""
        return self._story.reason

    def explain(self) -> str:
        return self._story.explain()

    def _next(self, state: State, chances: list[float]) -> int:
        """One step from the last depth towards the one that is fair now."""
        fair = sum(c >= FAIR for c in accumulate(chances, mul))
        if chances[0] < HOPELESS:
            state.depth = 0
            return int(self._book.round - state.drafted >= PROBE_EVERY)
        goal = max(1, fair)
        last = goal if state.depth is None else state.depth
        state.depth = max(1, last + (goal > last) - (goal < last))
        return state.depth
