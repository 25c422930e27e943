"""How wide trees of guesses are: wide where rows cost nothing, narrow where they do, and every size of batch for itself."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.config import SamplingParams
from outrider.control.costs import Costs
from outrider.control.limits import Shape
from outrider.control.plan import Load
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
        trees.used()
    planner = trees.choose(load(16, accept=0.8, width=1.0), dear)
    assert planner.load.accept[0, 0] == pytest.approx(0.8, abs=0.01) and planner.load.width == pytest.approx(1.0, abs=0.01)


def test_whoever_named_a_depth_has_the_whole_tree() -> None:
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, depth=4)]
    requests = tuple(tiny.request([1, 2], p) for p in params)
    batch = Batch(requests, (1, 1), (True, True), (64, 64))
    assert Shape(Asks(4, 12)).budget(batch, [4, 4], 1.0).nodes == (4, 12)
    assert Shape(Asks(4, 12)).budget(batch, [4, 4]).nodes == (12, 12)
