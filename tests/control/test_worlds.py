"""Controllers in worlds without a model: given chances, given costs, noise. Seeds are fixed, so every run is the same one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from outrider.bench import simulate
from outrider.bench.simulate import Asks, Clock, Simulation, World, card, code_then_poetry, laptop
from outrider.config import SamplingParams
from outrider.control import CONTROLLERS, Adaptive, Fixed, Goodput
from outrider.types import Batch, Budget

MACHINES: dict[str, Callable[[int, int], float]] = {"cpu": laptop, "gpu": card}
WARM, ROUNDS = 50, 400
DEEP = 10


def drafting(share: float, machine: str) -> Callable[[int, int], float]:
    """A drafter whose every level costs this share of a plain pass of one."""
    one = MACHINES[machine](1, 1)
    return lambda depth, requests: share * depth * one


def world(machine: str, batch: int, share: float, chance: float | None) -> World:
    """`chance` None: requests of four kinds, from hopeless to easy."""
    kinds = (0.1, 0.9, 0.5, 0.8)
    return World(
        accept=(lambda b, round_: kinds[b % 4]) if chance is None else (lambda b, round_: chance),
        draft=drafting(share, machine),
        verify=MACHINES[machine],
        batch=batch,
    )


def play(world: World, seed: int = 0, **params: object) -> Simulation:
    clock = Clock()
    asks = SamplingParams(max_tokens=simulate.LONG, **params)
    return Simulation(world, Goodput(Asks(DEEP, DEEP), clock), clock, seed, asks)


class Always(Fixed):
    def __init__(self, depth: int) -> None:
        super().__init__(Asks(depth, depth))


def best_fixed(world: World, rounds: int = 3) -> float:
    """The most that any fixed depth reaches; expectations do not vary unless the drafter is sometimes silent."""
    return max(simulate.speed(Simulation(world, Always(k), Clock()).run(rounds)) for k in range(DEEP + 1))


CASES = [
    (machine, batch, share, chance)
    for machine in MACHINES
    for batch in (1, 4, 16, 64)
    for share in (0.005, 0.1, 0.3)
    for chance in ((0.0, 0.3, 0.6, 0.8, 0.95, None) if batch == 1 else (0.0, 0.6, 0.95, None) if batch < 64 else (0.8, None))
]


@pytest.mark.parametrize(("machine", "batch", "share", "chance"), CASES)
def test_never_slower_than_plain_and_near_the_best_fixed_depth(
    machine: str, batch: int, share: float, chance: float | None
) -> None:
    """One request's luck says little, so its case is played with several seeds."""
    given, rounds = world(machine, batch, share, chance), []
    for seed in range(4 if batch == 1 else 1):
        run = play(given, seed)
        run.run(WARM)
        rounds += run.run(ROUNDS if batch < 16 else 200)
    assert simulate.against_plain(rounds, batch) >= 0.98
    assert simulate.speed(rounds) >= 0.95 * best_fixed(given)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9])
def test_a_drafter_that_is_mostly_silent(machine: str, batch: int, chance: float) -> None:
    given = replace(world(machine, batch, 0.005, chance), offer=lambda b, round_: 0.2)
    run = play(given)
    run.run(WARM)
    rounds = run.run(ROUNDS)
    assert simulate.against_plain(rounds, batch) >= 0.98
    assert simulate.speed(rounds) >= 0.93 * best_fixed(given, ROUNDS)


def settled(depths: list[float], holds: Callable[[float], bool]) -> int:
    """Rounds until something holds for five rounds."""
    return next(i for i in range(len(depths) - 4) if all(map(holds, depths[i : i + 5])))


def test_code_then_poetry_then_code() -> None:
    """Down within 20 rounds, up within 40, in 19 of 20 runs at least: a run of luck may look like code for a while."""
    down, up = [], []
    for seed in range(20):
        run = play(code_then_poetry(150), seed)
        run.run(450)
        depths = [r.depth for r in run.rounds]
        assert sum(depths[60:150]) / 90 > 3, "deep in code"
        assert sum(depths[170:300]) / 130 < 0.6, "off in poetry"
        down.append(settled(depths[150:300], lambda d: d <= 1))
        up.append(settled(depths[300:], lambda d: d >= 3))
    assert sum(d <= 20 for d in down) >= 19 and sum(u <= 40 for u in up) >= 19
    assert sorted(down)[10] <= 10 and sorted(up)[10] <= 20


@pytest.mark.parametrize("seed", range(4))
def test_adaptive_follows_too(seed: int) -> None:
    clock = Clock()
    run = Simulation(code_then_poetry(150), Adaptive(Asks(8, 8), clock), clock, seed)
    run.run(450)
    depths = [r.depth for r in run.rounds]
    assert sum(depths[100:150]) / 50 > 3 and sum(depths[200:300]) / 100 < 1 and sum(depths[400:]) / 50 > 3
    steps = [abs(b - a) for a, b in pairwise(depths[:150])]
    assert max(steps) <= 1, "a level at a time"


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("batch", [1, 16])
def test_a_drafter_ten_times_as_slow_as_it_should_be(machine: str, batch: int) -> None:
    """Right four times in five, at the price of a pass per guess."""
    run = play(world(machine, batch, 1.0 if batch == 1 else 10.0, 0.8))
    run.run(WARM)
    assert simulate.against_plain(run.run(600), batch) >= 0.97


def test_a_drafter_that_becomes_slow() -> None:
    """After a hundred rounds every guess takes ten times as long: within fifty rounds it is out, and costs 3 % at most."""
    played: list[Simulation] = []

    def draft(depth: int, requests: int) -> float:
        slow = played and len(played[0].rounds) >= 100
        return (0.5 if slow else 0.05) * depth * laptop(1, 1)

    played.append(play(World(lambda b, round_: 0.6, draft, laptop)))
    before = played[0].run(100)
    played[0].run(50)
    after = played[0].run(400)
    assert simulate.against_plain(before[50:]) > 1.4 and simulate.against_plain(after) >= 0.97


def test_crashing_rounds_cost_little() -> None:
    """Every hundredth round is lost: ten times the time, and no guesses."""
    at: list[Simulation] = []

    def crashed() -> bool:
        return bool(at) and len(at[0].rounds) % 100 == 99

    def draft(depth: int, requests: int) -> float:
        return (10 if crashed() else 0.1 * depth) * laptop(1, 1)

    given = World(lambda b, round_: 0.3, draft, laptop, offer=lambda b, round_: 0.0 if crashed() else 1.0)
    at.append(play(given))
    at[0].run(WARM)
    lost = [r for r in at[0].run(600) if r.seconds > 10 * laptop(1, 1)]
    wasted = sum(r.seconds - r.plain_seconds for r in lost)
    rest = [r for r in at[0].rounds[WARM:] if r not in lost]
    assert len(lost) <= 6 and simulate.against_plain(rest) > 1.05, "what was lost does not poison the tables"
    assert wasted <= 6 * 11 * laptop(1, 1)


def test_first_rounds_that_take_long_do_not_poison_the_tables() -> None:
    """Every new shape takes twenty times as long once, as compiling or capturing it does."""
    seen: set[tuple[str, int]] = set()

    def slow_at_first(kind: str, size: int, seconds: float) -> float:
        first = (kind, size) not in seen
        seen.add((kind, size))
        return seconds * (20 if first else 1)

    given = World(
        lambda b, round_: 0.85,
        lambda depth, requests: slow_at_first("draft", depth, 0.1 * depth * card(1, 1)),
        lambda rows, requests: slow_at_first("verify", rows, card(rows, requests)),
    )
    run = play(given)
    run.run(WARM)
    calm = World(lambda b, round_: 0.85, drafting(0.1, "gpu"), card)
    warm = [r for r in run.run(200) if r.seconds < 6 * card(1, 1)]
    assert len(warm) > 190 and simulate.speed(warm) >= 0.95 * best_fixed(calm)


def test_a_machine_that_slows_down_changes_no_decision() -> None:
    """Somebody else takes half of the machine: everything is slower, so nothing is to be decided anew."""
    at: list[Simulation] = []

    def pace() -> float:
        return 2.0 if at and 200 <= len(at[0].rounds) < 300 else 1.0

    given = World(
        lambda b, round_: 0.7, lambda d, n: pace() * 0.1 * d * laptop(1, 1), lambda rows, n: pace() * laptop(rows, n), noise=0.02
    )
    at.append(play(given))
    at[0].run(400)
    depths = [r.depth for r in at[0].rounds]
    assert min(sum(depths[a : a + 50]) / 50 for a in (150, 200, 250, 300, 350)) > 1.5


def test_probes_cost_one_percent() -> None:
    """Hopeless, at less than 0.4 rounds a guess: once it is off, trials are all it costs."""
    run = play(replace(world("cpu", 1, 0.3, 0.0), noise=0.0, stall=0.0))
    run.run(WARM)
    rounds = run.run(1000)
    tried = sum(r.depth > 0 for r in rounds)
    assert tried >= 20, "it goes on trying"
    assert simulate.against_plain(rounds) >= 0.988


@pytest.mark.parametrize("name", CONTROLLERS)
def test_the_same_clock_and_seed_give_the_same_decisions(name: str) -> None:
    def depths() -> list[float]:
        clock = Clock()
        made = CONTROLLERS[name]
        controller = Fixed(Asks(6, 6)) if made is Fixed else made(Asks(6, 6), clock)
        run = Simulation(world("gpu", 4, 0.1, None), controller, clock, seed=5)
        return [r.depth for r in run.run(150)]

    assert depths() == depths()


@pytest.mark.parametrize("name", CONTROLLERS)
@pytest.mark.parametrize(
    ("params", "allowed"),
    [({"depth": 3}, {3}), ({"depth": 0}, {0}), ({"draft": "none"}, {0}), ({"max_depth": 2}, {0, 1, 2}), ({"max_depth": 0}, {0})],
)
@pytest.mark.parametrize("chance", [0.0, 0.95])
def test_the_user_s_word_wins(name: str, params: dict[str, object], allowed: set[int], chance: float) -> None:
    controller = CONTROLLERS[name](Asks(6, 6))
    run = Simulation(world("gpu", 2, 0.1, chance), controller, Clock(), params=SamplingParams(max_tokens=simulate.LONG, **params))
    assert {r.depth for r in run.run(80)} <= allowed | ({0.5, 1.5} if max(allowed) == 2 else set())


def test_a_cap_is_used_where_guesses_are_good() -> None:
    run = play(world("gpu", 1, 0.05, 0.95), max_depth=2)
    run.run(WARM)
    assert sum(r.depth for r in run.run(100)) > 190


def test_others_adapt_around_a_forced_request() -> None:
    """One request insists on six guesses; the rest, hopeless, make none."""
    run = play(world("cpu", 4, 0.1, 0.0))
    first = run._batch.requests[0]
    first.params = replace(first.params, depth=6)
    budgets: list[Budget] = []
    asked = run.controller.budget

    def budget(batch: Batch) -> Budget:
        budgets.append(asked(batch))
        return budgets[-1]

    run.controller.budget = budget  # type: ignore[method-assign]
    run.run(200)
    assert all(b.depth[0] == 6 for b in budgets)
    assert sum(sum(b.depth[1:]) for b in budgets[100:]) < 60


def test_trees_shrink_with_their_depth() -> None:
    clock = Clock()
    goodput = Goodput(Asks(5, 15), clock)
    run = Simulation(world("gpu", 1, 0.05, 0.9), goodput, clock)
    budget = goodput.budget(run._batch)
    assert budget.depth[0] >= 1 and budget.nodes[0] == 3 * budget.depth[0]


@pytest.mark.parametrize("batch", [4, 16, 60])
@pytest.mark.parametrize("easy", [0, 1])
def test_a_few_easy_requests_do_not_keep_the_others_waiting(batch: int, easy: int) -> None:
    """On a GPU, guesses made by the host cost everybody the time that plain rounds hide: more than a few requests can bring in,
    whatever guesses took while the batch was small."""

    def crowd(many: int, lost: float) -> World:
        accept = lambda b, round_: 0.95 if b < easy else 0.2  # noqa: E731
        return World(accept, lambda depth, requests: 5e-5 + 4e-6 * requests, card, many, lost=lost)

    first = play(crowd(1, 1e-4))
    controller = first.controller
    assert isinstance(controller, Goodput)
    controller.overlaps = True
    first.run(200)
    for seed in range(3):
        many = Simulation(crowd(batch, 4e-5 * batch), controller, first.clock, seed, first.params)
        assert simulate.against_plain(many.run(ROUNDS)[WARM:], batch) > 0.97
