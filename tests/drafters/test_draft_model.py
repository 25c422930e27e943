"""The draft model's own memory, its trees, and what does not fit."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import registry
from outrider.cache.slots import SlotCache
from outrider.config import SamplingParams
from outrider.drafters.draft_model import DraftModel, Forest, _fit, check_vocabulary
from outrider.errors import DrafterMismatch
from outrider.models.layout import Layout
from outrider.types import NONE, ROOT, Batch, Budget, Finish, Proposal, Request

from .. import tiny

PROMPTS = tiny.prompts(3, seed=33)
PARAMS = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=4)


def requests(params: SamplingParams = PARAMS, prompts: list[list[int]] = PROMPTS) -> list[Request]:
    return [tiny.request(p, params) for p in prompts]


def plain(params: SamplingParams = PARAMS, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return tiny.World().run(registry.parse("none"), requests(params, prompts))


def fresh_kv(drafter: DraftModel, tokens: list[int]) -> SlotCache:
    cache, twin = SlotCache(drafter.decoder.layers, 1, 256, torch.float64), tiny.request(tokens)
    cache.reserve(twin, len(tokens))
    layout = Layout.build(Batch((twin,), (len(tokens),), (False,), (0,)), Proposal.empty(1), cache)
    drafter.decoder.forward(layout, cache)
    cache.twin = twin  # type: ignore[attr-defined]
    return cache


def check_memory(drafter: DraftModel, request: Request) -> int:
    """Every token that counts as computed, and every fed guess on the accepted path, has the KV a fresh forward gives it."""
    memory = drafter._memory.get(request.id)
    if memory is None:
        return 0
    known = request.tokens[: memory.computed] + memory.ran
    cache = fresh_kv(drafter, known)
    for layer in range(len(drafter.decoder.layers)):
        ours, fresh = drafter.cache.view(layer, request, len(known)), cache.view(layer, cache.twin, len(known))  # type: ignore[attr-defined]
        for a, b in zip(ours, fresh, strict=True):
            assert (a - b).abs().max() < 1e-9, f"stale KV at {(a - b).abs().amax((1, 2)).argmax()} of {len(known)}"
    return len(memory.ran)


@pytest.mark.parametrize("config", [{"depth": 4}, {"depth": 3, "width": 3}, {"depth": 1}, {"depth": 2, "width": 2}])
@pytest.mark.parametrize("layers", [2, 3])
def test_its_memory_is_fresh_after_every_round(layers: int, config: dict[str, int]) -> None:
    drafter = tiny.draft_model(layers, **config)
    world, made = tiny.World(), requests()
    engine, reused = world.engine(drafter), 0
    for r in made:
        engine.add(r)
    while engine.step() is not None:
        reused += sum(check_memory(drafter, r) for r in made if r.finish is Finish.RUNNING)
    assert engine.drafter.working and [r.output for r in made] == plain()
    assert not drafter._memory and drafter.cache.free() == drafter.cache.capacity
    assert config["depth"] == 1 or reused > 0, "what was fed is never used again"


def test_stale_memory_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without moving the accepted path into line, the check above fails."""
    drafter = tiny.draft_model(3, depth=3, width=3)
    world, made = tiny.World(), requests()
    engine = world.engine(drafter)
    monkeypatch.setattr(drafter.cache, "move", lambda *args: None)
    for r in made:
        engine.add(r)
    with pytest.raises(AssertionError, match="stale KV"):
        while engine.step() is not None:
            for r in made:
                check_memory(drafter, r)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_long_prompts_are_caught_up_in_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.drafters.draft_model._CHUNK", chunk)
    drafter, made = tiny.draft_model(3, depth=3), requests()
    tiny.World().run(drafter, made)
    assert [r.output for r in made] == plain()
    assert all(r.stats.accepted == r.stats.drafted > 0 for r in made), "the target's twin is always right"


def test_random_gaps_and_wrong_memories() -> None:
    """Idle for random rounds, tokens it never saw: after any gap its guesses are those of a fresh draft."""
    rng = random.Random(1)
    drafter, world = tiny.draft_model(2, depth=3, width=2), tiny.World()
    world.engine(drafter)
    one = tiny.request([3, 4, 5], PARAMS)
    for _ in range(25):
        one.tokens += [rng.randrange(2, 48) for _ in range(rng.randint(1, 4))]
        other = tiny.draft_model(2, depth=3, width=2)
        tiny.World().engine(other)
        twin = tiny.request(one.tokens, PARAMS)
        twin.key, twin.prompt_len = one.key, one.prompt_len
        got, want = (d.propose(Batch((r,), (1,), (True,), (6,)), Budget((3,), (6,))) for d, r in ((drafter, one), (other, twin)))
        assert torch.equal(got.tokens, want.tokens) and torch.equal(got.parents, want.parents)
        keep = rng.randint(0, 3)  # sometimes a prefix of the first branch is what gets written
        branch: list[int] = []
        for c in range(got.columns):
            if int(got.parents[0, c]) == (branch[-1] if branch else ROOT) and len(branch) < keep:
                branch.append(c)
        path = torch.full((1, got.columns), NONE)
        path[0, : len(branch)] = torch.tensor(branch, dtype=torch.int64)
        drafter.observe(Batch((one,), (1,), (True,), (6,)), got, SimpleNamespace(path=path), None)  # type: ignore[arg-type]
        one.tokens += [int(got.tokens[0, c]) for c in branch]


def test_a_full_cache_means_no_guesses_and_no_harm() -> None:
    drafter = tiny.draft_model(3, depth=3, tokens=64)
    prompts = [p * 3 for p in tiny.prompts(4, seed=2, low=12, high=14)]
    made = requests(prompts=prompts)
    tiny.World().run(drafter, made)
    assert [r.output for r in made] == plain(prompts=prompts)
    rounds = [r.stats.rounds for r in made]
    assert rounds[3] > rounds[0], "the first ones hold all blocks; the last is decoded plainly until they are done"
    assert all(r.stats.accepted == r.stats.drafted for r in made)
    assert drafter.cache.free() == drafter.cache.capacity


def test_one_request_is_drafted_for_while_another_is_not() -> None:
    drafter = tiny.draft_model(2, depth=3, width=2)
    tiny.World().engine(drafter)
    made = requests()
    batch = Batch(tuple(made), (1, 1, 1), (True,) * 3, (6, 0, 6))
    got = drafter.propose(batch, Budget((3, 0, 2), (6, 0, 4)))
    assert got.widths == (6, 0, 4) and made[1].id not in drafter._memory
    empty = drafter.propose(batch, Budget((0, 0, 0), (0, 0, 0)))
    assert empty.columns == 0


def test_trees_are_wide_at_every_level_and_siblings_differ() -> None:
    drafter = tiny.draft_model(2, depth=3, width=3)
    tiny.World().engine(drafter)
    got = drafter.propose(Batch(tuple(requests()), (1,) * 3, (True,) * 3, (9,) * 3), Budget((3,) * 3, (9,) * 3))
    for b in range(3):
        nodes = list(zip(got.parents[b].tolist(), got.tokens[b].tolist(), strict=True))
        assert len(set(nodes)) == 9 and sum(p == ROOT for p, _ in nodes) == 3


# Forests


@settings(max_examples=150, deadline=None)
@given(data=st.data(), width=st.integers(1, 4))
def test_a_level_is_the_best_of_all_candidates(data: st.DataObject, width: int) -> None:
    rows = data.draw(st.integers(1, 4))
    gains = [data.draw(st.lists(st.integers(-30, 0).map(float), min_size=3, max_size=3)) for _ in range(rows)]
    tokens = [[10 * r + i for i in range(3)] for r in range(rows)]
    forest = Forest(1, width)
    forest.trees[0], forest.totals[0] = [(90 + i, ROOT) for i in range(rows)], [-1.0 * i for i in range(rows)]
    room = data.draw(st.integers(rows, rows + 5))
    grown = forest.grow([0] * rows, list(range(rows)), tokens, gains, [room])
    new = forest.trees[0][rows:]
    assert len(new) == min(width, room - rows, 3 * rows) and grown == bool(new)
    every = sorted((-1.0 * r + g for r, row in enumerate(gains) for g in row), reverse=True)
    assert forest.totals[0][rows:] == every[: len(new)]
    assert all(10 * p <= t < 10 * p + 3 for t, p in new)


def test_what_cannot_be_is_no_candidate() -> None:
    forest = Forest(2, 2)
    minus = float("-inf")
    assert not forest.grow([0, 1], [ROOT, ROOT], [[3, 4], [NONE, NONE]], [[minus, minus], [0.0, 0.0]], [9, 9])
    assert forest.grow([0, 1], [ROOT, ROOT], [[3, 4], [5, NONE]], [[0.0, minus], [0.0, -1.0]], [9, 0])
    assert forest.trees == [[(3, ROOT)], []]


def test_proposals_are_spread_over_the_batch() -> None:
    for width in (1, 2):
        forest = Forest(2, width)
        forest.trees = [[(5, ROOT), (6, 0)], [(7, ROOT)]]
        made = forest.proposal(torch.device("cpu"), [3, 1], 4)
        assert made.widths == (0, 1, 0, 2) and made.tokens[3].tolist() == [5, 6] and made.linear == (width == 1)


# Vocabularies


def test_logits_are_fitted_to_the_targets_vocabulary() -> None:
    logits = torch.arange(8.0).view(2, 4)
    assert torch.equal(_fit(logits, 3), logits[:, :3]) and torch.equal(_fit(logits, 4), logits)
    wide = _fit(logits, 6)
    assert torch.equal(wide[:, :4], logits) and bool((wide[:, 4:] == float("-inf")).all())


@pytest.mark.parametrize("vocab", [tiny.VOCAB - 20, tiny.VOCAB + 16])
@pytest.mark.parametrize("width", [1, 3])
def test_padded_and_cut_vocabularies(vocab: int, width: int) -> None:
    drafter, made = tiny.draft_model(3, vocab=vocab, depth=3, width=width), requests()
    tiny.World().run(drafter, made)
    assert [r.output for r in made] == plain()
    assert sum(r.stats.accepted for r in made) > 0


def vocabulary(theirs: dict[str, int] | None, ours: dict[str, int] | None) -> None:
    start: Any = SimpleNamespace(vocab=ours, name="big")
    check_vocabulary(SimpleNamespace(name="small"), SimpleNamespace(vocab=theirs), start)  # type: ignore[arg-type]


def test_vocabularies_that_fit() -> None:
    base = {f"t{i}": i for i in range(100)}
    vocabulary(base, base)
    vocabulary(base | {"extra": 100}, base)
    vocabulary(base, base | {"pad1": 100, "pad2": 101})
    vocabulary(None, base)
    vocabulary(base, None)
    check_vocabulary(SimpleNamespace(name="small"), None, SimpleNamespace(vocab=base, name="big"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "theirs",
    [
        {f"t{i}": 99 - i for i in range(100)},
        {f"t{i}": i for i in range(99)} | {"t99": 150},
        {f"x{i}": i for i in range(100)},
        {f"t{i}": i for i in range(50)} | {f"x{i}": i for i in range(50, 100)},
    ],
)
def test_vocabularies_that_do_not_fit(theirs: dict[str, int]) -> None:
    with pytest.raises(
        DrafterMismatch, match=r"draft model small \(vocabulary 100\) and the target big \(vocabulary 100\).*ngram"
    ):
        vocabulary(theirs, {f"t{i}": i for i in range(100)})


def test_a_drawn_tree_has_a_shape_that_no_draw_decides() -> None:
    """Under a classical rule: `width` children of the root in drawn order, then one child each, however poor its score."""
    forest = Forest(1, 2, [True])
    assert forest.grow([0], [ROOT], [[5, 4]], [[0.0, -9.0]], [9])
    assert forest.grow([0, 0], [0, 1], [[7, 8], [6, 8]], [[0.0, -0.1], [0.0, -0.1]], [9])
    assert forest.trees[0] == [(5, ROOT), (4, ROOT), (7, 0), (6, 1)]
    best = Forest(1, 2)
    best.grow([0], [ROOT], [[5, 4]], [[0.0, -9.0]], [9])
    best.grow([0, 0], [0, 1], [[7, 8], [6, 8]], [[0.0, -0.1], [0.0, -0.1]], [9])
    assert best.trees[0] == [(5, ROOT), (4, ROOT), (7, 0), (8, 0)]
