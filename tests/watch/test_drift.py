"""The drift alarm, by simulation: how often it is false, how soon it is right."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator

import pytest

from outrider.watch.drift import BLOCK, Change, Drift


def alike(chance: float, dice: random.Random) -> Iterator[bool]:
    """Guesses that have nothing to do with one another."""
    while True:
        yield dice.random() < chance


def stretches(chance: float, dice: random.Random) -> Iterator[bool]:
    """Easy and hard stretches of a text, of twenty guesses on average."""
    easy = True
    while True:
        easy = easy if dice.random() < 0.95 else not easy
        yield dice.random() < chance + (0.2 if easy else -0.2)


def texts(chance: float, dice: random.Random) -> Iterator[bool]:
    """Requests of about a hundred guesses that differ: shares of 0.5 to 0.8, say."""
    while True:
        mine = dice.betavariate(8 * chance, 8 * (1 - chance))
        for _ in range(5 + int(dice.expovariate(0.01))):
            yield dice.random() < mine


def feed(drift: Drift, guesses: Iterator[bool], count: int) -> list[tuple[int, Change]]:
    found = [(i, drift.see(next(guesses))) for i in range(1, count + 1)]
    return [(i, change) for i, change in found if change is not None]


@pytest.mark.parametrize(
    ("world", "chance", "most"),
    [
        (alike, 0.001, 2),
        (alike, 0.02, 2),
        (alike, 0.5, 2),
        (alike, 0.97, 2),
        (alike, 0.999, 2),
        (stretches, 0.5, 2),
        (texts, 0.65, 16),
    ],
)
def test_false_alarms_are_rare(world, chance, most):
    """Over 80,000 first guesses: at most one in 40,000 where nothing changes, one in 5,000 where texts differ much."""
    alarms = 0
    for seed in range(20):
        drift = Drift()
        alarms += len(feed(drift, world(chance, random.Random(seed)), 4000))
    assert alarms <= most


@pytest.mark.parametrize(
    ("before", "after", "within"),
    [(0.8, 0.3, 64), (0.3, 0.8, 64), (0.8, 0.5, 112), (0.1, 0.5, 64), (0.8, 0.65, 300), (0.999, 0.8, 64)],
)
def test_a_change_is_found_soon_and_told_rightly(before, after, within):
    delays, told = [], []
    for seed in range(30):
        dice, drift = random.Random(seed), Drift()
        assert not feed(drift, alike(before, dice), 1000)
        delay, change = feed(drift, alike(after, dice), 2000)[0]
        delays.append(delay)
        told.append((change.before, change.after))
        assert change.since <= delay + 20 * BLOCK
    assert statistics.median(delays) <= within
    assert abs(statistics.median(t[0] for t in told) - before) < 0.05
    assert abs(statistics.median(t[1] for t in told) - after) < 0.1


def test_all_begins_anew_after_an_alarm():
    dice, drift = random.Random(5), Drift()
    feed(drift, alike(0.8, dice), 800)
    assert len(feed(drift, alike(0.2, dice), 2000)) == 1
    assert len(feed(drift, alike(0.8, dice), 2000)) == 1
    assert drift.alarms == 2


@pytest.mark.parametrize("hit", [True, False])
def test_guesses_that_are_all_alike_raise_no_alarm(hit):
    drift = Drift()
    assert not feed(drift, iter([hit] * 5000), 5000)


def test_one_miss_after_many_hits_raises_no_alarm():
    drift = Drift()
    assert not feed(drift, iter([True] * 20_000 + [False] + [True] * 500), 20_501)
