"""A pass as one replay of a CUDA graph, where it is so narrow that its kernels run faster than they can be launched one by one.

That is: prompts of some hundred tokens, and rounds that captured ones (`rounds.py`) cannot do: log-probabilities,
classical rules, features for drafters. The graph holds the layers; what is asked of their states stays with the caller.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .rounds import COLUMNS, LENGTHS, bucket
from .rows import Rows

if TYPE_CHECKING:
    from .native import Native
    from .rounds import Machine

ROWS = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
REQUESTS = (1, 4, 16, 48, 96)
NARROW, WORK = 1024, 4e10
"""Rows that are narrow for any model, and rows times a layer's weights up to which a layer runs faster than it is launched (0.2
milliseconds, at 400 Tflop/s)."""


class Shape(NamedTuple):
    """`requests` B, `rows` R, `columns` of paths, a bound on sequence lengths, how many tiles, whether guesses branch and one
    program walks a tile's whole past, which layers' inputs are kept."""

    requests: int
    rows: int
    columns: int
    longest: int
    tiles: int
    tree: bool
    serial: bool
    taps: tuple[str, ...]


def shape_of(rows: Rows, per_tile: int, taps: Collection[str], most: int = ROWS[-1]) -> Shape | None:
    """The smallest bucket for a pass of at most `most` rows; None where there is none."""
    where = rows.where
    count = bucket(rows.token.shape[0], ROWS)
    requests, columns = bucket(where.known.shape[0], REQUESTS), bucket(where.path.shape[1], COLUMNS)
    longest = bucket(where.longest, LENGTHS)
    if count is None or requests is None or columns is None or longest is None:
        return None
    if count > most or (rows.tree and rows.serial):
        return None
    return Shape(requests, count, columns, longest, requests + count // per_tile, rows.tree, rows.serial, tuple(sorted(taps)))


class Passes:
    """Captured passes of a decoder over one cache, in the memory of `machine`'s graphs."""

    def __init__(self, decoder: Native, cache: Any, machine: Machine) -> None:
        self.decoder, self.cache, self.machine = decoder, cache, machine
        self._met = set[Shape]()
        self.most = max(NARROW, int(WORK * decoder.num_layers / max(1, _weights(decoder))))

    def run(self, rows: Rows, taps: Collection[str]) -> tuple[Tensor, dict[str, Tensor]] | None:
        """States `[R, width]` after the final norm, and the inputs of the layers in `taps`; None where the pass is too wide."""
        from ..kernels.attention import rows_per_tile

        shape = shape_of(rows, rows_per_tile(self.decoder.group), taps, self.most)
        if shape is None:
            return None
        if shape.serial and shape not in self._met:  # a wide pass may be the only one of its kind
            self._met.add(shape)
            return None
        return self.machine.kept(shape, lambda: Pass(shape, self)).play(rows)


class Pass:
    """One captured shape. Rows it has no use for stand nowhere and write to the scratch page."""

    def __init__(self, shape: Shape, owner: Passes) -> None:
        from ..kernels.attention import Where

        self.shape, self.owner = shape, owner
        device = owner.decoder.device

        def some(*size: int, dtype: torch.dtype = torch.int32, fill: int = 0) -> Tensor:
            return torch.full(size, fill, dtype=dtype, device=device)

        where = Where(
            some(shape.rows, fill=-1),
            some(shape.requests),
            some(shape.rows, shape.columns),
            some(shape.requests, shape.longest // owner.cache.block_size + 1),
            some(shape.tiles, 3),
            shape.longest,
        )
        longest = min(shape.longest, owner.decoder.max_len)
        token, write = some(shape.rows, dtype=torch.int64), some(shape.rows, dtype=torch.int64)
        self.rows = Rows(token, some(shape.rows), write, where, shape.tree, shape.serial, longest)
        self.taps: dict[str, Tensor] = {}
        self.normed = token
        self.graph = owner.machine.captured(self._work)

    def _work(self) -> None:
        decoder = self.owner.decoder
        self.taps = dict.fromkeys(self.shape.taps, self.normed)
        self.normed, _ = decoder.states(self.rows, self.owner.cache, range(decoder.num_layers), taps=self.taps)

    def play(self, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        """Run it. What it gives is the caller's own."""
        mine, where, given = self.rows, self.rows.where, rows.where
        count = rows.token.shape[0]
        for part, value, idle in (
            (mine.token, rows.token, 0),
            (mine.position, rows.position, 0),
            (mine.write, rows.write, 0),
            (where.position, given.position, -1),
            (where.known, given.known, 0),
            (where.tiles, given.tiles, 0),
        ):
            part[: len(value)] = value
            part[len(value) :] = idle
        where.table[: given.table.shape[0], : given.table.shape[1]] = given.table[:, : where.table.shape[1]]
        where.path[:count, : given.path.shape[1]] = given.path
        if self.graph is None:
            self._work()
        else:
            self.graph.replay()
        return self.normed[:count].clone(), {name: tap[:count].clone() for name, tap in self.taps.items()}


def _weights(decoder: Native) -> int:
    """How many numbers all layers multiply by."""
    return sum(w.shape[0] * w.shape[1] for b in decoder.stack for w in (b.qkv, b.out, b.gate_up, b.down))
