"""The memory behind the text: KV, hidden states and node scores against a fresh forward over the committed tokens."""

from __future__ import annotations

import pytest
import torch

from outrider import tree
from outrider.config import SamplingParams
from outrider.models.layout import Layout
from outrider.types import Batch, Finish, Proposal

from .. import tiny
from .drafters import every
from .test_text import OPTIONS, PROMPTS, answers, requests

TRICKY = ("bushy", "draft_model:width=3", "owner", "exiter", "merger", "self", "replay:32", "early_exit:1", "layer_skip:search")


@pytest.mark.parametrize("cache", ["paged", "slots"])
@pytest.mark.parametrize("name", TRICKY)
def test_kv_equals_a_fresh_forward_after_every_round(name: str, cache: str) -> None:
    world = tiny.World(cache=cache)
    engine = world.engine(every()[name](answers("sampled")))
    made = requests(OPTIONS["sampled"], PROMPTS[:3])
    for request in made:
        engine.add(request)
    while engine.step() is not None:
        for request in (r for r in made if r.finish is Finish.RUNNING):
            assert_fresh(world, request)
    assert engine.drafter.working, engine.drafter.reason


def assert_fresh(world: tiny.World, request) -> None:
    other = tiny.World(cache="slots", own=world.decoder)
    twin = tiny.request(request.tokens)
    length = request.computed
    other.cache.reserve(twin, length)
    layout = Layout.build(Batch((twin,), (length,), (False,), (0,)), Proposal.empty(1), other.cache)
    world.decoder.forward(layout, other.cache)
    for layer in range(len(world.decoder.layers)):
        for ours, fresh in zip(world.cache.view(layer, request, length), other.cache.view(layer, twin, length), strict=True):
            assert (ours - fresh).abs().max() < 1e-9, f"KV of layer {layer} is stale"


def forest() -> list[list[tuple[int, int]]]:
    return [[(5, -1), (9, -1), (6, 0), (7, 0), (5, 1), (8, 2), (3, 5)], [(4, -1)], [(2, -1), (3, 0), (4, 1), (2, 0)]]


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_node_scores_equal_those_of_their_chain(family: str, by_rows: bool) -> None:
    """Every node of every tree, scored in one ragged pass, against a forward over its root path alone."""
    world = tiny.World(family, by_rows=by_rows)
    made = requests(OPTIONS["greedy"], PROMPTS[:3])
    engine = world.engine(every()["none"]({}))
    for request in made:
        engine.add(request)
    engine.step()
    trees = Proposal.trees(forest())
    batch = Batch(tuple(made), (1, 1, 1), (True,) * 3, (8,) * 3)
    for request in made:
        world.cache.reserve(request, len(request.tokens) + 8)
    layout = Layout.build(batch, trees, world.cache)
    out = world.decoder.forward(layout, world.cache, features=("hidden:last",), by_rows=by_rows)
    paths, depth = tree.path_tokens(trees)
    for row in range(len(layout.tokens)):
        b, slot = int(layout.rows.request[row]), int(layout.rows.slot[row])
        tail = paths[b, slot, : depth[b, slot]].tolist()
        logits, hidden = fresh(world, made[b].tokens + tail)
        assert (out.logits[row] - logits).abs().max() < 1e-9
        assert (out.features["hidden:last"][row] - hidden).abs().max() < 1e-9
        assert int(layout.rows.position[row]) == len(made[b].tokens) + len(tail) - 1


def fresh(world: tiny.World, tokens: list[int]):
    other = tiny.World(cache="slots", own=world.decoder)
    twin = tiny.request(tokens)
    other.cache.reserve(twin, len(tokens))
    layout = Layout.build(Batch((twin,), (len(tokens),), (True,), (0,)), Proposal.empty(1), other.cache)
    out = world.decoder.forward(layout, other.cache, features=("hidden:last",))
    return out.logits[0], out.features["hidden:last"][-1]


def test_rows_do_not_care_who_shares_the_pass_in_fp32() -> None:
    """By rows, with packed products, an fp32 token's scores have the same bits alone, in a chain, in a tree, and in a batch."""
    own = tiny.Decoder(tiny.model(dtype=torch.float32, hidden_size=64, intermediate_size=1536, seed=4), "fp32")
    assert own.packed > 0
    world = tiny.World(own=own, by_rows=True)
    made = [tiny.request(p, SamplingParams(temperature=0.0, max_tokens=40)) for p in PROMPTS[:2]]
    engine = world.engine(every()["none"]({}))
    for request in made:
        engine.add(request)
    engine.step()
    tokens = [6, 7, 8, 9]
    scores = {}
    for name, nodes in {
        "chain": [[(t, i - 1) for i, t in enumerate(tokens)], []],
        "tree": [[(9, -1), (6, -1), (5, 1), (7, 1), (8, 3), (2, -1), (9, 4)], []],
        "batch": [[(t, i - 1) for i, t in enumerate(tokens)], [(3, -1)] * 1 + [(4, 0), (5, 0), (6, 2)]],
    }.items():
        made_trees = Proposal.trees(nodes)
        scores[name] = _path_scores(world, made, made_trees, tokens)
    scores["alone"] = _alone(world, made[0], tokens)
    for name in ("tree", "batch", "alone"):
        assert torch.equal(scores["chain"], scores[name]), name


def _path_scores(world, made, trees, tokens):
    live = [r for b, r in enumerate(made) if b == 0 or trees.widths[b]]
    picked = [b for b, r in enumerate(made) if r in live]
    nodes = Proposal(
        trees.tokens[picked],
        trees.parents[picked],
        trees.sizes[picked],
        trees.source[picked],
        tuple(trees.widths[b] for b in picked),
    )
    for request in live:
        world.cache.reserve(request, len(request.tokens) + 8)
    batch = Batch(tuple(live), (1,) * len(live), (True,) * len(live), (8,) * len(live))
    layout = Layout.build(batch, nodes, world.cache)
    out = world.decoder.forward(layout, world.cache, by_rows=True)
    paths, depth = tree.path_tokens(nodes)
    rows = [0] + [
        next(r for r in range(1, 1 + nodes.widths[0]) if paths[0, r, : depth[0, r]].tolist() == tokens[: i + 1])
        for i in range(len(tokens))
    ]
    return out.logits[rows]


def _alone(world, request, tokens):
    known, computed, out = list(request.tokens), request.computed, []
    for i in range(len(tokens) + 1):
        request.tokens = known + tokens[:i]
        request.computed = len(request.tokens) - 1
        world.cache.reserve(request, len(request.tokens))
        layout = Layout.build(Batch((request,), (1,), (True,), (0,)), Proposal.empty(1), world.cache)
        out.append(world.decoder.forward(layout, world.cache, by_rows=True).logits[0])
    request.tokens, request.computed = known, computed
    return torch.stack(out)
