"""What a request allows, whoever decides: its prompt is read, there is room for guesses, and the user's word."""

from __future__ import annotations

import math

from ..protocols import Drafter
from ..types import Batch, Budget, Request


def bounds(batch: Batch, b: int, wish: int) -> tuple[int, int]:
    """Least and most look-ahead of request b, where the drafter would like `wish`.

    `(0, 0)` while the prompt is read, with one token left to write, or under `draft="none"`. The two are equal where the user
    set `depth`. They are equal, too, for sampled requests of a classical rule that name a seed: their text depends on the depth,
    and whoever names a seed wants the same text again, on a slower machine as well."""
    request = batch.requests[b]
    params = request.params
    able = batch.ready[b] and batch.pending[b] == 1 and request.computed >= request.prompt_len
    if not able or params.draft is not None:
        return 0, 0
    most, left = batch.room[b], request.room - 1
    most = most if most < left else left if left > 0 else 0
    if params.max_depth is not None:
        most = min(most, params.max_depth)
    if params.depth is not None:
        most = min(most, params.depth)
        return most, most
    most = min(most, wish)
    return (most, most) if request.sampled and params.seed is not None else (0, most)


def all_bounds(batch: Batch, wish: int) -> list[tuple[int, int]]:
    """`bounds` of every request."""
    return [bounds(batch, b, wish) for b in range(len(batch))]


def is_open(request: Request) -> bool:
    """Whether it is open how far to look ahead for a request; see `bounds`."""
    params = request.params
    return params.draft is None and params.depth is None and not (request.sampled and params.seed is not None)


class Shape:
    """How many nodes go with a depth: as many as the drafter has at its full depth, in proportion."""

    def __init__(self, drafter: Drafter) -> None:
        self.depth = drafter.depth
        self.width = max(1.0, drafter.nodes / max(1, drafter.depth))

    def nodes(self, levels: int, width: float) -> int:
        """Nodes of so many levels with `width` nodes each, of those that the drafter has."""
        return max(levels, math.ceil(min(levels, self.depth) * width))

    def budget(self, batch: Batch, depths: list[int], width: float | None = None) -> Budget:
        """The depths with their nodes, within the room there is; `width` nodes a level (None: all) for whom it is open."""
        own = [self.width if width is None or not is_open(r) else width for r in batch.requests]
        nodes = [min(self.nodes(d, w), room) for d, w, room in zip(depths, own, batch.room, strict=True)]
        return Budget(tuple(depths), tuple(nodes))
