"""Attention against a plain fp64 reference, and against itself: the same row in other company."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from outrider.kernels.attention import TUNING, Form, Where, attention, rows_per_tile
from tests.kernels.places import CARD, DEVICE, DTYPES, near, same

SHAPES = [
    # group, KV heads, head size, known, nodes, window, softcap
    (3, 1, 64, 130, 7, None, None),
    (4, 2, 32, 60, 5, None, None),
    (1, 1, 96, 250, 9, 70, None),
    (6, 1, 64, 126, 6, None, 5.0),
    (2, 1, 16, 1, 4, 3, None),
]
if CARD:
    SHAPES += [(4, 8, 128, 700, 40, None, None), (6, 2, 128, 513, 16, 200, 20.0), (3, 3, 64, 5, 63, None, None)]


@dataclass(frozen=True)
class World:
    """One request's tree over paged KV. `slots[r]` are the KV slots of row r's positions, 0 first."""

    q: Tensor
    keys: Tensor
    values: Tensor
    where: Where
    slots: list[list[int]]
    form: Form

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5

    def run(self, **changes: object) -> Tensor:
        return attention(self.q, (self.keys, self.values), self.where, self.scale, replace(self.form, **changes))  # type: ignore[arg-type]


def world(shape: tuple, dtype: torch.dtype = torch.float32, seed: int = 0) -> World:
    group, kv, dim, known, nodes, window, cap = shape
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    blocks = (known + nodes) // 64 + 2
    table = [rng.sample(range(1, 2 * blocks + 1), blocks)]
    keys, values = (torch.randn(64 * (2 * blocks + 1), kv, dim, generator=generator).to(DEVICE, dtype) for _ in range(2))
    q = torch.randn(nodes + 1, group * kv, dim, generator=generator).to(DEVICE, dtype)
    paths: list[list[int]] = []
    for node in range(nodes):
        parent = rng.randrange(-1, node)
        paths.append([*(paths[parent] if parent >= 0 else []), known + node])
    table_of_paths = torch.zeros(nodes + 1, nodes + 1, dtype=torch.int32)
    for node, path in enumerate(paths):
        table_of_paths[node + 1, : len(path)] = torch.tensor(path)
    per_tile = rows_per_tile(group)
    tiles = [(0, r, min(per_tile, nodes + 1 - r)) for r in range(0, nodes + 1, per_tile)]
    where = Where(
        ints([known - 1] + [known - 1 + len(path) for path in paths]),
        ints([known]),
        table_of_paths.to(DEVICE),
        ints(table),
        ints(tiles),
        known + nodes + 1,
    )
    slots = [[table[0][v // 64] * 64 + v % 64 for v in [*range(known), *path]] for path in [[], *paths]]
    return World(q, keys, values, where, slots, Form(window, cap, tree=True))


def ints(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def reference(w: World, row: int) -> Tensor:
    """Softmax attention of one row in fp64."""
    slots, (heads, dim) = w.slots[row], w.q.shape[1:]
    slots = slots[max(len(slots) - w.form.window, 0) :] if w.form.window else slots
    group = heads // w.keys.shape[1]
    keys, values = (x[slots].double().repeat_interleave(group, 1) for x in (w.keys, w.values))
    scores = torch.einsum("hd,nhd->hn", w.q[row].double(), keys) / math.sqrt(dim)
    if w.form.softcap:
        scores = w.form.softcap * torch.tanh(scores / w.form.softcap)
    return torch.einsum("hn,nhd->hd", scores.softmax(1), values)


def alone(w: World, row: int, form: Form) -> Tensor:
    """One row as the last token of a sequence that was always a sequence; KV that it may not see is NaN."""
    keys, values = torch.full_like(w.keys, math.nan), torch.full_like(w.values, math.nan)
    length = len(w.slots[row])
    virtual = torch.arange(length, device=DEVICE)
    straight = w.where.table[0, virtual // 64].long() * 64 + virtual % 64
    keys[straight], values[straight] = w.keys[w.slots[row]], w.values[w.slots[row]]
    nothing = torch.zeros(1, 0, dtype=torch.int32, device=DEVICE)
    where = Where(ints([length - 1]), ints([length]), nothing, w.where.table, ints([[0, 0, 1]]), 2048)
    return attention(w.q[row : row + 1], (keys, values), where, w.scale, form)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_are_what_a_plain_reference_says(shape, dtype):
    w = world(shape, dtype)
    out = w.run()
    near(out, torch.stack([reference(w, r) for r in range(len(w.q))]), dtype)
    assert out.dtype is dtype


@pytest.mark.parametrize("serial", [False, True], ids=["parts", "serial"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_node_has_the_bits_of_a_sequence(shape, dtype, serial):
    w = world(shape, dtype, seed=1)
    out = w.run()
    for row in range(len(w.q)):
        same(out[row], alone(w, row, replace(w.form, tree=False, serial=serial)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_chains_prompts_and_trees_agree(dtype, window):
    """Rows 0.. of a prompt, in parts, serially, and as a tree that is a chain."""
    rows, known = (24, 120) if not CARD else (200, 700)
    w = world((3, 1, 32, known, rows - 1, window, None), dtype, seed=2)
    position = torch.arange(known - 1, known - 1 + rows, dtype=torch.int32, device=DEVICE)
    path = torch.zeros(rows, rows, dtype=torch.int32, device=DEVICE)
    for row in range(1, rows):
        path[row, :row] = torch.arange(known, known + row, device=DEVICE)
    w = replace(w, where=replace(w.where, position=position, path=path))
    tree, parts, serial = w.run(), w.run(tree=False), w.run(tree=False, serial=True)
    same(tree, parts)
    same(parts, serial)
    virtual = range(known - 1 + rows)
    slots = [int(w.where.table[0, v // 64]) * 64 + v % 64 for v in virtual]
    w = replace(w, slots=[slots[: known + r] for r in range(rows)])
    near(serial, torch.stack([reference(w, r) for r in range(rows)]), dtype)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_buffers_and_programs_change_no_bit(tree):
    w = world((2, 1, 16, 300, 3, None, None), DTYPES[-1], seed=3)
    out = w.run(tree=tree)
    longer = replace(w, where=replace(w.where, longest=4096)).run(tree=tree)
    fewer = attention(w.q, (w.keys, w.values), w.where, w.scale, replace(w.form, tree=tree), replace(TUNING, most=1))
    assert torch.equal(out, longer)
    assert torch.equal(out, fewer)


SMALL = replace(TUNING, split=64, stretch=2)
"""Stretches of 128 positions, so that a few hundred hold several."""


def merged(w: World, **tuning: int) -> Tensor:
    return attention(w.q, (w.keys, w.values), w.where, w.scale, w.form, replace(SMALL, **tuning))


@pytest.mark.parametrize("known", [1, 127, 128, 300])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_who_merges_changes_no_bit(known, tree):
    """A program per split, per stretch, one for all of a tile's, and one that merges everything."""
    whole = w_of((2, 1, 16, known, 3, None, None), tree)
    splits = merged(whole, enough=1 << 30)
    (same if tree else equal)(splits, merged(whole, enough=1))
    equal(splits, merged(whole, enough=1 << 30, most=1))
    equal(merged(whole, enough=1), merged(whole, enough=1, most=1))
    if not tree:
        equal(splits, merged(replace(whole, form=replace(whole.form, serial=True))))


@pytest.mark.parametrize(
    "shape", [(4, 2, 16, 190, 2, 70, None), (1, 1, 24, 200, 3, 64, 5.0), (6, 1, 16, 255, 2, None, 20.0)], ids=str
)
def test_who_merges_changes_no_bit_with_windows_and_caps(shape):
    whole = w_of(shape, tree=False)
    splits = merged(whole, enough=1 << 30)
    equal(splits, merged(whole, enough=1))
    equal(splits, merged(replace(whole, form=replace(whole.form, serial=True))))
    tree = w_of(shape, tree=True)
    same(merged(tree, enough=1 << 30), merged(tree, enough=1))
    near(merged(tree, enough=1), torch.stack([reference(tree, r) for r in range(len(tree.q))]), tree.q.dtype)


@pytest.mark.parametrize("form", ["splits", "stretches", "serial"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_tiles_that_share_their_loads_keep_their_bits(form, tree):
    """Fourteen rows of four lines: two matrix tiles, and one and a half of the next two."""
    w = w_of((3, 1, 32, 140, 13, None, None), tree, torch.float16)
    w = replace(w, form=replace(w.form, serial=form == "serial"))
    enough = 1 if form == "stretches" else 1 << 30
    out = merged(w, enough=enough)
    equal(out, merged(w, enough=enough, pair=1))
    if tree:
        near(out, torch.stack([reference(w, r) for r in range(len(w.q))]), torch.float16)


def test_the_order_of_merging_is_part_of_the_arithmetic():
    """A negative control: these tests would see another order."""
    w = w_of((2, 1, 16, 640, 3, None, None), tree=False)
    assert not torch.equal(merged(w, stretch=1), merged(w, stretch=4))


def w_of(shape: tuple, tree: bool, dtype: torch.dtype = torch.float32) -> World:
    """A tree, or its rows as a chain."""
    w = world(shape, dtype, seed=7)
    if tree:
        return w
    position = torch.arange(len(w.q), dtype=torch.int32, device=DEVICE) + shape[3] - 1
    return replace(w, where=replace(w.where, position=position), form=replace(w.form, tree=False))


def equal(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a, b)


@pytest.mark.parametrize("serial", [False, True], ids=["parts", "serial"])
def test_requests_do_not_see_each_other_and_padding_is_zero(serial):
    """Two requests with tables of their own, a tile without rows, and rows that do not exist."""
    a, b = world((2, 1, 16, 70, 0, None, None), seed=4), world((2, 1, 16, 9, 0, None, None), seed=5)
    offset = len(a.keys) // 64
    keys, values = torch.cat([a.keys, b.keys]), torch.cat([a.values, b.values])
    table = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    table[0], table[1, :1] = a.where.table[0, :2], b.where.table[0, :1] + offset
    q = torch.cat([a.q, b.q, a.q, a.q])
    nothing = torch.zeros(4, 0, dtype=torch.int32, device=DEVICE)
    tiles = ints([[0, 0, 1], [1, 1, 2], [0, 0, 0], [0, 3, 1]])
    where = Where(ints([69, 8, -1, -1]), ints([70, 9]), nothing, table, tiles, 128)
    out = attention(q, (keys, values), where, a.scale, Form(serial=serial))
    same(out[0], a.run(tree=False)[0])
    same(out[1], b.run(tree=False)[0])
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))


@pytest.mark.parametrize("what", ["path", "table", "position", "known"])
def test_a_wrong_map_is_noticed(what):
    """Negative controls: what attention is told matters."""
    w = world((2, 1, 16, 130, 5, None, None), seed=6)
    out = w.run()
    where = w.where
    wrong = {
        "path": replace(where, path=where.path.roll(1, 0)),
        "table": replace(where, table=where.table.roll(1, 1)),
        "position": replace(where, position=where.position.roll(1, 0).clamp(max=130)),
        "known": replace(where, known=where.known - 1),
    }[what]
    assert not torch.allclose(replace(w, where=wrong).run(), out, atol=1e-3)


def test_heads_that_fit_no_tile():
    q, kv = torch.zeros(1, 3, 16, device=DEVICE), torch.zeros(64, 2, 16, device=DEVICE)
    where = world((1, 1, 16, 1, 0, None, None)).where
    with pytest.raises(ValueError, match="3 query heads over 2"):
        attention(q, (kv, kv), where, 1.0)
    with pytest.raises(ValueError, match="tile of 64"):
        attention(torch.zeros(1, 65, 16, device=DEVICE), (kv[:, :1], kv[:, :1]), where, 1.0)
