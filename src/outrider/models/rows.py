"""A packed pass as the kernels want it: where every row stands, what it may see, where it writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import tree
from ..cache.paged import PagedCache
from ..kernels import BLOCK, there
from ..types import NONE
from .layout import Layout

if TYPE_CHECKING:
    from ..kernels.attention import Where

SERIAL = 128
"""Rows from which on one program walks a row's whole past: partial results of so many rows would cost more than they save."""


@dataclass(frozen=True, slots=True)
class Rows:
    """`token [R]` int64, `position [R]` int32 (within the context), `write [R]` int64 KV slots, `where` as attention reads it;
    `longest` bounds position + 1."""

    token: Tensor
    position: Tensor
    write: Tensor
    where: Where
    tree: bool
    serial: bool
    longest: int


def anchors(cache: object) -> bool:
    """Whether the anchored kernels can serve this KV: paged, on CUDA, in a dtype they know."""
    if not isinstance(cache, PagedCache) or not there(cache.device.type) or cache.block_size != BLOCK:
        return False
    return cache.dtype in (torch.bfloat16, torch.float16, torch.float32)


def rows_of(layout: Layout, cache: Any, group: int, max_len: int) -> Rows:
    """The rows of a layout, for `group` query heads per KV head."""
    from ..kernels.attention import Where, rows_per_tile

    device = layout.tokens.device
    requests = [s.request for s in layout.spans]
    known = torch.tensor([s.known for s in layout.spans], dtype=torch.int32)
    tiles = torch.tensor(tiles_of(((s.lo, s.hi) for s in layout.spans), rows_per_tile(group)), dtype=torch.int32)
    path = (
        _paths(layout) if layout.ancestors is not None else torch.zeros(len(layout.tokens), 0, dtype=torch.int32, device=device)
    )
    longest = max(s.length for s in layout.spans)
    position = layout.rows.position
    where = Where(
        position.int(),
        known.to(device, non_blocking=True),
        path,
        cache.table(requests).int(),
        tiles.to(device, non_blocking=True),
        longest,
    )
    clamped = position.clamp(max=max_len - 1).int()
    serial = len(layout.tokens) >= SERIAL
    return Rows(layout.tokens, clamped, layout.write, where, layout.ancestors is not None, serial, min(longest, max_len))


def tiles_of(spans: Iterable[tuple[int, int]], size: int) -> list[tuple[int, int, int]]:
    """(request, first row, rows) of tiles of at most `size` rows, none across requests; request b has rows `lo..hi - 1`."""
    return [(b, row, min(size, hi - row)) for b, (lo, hi) in enumerate(spans) for row in range(lo, hi, size)]


def _paths(layout: Layout) -> Tensor:
    """`[R, N]` int32: virtual indices of each node row's ancestors and itself, root first; a known row has none."""
    nodes = layout.proposal
    live = tree.used(nodes.sizes, nodes.columns)
    columns = tree.paths(nodes.parents.where(live, -1))  # [B, N, N]
    known = torch.zeros(len(nodes.widths), dtype=torch.int64)
    for span in layout.spans:
        known[span.index] = span.known
    rows, base = layout.rows, known.to(columns.device, non_blocking=True)[layout.rows.request]
    column = rows.virtual - base
    mine = columns[rows.request, column.clamp(min=0)]
    path = torch.where(mine == NONE, 0, mine + base[:, None])
    return path.where((column >= 0)[:, None], 0).int()
