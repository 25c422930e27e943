"""Inputs of the kernels at real shapes, for checks and timing on a GPU: attention's paged worlds, requests in lanes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.gpu.shapes import graphed, milliseconds, request
from torch import Tensor

from outrider.kernels.attention import TUNING, Form, Tuning, Where, attention, rows_per_tile
from outrider.kernels.choose import Asked
from outrider.kernels.rounds import Lanes
from outrider.models.lanes import LaneBook, filters
from outrider.models.rows import tiles_of
from outrider.types import NONE, Request, Slots

CARD = torch.device("cuda")


def microseconds(works: Sequence[Callable[[], object]], launches: int = 20) -> float:
    """Median time of one launch: `launches` of them, in turn, in a CUDA graph's replay; median of 20 replays."""
    turns = list(itertools.islice(itertools.cycle(works), launches))

    def work() -> None:
        for turn in turns:
            turn()

    return round(milliseconds(graphed(work))["median"] * 1000 / launches, 2)


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=CARD)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(CARD).manual_seed(seed), device=CARD).to(dtype)


@dataclass(frozen=True)
class Attend:
    """Rows over paged KV. `slots[r]`: KV slots of row r's positions, 0 first (of trees only)."""

    q: Tensor
    pool: tuple[Tensor, Tensor]
    where: Where
    form: Form
    slots: list[Tensor]

    def run(self, tuning: Tuning = TUNING) -> Tensor:
        return attention(self.q, self.pool, self.where, self.q.shape[2] ** -0.5, self.form, tuning)

    def alone(self, row: int, serial: bool) -> Tensor:
        """One row as the last of a sequence that was always a sequence; KV that it may not see is NaN."""
        slots, length = self.slots[row], len(self.slots[row])
        virtual = torch.arange(length, device=CARD)
        straight = self.where.table[0, virtual // 64].long() * 64 + virtual % 64
        pool = torch.full_like(self.pool[0], math.nan), torch.full_like(self.pool[1], math.nan)
        for new, old in zip(pool, self.pool, strict=True):
            new[straight] = old[slots]
        nothing = torch.zeros(1, 0, dtype=torch.int32, device=CARD)
        where = Where(ints([length - 1]), ints([length]), nothing, self.where.table, ints([[0, 0, 1]]), 16384)
        form = replace(self.form, tree=False, serial=serial)
        return replace(self, q=self.q[row : row + 1], pool=pool, where=where, form=form).run()[0]

    def exact(self, row: int) -> Tensor:
        """The row in fp64."""
        slots, group = self.slots[row], self.q.shape[1] // self.pool[0].shape[1]
        slots = slots[-self.form.window :] if self.form.window else slots
        keys, values = (x[slots].double().repeat_interleave(group, 1) for x in self.pool)
        scores = torch.einsum("hd,nhd->hn", self.q[row].double(), keys) * self.q.shape[2] ** -0.5
        if self.form.softcap:
            scores = self.form.softcap * torch.tanh(scores / self.form.softcap)
        return torch.einsum("hn,nhd->hd", scores.softmax(1), values)


def tree(heads: tuple[int, int, int], known: int, parents: Sequence[int], form: Form) -> Attend:
    """A request's last known token and a tree of guesses below it. `heads`: query heads, KV heads, head size."""
    count, kv, dim = heads
    nodes = len(parents)
    blocks = (known + nodes) // 64 + 1
    table = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(known))[:blocks] + 1
    slots_of = (table[:, None] * 64 + torch.arange(64)).reshape(-1).to(CARD)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), known + node])
    path = torch.zeros(nodes + 1, nodes + 1, dtype=torch.int32)
    for node, one in enumerate(paths):
        path[node + 1, : len(one)] = torch.tensor(one)
    position = ints([known - 1, *(known - 1 + len(p) for p in paths)])
    tiles = ints(tile([nodes + 1], rows_per_tile(count // kv)))
    where = Where(position, ints([known]), path.to(CARD), table[None].int().to(CARD), tiles, known + nodes + 1)
    pool = normal(64 * (2 * blocks + 1), kv, dim, seed=1), normal(64 * (2 * blocks + 1), kv, dim, seed=2)
    slots = [slots_of[[*range(known), *p]] for p in [[], *paths]]
    return Attend(normal(nodes + 1, count, dim), pool, where, form, slots)


def tile(rows: Sequence[int], size: int) -> list[tuple[int, int, int]]:
    """(request, first row, rows) for requests of so many rows each."""
    return tiles_of(itertools.pairwise([0, *itertools.accumulate(rows)]), size)


def chains(
    heads: tuple[int, int, int], context: int, rows: Sequence[int], tuning: Tuning = TUNING, serial: bool = False
) -> list[Attend]:
    """The same pass on KV of many layers, so that no cache holds it: request b has `rows[b]` rows after `context` tokens."""
    count, kv, dim = heads
    blocks = (context + max(rows) + 63) // 64
    table = torch.arange(1, len(rows) * blocks + 1, dtype=torch.int32, device=CARD).reshape(len(rows), blocks)
    position = ints([context + i for n in rows for i in range(n)])
    nothing = torch.zeros(sum(rows), 0, dtype=torch.int32, device=CARD)
    tiles = ints(tile(rows, rows_per_tile(count // kv)))
    known = ints([context + n for n in rows])
    where = Where(position, known, nothing, table, tiles, context + max(rows))
    slots = 64 * (len(rows) * blocks + 1)
    layers = max(2, min(20, 120_000_000 // (slots * kv * dim * 4)))
    q = normal(sum(rows), count, dim)
    pools = [(normal(slots, kv, dim, seed=i), normal(slots, kv, dim, seed=i + 100)) for i in range(layers)]
    return [Attend(q, pool, where, Form(serial=serial), []) for pool in pools]


class InLanes:
    """Requests in lanes, and rows that point at them."""

    def __init__(self, params: Sequence[dict[str, Any]]) -> None:
        self.requests: tuple[Request, ...] = tuple(request([1, 2, i], 64, seed=i, **p) for i, p in enumerate(params))
        self.lanes = Lanes.make(len(params) + 1, 4, CARD)
        self.lane = ints(LaneBook(self.lanes, SimpleNamespace(blocks=lambda r: ())).take(self.requests))
        self.filters = any(map(filters, self.requests))

    def rows(self, which: Tensor, position: Tensor) -> Any:
        """What `choose` wants to know of rows of requests `which` for tokens at `position`."""
        return Asked(self.lane[which], position.int())

    def slots(self, which: Tensor, position: Tensor) -> Slots:
        """The same for a sampler."""
        nothing = torch.full((len(which), 0), NONE, device=CARD)
        return Slots(self.requests, which, position, nothing, torch.zeros_like(which))
