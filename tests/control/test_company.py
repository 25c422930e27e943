"""Requests beside others and after them: what some were promised, or are like, is not held against the rest."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from outrider.bench import simulate
from outrider.bench.simulate import LONG, Asks, Clock, Simulation, World, laptop, overlapped
from outrider.config import SamplingParams
from outrider.control import Foresight, Goodput
from outrider.control.book import ENOUGH, Asked, Book
from outrider.control.costs import bucket
from outrider.control.goodput import FEWER
from outrider.control.judge import Judge
from outrider.control.plan import Load
from outrider.control.rates import Rates, Track
from outrider.control.shelf import Known
from outrider.types import NONE, Batch, Committed, Finish, StepEvent

from .test_cards import card

DEPTH = 5
FREE, FORCED = SamplingParams(max_tokens=LONG), SamplingParams(max_tokens=LONG, depth=DEPTH)
numbers = count(1000)


def among(world: World, controller: Goodput, seed: int, params: tuple[SamplingParams, ...]) -> Simulation:
    """New requests, with these parameters, for a controller that may know others."""
    assert isinstance(controller._clock, Clock)
    run = Simulation(world, controller, controller._clock, seed)
    requests = tuple(replace(r, id=next(numbers), params=p) for r, p in zip(run._batch.requests, params, strict=True))
    run._batch = replace(run._batch, requests=requests)
    return run


def home(chance: float, batch: int) -> World:
    """A laptop, and a drafter that takes an eighth of a pass a level."""
    return World(accept=lambda b, round_: chance, draft=lambda d, n: 0.12 * d * laptop(1, 1), verify=laptop, batch=batch)


def on_a_card(batch: int, chance: float) -> World:
    """A captured drafter on a GPU, where nothing is left to be captured."""
    return card("captured", batch, chance, capture=0.0)


@pytest.mark.parametrize(("chance", "least"), [(0.85, 1.7), (0.6, 1.05)])
def test_one_who_always_has_guesses_keeps_nobody_from_theirs(chance: float, least: float) -> None:
    """With a depth that a user set no round is plain, so a plain round for comparison is never due."""
    run = among(home(chance, 4), Goodput(Asks(DEPTH, DEPTH), Clock()), 2, (FORCED, FREE, FREE, FREE))
    run.run(200)
    assert simulate.against_plain(run.run(400), 4) >= least


def test_guesses_that_a_user_insists_on_are_no_verdict_on_those_of_others() -> None:
    controller = Goodput(Asks(DEPTH, DEPTH), Clock())
    among(home(0.85, 1), controller, 1, (FREE,)).run(300)
    among(home(0.05, 1), controller, 2, (FORCED,)).run(600)
    again = among(home(0.85, 1), controller, 3, (FREE,))
    again.run(100)
    assert simulate.against_plain(again.run(200)) >= 2.0


def test_newcomers_are_not_held_to_what_became_of_those_before() -> None:
    """Four good texts after four bad ones, on a card: guesses for most of them within some dozen rounds."""
    first, speeds = list[int](), list[float]()

    for seed in range(6):
        controller = Goodput(Asks(DEPTH, DEPTH), Clock())
        controller.overlaps = True
        among(on_a_card(4, 0.8), controller, seed, (FREE,) * 4).run(300)
        among(on_a_card(4, 0.05), controller, seed + 100, (FREE,) * 4).run(60)
        late = among(on_a_card(4, 0.8), controller, seed + 200, (FREE,) * 4)
        rounds = late.run(150)
        first.append(next((i for i in range(140) if all(r.depth > 0 for r in rounds[i : i + 4])), 999))
        speeds.append(simulate.against_plain(rounds, 4))
    assert sorted(first)[len(first) // 2] <= 40 and sum(speeds) / len(speeds) >= 1.5


@pytest.mark.parametrize(("speed", "found"), [(1.04, False), (0.9, True)])
def test_rounds_of_two_sizes_in_turn_are_each_judged_by_their_own(speed: float, found: bool) -> None:
    """Twenty rounds of four requests, twenty of eight: foreseen guesses that gain a little are no loss, and losing is seen."""
    controller, noise, seconds = Foresight(Asks(DEPTH, DEPTH), Clock()), random.Random(0), 1e-3
    requests = [simulate._request(b, FREE) for b in range(8)]
    for n in (4, 8):
        for _ in range(30):
            controller.costs.add_verify(n, n, seconds)
            controller.costs.add_verify(n, 2 * n, seconds)
        controller.costs.add_other(n, 0.0)
        controller._plain_sizes.add(bucket(n))
    for visit in range(40):
        n = (4, 8)[visit % 2]
        asked = Asked(tuple(r.id for r in requests[:n]), (1,) * n, 1, n, foreseen=True)
        tokens = [1 + (b % 4 == 0) for b in range(n)]
        items = tuple(
            Committed(r, (0,) * t, (0,) * (t - 1) + (NONE,), 1, t - 1, (1,), (), "", Finish.RUNNING)
            for r, t in zip(requests, tokens, strict=False)
        )
        for _ in range(20):
            wall = seconds * 1.25 / speed * noise.uniform(0.95, 1.05)
            controller._book.open.append(asked)  # the next one is like this
            controller._learn(asked, StepEvent(items, 0.0, seconds, wall, 0, 2 * n), wall, False)
            controller._book.open.clear()
        if found and controller._judge.rests(n):
            return
        assert not controller._judge.rests(n)
    assert not found


def test_rounds_of_another_length_of_context_are_each_compared_with_their_own_plain_ones() -> None:
    judge, plain = Judge(), {"long": 2e-3, "short": 1e-3}
    for text in ("long", "short"):
        for _ in range(40):
            judge.add(1, 1.2, plain[text], 1 / plain[text])
            assert not judge.rests(1)


def read_prompts(run: Simulation) -> None:
    """New prompts come in: no round can be launched ahead meanwhile, and the device is still at it when the next one is."""
    if run._unread is not None:
        run.controller.observe(run._unread)
        run._unread = None
    nothing = tuple(Committed(r, (), (), 0, 0, (), (), "", Finish.RUNNING) for r in run._batch.requests)
    run.controller.budget(replace(run._batch, pending=(9,) * len(nothing), ready=(False,) * len(nothing)))
    run.clock.now += 2e-3
    run.controller.observe(StepEvent(nothing, 0.0, 2e-3, 2e-3, 9 * len(nothing), 9 * len(nothing)))
    world = run.world
    run.world = replace(world, lost=world.lost + 4e-3)
    run._step()
    run.world = world


def test_short_texts_leave_time_for_trials() -> None:
    """What a round takes that waits for prompts to be read is no price of a trial, and none of guessing."""
    controller = Goodput(Asks(DEPTH, DEPTH), Clock())
    controller.overlaps, good = True, []
    among(on_a_card(4, 0.02), controller, 1, (FREE,) * 4).run(600)
    for text in range(40):
        run = among(on_a_card(4, 0.85), controller, text, (FREE,) * 4)
        read_prompts(run)
        good += run.run(90)
    assert simulate.against_plain(good[len(good) // 2 :], 4) >= 1.8


def test_guesses_that_users_insist_on_do_not_have_everybody_planned_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs pay, those of the one who is free do not."""
    plans = list[int]()
    best = Goodput._best
    monkeypatch.setattr(Goodput, "_best", lambda self, planner: plans.append(self._book.round) or best(self, planner))
    world = replace(home(0.9, 3), accept=lambda b, round_: 0.95 if b < 2 else 0.0)
    four = replace(FORCED, depth=4)
    run = among(world, Goodput(Asks(DEPTH, DEPTH), Clock()), 0, (four, four, FREE))
    run.run(100)
    plans.clear()
    run.run(200)
    assert len(plans) <= 60


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_trials_that_are_stalled_again_and_again_are_paid_for(share: float) -> None:
    """A drafter that pays little, and whose rounds are stalled by 20 passes now and then, whatever a first stall is taken for."""
    rounds = []
    for seed in range(4):
        luck, controller = random.Random(seed), Goodput(Asks(DEPTH, DEPTH), Clock())
        controller.overlaps = True
        world = on_a_card(64, 0.3)
        world = replace(world, unsaid=lambda d, n, luck=luck: 0.02 if luck.random() < share else 1e-4)  # type: ignore[misc]
        run = among(world, controller, seed, (FREE,) * 64)
        run.run(200)
        rounds += run.run(1500)
    assert simulate.against_plain(rounds, 64) >= 0.98


def test_guesses_are_judged_even_where_every_round_waits_for_prompts() -> None:
    """A server whose every second round reads prompts: guessing that loses is seen to lose all the same, trials apart."""
    controller = Goodput(Asks(DEPTH, DEPTH), Clock())
    controller.overlaps = True
    for n in (1, 16, 32, 96):
        for _ in range(4):
            controller.costs.add_verify(16, n, overlapped(n, 16))
    world = replace(on_a_card(16, 0.05), draft=lambda d, n: 5e-4 * d, unsaid=lambda d, n: 2e-4)
    run = among(world, controller, 1, (FREE,) * 16)
    for _ in range(400):
        read_prompts(run)
    assert sum(r.depth > 0 for r in run.rounds[-200:]) <= 30


def test_of_a_crowd_some_are_learned_from_in_a_round_and_all_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, learn = list[int](), Rates.learn

    def counted(self: Rates, round_: Iterable[tuple[Track, int, int]], rounds: int = 1) -> None:
        some = list(round_)
        sizes.append(len(some))
        learn(self, some, rounds)

    monkeypatch.setattr(Rates, "learn", counted)
    controller = Goodput(Asks(DEPTH, DEPTH), Clock())
    run = among(on_a_card(64, 0.8), controller, 1, (FREE,) * 64)
    rounds = run.run(200)
    assert max(sizes) == ENOUGH and sizes.count(ENOUGH) > len(sizes) / 2
    ages = [controller._book.state(r).accept.age for r in run._batch.requests]
    assert min(ages) > 100 and max(ages) <= 208, "in rounds, not in those that told"
    assert simulate.against_plain(rounds[100:], 64) >= 1.2


@pytest.mark.parametrize(("size", "gone", "anew"), [(64, 4, False), (64, 64 // FEWER, True), (8, 1, True)])
def test_a_plan_stands_while_few_of_a_crowd_leave(size: int, gone: int, anew: bool) -> None:
    controller = Goodput(Asks(DEPTH, DEPTH), Clock())
    run = among(on_a_card(size, 0.8), controller, 1, (FREE,) * size)
    run.run(300)
    made = controller._planned
    while controller._planned == made:
        run.run(1)
    made, left, batch = controller._planned, size - gone, run._batch
    controller._thought.lived(1.0)  # it has been long enough
    run._batch = Batch(batch.requests[:left], (1,) * left, (True,) * left, (64,) * left)
    controller.budget(run._batch)
    assert (controller._planned > made) == anew and controller._usual_depth


@pytest.mark.parametrize(("chance", "guesses"), [(0.85, True), (0.02, False)])
def test_newcomers_are_planned_for_while_the_device_works(chance: float, guesses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then they have what most had: the first round after a prompt waits for the host."""
    controller = Goodput(Asks(DEPTH, DEPTH), Clock())
    controller.overlaps, measure, ahead = True, Goodput._measure, list[bool]()

    def noted(self: Goodput, batch: Batch, *rest: Any) -> Load:
        ahead.append(bool(self._book.open))  # another round is under way
        return measure(self, batch, *rest)

    among(on_a_card(2, chance), controller, 1, (FREE,) * 2).run(400)
    monkeypatch.setattr(Goodput, "_measure", noted)
    controller._thought.lived(1.0)
    run = among(on_a_card(2, chance), controller, 2, (FREE,) * 2)
    read_prompts(run)
    assert not ahead and controller._late and (run.rounds[-1].depth > 0) == guesses
    run.run(1)
    assert ahead == [True] and not controller._late, "in the round after it"


@pytest.mark.parametrize("between", [1, 2, 3])
def test_guesses_that_lose_are_given_up_however_often_prompts_come_in(between: int) -> None:
    controller = Goodput(Asks(DEPTH, DEPTH), Clock())
    controller.overlaps = True
    among(on_a_card(16, 0.9), controller, 1, (FREE,) * 16).run(300)
    assert controller._usual_depth
    run = among(replace(on_a_card(16, 0.02), draft=lambda d, n: 5e-4 * d), controller, 2, (FREE,) * 16)
    for _ in range(60):
        read_prompts(run)
        run.run(between - 1)
    assert sum(r.depth > 0 for r in run.rounds[-20:]) <= 4


def test_who_is_only_tried_in_a_crowd_is_always_learned_from() -> None:
    """Of all others some; in rounds of every other number, too."""
    book, requests = Book(Known(DEPTH)), [simulate._request(b, FREE) for b in range(40)]
    some = Batch(tuple(requests), (1,) * 40, (True,) * 40, (64,) * 40)
    items = tuple(Committed(r, (0, 0), (0, NONE), 2, 1, (1, 1), (), "", Finish.RUNNING) for r in requests)
    for _ in range(12):
        book.ask(some, [2] * 40, frozenset({3, 38}))
        book.settle(StepEvent(items, 0.0, 1e-3, 1e-3, 0, 120))
        book.ask(some, [0] * 40)  # a round of another kind
        book.settle(StepEvent(items, 0.0, 1e-3, 1e-3, 0, 40))
    weights = [book.state(r).accept.tests[0] for r in requests]
    assert min(weights[3], weights[38]) > 7 and all(2.5 < w < 5 for b, w in enumerate(weights) if b not in (3, 38))
    assert all(book.state(r).accept.age == 12 for b, r in enumerate(requests) if b not in (3, 38))
