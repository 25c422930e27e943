"""Rounds of a hybrid that go on as those before them: who is asked, who is told, and what is learned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider import registry
from outrider.config import SamplingParams
from outrider.drafters._alike import LIGHT, TWICE, Alike, Like
from outrider.drafters._members import Member
from outrider.drafters.hybrid import Hybrid
from outrider.errors import OutriderWarning
from outrider.protocols import Drafter
from outrider.types import Batch, Budget, Proposal, Scores, Verdict

from .. import tiny
from .test_foreseen import Model
from .test_hybrid import batch, outcome, scores, started


class Listening(Model):
    """Counts the rounds that it is shown with its own guesses."""

    def __init__(self, name: str, chain: list[int]) -> None:
        super().__init__(name, chain)
        self.shown, self.made, self.fails = 0, Proposal.empty(1), False

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        if self.fails:
            raise ZeroDivisionError("oops")
        self.made = super().propose(batch, budget)
        return self.made

    def observe(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        self.shown += proposal is self.made


@pytest.fixture(autouse=True)
def nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are where looking at them would mean waiting."""
    monkeypatch.setattr(Proposal, "unseen", property(lambda proposal: proposal.q is None))


def beside(*drafters: Drafter) -> Hybrid:
    """A lookup and others, of which the last is believed to pay, whatever the clock says."""
    made = started(registry.parse("suffix"), *drafters)
    made.members[-1].best = lambda request, most, passes, spent: (most, float("inf"))  # type: ignore[method-assign]
    return made


def ahead(made: Hybrid, some: Batch, count: int) -> list[Proposal]:
    """Rounds of two guesses, launched ahead, each before the text of the one before is known; the first guess is right."""
    found = []
    for number in range(count):
        guess = made.propose(replace(some, blind=number > 0), Budget((2,) * len(some), (made.nodes,) * len(some)))
        made.observe(replace(some, blind=number > 0), guess, outcome(guess, [1] * len(some)), scores(guess))
        if number:
            for request in some.requests:
                request.tokens += [1, 1]
        found.append(guess)
    return found


def light(made: Hybrid, some: Batch, count: int) -> list[bool]:
    """In which of the next rounds nothing is learned."""
    found = []
    for _ in range(count):
        before = made._alike._left
        ahead_ = replace(some, blind=True)
        guess = made.propose(ahead_, Budget((3,) * len(some), (made.nodes,) * len(some)))
        found.append(made._light is not None and made._alike._left == before - 1)
        made.observe(ahead_, guess, outcome(guess, [2] * len(some)), scores(guess))
        for request in some.requests:
            request.tokens += [1] * 3
    return found


def test_after_two_rounds_alike_some_go_on() -> None:
    alike, member, budget = Alike(), Member(registry.parse("suffix"), 0), Budget((3,), (3,))
    some = replace(batch(1), blind=True)
    like = Like(some.requests, budget, member, budget, 3)
    for looked_at in (2, *[1] * (TWICE - 1), 2, 1):
        for _ in range(looked_at):
            assert alike.again(some, budget) is None
            alike.note(like)
        for _ in range(LIGHT):
            assert alike.again(some, budget) is like
    alike.note(Like(some.requests, budget, member, Budget((2,), (2,)), 2))
    assert alike.again(some, budget) is None, "another one was asked for"
    alike.note(like)
    alike.note(like)
    assert alike.again(replace(some, blind=False), budget) is None and alike.again(some, Budget((2,), (3,))) is None
    assert alike.again(replace(some, requests=(tiny.request([1]),)), budget) is None and alike.again(some, budget) is like
    alike.forget()
    assert alike.again(some, budget) is None


def test_one_level_more_that_is_tried_interrupts_nothing() -> None:
    alike, member, budget = Alike(), Member(registry.parse("suffix"), 0), Budget((8,), (8,))
    some = replace(batch(1), blind=True)
    like, more, less = (Like(some.requests, budget, member, Budget((n,), (n,)), n) for n in (3, 4, 2))
    for _ in range(2):
        alike.note(like)
    assert alike.again(some, budget) is like
    alike.note(more, tried=True)
    assert alike.again(some, budget) is like, "it was only tried"
    alike.note(less, tried=True)
    assert alike.again(some, budget) is None, "fewer seem to pay now"
    for _ in range(2):
        alike.note(like)
    alike.note(None, tried=True)
    assert alike.again(some, budget) is None, "another one guessed"


@pytest.mark.parametrize("count", [1, 3])
def test_most_rounds_launched_ahead_are_told_to_the_model_alone(count: int) -> None:
    model = Listening("model", [5, 6, 7])
    made, some = beside(model), batch(count)
    found = ahead(made, some, 80)
    assert model.shown == 80 and all(g.tokens[0].tolist() == [5, 6] for g in found)
    assert made.members[1].rates.common.lately.tests[0] > 6, "one round in eleven and those before are learned"
    record = made.members[1].record(some.requests[0])
    assert 0 < record.accepted == pytest.approx(record.promised / 2), "what is learned is so"
    told = list[int]()
    book = made.members[1].book
    made.members[1].book = lambda request, *what: told.append(what[0]) or book(request, *what)  # type: ignore[method-assign]
    went = light(made, some, 48)
    assert 34 <= sum(went) <= 40 and not all(went[-11:]), "and now and then all is"
    assert count * (48 - sum(went)) - count <= len(told) <= count * (49 - sum(went)), "of each of those what became of it"
    assert set(told[count:]) == {2}


def test_now_and_then_a_level_more_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """In rounds of which all is learned, one at a time, however the others fall."""
    monkeypatch.setattr("outrider.drafters.hybrid._DEEPER", 7)
    made, some = beside(Listening("model", [5, 6, 7])), batch(1)
    made.members[1].best = lambda request, most, passes, spent: (2, float("inf"))  # type: ignore[method-assign]
    model, asked = made.members[1].drafter, list[int]()
    propose = model.propose
    monkeypatch.setattr(model, "propose", lambda batch, budget: asked.append(budget.depth[0]) or propose(batch, budget))
    went = light(made, some, 70)
    assert [i for i, depth in enumerate(asked, 1) if depth == 3] == list(range(7, 71, 7)) and asked[:6] == [2] * 6
    assert not any(went[n - 1] for n in range(7, 71, 7)) and sum(went) > 20


def test_those_who_go_on_are_told_of_as_many_levels_as_they_went(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was tried in between."""
    monkeypatch.setattr("outrider.drafters.hybrid._DEEPER", 7)
    made, some = beside(Listening("model", [5, 6, 7])), batch(1)
    made.members[1].best = lambda request, most, passes, spent: (2, float("inf"))  # type: ignore[method-assign]
    levels = list[tuple[bool, int]]()
    for _ in range(40):
        [is_light] = light(made, some, 1)
        levels.append((is_light, made.members[1].levels))
    assert {n for is_light, n in levels if is_light} == {2} and (False, 3) in levels


def test_what_others_see_or_rules_say_is_never_left_out() -> None:
    for others, rule in (([Listening("other", [])], "coupled"), ([], "rejection")):
        for other in others:
            other.depth = other.nodes = 1
        made = beside(*others, Model("model", [5, 6, 7]))
        assert not any(light(made, batch(1, rule), 40))


def test_another_request_or_a_pause_is_looked_at() -> None:
    made, some = beside(Listening("model", [5, 6, 7])), batch(1)
    assert any(light(made, some, 30))
    while not light(made, some, 1)[0] or not made._alike._left:
        pass
    assert made._beats._last is None, "what passes in such rounds is no time of one of another kind"
    empty = Proposal.empty(1)
    made.observe(some, empty, outcome(empty, [0]), scores(empty))
    assert not light(made, some, 1)[0], "after a pause"
    while not light(made, some, 1)[0]:
        pass
    made.release(some.requests[0])
    assert not light(made, some, 1)[0], "somebody is gone"


def test_a_model_that_fails_there_is_asked_once_more_and_switched_off() -> None:
    model = Listening("model", [5, 6, 7])
    made, some = beside(model), batch(1)
    while not light(made, some, 1)[0]:
        pass
    model.fails = True
    with pytest.warns(OutriderWarning, match="model"):
        guess = made.propose(replace(some, blind=True), Budget((3,), (made.nodes,)))
    assert not guess.columns and made.members[1].reason is not None and made._light is None
    made.observe(some, guess, outcome(guess, [0]), scores(guess))
    assert [m.reason is None for m in made.members] == [True, False]


def test_an_unsound_guess_there_is_no_better_than_elsewhere() -> None:
    model = Listening("model", [5, 6, 7])
    made, some = beside(model), batch(1)
    while not light(made, some, 1)[0]:
        pass
    wide = Proposal.chains([[5] * 40])
    model.propose = lambda *_: wide  # type: ignore[method-assign]
    with pytest.warns(OutriderWarning, match="unsound"):
        for _ in range(4):
            guess = made.propose(replace(some, blind=True), Budget((3,), (made.nodes,)))
            made.observe(some, guess, outcome(guess, [0]), scores(guess))
            assert not guess.columns


def test_a_round_of_it_that_came_to_nothing_leaves_no_trace() -> None:
    """It was launched, then turned down: what is shown next is none of it."""
    model = Listening("model", [5, 6, 7])
    made, some = beside(model), batch(1)
    while not light(made, some, 1)[0]:
        pass
    while made._light is None:
        made.propose(replace(some, blind=True), Budget((3,), (made.nodes,)))
    empty = Proposal.empty(1)
    made.observe(some, empty, outcome(empty, [0]), scores(empty))
    before = model.shown
    request = tiny.request([1, 2, 3, 1, 2, 3, 1, 2], SamplingParams(max_tokens=20))
    other = Batch((request,), (1,), (True,), (20,))
    guess = made.propose(other, Budget((3,), (made.nodes,)))
    made.observe(other, guess, outcome(guess, [1]), scores(guess))
    assert made._light is None and made._ledger._of and (model.shown == before) == bool(torch.any(guess.source == 0))
