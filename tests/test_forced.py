"""Tokens that a request's own processor knows beforehand: guesses ahead of any drafter's, which change nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache as memo
from itertools import count
from typing import Any

import pytest
import torch

from outrider import registry
from outrider.accept import RULES
from outrider.config import SamplingParams
from outrider.control import Foresight
from outrider.control.pace import Pace
from outrider.drafters.hybrid import Hybrid
from outrider.drafters.none import NoDrafter
from outrider.forced import Forced, holds
from outrider.models.target import ModelTarget
from outrider.types import FORCED, NONE, Batch, Budget, Proposal, Request, Scores

from . import heads, tiny
from .contract.drafters import every

PROMPTS = tiny.prompts(3, seed=4, low=4, high=12)


def word(position: int) -> int:
    return 2 + position % 7


class Rhyme:
    """Three of four tokens are fixed by their place, the fourth is free. `lies`: what `forced` says is wrong now and then."""

    def __init__(self, lies: bool = False) -> None:
        self.lies, self.asked = lies, 0

    def __call__(self, tokens: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        if len(tokens) % 4 == 0:
            return scores
        only = torch.full_like(scores, float("-inf"))
        only[word(len(tokens))] = scores[word(len(tokens))]
        return only

    def forced(self, tokens: Sequence[int], most: int) -> list[int]:
        self.asked += 1
        found, at = [], len(tokens)
        while at % 4 and len(found) < most:
            found.append(word(at) + (self.lies and self.asked % 3 == 0))
            at += 1
        return found


def requests(processor: Callable[[], object], temperature: float = 0.0, accept: str = "coupled") -> list[Request]:
    made = []
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            temperature=temperature,
            max_tokens=18,
            seed=i + 1,
            ignore_eos=True,
            processors=(processor(),),  # type: ignore[arg-type]
        )
        made.append(tiny.request(prompt, params, rule=accept))
    return made


@memo
def plain(temperature: float) -> list[list[int]]:
    return tiny.World().run(NoDrafter(), requests(Rhyme, temperature))


@memo
def answers() -> dict[tuple[int, ...], tuple[int, ...]]:
    return {tuple(p): tuple(a) for p, a in zip(PROMPTS, plain(0.0), strict=True)}


@pytest.fixture
def only_passes_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """How busy the machine is does not matter."""
    passes, looks, score = [0], count(), ModelTarget.score

    def timed(*given: Any) -> Scores:
        passes[0] += 1
        return score(*given)

    monkeypatch.setattr(ModelTarget, "score", timed)
    monkeypatch.setattr(time, "perf_counter", lambda: 1e-3 * passes[0] + 1e-7 * next(looks))
    monkeypatch.setattr(Pace, "affords", lambda pace, size, turns=1: True)


@pytest.mark.usefixtures("only_passes_take_time")
@pytest.mark.parametrize("spec", ["suffix", "ngram", "hybrid:members=suffix+ngram"])
def test_lookups_that_are_seen_beforehand_let_a_grammar_lead(spec: str) -> None:
    """The default controller sees what is forced as well as what is looked up."""
    world, made = tiny.World(), requests(Rhyme)
    world.control = lambda drafter: Foresight(drafter, time.perf_counter)
    assert world.run(registry.parse(spec), made) == plain(0.0)
    forced = [request.origins.count(FORCED) for request in made]
    assert min(forced) > 3


@pytest.mark.usefixtures("only_passes_take_time")
def test_what_stands_in_for_a_hybrids_guess_leaves_its_members_whole() -> None:
    """Forced chains are longer than suffix's guess. EAGLE, who reads the states of all requests, goes on as it did alone."""
    rates = []
    for made in (lambda: Hybrid.of([registry.parse("suffix:depth=1"), heads.eagle()]), heads.eagle):
        some = requests(Rhyme)
        assert tiny.World().run(made(), some) == plain(0.0)
        own = [sum(o not in (FORCED, NONE) for o in r.origins) for r in some]
        rates.append(sum(own))
    assert rates[0] >= 0.7 * rates[1] > 0


@pytest.mark.parametrize("name", every())
def test_no_text_changes_and_no_drafter_stumbles(name: str) -> None:
    """Every drafter sees rounds in which others' guesses stood in for its own; half of what is forced is right."""
    made = requests(lambda: Rhyme(lies=True))
    assert tiny.World().run(every()[name](answers()), made) == plain(0.0)
    for request in made:
        assert 0 <= request.stats.accepted <= request.stats.drafted


@pytest.mark.parametrize("name", ["self", "ngram", "tree", "hybrid:merge"])
def test_sampled_texts_too(name: str) -> None:
    maker = every().get(name) or every()["ngram"]
    assert tiny.World().run(maker(answers()), requests(Rhyme, 1.0)) == plain(1.0)


@pytest.mark.parametrize("accept", [name for name in RULES if name != "coupled"])
def test_other_rules(accept: str) -> None:
    """At T = 0 every rule leaves one text; at T = 1 what is fixed stays fixed."""
    assert tiny.World().run(tiny.draft_model(2, depth=4), requests(Rhyme, 0.0, accept), accept) == plain(0.0)
    for prompt, text in zip(
        PROMPTS, tiny.World().run(tiny.draft_model(2, depth=4), requests(Rhyme, 1.0, accept), accept), strict=True
    ):
        assert all(t == word(p) for p, t in enumerate(text, len(prompt)) if p % 4)


def test_they_save_rounds_where_a_drafter_knows_nothing() -> None:
    made = requests(Rhyme)
    tiny.World().run(every()["ngram"](answers()), made)
    silent = requests(lambda: Rhyme().__call__)
    tiny.World().run(every()["ngram"](answers()), silent)
    assert sum(r.stats.rounds for r in made) < 0.6 * sum(r.stats.rounds for r in silent)
    assert any(FORCED in r.origins for r in made) and not any(FORCED in r.origins for r in silent)


def test_plain_decoding_stays_plain() -> None:
    made = requests(Rhyme)
    for request in made:
        object.__setattr__(request.params, "draft", "none")
    assert tiny.World().run(every()["ngram"](answers()), made) == plain(0.0)
    assert not any(r.stats.drafted for r in made)


def one(processor: object, **more: object) -> tuple[Batch, Budget]:
    request = requests(lambda: processor, 1.0)[0]
    request.tokens[:] = [1] * 5
    for name, value in more.items():
        setattr(request, name, value)
    return Batch((request,), (1,), (True,), (4,)), Budget((4,), (4,))


def test_which_guesses_are_taken() -> None:
    """The drafter's where they begin with what is forced, else what is forced; a sampled draft never for what it is."""
    chain = [word(5), word(6), word(7)]
    agrees, differs = Proposal.chains([[*chain, 9]]), Proposal.chains([[chain[0], 11, 12, 13]])
    tree = Proposal.trees([[(9, -1), (chain[0], -1), (chain[1], 1), (chain[2], 2)]])
    forced = Forced(tiny.VOCAB)
    batch, budget = one(Rhyme())
    assert forced.lead(batch, budget, agrees) is agrees and forced.lead(batch, budget, tree) is tree
    led = forced.lead(batch, budget, differs)
    assert led.tokens[0, :3].tolist() == chain and led.widths == (3,) and set(led.source[0].tolist()) == {FORCED}
    assert forced.lead(batch, Budget((2,), (2,)), Proposal.empty(1)).tokens.tolist() == [chain[:2]]
    assert forced.lead(batch, Budget.none(1), differs) is differs
    classical, _ = one(Rhyme(), rule="rejection")
    assert forced.lead(classical, budget, agrees).widths == (3,)


@pytest.mark.parametrize("said", [RuntimeError("too complex"), [tiny.VOCAB], [-1], ["x"], None, []])
def test_processors_that_fail_know_nothing(said: object) -> None:
    class Odd(Rhyme):
        def forced(self, tokens: Sequence[int], most: int) -> list[int]:
            tokens.clear()  # type: ignore[attr-defined]
            if isinstance(said, Exception):
                raise said
            return said  # type: ignore[return-value]

    batch, budget = one(Odd())
    own = Proposal.chains([[3, 4]])
    assert Forced(tiny.VOCAB).lead(batch, budget, own) is own and len(batch.requests[0].tokens) == 5


def test_holds() -> None:
    tree = Proposal.trees([[(3, -1), (4, -1), (5, 1)], [(7, -1)]])
    assert holds(tree, 0, [4, 5]) and holds(tree, 0, []) and holds(tree, 1, [7])
    assert not holds(tree, 0, [3, 5]) and not holds(tree, 1, [7, 0])
