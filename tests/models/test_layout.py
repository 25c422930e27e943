"""The layout of a pass against a row-by-row definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import oracle
from outrider.models.layout import Layout
from outrider.types import NONE, ROOT, Batch, Proposal, Request

from .. import tiny


class Strided:
    """A cache of which only the addresses matter: virtual index i of request r is slot 1000 r + 3 i."""

    def slots(self, request: Request, start: int, end: int) -> torch.Tensor:
        return 1000 * request.id + 3 * torch.arange(start, end)


@dataclass(frozen=True)
class Row:
    token: int
    request: int
    position: int
    virtual: int
    slot: int
    write: int
    scored: bool
    sees: frozenset[int]
    """Virtual indices without a window."""


@dataclass
class Part:
    length: int
    computed: int
    fed: int
    tree: list[tuple[int, int]]


@st.composite
def parts(draw: st.DrawFn, chain: bool) -> Part:
    length = draw(st.integers(1, 9))
    computed = draw(st.integers(0, length - 1))
    fed = draw(st.integers(1, length - computed))
    tree = []
    for column in range(draw(st.integers(0, 6))):
        parent = column - 1 if chain else draw(st.integers(ROOT, column - 1))
        tree.append((draw(st.integers(0, 40)), parent))
    return Part(length, computed, fed, tree if fed == length - computed else [])


def build(items: list[Part], start: int | list[int], linear: bool) -> tuple[Batch, Proposal, Layout]:
    requests = []
    for i, part in enumerate(items):
        made = tiny.request(range(100 * i, 100 * i + part.length))
        made.computed, made.id = part.computed, i + 1
        requests.append(made)
    ready = tuple(p.computed + p.fed == p.length for p in items)
    batch = Batch(tuple(requests), tuple(p.fed for p in items), ready, (9,) * len(items))
    trees = [p.tree for p in items]
    nodes = Proposal.chains([[t for t, _ in tree] for tree in trees]) if linear else Proposal.trees(trees)
    return batch, nodes, Layout.build(batch, nodes, Strided(), start)  # type: ignore[arg-type]


def definition(items: list[Part], starts: list[int]) -> list[Row]:
    rows = []
    for b, (part, start) in enumerate(zip(items, starts, strict=True)):
        known, parents = part.computed + part.fed, [p for _, p in part.tree]
        reaches = known == part.length
        if start == 0:
            for i in range(part.computed, known):
                last = i == known - 1 and reaches
                sees = frozenset(range(i + 1))
                rows.append(Row(100 * b + i, b, i, i, 0 if last else NONE, 1000 * (b + 1) + 3 * i, last, sees))
        for c in range(max(start - 1, 0), len(part.tree)):
            path = oracle.path_to(parents, c)
            virtual, position = known + c, known + len(path) - 1
            sees = frozenset([*range(known), *(known + p for p in path)])
            rows.append(Row(part.tree[c][0], b, position, virtual, c + 1, 1000 * (b + 1) + 3 * virtual, True, sees))
    return rows


def rows_of(layout: Layout) -> list[Row]:
    out, scored = [], set(layout.scored.tolist())
    columns = (layout.tokens, layout.rows.request, layout.rows.position, layout.rows.virtual, layout.rows.slot, layout.write)
    fields = [c.tolist() for c in columns]
    for span in layout.spans:
        visible = layout.visible(span)
        for r in range(span.lo, span.hi):
            sees = range(span.length) if visible is None else visible[r - span.lo].nonzero()[:, 0].tolist()
            out.append(Row(*(f[r] for f in fields), r in scored, frozenset(sees)))
    return out


@pytest.mark.parametrize("chain", [True, False])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_rows_equal_the_definition(chain: bool, data: st.DataObject) -> None:
    items = data.draw(st.lists(parts(chain), min_size=1, max_size=4))
    starts = [data.draw(st.integers(0, len(p.tree) + 1)) for p in items] if data.draw(st.booleans()) else [0] * len(items)
    want = definition(items, starts)
    for linear in {chain, False}:
        if not want:
            return
        batch, nodes, layout = build(items, starts, linear)
        assert rows_of(layout) == want
        assert layout.linear == linear and layout.tokens.dtype == layout.write.dtype == torch.int64
        check_slots(batch, nodes, layout, items)


def check_slots(batch: Batch, nodes: Proposal, layout: Layout, items: list[Part]) -> None:
    """Where scored rows stand: the tokens of their own path, and the position of the token to come."""
    slots = layout.slots(batch)
    for s, row in enumerate(layout.scored.tolist()):
        b, slot = int(layout.rows.request[row]), int(layout.rows.slot[row])
        path = oracle.path_to([p for _, p in items[b].tree], slot - 1) if slot else []
        depth = int(slots.depth[s])
        assert (int(slots.request[s]), depth) == (b, len(path))
        assert slots.path[s].tolist() == [items[b].tree[c][0] for c in path] + [NONE] * (slots.path.shape[1] - depth)
        assert int(slots.position[s]) == items[b].length + depth


@settings(max_examples=150, deadline=None)
@given(data=st.data(), window=st.integers(1, 8))
def test_windows_are_measured_in_positions(data: st.DataObject, window: int) -> None:
    items = data.draw(st.lists(parts(False), min_size=1, max_size=3))
    _, _, layout = build(items, 0, False)
    everything = definition(items, [0] * len(items))
    where = {(r.request, r.virtual): r.position for r in everything}
    for span in layout.spans:
        visible = layout.visible(span, window)
        assert visible is not None
        for r in range(span.lo, span.hi):
            row = everything[r]
            near = {v for v in row.sees if row.position - where.get((row.request, v), v) < window}
            assert set(visible[r - span.lo].nonzero()[:, 0].tolist()) == near
            assert row.virtual in near, "every row sees itself"


def test_a_single_new_token_needs_no_mask() -> None:
    _, _, layout = build([Part(5, 4, 1, [])], 0, True)
    assert layout.visible(layout.spans[0]) is None
    assert layout.visible(layout.spans[0], 3).tolist() == [[False, False, True, True, True]]


def test_bounds_of_sizes_make_rows_that_nobody_looks_at() -> None:
    """`widths` says 3 for both, `sizes` 1 and 3: rows are laid out by widths, and those in use see no others."""
    requests = tuple(tiny.request([5, 6]) for _ in range(2))
    for r in requests:
        r.computed = 1
    batch = Batch(requests, (1, 1), (True, True), (9, 9))
    tokens, parents = torch.tensor([[7, 0, 0], [8, 9, 10]]), torch.tensor([[ROOT, ROOT, ROOT], [ROOT, 0, ROOT]])
    nodes = Proposal(tokens, parents, torch.tensor([1, 3]), torch.zeros(2, 3, dtype=torch.int64), (3, 3))
    layout = Layout.build(batch, nodes, Strided())  # type: ignore[arg-type]
    assert layout.tokens.tolist() == [6, 7, 0, 0, 6, 8, 9, 10]
    assert layout.rows.position.tolist()[:2] == [1, 2] and layout.rows.position.tolist()[4:] == [1, 2, 3, 2]
    visible = layout.visible(layout.spans[0])
    assert visible[:2].tolist() == [[True, True, False, False, False], [True, True, True, False, False]]


def test_prompt_chunks_are_marked() -> None:
    def prompt(length: int, prompt_len: int, computed: int, start: int = 0, **extra: Any) -> list[bool]:
        made = tiny.request([1] * length)
        made.prompt_len, made.computed = prompt_len, computed
        batch = Batch((made,), (length - computed,), (True,), (2,))
        return [s.prompt for s in Layout.build(batch, Proposal.chains([[3, 4]]), Strided(), start).spans]  # type: ignore[arg-type]

    assert prompt(6, 6, 0) == [True] and prompt(6, 4, 4) == [False] and prompt(6, 6, 3, start=1) == [False]


def test_computed_may_be_overridden() -> None:
    made = tiny.request([5, 6, 7, 8])
    made.computed = 3
    layout = Layout.build(Batch((made,), (2,), (True,), (0,)), Proposal.empty(1), Strided(), 0, [1])  # type: ignore[arg-type]
    assert layout.tokens.tolist() == [6, 7] and layout.rows.slot.tolist() == [NONE, NONE]
    layout = Layout.build(Batch((made,), (4,), (True,), (0,)), Proposal.empty(1), Strided(), 0, [0])  # type: ignore[arg-type]
    assert layout.rows.slot.tolist() == [NONE, NONE, NONE, 0] and layout.scored.tolist() == [3]
