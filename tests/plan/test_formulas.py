"""The formulas of the literature, against numbers worked out by hand or by counting."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.plan import formulas
from outrider.plan.acceptance import Answer, Chances, Record
from outrider.plan.costs import Samples, Table, ascending, merged, typical
from outrider.plan.predict import best, break_even, grid, predict, share

TABLE = {
    (0.6, 0.05): (4, 1.92),
    (0.7, 0.1): (4, 1.98),
    (0.8, 0.02): (11, 3.82),
    (0.8, 0.2): (4, 1.87),
    (0.9, 0.05): (13, 4.67),
}


@pytest.mark.parametrize("known", TABLE)
def test_the_best_depth_of_the_textbook_formula(known: tuple[float, float]) -> None:
    depth, speed = formulas.best_depth(*known, range(1, 25))
    assert (depth, round(speed, 2)) == TABLE[known]


def test_formulas_at_their_ends() -> None:
    assert formulas.chain_tokens(1.0, 5) == 6.0 and formulas.chain_tokens(0.0, 5) == 1.0
    assert formulas.textbook(0.6, 1, 0.25) == pytest.approx(1.6 / 1.25)
    assert formulas.all_or_nothing(0.8, 5) == pytest.approx(4.2)
    assert formulas.best_depth(0.1, 0.5, range(1, 9)) == (0, 1.0)


def flat(draft: float, plain: float = 10.0, row: float = 0.0, other: float = 0.0, asked: bool = True) -> Table:
    """A machine where a guess costs `draft`, a pass `plain` and `row` for each further row."""
    lines = {
        "verify": ((1.0, plain), (13.0, plain + 12 * row)),
        "draft": ((1.0, draft), (12.0, 12 * draft)),
        "other": ((0.0, 0.0), (1.0, other), (12.0, other)),
    }
    return Table({name: {1: points} for name, points in lines.items()}, asked)


def test_a_machine_as_the_textbook_has_it() -> None:
    costs = flat(1.0)
    for rate in (0.3, 0.7, 1.0):
        for depth in (1, 4, 12):
            found = predict(Chances((rate,)), costs, depth, 1)
            assert found.speedup == pytest.approx(formulas.textbook(rate, depth, 0.1))
            assert share(costs, 1, depth) == pytest.approx(0.1)
    assert break_even(costs, range(1, 13), 1) == pytest.approx(0.1, abs=2e-3)


def test_costs_that_the_textbook_leaves_out() -> None:
    costs = flat(1.0, row=0.5, other=2.0)
    assert predict(Chances((0.8,)), costs, 4, 1).speedup < formulas.textbook(0.8, 4, 0.1)
    assert break_even(costs, range(1, 13), 1) == pytest.approx(0.35, abs=2e-3)
    assert break_even(flat(11.0), range(1, 13), 1) is None
    assert best(grid(Chances((0.05,)), costs, range(1, 9), (1,)), 1) is None


def test_chances_by_position() -> None:
    chances = Chances.of_survival([0.8, 0.4, 0.1])
    assert chances.accept == pytest.approx((0.8, 0.5, 0.25))
    assert chances.round(3)[0] == pytest.approx(2.3) and chances.round(4)[0] == pytest.approx(2.325)
    assert chances.rate == pytest.approx(1.3 / 2.2)
    silent = Chances.of_survival([0.8, 0.4], [0.5, 0.25])
    assert silent.round(2) == pytest.approx((1 + 0.4 + 0.1, 0.75)) and silent.deepest(2) == pytest.approx([0.5, 0.25, 0.25])
    copied = Chances.of_survival([0.65, 0.88, 0.81], [0.62, 0.34, 0.32])  # deep guesses only in rounds that go well
    assert copied.round(3)[0] == pytest.approx(1 + 0.65 * 0.62 + 0.88 * 0.34 + 0.81 * 0.32) and copied.accept[1] == 1.0
    assert copied.round(4)[0] > copied.round(3)[0] and copied.rate <= 1.0
    cheap = predict(silent, flat(1.0, asked=False), 2, 1)
    assert cheap.round_seconds == pytest.approx(10.75)


def text(hits: list[bool], depth: int, limit: int | None = None) -> Answer:
    """A text whose token i + 1 can be guessed where `hits[i]`, whatever came before."""
    runs = [next((j for j in range(depth) if i + j >= len(hits) or not hits[i + j]), depth) for i in range(len(hits))]
    return Answer(tuple(runs), (depth,) * len(hits), depth, len(hits) + 1, limit or len(hits) + 1)


def test_independent_guesses_give_the_formula() -> None:
    luck = random.Random(0)
    record = Record((text([luck.random() < 0.7 for _ in range(12_000)], 12),))
    assert record.rate == pytest.approx(0.7, abs=0.02) and record.chances.rate == pytest.approx(0.7, abs=0.02)
    for depth in (1, 3, 8, 12):
        found = predict(record, flat(1.0), depth, 1)
        assert found.tau == pytest.approx(formulas.chain_tokens(0.7, depth), rel=0.03)
        assert found.speedup == pytest.approx(formulas.textbook(0.7, depth, 0.1), rel=0.03)


def test_guesses_that_come_in_runs_do_not() -> None:
    """Ten right ones, then ten wrong ones: half are right, but a round seldom begins where the average place is."""
    record = Record((text(([True] * 10 + [False] * 10) * 200, 12),))
    tau = predict(record, flat(1.0), 8, 1).tau
    rounds = 200 * (2 + 9)  # nine guesses and the bonus, the last right one and the first wrong, then nine wrong ones
    assert tau == pytest.approx(4001 / rounds, rel=0.02)
    assert abs(formulas.chain_tokens(record.rate, 8) / tau - 1) > 0.09


def test_the_end_of_a_text() -> None:
    answer = text([True] * 9, 12, limit=10)
    assert [answer.ask(w, 12) for w in (1, 8, 9)] == [8, 1, 0] and answer.gained(1, 8) == 9
    assert predict(Record((answer,)), flat(0.0), 12, 1).tau == 5.0  # reading, and one round of nine


def test_texts_that_are_written_together() -> None:
    costs = flat(1.0, row=1.0)
    record = Record((text([True] * 20, 4), text([False] * 20, 4)))
    both = predict(record, costs, 4, 2)
    assert both.batch == 2 and both.rows > 5 and len(list(record.groups(4))) == 1
    assert not both.known and predict(record, costs, 4, 1).known


def test_what_is_measured_can_be_written_and_read() -> None:
    samples = Samples()
    for size in (1, 5, 9):
        samples.add("verify", 1, size, 0.01 * size)
    samples.add("draft", 1, 4, 0.004)
    samples.contexts += [20, 80]
    table = samples.table(asked=True)
    assert Table.of_json(table.as_json()) == table and table.context == (20, 80)
    assert table.verify(1, 3) == pytest.approx(0.03) and table.verify(1, 18) == pytest.approx(0.18)
    assert table.draft(1, 2) == pytest.approx(0.002) and table.draft(1, 0) == 0.0 and table.begin(1) == 0.0
    assert typical([1.0] * 40 + [50.0]) == 1.0 and typical([1.0, 3.0]) == 2.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 10.0), st.integers(1, 40)), min_size=1, max_size=12))
def test_curves_that_never_fall_are_the_nearest_ones(found: list[tuple[float, int]]) -> None:
    """Against each neighbour along any block moved a little, and the mean that has to stay."""
    values, weights = np.array([v for v, _ in found]), np.array([w for _, w in found], dtype=float)
    best = np.array(ascending(values.tolist(), weights.tolist()))
    assert np.all(np.diff(best) >= 0) and best @ weights == pytest.approx(values @ weights)

    def missed(curve: NDArray[np.float64]) -> float:
        return float(weights @ (curve - values) ** 2)

    for first in range(len(found)):
        for last in range(first, len(found)):
            for step in (-1e-3, 1e-3):
                other = best.copy()
                other[first : last + 1] += step
                assert np.any(np.diff(other) < 0) or missed(other) >= missed(best) - 1e-9


def test_noise_makes_no_deeper_guess_cheaper() -> None:
    """Passes of more rows and more levels never take less, but a plain pass may take more than one drafted for."""
    samples = Samples()
    for depth, seconds in ((2, 3.0), (4, 2.0), (6, 4.0)):
        samples.add("draft", 1, depth, seconds)
        samples.add("verify", 1, 1 + depth, seconds / 10)
        samples.add("other", 1, depth, 1.0 / depth)
    samples.add("plain", 1, 0, 1.0)
    table = samples.table(asked=True)
    assert [table.draft(1, k) for k in (2, 4, 6)] == [2.5, 2.5, 4.0]
    assert [table.verify(1, n) for n in (3, 5, 7)] == [0.25, 0.25, 0.4] and table.verify(1, 1) == table.plain(1) == 1.0
    assert table.other(1, 6) < table.other(1, 2), "the host's part may be less"


def test_passes_that_go_on_from_a_draft_take_what_its_depth_leaves() -> None:
    """Two rows cost 3 after one level, of which no state is left for the second row, and 1 after four, of which there is."""
    samples = Samples()
    for depth, rows, seconds in ((1, 2, 3.0), (4, 2, 1.0), (4, 5, 2.0)):
        samples.add("verify", 1, rows, seconds)
        samples.resumed[1, depth].append((rows, seconds))
        samples.add("draft", 1, depth, 0.1 * depth)
    samples.add("plain", 1, 0, 4.0)
    table = merged([samples]).table(asked=True)
    assert table.verify(1, 2) == pytest.approx(2.0) and table.beyond(1, 1) == pytest.approx(1.0)
    assert table.beyond(1, 4) == pytest.approx(-0.5)
    assert Table.of_json(table.as_json()) == table
    shallow = predict(Chances((1.0,)), table, 1, 1)
    assert shallow.round_seconds == pytest.approx(0.1 + 3.0)
    record = Record((Answer((1, 1, 0), (1, 1, 1), 4, 4, 9),))
    assert predict(record, table, 1, 1).round_seconds == pytest.approx(0.1 + 3.0)


@pytest.mark.parametrize(
    "broken", [None, {}, {"verify": {"one": [[1, 2]]}}, {"verify": {"1": []}}, {"verify": {"1": [[1, "x"]]}}]
)
def test_costs_that_cannot_be_read(broken: object) -> None:
    from outrider.errors import BadInput

    with pytest.raises(BadInput, match="measure again"):
        Table.of_json(broken)


def test_rows_of_a_tree_are_those_that_were_counted() -> None:
    """A tree of two levels may have all its nodes; a plain round has none, whatever the tree."""
    costs = flat(1.0, row=1.0)
    tree = Table({**costs.parts, "nodes": {1: ((1.0, 4.0), (2.0, 12.0), (5.0, 12.0))}})
    record = Record((Answer((1,) * 60, (12,) * 60, 5, 61, 1000),))
    chain = Record((Answer((1,) * 60, (5,) * 60, 5, 61, 1000),))
    for depth, rows in ((1, 5.0), (2, 13.0), (5, 13.0)):
        found = predict(record, tree, depth, 1)
        assert found.rows == pytest.approx(rows)
        assert found.plain_tokens_per_second == pytest.approx(predict(chain, costs, depth, 1).plain_tokens_per_second)
        assert found.round_seconds == pytest.approx(10.0 + (rows - 1) + depth)
    assert predict(record, costs, 2, 1).rows == pytest.approx(1 + 5), "in proportion, where nobody counted"
