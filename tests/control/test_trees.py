"""How wide trees of guesses are: wide where rows cost nothing, narrow where they do, and every size of batch for itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from outrider.config import SamplingParams
from outrider.control.costs import Costs
from outrider.control.limits import Shape
from outrider.control.plan import Load, Planner
from outrider.control.probes import Allowance, Prices
from outrider.control.trees import STEEP, Trees
from outrider.types import Batch

from .. import tiny
from .test_parts import Asks


def load(batch: int, accept: float = 0.9, width: float = 3.0, depth: int = 4) -> Load:
    """Requests that are all alike."""
    chances, ends = np.full((batch, depth), accept), np.full(batch, depth)
    return Load(batch, batch, batch, chances, np.ones_like(chances), np.zeros(batch, dtype=np.int64), ends, width)


def costs(row: float, free: int = 0) -> Costs:
    """A pass takes 1 ms, and `row` of that more for every row beyond the `free` ones."""
    made = Costs()
    for batch in (1, 16):
        for rows in (1, 8, 16, 64, 128, 256, 512):
            for _ in range(3):
                made.add_verify(batch, rows, 1e-3 * (1 + row * max(0, rows - free)))
        for depth in (1, 4):
            made.add_draft(batch, depth, 1e-5 * depth)
    return made


def test_widths_are_powers_of_two_up_to_the_drafter_s_own() -> None:
    assert Trees(1.0).widths == (1.0,) and Trees(3.0).widths == (1.0, 2.0, 3.0) and Trees(16.0).widths == (1, 2, 4, 8, 16)
    assert Trees(3.0, fixed=True).widths == (3.0,)


def test_rows_that_cost_nothing_are_used() -> None:
    trees = Trees(3.0)
    planner = trees.choose(load(1), costs(0.5, free=600))
    assert trees.now == planner.load.width == 3.0


def test_where_rows_are_dear_trees_are_narrow() -> None:
    trees = Trees(3.0)
    wide = trees.choose(load(16), costs(0.0)).best()
    planner = Trees(3.0).choose(load(16), costs(0.02))
    assert wide.speed > planner.best().speed and planner.load.width == 1.0
    assert planner.load.accept[0, 0] == pytest.approx(1 - 0.1 * 3**STEEP), "with fewer nodes more levels miss"


def test_each_size_of_batch_has_its_own_width() -> None:
    trees, dear = Trees(3.0), costs(0.02, free=30)
    assert [trees.choose(load(n), dear) and trees.now for n in (1, 16, 1, 16)] == [3.0, 1.0, 3.0, 1.0]


def test_what_is_measured_of_a_narrow_tree_is_not_corrected_again() -> None:
    trees, dear = Trees(3.0), costs(0.02)
    trees.choose(load(16), dear)
    for _ in range(60):
        trees.used(16)
    planner = trees.choose(load(16, accept=0.8, width=1.0), dear)
    assert planner.load.accept[0, 0] == pytest.approx(0.8, abs=0.01) and planner.load.width == pytest.approx(1.0, abs=0.01)
    trees.now = 3.0
    for _ in range(60):
        trees.used(1)
    planner = trees.choose(load(16, accept=0.8, width=1.0), dear)
    assert planner.load.accept[0, 0] == pytest.approx(0.8, abs=0.01), "how wide the guesses of few are says nothing of many"


def test_whoever_named_a_depth_has_the_whole_tree() -> None:
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, depth=4)]
    requests = tuple(tiny.request([1, 2], p) for p in params)
    batch = Batch(requests, (1, 1), (True, True), (64, 64))
    assert Shape(Asks(4, 12)).budget(batch, [4, 4], 1.0).nodes == (4, 12)
    assert Shape(Asks(4, 12)).budget(batch, [4, 4]).nodes == (12, 12)


@pytest.mark.parametrize(("count", "row"), [(2, 0.01), (12, 0.01), (12, 0.12)])
def test_a_plan_of_a_drafter_that_paces_itself_is_worth_what_its_depths_are(count: int, row: float) -> None:
    """Of many who share a pass, those who are let are let as far as pays for all together."""
    rng = np.random.default_rng(1)
    chances, ends = rng.uniform(0.3, 0.95, (count, 6)), np.full(count, 6)
    offered = rng.uniform(0.5, 1.0, (count, 6))
    paced = Load(count, count, count, chances, offered, np.zeros(count, dtype=np.int64), ends, 1.0, paced=True)
    planner = Planner(paced, costs(row))
    plan = planner.best()
    [depth] = set(plan.depths) - {0}
    assert (depth == 6) == (count <= 2)
    assert plan.speed >= planner.value(np.where(np.array(plan.depths) > 0, 6, 0)).speed
    assert plan.speed == pytest.approx(planner.value(np.array(plan.depths)).speed), "else no plan is ever kept"


def test_beyond_what_was_seen_a_neighbour_tells() -> None:
    made = Costs()
    for rows in (1, 16, 64, 256):
        for _ in range(3):
            made.add_verify(1, rows, 1e-3 + 1e-6 * max(0, rows - 64))
    for rows, seconds in ((12, 1.00e-3), (16, 1.15e-3)):
        for _ in range(3):
            made.add_verify(16, rows, seconds)
    assert made.plain(16, 16) == pytest.approx(1.15e-3), "its own, where it has some"
    assert made.plain(16, 64) < 1.25e-3, "a line through 12 and 16 rows says 2.9 ms"
    assert made.plain(16, 64) >= made.plain(16, 16) and made.plain(16, 256) == pytest.approx(1.37e-3, rel=0.05)


def test_a_shape_that_is_nothing_somewhere_does_not_blow_up() -> None:
    made = Costs()
    for depth, seconds in ((1, 1e-4), (2, 1.5e-4)):
        for _ in range(3):
            made.add_draft(4, depth, seconds)
    for depth, seconds in ((1, 0.0), (2, 0.0), (3, 2e-5), (5, 3e-4)):
        for _ in range(3):
            made.add_draft(1, depth, seconds)
    assert 1e-4 < made.draft(4, 5) < 2e-3


def test_passes_on_a_device_move_with_one_another_by_half() -> None:
    def plain_after(steady: bool) -> float:
        made = Costs()
        made.steady = steady
        for rows, seconds in ((1, 1e-3), (8, 1.2e-3)):
            for _ in range(24):
                made.add_verify(1, rows, seconds)
        for _ in range(24):
            made.add_verify(1, 8, 1.8e-3)
        return made.plain(1, 1)

    assert plain_after(False) == pytest.approx(1.5e-3, rel=0.03) and plain_after(True) == pytest.approx(1.22e-3, rel=0.03)


def test_a_stalled_trial_is_no_price_for_controllers_to_come() -> None:
    prices: Prices = {}
    allowance = Allowance(prices)
    allowance.affords(0.01, 16)
    for _ in range(3):
        allowance.pay(0.5, 0.0, stalled=True, batch=16)
    later = Allowance(prices)
    later.earn(10.0, 16)
    later.earn(10.0, 1)
    assert later.affords(0.01, 16) and later.price(16) <= 0.02
    for _ in range(7):
        allowance.pay(0.5, 0.0, batch=16)
    assert not later.affords(0.01, 16) and later.affords(0.01, 1), "what trials took is known by size of batch"


def test_chains_of_a_drafter_of_trees_have_prices_of_their_own() -> None:
    """Where they are fed one node a level, they take less."""
    made = Costs()
    made.add_draft(4, 3, 3e-4)
    made.add_wait(4, 3, 1e-4)
    assert made.guessing(4, 4, 3, chain=True) == made.guessing(4, 4, 3) == pytest.approx(4e-4), "nothing else is known"
    made.add_draft(4, 3, 1e-4, chain=True)
    made.add_wait(4, 3, 0.0, chain=True)
    assert made.guessing(4, 4, 3) == pytest.approx(4e-4) and made.guessing(4, 4, 3, chain=True) == pytest.approx(1e-4)
    for rows in (4, 8, 16, 64):
        made.add_verify(4, rows, 1e-3 * (1 + 0.005 * rows))
    trees = Trees(2.0)
    load = Load(4, 4, 4, np.full((4, 3), 0.9), np.ones((4, 3)), np.zeros(4, np.int64), np.full(4, 3), width=2.0)
    assert trees.choose(load, made).load.chain and trees.linear, "which decides here"
    made.add_draft(4, 3, 1e-6)
    made.add_wait(4, 3, 0.0)
    even = Trees(2.0)
    assert not even.choose(load, made).load.chain


def test_a_glance_at_many_who_are_alike_says_what_a_whole_look_says() -> None:
    """Whether guesses pay at all for a batch of newcomers, against a search among requests that differ by next to nothing."""
    rng, none = np.random.default_rng(3), 0
    for _ in range(60):
        made, free = Costs(), rng.integers(36, 120)
        made.steady = True
        for rows in (40, 44, 60, 80, 120, 160, 240, 320):
            made.add_verify(40, rows, 1e-3 * (1 + 0.03 * max(0, rows - free)))
        for depth in range(1, 6):
            made.add_draft(40, depth, 1e-4 * depth * rng.uniform(0.5, 6))
        chances = np.sort(rng.uniform(0.0, 0.9, 5))[::-1]
        even = Load(40, 40, 40, np.tile(chances, (40, 1)), np.ones((40, 5)), np.zeros(40, np.int64), np.full(40, 5), fresh=True)
        uneven = replace(even, fresh=False, accept=even.accept + 1e-12 * rng.uniform(size=(40, 5)))
        quick, whole = Planner(even, made).best(), Planner(uneven, made).best()
        assert quick.speed >= 0.98 * whole.speed
        none += not any(quick.depths)
    assert 10 < none < 50


def test_one_sample_of_a_chain_does_not_hide_what_is_known_of_trees() -> None:
    made = Costs()
    made.steady = True
    for batch in (1, 8, 32):
        for rows in (batch, 2 * batch, 8 * batch):
            made.add_verify(batch, rows, 5e-3 * (1 + 1e-4 * rows))
    before = [made.plain(32, 128, chain=True), made.plain(8, 64, chain=True)]
    made.add_verify(8, 16, 5e-3, chain=True)
    assert [made.plain(32, 128, chain=True), made.plain(8, 64, chain=True)] == pytest.approx(before, rel=0.02)


def test_chances_of_all_widths_are_those_of_each() -> None:
    """Half of what is missed with one node a level is missed with four; the width of late has what was measured."""
    trees, accept = Trees(4.0), np.array([0.9, 0.5])
    found = trees.spread(accept)
    assert found.shape == (len(trees.widths), 2) and found[-1] == pytest.approx(accept)
    assert found[0] == pytest.approx(1 - (1 - accept) * 4.0**STEEP) and (found[0] <= found[1]).all()
    trees.whole()
    for _ in range(200):
        trees.now = 1.0
        trees.used()
    assert trees.spread(accept)[0] == pytest.approx(accept, rel=1e-6)
    assert trees.spread(accept)[-1] == pytest.approx(1 - (1 - accept) / 2, rel=1e-6)
