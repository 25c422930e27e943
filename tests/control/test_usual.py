"""What rounds should take: the tables of costs, as they were some rounds ago."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.control.costs import Costs
from outrider.control.usual import LATELY, MOST, Usual


def costs() -> Costs:
    made = Costs()
    for rows in (4, 8, 20):
        made.add_verify(4, rows, 1.0 + rows / 10)
    for levels in (1, 3, 5):
        made.add_draft(2, levels, levels / 100)
        made.add_wait(4, levels, levels / 1000)
    made.add_other(4, 0.5)
    return made


@pytest.mark.parametrize(("rows", "drafted", "deepest"), [(4, 0, 0), (7, 2, 3), (40, 3, 20), (0, 1, 1)])
def test_they_say_what_the_tables_say(rows: int, drafted: int, deepest: int) -> None:
    made = costs()
    right = made.plain(4, rows) + made.other(4) + made.guessing(4, drafted, deepest)
    assert Usual(made).seconds(0, 4, rows, drafted, deepest) == pytest.approx(right)


def test_they_stand_for_some_rounds() -> None:
    made = costs()
    usual = Usual(made)
    before = usual.seconds(5, 4, 8)
    for _ in range(100):
        made.add_verify(4, 8, 9.0)
    assert usual.seconds(5 + LATELY - 1, 4, 8) == before
    after = usual.seconds(5 + LATELY, 4, 8)
    assert after > 2 * before
    for _ in range(100):
        made.add_verify(4, 8, 0.1)
    assert usual.seconds(0, 4, 8) < after / 2, "rounds that are counted anew know nothing of those before"


def test_passes_have_as_many_rows_as_were_asked_for() -> None:
    usual = Usual(costs())
    passes = usual.passes(0, 4, 100)
    assert len(passes) > 100 and passes[8] == pytest.approx(1.8, rel=0.1) and np.all(np.diff(passes) >= 0)
    assert len(usual.passes(0, 4, 3)) < len(passes)


def test_kinds_of_rounds_are_forgotten_in_time() -> None:
    usual = Usual(costs())
    for batch in range(1, 3 * MOST):
        usual.seconds(0, batch, batch)
    assert len(usual._told) <= MOST


def test_crowds_a_little_apart_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their size changes every few rounds. None is taken for a smaller one, whose plain rounds have fewer rows."""
    asked = list[int]()
    verify = Costs.verify
    monkeypatch.setattr(Costs, "verify", lambda self, batch, *rest: asked.append(batch) or verify(self, batch, *rest))
    usual = Usual(costs())
    for batch in (*range(1, 17), *range(57, 64)):
        usual.seconds(0, batch, batch)
    assert asked == [*range(1, 17), 60, 64]


def test_a_jittering_wait_says_nothing_of_other_depths() -> None:
    """Most rounds wait for nothing, so that one of half a millisecond is a hundred times as much as usual."""
    chance, made = np.random.default_rng(0), Costs()

    def wait(depth: int, mean: float, deviation: float) -> None:
        for seconds in chance.normal(mean, deviation, 30):
            made.add_wait(60, depth, max(0.0, seconds))

    wait(2, 0.0, 5e-5)
    wait(4, 0.0, 5e-5)
    before = made.waits(60, np.array([2.0, 4.0]))
    wait(4, 5e-4, 2e-4)
    after = made.waits(60, np.array([2.0, 4.0]))
    assert after[0] == before[0] < 1e-4 and after[1] > 3e-4, "the other one, and only that"
