"""Counting: every guess once, at its depth, and nothing after the end of the text."""

from __future__ import annotations

import pytest

from outrider.config import SamplingParams
from outrider.metrics import add, charge, summarise
from outrider.types import NONE, Committed, Finish, Stats, StepEvent

from . import probes, tiny


def item(origins: tuple[int, ...], drafted: int, offered_at: tuple[int, ...]) -> Committed:
    request = tiny.request([2])
    accepted = sum(o != NONE for o in origins)
    return Committed(request, (5,) * len(origins), origins, drafted, accepted, offered_at, (), "", Finish.RUNNING)


def test_counts_add_up_over_rounds() -> None:
    stats = Stats()
    add(stats, item((0, 0, NONE), 4, (1, 1, 1, 1)))
    add(stats, item((NONE,), 2, (1, 1)))
    add(stats, item((NONE,), 0, ()))
    assert (stats.rounds, stats.tokens, stats.drafted, stats.accepted) == (3, 5, 6, 2)
    assert (stats.offered_at, stats.accepted_at) == ([2, 2, 1, 1], [1, 1, 0, 0])


def test_rounds_without_tokens_or_guesses_do_not_count() -> None:
    stats = Stats()
    add(stats, item((), 0, ()))
    assert stats == Stats()


def test_accepted_probes_are_no_guesses() -> None:
    """A probe at depth 1 leads to a guess at depth 2: depth 2 was offered and kept, depth 1 neither."""
    stats = Stats()
    add(stats, item((NONE, 0, NONE), 1, (0, 1)))
    assert (stats.accepted, stats.offered_at, stats.accepted_at) == (1, [0, 1], [0, 1])
    assert summarise(stats, "x").acceptance_by_position == (0.0, 1.0)


def test_seconds_are_charged_to_all_who_waited() -> None:
    items = (item((0, NONE), 1, (1,)), item((), 0, ()))
    for i in items:
        i.request.started = 10.0
        add(i.request.stats, i)
    charge(StepEvent(items, 0.25, 0.5, 1.0, 0, 3), now=12.0)
    first, second = (i.request.stats for i in items)
    assert (first.draft_seconds, first.verify_seconds, first.seconds, first.first_token_seconds) == (0.25, 0.5, 2.0, 2.0)
    assert (second.seconds, second.first_token_seconds) == (2.0, 0.0)
    add(first, items[0])
    charge(StepEvent(items[:1], 0.25, 0.5, 1.0, 0, 3), now=15.0)
    assert (first.draft_seconds, first.seconds, first.first_token_seconds) == (0.5, 5.0, 2.0)


def test_summary_of_nothing_and_of_something() -> None:
    nothing = summarise(Stats(), "none")
    assert (nothing.tokens_per_round, nothing.acceptance_rate, nothing.tokens_per_second) == (0.0, 0.0, 0.0)
    assert nothing.acceptance_by_position == () and nothing.drafter == "none"
    some = summarise(Stats(12, 4, 16, 8, [4, 4], [3, 1], 0.1, 0.2, 2.0, 0.5), "ngram")
    assert (some.tokens_per_round, some.acceptance_rate, some.tokens_per_second) == (3.0, 0.5, 6.0)
    assert some.acceptance_by_position == (0.75, 0.25) and some.first_token_seconds == 0.5


@pytest.mark.parametrize("name", ["replay", "bushy", "prober"])
def test_positions_add_up_on_an_engine(name: str) -> None:
    prompt = tiny.prompts(1, seed=9)[0]
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, seed=3)
    answer = tiny.World().run(probes.Replay({tuple(prompt): []}, depth=1), [tiny.request(prompt, params)])[0]
    makers = {"replay": probes.Replay, "bushy": probes.Bushy, "prober": probes.Prober}
    request, events = tiny.request(prompt, params), []
    engine = tiny.World().engine(makers[name]({tuple(prompt): answer}, depth=4))
    engine.sinks.append(events.append)
    engine.add(request)
    while engine.step() is not None:
        pass
    stats = request.stats
    assert request.output == answer
    assert sum(stats.accepted_at) == stats.accepted == sum(o != NONE for o in request.origins) > 0
    assert sum(stats.offered_at) <= stats.drafted == sum(c.drafted for e in events for c in e.committed)
    assert all(a <= o for a, o in zip(stats.accepted_at, stats.offered_at, strict=True))
    assert stats.tokens == 40 and stats.rounds == len(events)
    assert stats.seconds >= stats.verify_seconds > 0 and stats.first_token_seconds > 0
