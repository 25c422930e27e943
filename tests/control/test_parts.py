"""The parts of a controller, each against what it should say."""

from __future__ import annotations

import itertools
import logging
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from outrider.bench.simulate import Asks, Clock, Simulation, code_then_poetry
from outrider.config import SamplingParams
from outrider.control import CONTROLLERS, Fixed, Goodput, calibrate, check, make
from outrider.control.calibrate import COMPILING, TIMES
from outrider.control.costs import OLD, WINDOW, Costs, Curve, bucket, grain, robust
from outrider.control.cut import shorten, worth
from outrider.control.limits import bounds
from outrider.control.plan import Load, Planner
from outrider.control.probes import GAP, Allowance
from outrider.control.rates import EARLY, Rates, estimate, estimates, pull
from outrider.control.story import Story
from outrider.control.turns import Turns
from outrider.drafters import AUTO, pick
from outrider.errors import BadInput
from outrider.types import Batch, Proposal, Scores

from .. import tiny


def at(curve: Curve, size: float) -> float:
    return float(curve.read(np.array([float(size)]))[0])


# Costs


def test_robust_means_shrug_at_outliers() -> None:
    assert robust([100.0, 2.0]) == 2.0 and robust([5.0]) == 5.0
    assert robust([2.0, 100.0, 2.2]) == 2.2
    assert robust([1.0] * 9 + [50.0, 90.0]) == 1.0


def test_sizes_share_cells_only_where_they_are_close() -> None:
    assert [grain(n) for n in (1, 7, 16, 17, 18, 33, 35, 127)] == [1, 7, 16, 18, 18, 32, 36, 128]
    assert all(abs(grain(n) - n) <= max(0, n / 16) + 0.5 for n in range(1, 2000))
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 64, 65)] == [0, 1, 2, 2, 3, 3, 4, 6, 7]


def test_a_curve_draws_lines_between_and_goes_on_beyond() -> None:
    curve = Curve()
    for _ in range(3):
        curve.add(1, 10.0)
        curve.add(3, 14.0)
    assert [at(curve, n) for n in (1, 2, 3, 4, 8)] == pytest.approx([10, 12, 14, 16, 24])
    drafting = Curve(anchored=True)
    assert at(drafting, 5) == 0.0, "unknown is free, so that it is tried"
    drafting.add(4, 8.0)
    assert [at(drafting, n) for n in (0, 2, 4, 8)] == pytest.approx([0, 4, 8, 16])


def test_more_rows_never_take_less_time() -> None:
    curve, rng = Curve(), random.Random(1)
    for _ in range(300):
        n = rng.randint(1, 60)
        curve.add(n, 20 + 0.01 * n + rng.gauss(0, 3))
    read = curve.read(np.arange(1.0, 80.0))
    assert (np.diff(read) >= -1e-9).all() and 15 < read[0] < 25


def test_the_first_slow_sample_of_a_size_counts_for_little() -> None:
    curve = Curve()
    for _ in range(4):
        curve.add(1, 10.0)
        curve.add(2, 10.2)
    curve.add(3, 900.0)
    assert at(curve, 3) < 13.5
    for _ in range(3):
        curve.add(3, 10.4)
    assert at(curve, 3) == pytest.approx(10.4)
    for _ in range(6):
        curve.add(4, 30.0)
    assert at(curve, 4) == pytest.approx(30.0), "but what is slow again and again is slow"


def test_what_slows_all_sizes_moves_those_not_measured_meanwhile() -> None:
    curve = Curve()
    for _ in range(WINDOW + 1):
        curve.add(1, 10.0)
        curve.add(5, 12.0)
    for _ in range(2 * WINDOW):
        curve.add(5, 24.0)
    assert at(curve, 5) == pytest.approx(24.0) and at(curve, 1) == pytest.approx(20.0, rel=0.05)
    curve.add(1, 20.0)
    assert at(curve, 1) == pytest.approx(20.0, rel=0.05)


@pytest.mark.parametrize("anchored", [False, True])
def test_what_moves_all_sizes_moves_what_was_read_of_them_as_if_it_were_read_anew(anchored: bool) -> None:
    rng, read, anew = random.Random(3), Curve(anchored), Curve(anchored)
    for step in range(400):
        size, seconds, factor = rng.choice((1, 2, 5, 9, 30, 47)), rng.uniform(5.0, 20.0), rng.uniform(0.8, 1.25)
        for curve in (read, anew):
            curve.add(size, seconds) if step % 3 else curve.move(factor)
        anew._points = None
        assert at(read, 7) == pytest.approx(at(anew, 7), rel=1e-9) and at(read, 60) == pytest.approx(at(anew, 60), rel=1e-9)


def test_passes_without_guesses_are_read_from_their_own_curve_whatever_else_is_asked() -> None:
    costs = Costs()
    costs.steady = True
    for _ in range(4):
        costs.add_verify(8, 8, 1.0)
        costs.add_verify(8, 24, 3.0)
    rows = np.arange(1.0, 25.0)
    assert costs.verify(8, rows)[:8].tolist() == costs.verify(8, rows[:8]).tolist()


def test_sizes_not_met_for_long_are_forgotten() -> None:
    curve = Curve()
    curve.add(9, 50.0)
    for _ in range(OLD + 64):
        curve.add(1, 10.0)
    assert set(curve.cells) == {1}


def test_a_batch_size_not_seen_borrows_its_neighbour_s_shape() -> None:
    costs = Costs()
    assert costs.draft(1, 4) == 0.0 and costs.plain(1, 1) == 1.0 and costs.other(3) == 0.0
    for _ in range(3):
        for rows in (4, 8, 16):
            costs.add_verify(4, rows, 10.0 + rows)
        costs.add_verify(16, 16, 52.0)
        costs.add_draft(4, 2, 3.0)
        costs.add_other(4, 0.5)
    assert costs.plain(4, 8) == pytest.approx(18.0) and costs.plain(8, 8) == pytest.approx(18.0)
    assert costs.plain(16, 16) == pytest.approx(52.0) and costs.plain(16, 8) == pytest.approx(36.0)
    assert costs.draft(64, 4) == pytest.approx(6.0) and costs.draft(0, 4) == costs.draft(3, 0) == 0.0
    assert costs.other(64) == 0.5


# Chances


def test_rates_count_only_what_was_put_to_the_test() -> None:
    rates = Rates(4, prior=0.5)
    own = rates.track()
    rates.learn([(own, 2, 4)])
    assert own.tests[:2] == [1, 1] and own.hits == [1, 1, 0, 0] and own.tests[2:] == [1, 0]
    for _ in range(200):
        rates.learn([(own, 2, 4)])
    found = estimate(own, rates.beliefs())
    assert found[0] > 0.95 and found[1] > 0.95 and found[2] < 0.05
    fresh = estimate(rates.track(), rates.beliefs())
    assert fresh[0] > 0.9 and fresh[2] < 0.1, "a new request is believed to be like the others"


def test_a_position_not_reached_comes_to_look_like_the_one_before() -> None:
    rates = Rates(2, prior=0.5)
    own = rates.track()
    for _ in range(5):
        rates.learn([(own, 1, 2)])
    assert estimate(own, rates.beliefs())[1] < 0.3
    for _ in range(150):
        rates.learn([(own, 1, 1)])
    assert estimate(own, rates.beliefs())[1] > 0.9


def test_who_begins_is_not_taken_for_those_who_are_left_of_a_batch() -> None:
    """A batch ends with the requests whose guesses come true least. The next one is like the last was at first."""
    rng, rates = random.Random(5), Rates(3, prior=0.5)
    batch = [(rates.track(), 0.1 if i < 4 else 0.9) for i in range(32)]

    def hits(chance: float) -> int:
        return next((i for i in range(3) if rng.random() >= chance), 3)

    for round_ in range(300):
        writing = batch if round_ < 40 else batch[:4]
        rates.learn([(track, hits(chance), 3) for track, chance in writing])
    assert estimate(batch[0][0], rates.beliefs())[0] < 0.3
    assert rates.beliefs().everybody[0] < 0.3
    new = rates.track()
    assert 0.7 < estimate(new, rates.beliefs())[0] < 0.9
    tracks = [new, batch[0][0], batch[9][0]]
    for row, track in zip(estimates(tracks, rates.beliefs()), tracks, strict=True):
        assert row.tolist() == pytest.approx(estimate(track, rates.beliefs()))
    for _ in range(EARLY):  # one that begins otherwise shows it, and nobody holds what others did against it
        rates.learn([(new, 0, 3)])
    assert estimate(new, rates.beliefs())[0] < 0.3


def test_requests_that_differ_by_luck_alone_are_taken_for_one_another() -> None:
    rng = random.Random(3)

    def tracks(chances: list[float]) -> list:
        rates = Rates(1, prior=0.5)
        made = [rates.track() for _ in chances]
        for _ in range(40):
            rates.learn([(t, int(rng.random() < c), 1) for t, c in zip(made, chances, strict=True)])
        return made

    assert pull(tracks([0.5] * 32)) > 10
    assert pull(tracks([0.1, 0.9] * 16)) == pytest.approx(4.0)
    assert pull(tracks([0.5] * 2)) == pytest.approx(4.0)


def test_turns_are_noticed_soon_and_seldom_imagined() -> None:
    turns = Turns()
    assert all(turns.see(0.85, i % 6 > 0) is None for i in range(60))
    assert [turns.see(0.85, False) for _ in range(4)] == [None, None, None, (4, 0)]
    assert [turns.see(0.1, True) for _ in range(2)] == [None, (2, 2)]
    rng, alarms = random.Random(0), 0
    for _ in range(2000):
        alarms += turns.see(0.7, rng.random() < 0.7) is not None
    assert alarms < 20


# Plans


def simple(n: int, depth: int, rng: random.Random, costs: Costs, batch: int | None = None) -> Load:
    def chances() -> np.ndarray:
        return np.array([[rng.uniform(0.1, 0.95) for _ in range(depth)] for _ in range(n)])

    high = np.array([rng.randint(1, depth) for _ in range(n)])
    low = np.array([rng.choice([0, 0, h]) for h in high])
    return Load(batch or n, batch or n, batch or n, chances(), chances(), low, high, width=1.0)


@pytest.mark.parametrize("seed", range(30))
def test_the_plan_is_within_a_hair_of_the_best_of_all(seed: int) -> None:
    """Against every combination of depths of up to three requests; drafting costs by level, rows more and more."""
    rng = random.Random(seed)
    costs, n = Costs(), rng.randint(1, 3)
    bend = rng.choice([2, 5, 50])
    for _ in range(3):
        for rows in range(1, 14):
            costs.add_verify(n, rows, 10.0 + max(0, rows - bend) * rng.choice([1.0, 1.0001]))
        for size in (1, 2, 4):
            for depth in range(1, 5):
                costs.add_draft(size, depth, rng.choice([0.1]) * depth * 3)
    load = simple(n, 4, rng, costs)
    planner = Planner(load, costs)
    found = planner.best()
    every = itertools.product(*(range(lo, hi + 1) for lo, hi in zip(load.low, load.high, strict=True)))
    best = max(planner.value(np.array(depths)).speed for depths in every)
    assert found.speed <= best * (1 + 1e-9) and found.speed >= 0.985 * best
    assert planner.value(np.array(found.depths)).speed == pytest.approx(found.speed, rel=0.02)
    assert all(lo <= d <= hi for lo, d, hi in zip(load.low, found.depths, load.high, strict=True))


def test_an_optimal_depth_of_the_textbook() -> None:
    """alpha = 0.8, a guess costs 0.1 of a pass, rows are free: 6 guesses, 2.47 times plain (Leviathan et al. 2023, eq. for S)."""
    costs = Costs()
    for _ in range(3):
        for rows in (1, 2, 32):
            costs.add_verify(1, rows, 1.0)
        for depth in (1, 2, 16):
            costs.add_draft(1, depth, 0.1 * depth)
    load = Load(1, 1, 1, np.full((1, 16), 0.8), np.ones((1, 16)), np.array([0]), np.array([16]))
    plan = Planner(load, costs).best()
    assert plan.depths == (6,) and plan.speed == pytest.approx(2.47, abs=0.005)


# Budgets


def test_a_large_batch_that_has_just_grown_gets_no_guesses_yet() -> None:
    goodput = Goodput(Asks(4, 4))
    goodput.overlaps = True
    goodput.known.referenced |= set(range(8))
    for size in (1, 16, 64):
        for rows in (size, 5 * size):
            goodput.costs.add_verify(size, rows, 1.0)
        goodput.costs.add_draft(size, 4, 0.01)
    requests = [tiny.request([1, 2]) for _ in range(66)]
    for number, request in enumerate(requests):
        request.id, request.computed, request.limit = number, 2, 64

    def deepest(size: int) -> int:
        return max(goodput.budget(Batch(tuple(requests[:size]), (1,) * size, (True,) * size, (9,) * size)).depth)

    assert deepest(1) > 0, "one alone need not wait"
    assert [deepest(size) > 0 for size in (20, 40, 60, 60, 64, 64)] == [False, False, False, True, True, True]
    assert [deepest(size) > 0 for size in (4, 6, 8)] == [True, True, True]


# Probes, cuts, words


def test_trials_are_paid_from_one_percent_of_the_time() -> None:
    allowance = Allowance()
    trials = 0
    for round_ in range(10_000):
        allowance.earn(1.0)
        if round_ >= GAP and allowance.affords(0.3):
            allowance.pay(0.3, 0.0)
            trials += 1
    assert 300 <= trials <= 334
    assert not allowance.affords(5.0)


def test_trials_that_cost_more_than_expected_come_less_often() -> None:
    allowance, spent = Allowance(), 0.0
    for _ in range(20_000):
        allowance.earn(1.0)
        if allowance.affords(0.3):
            allowance.pay(6.0, 0.0)
            spent += 6.0
    assert spent <= 0.015 * 20_000


def test_what_one_size_of_batch_saved_is_not_lost_on_another() -> None:
    allowance, trials = Allowance(), 0
    for round_ in range(5000):
        crowd = round_ % 20 == 0
        allowance.earn(1.0, 64 if crowd else 4)
        if crowd and allowance.affords(0.5, 64):
            allowance.pay(0.5, 0.0, batch=64)
            trials += 1
    assert 4 <= trials <= 5, "of its own 250 seconds"


def test_a_depth_that_was_opened_is_weighed_also_in_crowds() -> None:
    costs, n = Costs(), 40
    for rows, seconds in ((n, 1e-3), (2 * n, 1.1e-3), (4 * n, 1.3e-3), (8 * n, 2.0e-3)):
        for _ in range(4):
            costs.add_verify(n, rows, seconds)
    every = np.full((n, 8), 0.9)
    load = Load(n, n, n, every, np.ones((n, 8)), np.zeros(n, int), np.full(n, 8))
    assert max(Planner(load, costs).best({1, 3}).depths) == 3
    assert max(Planner(load, costs).best({0}).depths) == 0


def test_where_only_plain_passes_were_seen_guesses_begin_at_their_price() -> None:
    costs = Costs()
    costs.steady = True
    for _ in range(4):
        costs.add_verify(1, 1, 5e-3)
        costs.add_verify(64, 64, 15e-3)
        costs.add_verify(64, 128, 18e-3)
        costs.add_verify(64, 256, 24e-3)
    few = costs.verify(1, np.array([1.0, 2.0, 6.0]))
    assert few[0] == pytest.approx(5e-3) and np.all(few[1:] >= 5e-3) and np.all(few[1:] < 6e-3)


@dataclass(frozen=True, slots=True)
class Confident(Proposal):
    """A proposal whose drafter says how sure it is."""

    confidence: torch.Tensor | None = None


def confident(rows: list[list[float]]) -> Confident:
    plain = Proposal.chains([[3] * len(r) for r in rows])
    wide = max(map(len, rows))
    told = torch.tensor([r + [0.0] * (wide - len(r)) for r in rows])
    return Confident(plain.tokens, plain.parents, plain.sizes, plain.source, plain.widths, True, confidence=told)


def ready(requests: list) -> Batch:
    for request in requests:
        request.computed = request.prompt_len
    return Batch(tuple(requests), (1,) * len(requests), (True,) * len(requests), (8,) * len(requests))


def test_guesses_their_drafter_does_not_believe_in_are_cut() -> None:
    costs = Costs()
    for _ in range(3):
        for rows in range(2, 11):
            costs.add_verify(2, rows, 1.0 + 0.1 * rows)
    load = Load(2, 2, 2, np.ones((2, 4)), np.ones((2, 4)), np.array([0, 0]), np.array([4, 4]))
    assert worth([[0.9, 0.8, 0.02, 0.01], [0.05]], 0, load, costs) == [2, 0]
    greedy = [tiny.request([2, 3], SamplingParams(temperature=0.0)) for _ in range(2)]
    cut = shorten(ready(greedy), confident([[0.9, 0.9, 0.02, 0.9], [0.05]]), load, costs)
    assert cut.widths == (2, 0) and cut.sizes.tolist() == [2, 0]
    sure = confident([[0.99] * 4, [0.99]])
    assert shorten(ready(greedy), sure, load, costs) is sure
    drawn = [tiny.request([2, 3], SamplingParams(temperature=1.0), rule="rejection") for _ in range(2)]
    doubtful = confident([[0.01] * 4, [0.01]])
    assert shorten(ready(drawn), doubtful, load, costs) is doubtful, "a draw is verified, whatever it is"
    plain = Proposal.chains([[3] * 4, [3]])
    assert shorten(ready(greedy), plain, load, costs) is plain and shorten(ready(greedy), sure, None, costs) is sure


def test_bounds_keep_to_the_user_s_word_and_to_the_seed() -> None:
    def of(wish: int = 5, rule: str = "coupled", **params: object) -> tuple[int, int]:
        request = tiny.request([2, 3], SamplingParams(**{"max_tokens": 50, **params}), rule=rule)
        return bounds(ready([request]), 0, wish)

    assert of() == (0, 5) and of(max_depth=3) == (0, 3) and of(depth=7) == (7, 7) and of(depth=2, max_depth=4) == (2, 2)
    assert of(depth=99) == (8, 8), "no more than there is room for"
    assert of(draft="none", depth=4) == (0, 0) and of(depth=0) == (0, 0) and of(max_tokens=1) == (0, 0)
    assert of(rule="rejection") == (0, 5) and of(rule="rejection", seed=3) == (5, 5)
    assert of(rule="rejection", seed=3, temperature=0.0) == (0, 5) and of(seed=3) == (0, 5)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_depth": -1}, "max_depth must be 0"),
        ({"max_depth": 1.5}, "max_depth must be a whole number"),
        ({"depth": 5, "max_depth": 3}, r"depth \(5\) is larger than max_depth \(3\)"),
        ({"draft": "ngrm"}, "can only be 'none'"),
    ],
)
def test_bad_wishes_are_refused(params: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        SamplingParams(**params)


def test_names() -> None:
    assert [type(make(n, Asks(3, 3))).name for n in CONTROLLERS] == list(CONTROLLERS)
    assert isinstance(make("goodput", Asks(0, 0)), Fixed)
    with pytest.raises(BadInput, match="unknown controller 'fast'; use fixed, adaptive, goodput"):
        check("fast")


def test_auto_takes_the_best_there_is() -> None:
    names = [name for name, _ in AUTO]
    assert pick(names)[0] == names[0] and pick(names[1:])[0] == names[1]


def test_a_story_tells_changes_once_and_not_too_often(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    story = Story("goodput", clock)
    assert "nothing was decided" in story.explain()
    with caplog.at_level(logging.INFO, "outrider.control"):
        for depth in (4.0, 4.2, 3.9, 0.0, 4.0, 0.0):
            story.count([round(depth)])
            story.change(depth, lambda: "because")
            clock.now += 0.4
    lines = [r.getMessage() for r in caplog.records]
    assert lines == [
        "goodput, mean depth 4.0, on: because", "goodput, mean depth 0.0, off: because",
    ]  # fmt: skip
    assert story.explain() == "goodput: mean depth 2.7, off in 33% of rounds; last off: because"


# Calibration


@pytest.mark.parametrize("cache", ["paged", "slots"])
def test_calibration_measures_and_leaves_nothing_behind(cache: str) -> None:
    world = tiny.World(cache=cache)
    goodput = Goodput(Asks(4, 4))
    before = world.cache.free()
    assert calibrate(world.target, goodput, seconds=30.0) >= 10
    assert world.cache.free() == before == world.cache.capacity
    assert 0 < goodput.costs.plain(1, 1) < 1 and goodput.costs.plain(1, 1) <= goodput.costs.plain(1, 8)
    assert calibrate(world.target, Fixed(Asks(4, 4))) == 0
    prompt = tiny.prompts(1, seed=2)[0]
    assert world.run(tiny.draft_model(2), [tiny.request(prompt)]) == tiny.World().run(tiny.draft_model(2), [tiny.request(prompt)])


def test_calibration_is_bounded() -> None:
    ticks = itertools.count(0, 0.1)
    goodput = Goodput(Asks(4, 4))
    assert 0 < calibrate(tiny.World().target, goodput, seconds=1.0, clock=lambda: next(ticks)) <= 4


def test_what_compiling_takes_is_not_taken_from_calibration() -> None:
    now, turns, target = [0.0], itertools.count(), tiny.World().target
    real = target.score

    def slow(batch: Batch, proposal: Proposal) -> Scores:
        now[0] += 0.01 if next(turns) % TIMES else 5.0
        return real(batch, proposal)

    target.score = slow  # type: ignore[method-assign]
    assert calibrate(target, Goodput(Asks(4, 4)), clock=lambda: now[0]) >= 10 and 5 < now[0] < COMPILING + 6


def test_a_stall_while_planning_does_not_put_off_the_plans_to_come() -> None:
    """Plans take 0.1 ms, one takes 100 ms: the next one is made soon all the same."""
    now, planned = [0.0], list[int]()
    thinking = iter([1e-4] * 5 + [0.1] + [1e-4] * 1000)

    class Slow(Goodput):
        def _measure(self, *given: object) -> Load:
            now[0] += next(thinking)
            planned.append(len(run.rounds))
            return super()._measure(*given)  # type: ignore[arg-type]

    controller = Slow(Asks(4, 4), lambda: now[0])  # type: ignore[arg-type]
    run = Simulation(code_then_poetry(1000), controller, Clock(), seed=1)
    for _ in range(300):
        now[0] += 0.02
        run.run(1)
    stalled = planned[5]
    assert planned[6] - stalled <= 12


def test_trials_in_a_row_are_one_trial() -> None:
    """Where the second was launched before anybody knew what the first one took, both together are the price of trying."""
    for joined in (False, True):
        allowance = Allowance()
        for _ in range(6):
            for follows in (False, joined):
                allowance.earn(0.01, 64)
                allowance.pay(0.3, 0.0, batch=64, joined=follows)
        assert allowance.price(64) == pytest.approx(0.6 if joined else 0.3)
        for number in range(14):  # one after the other, each as the last one paid
            allowance.earn(0.01, 64)
            allowance.pay(0.3, 0.0, batch=64, joined=number > 0)
        assert allowance.price(64) < 0.61, "a chain is many trials"
