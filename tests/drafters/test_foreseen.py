"""Lookups that are seen beforehand: what `preview` promises, rounds of hybrids that are launched ahead, what texts tell of
guesses."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from outrider import registry
from outrider.config import SamplingParams
from outrider.control.costs import CROWD
from outrider.drafters import _panel, hybrid
from outrider.drafters._beats import HOPED, TOLL
from outrider.drafters._ledger import Entry, Ledger
from outrider.drafters._members import Member
from outrider.drafters.hybrid import Hybrid
from outrider.errors import OutriderWarning
from outrider.guard import Guard
from outrider.protocols import Drafter
from outrider.types import NONE, Batch, Budget, Proposal, Request

from .. import tiny
from .test_hybrid import Told, batch, outcome, scores, started

SPECS = ["ngram", "ngram:min=1,max=3", "suffix", "suffix:factor=3,depth=6", "hybrid:members=suffix+ngram(min=1)"]


def copying(seed: int, length: int) -> list[int]:
    """A text that copies itself in stretches."""
    rng, text = random.Random(seed), [7, 8]
    while len(text) < length:
        at = rng.randrange(len(text))
        text += text[at : at + rng.randint(2, 9)] if rng.random() < 0.6 else [rng.randrange(30)]
    return text[:length]


@pytest.mark.parametrize("spec", SPECS)
def test_a_preview_is_what_would_be_guessed(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And looking changes nothing: one that is looked at guesses as one that is not, where both take as long."""
    ticks = itertools.count()
    for module in (hybrid, _panel):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: 1e-4 * next(ticks)))
    seen, other = registry.parse(spec), registry.parse(spec)
    for one in (seen, other):
        tiny.World().engine(one)
    text, found = copying(1, 400), 0
    request = tiny.request(text[:5], SamplingParams(max_tokens=1000))
    for end in range(5, 400):
        request.tokens = text[:end]
        preview = seen.preview(request, 4)
        some = Batch((request,), (1,), (True,), (20,))
        guesses = [one.propose(some, Budget((4,), (4,))) for one in (seen, other)]
        tokens = [g.tokens[0, : g.widths[0]].tolist() for g in guesses]
        assert tokens[0] == tokens[1]
        if not spec.startswith("hybrid"):  # which asks further members where the first one's guess is short
            assert preview == tokens[0]
        found += bool(preview)
    assert found > 100


def test_who_cannot_tell_says_so() -> None:
    for spec in ("suffix:width=2", "lookahead", "hybrid:merge=yes,members=suffix+ngram"):
        assert registry.parse(spec).preview(tiny.request([1, 2, 3]), 4) is None
    mixed = Hybrid.of([registry.parse("suffix"), Told("model", [5])])
    assert mixed.preview(tiny.request([1, 2, 3]), 4) is None


class Vandal(Drafter):
    """Fails while it is looked at, or writes into the request."""

    name = "vandal"

    def __init__(self, writes: bool) -> None:
        self.writes = writes

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        return Proposal.empty(len(batch))

    def preview(self, request: Request, most: int) -> list[int]:
        if not self.writes:
            raise ZeroDivisionError("oops")
        request.tokens.append(5)
        return [1]


@pytest.mark.parametrize("writes", [False, True])
def test_a_preview_that_fails_switches_its_drafter_off(writes: bool) -> None:
    guard, request = Guard(Vandal(writes), 100), tiny.request([1, 2, 3])
    with pytest.warns(OutriderWarning, match="switched off"):
        assert guard.preview(request, 4) is None
    assert request.tokens == [1, 2, 3] and guard.reason is not None
    assert guard.preview(request, 4) is None, "and it is not asked again"


def test_texts_tell_what_became_of_guesses() -> None:
    ledger, request = Ledger(), tiny.request([1, 2, 3])
    ledger.note([request], [Entry(1, {1: (2.0, 2)})], False)
    assert not list(ledger.told([request], blind=True)), "its round is still in flight"
    request.tokens += [4, 5, 6]
    [(told, entry, right)] = ledger.told([request], blind=False)
    assert told is request and entry.member == 1 and right == 2
    assert not list(ledger.told([request], blind=False))
    for blind in (False, True):  # two in flight, one of them read
        ledger.note([request], [Entry(0, {0: (1.0, 1)})], blind)
    request.tokens += [7]
    assert [right for _, _, right in ledger.told([request], blind=True)] == [0]
    ledger.note([request], [Entry(0, {0: (1.0, 1)})], False)
    request.tokens += [8, 9, 10]
    assert not list(ledger.told([request], blind=False)), "two rounds at once: nobody knows which brought what"
    ledger.note([request], [Entry(NONE)], False)
    request.tokens += [11]
    assert not list(ledger.told([request], blind=False)), "nobody was asked"
    ledger.note([request], [Entry(0, {0: (1.0, 1)})], False)
    ledger.forget(request)
    assert not list(ledger.told([request], blind=False))


def test_rounds_in_which_nobody_was_asked_count_while_they_are_in_flight() -> None:
    ledger, request, asked = Ledger(), tiny.request([1, 2, 3]), Entry(0, {0: (4.0, 4)})
    for _ in range(5):
        ledger.pause([request])
        request.tokens += [4]
    ledger.pause([request])
    ledger.note([request], [asked], blind=True)
    request.tokens += [5]
    assert not list(ledger.told([request], blind=True)), "this token is of the round before"
    ledger.pause([request])
    request.tokens += [6, 7, 8]
    assert [right for _, _, right in ledger.told([request], blind=True)] == [2]
    assert not ledger._of, "nothing is left to be told"
    request.tokens += [9]
    ledger.note([request], [asked], blind=False)
    request.tokens += [10]
    assert [right for _, _, right in ledger.told([request], blind=False)] == [0]


class Model(Told):
    """Needs nothing of the host."""

    def follows(self, requests: object, guessing: bool = True) -> bool:
        return True


def test_rounds_are_launched_ahead_while_nothing_is_copied() -> None:
    made = started(registry.parse("suffix"), Model("model", [5, 6, 7]))
    some = batch(1)
    [request] = some.requests
    new = random.Random(3).sample(range(tiny.VOCAB), tiny.VOCAB)
    request.tokens[:] = [new.pop() for _ in range(30)]

    def round_(text: list[int], blind: bool) -> Proposal:
        guess = made.propose(replace(some, blind=blind), Budget((made.depth,), (made.nodes,)))
        made.observe(some, guess, outcome(guess, [0]), scores(guess))
        request.tokens += text
        return guess

    for _ in range(5):
        round_([new.pop()], False)
    assert made.follows([request]), "nothing to look up"
    blind = round_([new.pop()], True)
    assert blind.source[0, 0] == 1, "the lookup is not asked, for the text is not known"
    start = len(request.tokens)
    copied = request.tokens[5:25]
    for token in copied:
        last = made.follows([request])
        round_([token], False)
    assert not last, "the text copies: what comes is looked up"
    assert len(request.tokens) == start + len(copied)


def test_alone_without_lookups_or_with_models_that_wait_nothing_is_launched_ahead() -> None:
    request = tiny.request([1, 2, 3])
    waits = started(registry.parse("suffix"), Told("model", [5]))
    assert not waits.follows([request]) and waits.follows([request], False)
    assert not started(registry.parse("suffix"), registry.parse("ngram")).follows([request])
    merged = Hybrid.of([registry.parse("suffix"), Model("model", [5])], merge=True)
    assert not merged.follows([request])


def test_what_a_member_knows_of_a_request_goes_with_it() -> None:
    made = started(registry.parse("suffix"), Model("model", [5, 6, 7]))
    some = batch(2)
    for _ in range(3):
        made.follows(some.requests)
        guess = made.propose(some, Budget((3, 3), (made.nodes, made.nodes)))
        made.observe(some, guess, outcome(guess, [0, 0]), scores(guess))
        for request in some.requests:
            request.tokens.append(9)
    for request in some.requests:
        made.release(request)
    assert not any(m.records or m.texts or m.stands for m in made.members) and not made._ledger._of


def test_rounds_in_which_several_guessed_do_not_blur_what_the_others_brought() -> None:
    """Alone, beside another, not at all: every member's record is that of its own rounds."""
    one, two = Told("one", [5, 6, 7]), Told("two", [9, 10, 11])
    made, some = started(one, two), batch(2, "rejection")
    for number in range(40):
        one.only = {0, 1} if number % 3 == 0 else {0}  # else each request has another member's guess: no round of one alone
        two.only = {0, 1}
        if number % 5 == 4:
            empty = Proposal.empty(2)
            made.observe(some, empty, outcome(empty, [0, 0]), scores(empty))
            rights = [0, 0]
        else:
            guess = made.propose(some, Budget((3, 3), (made.nodes,) * 2))
            rights = [2 if guess.widths[b] and guess.source[b, 0] == 0 else 0 for b in range(2)]
            made.observe(some, guess, outcome(guess, rights), scores(guess))
        for request, right in zip(some.requests, rights, strict=True):
            request.tokens += [1] * (right + 1)
    made.propose(some, Budget((3, 3), (made.nodes,) * 2))
    records = [made.members[0].records[r.id] for r in some.requests]
    for record in records:  # two of three, whenever it was asked and had a guess
        assert record.accepted == pytest.approx(2 / 3 * record.promised, rel=0.05) or record.promised < 1


class Moody(Told):
    """Looks things up, until it fails."""

    def preview(self, request: Request, most: int) -> list[int]:
        raise ZeroDivisionError("oops")


def test_a_member_whose_preview_fails_is_switched_off_alone() -> None:
    request = tiny.request([1, 2, 3])
    for others in ([registry.parse("suffix")], [Model("model", [5])]):
        made = started(*others, Moody("moody", [7]))
        with pytest.warns(OutriderWarning, match="moody"):
            made.preview(request, 3) if others[0].name == "suffix" else made.follows([request])
        assert [m.reason is None for m in made.members] == [True, False]


def test_who_cannot_tell_is_asked() -> None:
    """A lookup that grows trees, and a hybrid within a hybrid, keep rounds from being launched ahead: they must see the text."""
    request = tiny.request([1, 2, 3])
    assert not started(registry.parse("suffix:width=2"), Model("model", [5])).follows([request])
    nested = Hybrid.of([registry.parse("suffix"), Model("inner", [5])])
    assert not started(nested, Model("model", [5])).follows([request])
    assert not started(registry.parse("suffix"), Model("one", [5]), Model("two", [6])).follows([request])
    both = started(registry.parse("ngram"), registry.parse("suffix:width=2"))
    assert both.preview(request, 3) is None


def test_many_requests_have_the_model_alone_while_it_does_well() -> None:
    """Nobody looks up anything for three; a model that brings nothing leaves it to the lookups, in rounds that see the text."""
    made = started(registry.parse("suffix"), Model("model", [5, 6, 7]))
    many = [tiny.request([1, 2, 3]) for _ in range(3)]
    assert made.follows(many) and made.follows(many, False)
    model = made.members[1]
    for _ in range(60):
        model.rates.learn([(model.rates.track(), 0, model.drafter.depth)])
    assert not made.follows(many) and made.follows(many, False)


def test_rounds_that_nobody_wants_to_be_told_of_count_while_they_are_in_flight() -> None:
    ledger, told, other, asked = Ledger(), tiny.request([1, 2, 3]), tiny.request([1, 2, 3]), Entry(0, {0: (4.0, 4)})
    for request in (told, other):
        ledger.note([request], [asked], False)
    ledger.note([told], [asked], True)
    ledger.skip([other])
    for request in (told, other):
        request.tokens += [4, 5]
    assert [r for r, _, _ in ledger.told([told, other], blind=True)] == [told]
    ledger.note([told, other], [asked, asked], True)
    for request in (told, other):
        request.tokens += [6, 7, 8]
    found = {id(request): right for request, _, right in ledger.told([told, other], blind=True)}
    assert found == {id(told): 2}, "what came for the other is of the round that was skipped"
    for request in (told, other):
        request.tokens += [9]
    found = {id(request): right for request, _, right in ledger.told([told, other], blind=False)}
    assert found == {id(told): 0, id(other): 0}


def test_of_a_crowd_a_few_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are asked alike, and what becomes of the guesses of a few tells of all. How far to look is given."""
    monkeypatch.setattr(Member, "best", lambda self, *given: (3, 1.0))
    made, some = started(registry.parse("suffix"), Model("model", [5, 6, 7])), batch(6)
    model = made.members[1]
    for _ in range(40):
        guess = made.propose(some, Budget((made.depth,) * 6, (made.nodes,) * 6))
        assert guess.source[:, 0].tolist() == [1] * 6 and len(set(guess.widths)) == 1
        kept = [min(2, w) for w in guess.widths]
        made.observe(some, guess, outcome(guess, kept), scores(guess))
        for request, n in zip(some.requests, kept, strict=True):
            request.tokens += [9] * (n + 1)
    followed = [request.id in model.records for request in some.requests]
    assert followed == [True] * 4 + [False] * 2
    assert model.rates.everybody()[0] > 0.9 and model.rates.everybody()[2] < 0.3, "they tell of all"


class Branchy(Model):
    """Could guess three nodes a level, and remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__("model", [5, 6, 7])
        self.nodes, self.budgets = 9, list[Budget]()

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        self.budgets.append(budget)
        return super().propose(batch, budget)


def test_a_large_crowd_has_what_was_asked_for() -> None:
    """The controller says how far, and the model makes chains of it, while it does well: a few tell of all."""
    drafter = Branchy()
    made, many = started(registry.parse("suffix"), drafter), batch(CROWD + 1)
    model, size = made.members[1], len(many)
    for levels in (2, 3, 1) * 20:
        guess = made.propose(many, Budget((levels,) * size, (made.nodes,) * size))
        if model.usual() < 0.5:
            break
        assert drafter.budgets[-1] == Budget((levels,) * size, (levels,) * size)
        assert guess.widths == (levels,) * size and guess.source[:, :levels].unique().tolist() == [1]
        made.observe(many, guess, outcome(guess, [0] * size), scores(guess))
        for request in many.requests:
            request.tokens += [9]
    assert model.usual() < 0.5 and not made.follows(many.requests), "it does not, and lookups have their turn"
    made._counted(False)
    assert model.usual() > 0.5, "of few nothing was learned"


def test_after_a_large_crowd_it_is_weighed_anew_how_wide_guesses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Branchy()
    made, few, many = started(registry.parse("suffix"), drafter), batch(CROWD), batch(CROWD + 1)

    def widest(self: Member, *given: object) -> tuple[int, float]:
        self.trees.now = self.trees.widths[-1]
        return 3, 1.0

    monkeypatch.setattr(Member, "best", widest)
    made.members[1].pace.add(1.0)
    nodes = []
    for some in (few, many, few):
        guess = made.propose(some, Budget((3,) * len(some), (made.nodes,) * len(some)))
        made.observe(some, guess, outcome(guess, [0] * len(some)), scores(guess))
        nodes.append(drafter.budgets[-1].nodes[0])
    assert nodes == [9, 3, 9]


def test_rounds_launched_ahead_are_left_for_more_than_what_keeps_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving them and coming back takes time of its own."""
    made, request, sees = started(registry.parse("suffix"), Model("model", [5, 6, 7])), tiny.request([1, 2, 3]), [0.0]
    monkeypatch.setattr(made, "_promise", lambda member, request: sees[0])
    usual = 1 + made.members[1].usual()

    def ahead(promise: float) -> bool:
        request.tokens += [4]
        sees[0] = promise
        return made.follows((request,))

    little, more, most = ((HOPED + by) * usual - 1 for by in (-0.01, TOLL / 2, TOLL + 0.01))
    assert [ahead(p) for p in (more, little, more, most, more, little)] == [False, True, True, False, False, True]


@pytest.mark.parametrize(("captured", "rule"), [(True, "coupled"), (False, "coupled"), (True, "rejection")])
def test_a_prompt_is_looked_at_in_the_time_of_the_first_guesses(captured: bool, rule: str) -> None:
    """Of a model whose replays nobody waits for; where a rule forbids that time decides, lookups are asked as ever."""
    made = started(registry.parse("suffix"), Model("model", [5, 6, 7]))
    made.members[1].replayed = captured
    request = tiny.request([2, 3, 4, 8, 9] * 6, SamplingParams(max_tokens=20), rule=rule)
    some = Batch((request,), (1,), (True,), (20,))
    looked, propose = list[int](), made.members[0].drafter.propose
    made.members[0].drafter.propose = lambda *what: looked.append(1) or propose(*what)  # type: ignore[method-assign]
    request.tokens.append(2)
    for number in range(2):
        guess = made.propose(some, Budget((made.depth,), (made.nodes,)))
        assert bool(looked) == (number == 1 or not captured or rule != "coupled") and guess.columns
        made.observe(some, guess, outcome(guess, [0]), scores(guess))
        request.tokens.append(3)


@pytest.mark.parametrize("off", [True, False])
def test_a_model_that_has_no_first_guess_keeps_nobody_from_looking(off: bool) -> None:
    made = started(registry.parse("suffix"), Model("model", []))
    made.members[1].replayed, made.members[1].reason = True, "it failed" if off else None
    request = tiny.request([2, 3, 4, 8, 9] * 6, SamplingParams(max_tokens=20))
    some = Batch((request,), (1,), (True,), (20,))
    request.tokens.append(2)
    guess = made.propose(some, Budget((made.depth,), (made.nodes,)))
    assert guess.widths[0] and set(guess.source[0, : guess.widths[0]].tolist()) == {0}
