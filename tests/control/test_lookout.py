"""Texts that copy in stretches: guessing goes on through the gaps while it pays on the whole, and else not for long."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outrider.bench import simulate
from outrider.bench.simulate import Asks, Clock, Simulation, World, laptop, overlapped
from outrider.config import SamplingParams
from outrider.control import Goodput
from outrider.control.lookout import PAYS, ROUNDS, Lookout

from .test_worlds import Always

DEPTH = 10


def stretches(seed: int, shortest: int, longest: int) -> list[bool]:
    """Whether each round is one that copies: half of them, so many in a row."""
    rng, found = random.Random(seed), list[bool]()
    while len(found) < 2000:
        for kind in (True, False):
            found += [kind] * rng.randint(shortest, longest)
    return found


def lookups(copies: list[bool], machine: str) -> World:
    """Prompt lookup: mostly right where the text copies, mostly silent elsewhere. On a card its guesses keep rounds from being
    launched ahead."""
    world = World(
        accept=lambda b, round_: 0.93 if copies[round_] else 0.2,
        draft=lambda depth, requests: 1.6e-4,
        verify=overlapped if machine == "card" else laptop,
        offer=lambda b, round_: 0.95 if copies[round_] else 0.3,
    )
    return replace(world, other=3e-5, lost=3.5e-4) if machine == "card" else world


def played(world: World, seed: int) -> float:
    clock = Clock()
    controller = Goodput(Asks(DEPTH, DEPTH), clock)
    controller.overlaps = world.lost > 0
    run = Simulation(world, controller, clock, seed, SamplingParams(max_tokens=simulate.LONG))
    run.run(50)
    return simulate.speed(run.run(1000))


@pytest.mark.parametrize("machine", ["card", "cpu"])
@pytest.mark.parametrize("seed", [1, 2])
def test_copying_in_stretches(machine: str, seed: int) -> None:
    world = lookups(stretches(seed, 6, 25), machine)
    best = max(simulate.speed(Simulation(world, Always(k), Clock()).run(1050)[50:]) for k in (0, 4, 8, DEPTH))
    assert played(world, seed) >= 0.93 * best


def test_gaps_that_are_too_long_are_not_sat_out() -> None:
    lookout = Lookout()
    assert not lookout.stays, "nothing was seen"
    for _ in range(10):
        lookout.saw(True, 1.5, 4.0)
    for missed in range(ROUNDS):
        assert lookout.stays, missed
        lookout.saw(False, 1.5, 1.0)
    assert not lookout.stays
    lookout.saw(True, 1.5, 4.0)
    assert lookout.stays


def test_where_it_does_not_pay_nobody_waits() -> None:
    lookout = Lookout()
    for _ in range(200):
        lookout.saw(True, 1.5, 1.5 * PAYS - 0.01)
    assert not lookout.stays
