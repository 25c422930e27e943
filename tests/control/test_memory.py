"""What outlives a round, a pause and a switch: stalls, verdicts on guessing, chances, and what is put on the shelf."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from outrider.bench import simulate
from outrider.bench.simulate import Asks, Clock, Simulation, World, laptop
from outrider.config import SamplingParams
from outrider.control import Fixed, Goodput, Shelf, make
from outrider.control.book import Book
from outrider.control.costs import CROWD, Costs
from outrider.control.judge import LONGEST, MANY, REST, Judge
from outrider.control.plan import Load, Plan, Planner
from outrider.control.rates import Rates
from outrider.control.shelf import Known, title
from outrider.control.stalls import FIRST, Stalls
from outrider.control.trees import Trees
from outrider.registry import parse


def test_where_nothing_stalls_nothing_waits() -> None:
    stalls = Stalls()
    assert stalls.usual == stalls.price(4, 3) == 0.0
    assert stalls.open(1, 7) and stalls.within(1, 7) == 7 and stalls.least(1, 7) == 1 and not stalls.wait(100.0)


def test_a_new_depth_waits_until_as_much_was_forgone_as_it_costs() -> None:
    stalls = Stalls()
    stalls.use(1, 2)
    stalls.saw(1, 2, 0.2)
    assert stalls.usual == stalls.price(1, 5) == stalls.price(3, 2) == 0.2 and stalls.price(1, 2) == 0.0
    assert not stalls.open(1, 5) and stalls.within(1, 5) == 2 and stalls.least(1, 5) == 2 and stalls.least(9, 5) == 1
    stalls.want(1, 5, 0.5)
    assert [stalls.wait(0.1) for _ in range(5)] == [False, False, False, True, False]
    assert stalls.open(1, 5) and stalls.within(1, 5) == 5, "half of 0.4 seconds"
    stalls.want(1, 4, 0.1)
    stalls.content()
    assert not stalls.wait(100.0) and not stalls.open(1, 4), "nobody misses it any more"


def test_what_somebody_knows_to_be_ready_does_not_wait() -> None:
    stalls = Stalls(ready=lambda batch, depth: depth <= 4 * batch)
    stalls.use(1, 2)
    stalls.saw(1, 2, 0.2)
    assert [stalls.within(1, 9), stalls.within(2, 9), stalls.price(1, 5)] == [4, 8, 0.2]
    stalls.saw(1, 4, 0.3)
    assert len(stalls.prices) == 2, "it was not ready after all"


def test_what_stalls_a_familiar_depth_is_the_machine() -> None:
    stalls = Stalls()
    for _ in range(FIRST + 1):
        stalls.use(1, 3)
    stalls.saw(1, 3, 0.2)
    stalls.use(1, 4)
    stalls.saw(1, 4, 0.001)
    assert stalls.usual == 0.0


def test_guessing_that_goes_on_losing_rests_longer_every_time() -> None:
    judge, rests = Judge(), []
    for _ in range(4):
        while not judge.rests(1):
            judge.add(1, 1, 1.25, 1.0)
        rests.append(judge.case(1).rest)
        while judge.rests(1):
            judge.tick(1)
    assert rests == [REST, 2 * REST, 4 * REST, 8 * REST]
    for _ in range(2 * MANY):
        judge.add(1, 2, 1.25, 1.0)
    assert judge.case(1).next == REST < LONGEST, "it has been seen to pay"


def test_a_stall_now_and_then_is_no_verdict_and_batches_are_not_mixed() -> None:
    judge = Judge()
    for i in range(300):
        judge.add(1, 11, 100.0 if i % 25 == 0 else 10.0, 1.0)
    assert not judge.rests(1) and judge.case(1).next == REST
    judge = Judge()
    for _ in range(MANY - 1):
        judge.add(1, 1, 1.25, 1.0)
        judge.add(64, 64, 60.0, 1.0)
    assert not judge.rests(1) and not judge.rests(64)
    judge.add(1, 1, 1.25, 1.0)
    assert judge.rests(1) and not judge.rests(64), "batches that come and go in turns do not hide a loss"


def test_who_catches_up_is_told_to_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round with guesses of a request, and the first one after a pause."""
    told = list[bool]()
    monkeypatch.setattr(Judge, "add", lambda self, *given, steady: told.append(steady))
    world = World(lambda b, r: 0.7, lambda d, n: 1e-4, laptop, batch=4, stall=0.0)
    run = Simulation(world, Goodput(Asks(6, 6), clock := Clock()), clock)
    run.run(600)
    assert len(told) > 100 and not all(told) and sum(told) > 0.8 * len(told)


@pytest.mark.parametrize("steady", [True, False])
def test_a_crowd_that_catches_up_with_its_prompts_says_nothing_about_the_next_rounds(steady: bool) -> None:
    """60 requests get two tokens each in 2.3 ms where plain rounds take 1.3; the first round reads their prompts, too: 12 ms."""
    judge = Judge()
    anew = [judge.add(60, 120, 2.3e-3 if i else 12.4e-3, 60 / 1.3e-3, steady=steady or i > 0) for i in range(5)]
    assert any(anew) == steady and not judge.rests(60)


@pytest.mark.parametrize("catching", [0, 1])
def test_a_drafter_that_always_catches_up_is_judged_all_the_same(catching: int) -> None:
    judge = Judge()
    anew = [judge.add(60, 66, 2.3e-3, 60 / 1.3e-3, steady=not catching) for _ in range(16)]
    assert any(anew) and judge.rests(60)


def test_chances_fade_to_those_of_long_ago_and_not_to_the_prior() -> None:
    rates = Rates(3, 0.6)
    own = rates.track()
    for _ in range(40):
        rates.learn([(own, 0, 3)])
    for _ in range(400):
        rates.learn([])
    assert rates.everybody()[0] < 0.05


def hopeless(share: float = 0.75) -> World:
    """Guesses that are never right, at this share of a pass each."""
    return World(lambda b, round_: 0.0, lambda depth, requests: share * depth * laptop(1, 1), laptop)


def answers(world: World, known: Known | None, lengths: list[int], seed: int) -> tuple[float, Known]:
    """Speed against plain decoding over answers of so many rounds each, by one controller."""
    clock = Clock()
    controller = Goodput(Asks(6, 6), clock, known)
    rounds = []
    for n, length in enumerate(lengths):
        run = Simulation(world, controller, clock, seed + n, SamplingParams(max_tokens=simulate.LONG))
        for request in run._batch.requests:
            request.id += 100 * n
        rounds += run.run(length)
    return simulate.against_plain(rounds), controller.known


@pytest.mark.parametrize(("length", "least"), [(64, 0.97), (128, 0.98)])
def test_a_hopeless_drafter_costs_little_even_in_a_short_first_answer(length: int, least: float) -> None:
    """Nothing is known: two guesses, at three quarters of a pass each, tell that it does not pay."""
    speeds = [answers(hopeless(), None, [length], seed)[0] for seed in range(6)]
    assert sum(speeds) / len(speeds) >= least


def test_what_is_known_spares_the_next_controller_the_first_rounds() -> None:
    speeds = []
    for seed in range(6):
        known = answers(hopeless(), None, [64, 64], seed)[1]
        speeds.append(answers(hopeless(), known, [64] * 4, seed + 50)[0])
    assert sum(speeds) / len(speeds) >= 0.985
    good = World(lambda b, round_: 0.85, lambda depth, requests: 0.05 * depth * laptop(1, 1), laptop)
    first, known = answers(good, None, [64], 0)
    assert answers(good, known, [64], 0)[0] >= first - 0.02


def test_a_pause_makes_nobody_hopeful() -> None:
    """Off for long, a drafter is tried within 1 % of the time and no more."""
    run = Simulation(replace(hopeless(0.3), noise=0.02), Goodput(Asks(6, 6), clock := Clock()), clock)
    run.run(50)
    assert simulate.against_plain(run.run(1500)) >= 0.985


def test_a_machine_that_becomes_far_slower_is_believed_in_the_end() -> None:
    at: list[Simulation] = []

    def verify(rows: int, requests: int) -> float:
        return laptop(rows, requests) * (20 if at and len(at[0].rounds) >= 60 else 1)

    at.append(Simulation(World(lambda b, r: 0.8, lambda d, n: 1e-4, verify), Goodput(Asks(6, 6), clock := Clock()), clock))
    at[0].run(360)
    controller = at[0].controller
    assert isinstance(controller, Goodput)
    assert controller.costs.plain(1, 1) == pytest.approx(20 * laptop(1, 1), rel=0.3)


def test_short_controllers_find_together_that_guesses_pay_again() -> None:
    """A drafter that lost while the host was slow, so that trials were dear, then pays well; no controller lives for longer than
    96 rounds, in which it earns about as many passes as one hundred have one."""
    slow = World(lambda b, round_: 0.7, lambda depth, requests: 4.0 * laptop(1, 1), laptop)
    known = answers(slow, None, [96] * 4, 0)[1]
    good = replace(slow, draft=lambda depth, requests: 0.1 * laptop(1, 1))
    speeds = [answers(good, known, [96], seed)[0] for seed in range(1, 17)]
    assert speeds[0] < 1.05, "it does not know yet"
    assert sum(speeds[-4:]) / 4 > 1.5


def test_the_shelf_knows_drafters_by_name_options_and_members() -> None:
    shelf = Shelf()
    specs = ["ngram", "ngram:depth=3", "suffix", "hybrid:members=suffix+ngram", "hybrid:members=ngram+suffix"]
    assert len({title(parse(s)) for s in specs}) == len(specs)
    first, again, other = (make("goodput", parse(s), shelf) for s in ("ngram", "ngram", "suffix"))
    assert isinstance(first, Goodput) and isinstance(again, Goodput) and isinstance(other, Goodput)
    assert first.costs is again.costs and first.costs is not other.costs
    assert isinstance(make("fixed", parse("ngram"), shelf), Fixed)


@pytest.mark.parametrize("chance", [0.7, 0.1])
def test_a_slow_planner_keeps_no_newcomer_waiting(chance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short answers one after another, where a plan takes as long as half a round: hardly anybody has to do without guesses that
    pay, and a drafter that does not is left alone all the same."""
    clock, planned = Clock(), Planner.best

    def slow(planner: Planner) -> Plan:
        clock.now += 5e-4
        return planned(planner)

    monkeypatch.setattr(Planner, "best", slow)
    world = replace(
        World(lambda b, round_: chance, lambda d, n: 4e-4, lambda rows, n: 1e-3, lost=1e-5, behind=True, noise=0.02, stall=0.0),
        unsaid=lambda depth, requests: 1e-4 + 1e-4 * depth,
    )
    run = Simulation(world, Goodput(Asks(5, 5), clock), clock, 0, SamplingParams(max_tokens=simulate.LONG))
    for answer in range(12):
        request = simulate._request(answer + 1, run.params)
        run._batch, run._unread = replace(run._batch, requests=(request,)), None
        run.run(60)
    off = [r.depth == 0 for r in run.rounds[180:]]
    assert sum(off) < 0.05 * len(off) if chance > 0.5 else sum(off) > 0.8 * len(off)


def test_another_controller_is_handed_a_verdict_but_no_long_one() -> None:
    judge = Judge()
    while judge.case(4).next < 4096:
        judge.add(4, 3.0, 1.0, 4.0)
        judge.tick(4)
    judge.case(4).rest = 3000
    judge.inherit()
    assert judge.case(4).rest == REST and judge.case(4).next == 4 * REST


def test_what_few_requests_taught_is_no_longer_believed_of_crowds_once_crowds_were_seen() -> None:
    known = Known(3)
    few = known.chances(1)
    few.accept.learn([(few.accept.track(), 3, 3)] * 40)
    many = known.chances(64)
    assert many.accept.everybody() == few.accept.everybody(), "better than nothing"
    for _ in range(20):
        many.accept.learn([(many.accept.track(), 0, 3)] * 40)
    few.accept.learn([(few.accept.track(), 3, 3)] * 4)
    assert known.chances(64) is many is known.chances(16) and known.chances(2) is few
    assert known.chances(64).accept.everybody()[0] < 0.1 < 0.9 < known.chances(2).accept.everybody()[0]


def test_how_wide_guesses_are_is_known_apart_for_crowds() -> None:
    known = Known(4)
    assert known.nodes(True) == known.nodes(False) == (0.0, 0.0)
    known.rows[False] = 5.0, 15.0
    assert known.nodes(True) == (5.0, 15.0), "better than nothing"
    known.rows[True] = 8.0, 8.0
    book = Book(known)
    assert book.width(64, 3.0) == pytest.approx(11 / 9) and book.width(2, 3.0) == 3.0


def test_a_first_crowd_of_chains_is_not_taken_for_trees() -> None:
    """Its chances are those of few, measured of chains."""
    trees = Trees(3.0)
    trees.now = 1.0
    for _ in range(60):
        trees.used(1)
    load = Load(16, 16, 16, *(np.full((16, 3), c) for c in (0.7, 1.0)), *(np.full(16, n) for n in (0, 3)), fresh=True)
    trees.choose(load, Costs())
    chosen = trees._load(load, 1.0)
    assert chosen.accept[0, 0] == pytest.approx(0.7, abs=0.01)


def test_a_drafter_that_paces_itself_is_told_how_deep_to_go_in_crowds() -> None:
    stalls = Stalls(paced=True)
    assert stalls.shape(CROWD, 5) == stalls.shape(CROWD, 2) and stalls.shape(CROWD + 1, 5) != stalls.shape(CROWD + 1, 2)
