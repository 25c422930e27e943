"""The coupled rule, vectorised and as a walk, against its definition in plain Python."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import oracle
from outrider.accept import RULES, rule
from outrider.accept.coupled import Coupled, agreeing, vectorised, walk
from outrider.config import SamplingParams
from outrider.errors import BadInput
from outrider.types import NONE, ROOT, Batch, Finish, PassRows, Proposal, Scores, Verdict

from . import tiny

FORMS = {"vectorised": vectorised, "walk": walk}
Tree = list[tuple[int, int]]


@dataclass
class Case:
    """One request's share of a round."""

    tree: Tree
    choices: list[int]
    stops: frozenset[int]
    room: int
    ready: bool


@st.composite
def cases(draw: st.DrawFn, chain: bool = False) -> Case:
    """Few tokens, so that paths agree often."""
    token, seen = st.integers(0, 3), set()
    tree: Tree = []
    for _ in range(draw(st.integers(0, 7))):
        node = (draw(token), len(tree) - 1 if chain else draw(st.integers(ROOT, len(tree) - 1)))
        if node not in seen:
            seen.add(node)
            tree.append(node)
    choices = draw(st.lists(st.integers(NONE, 3), min_size=len(tree) + 1, max_size=len(tree) + 1))
    if draw(st.booleans()):  # the target agrees with the deepest path
        for token_, parent in tree:
            choices[parent + 1] = token_
    stops = frozenset(draw(st.sets(token, max_size=2)))
    return Case(tree, choices, stops, draw(st.integers(1, 8)), draw(st.booleans()) or draw(st.booleans()))


def inputs(items: list[Case], garbage: random.Random | None, extra: int = 2) -> tuple[Proposal, torch.Tensor, Batch]:
    """A round of all cases together; columns that are not in use hold zeros or garbage."""
    linear = all(c.tree == [(t, i - 1) for i, (t, _) in enumerate(c.tree)] for c in items)
    made = Proposal.trees([c.tree + [(0, ROOT)] * extra for c in items])
    sizes = torch.tensor([len(c.tree) for c in items])
    choice = torch.full((len(items), made.columns + 1), NONE)
    for b, case in enumerate(items):
        choice[b, : len(case.choices)] = torch.tensor(case.choices)
        if not case.ready:
            choice[b, 0] = NONE
    tokens, parents = made.tokens.clone(), made.parents.clone()
    if garbage is not None:
        for b, case in enumerate(items):
            for column in range(len(case.tree), made.columns):
                # As misleading as can be: tokens that agree, links that lead anywhere, out of the table too.
                parents[b, column] = garbage.choice((ROOT, column - 1, column, garbage.randrange(-9, 99)))
                tokens[b, column] = garbage.choice((*range(4), NONE, 10**12))
                choice[b, column + 1] = garbage.randrange(-1, 4)
    params = [SamplingParams(max_tokens=c.room) for c in items]
    requests = [tiny.request([2], p) for p in params]
    for request, case in zip(requests, items, strict=True):
        request.stop_ids = case.stops
    batch = Batch(tuple(requests), (1,) * len(items), tuple(c.ready for c in items), (99,) * len(items))
    widths = tuple(len(c.tree) + extra for c in items)
    return Proposal(tokens, parents, sizes, torch.zeros_like(tokens), widths, linear), choice, batch


def check(verdict: Verdict, items: list[Case], columns: int) -> None:
    assert verdict.path.shape == (len(items), columns) and verdict.tokens.shape == (len(items), columns + 1)
    for tensor in (verdict.path, verdict.accepted, verdict.tokens, verdict.counts, verdict.finish):
        assert tensor.dtype == torch.int64
    for b, case in enumerate(items):
        if case.ready:
            tokens, parents = [t for t, _ in case.tree], [p for _, p in case.tree]
            want = oracle.accept(tokens, parents, case.choices, oracle.Limits(case.stops, case.room))
        else:
            want = oracle.Walk([], 0, [], oracle.RUNNING)
        assert verdict.path[b].tolist() == want.path + [NONE] * (columns - len(want.path))
        assert verdict.tokens[b].tolist() == want.tokens + [NONE] * (columns + 1 - len(want.tokens))
        assert [int(x[b]) for x in (verdict.accepted, verdict.counts, verdict.finish)] == [
            want.accepted, len(want.tokens), want.finish,
        ]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(items=st.lists(cases(), min_size=1, max_size=4), seed=st.none() | st.integers(0, 9))
def test_forests_equal_the_definition(items: list[Case], seed: int | None) -> None:
    proposal, choice, batch = inputs(items, None if seed is None else random.Random(seed))
    for form in FORMS.values():
        check(form(proposal, choice, batch), items, proposal.columns)


@settings(max_examples=200, deadline=None)
@given(items=st.lists(cases(chain=True), min_size=1, max_size=4), seed=st.none() | st.integers(0, 9))
def test_chains_equal_the_definition(items: list[Case], seed: int | None) -> None:
    proposal, choice, batch = inputs(items, None if seed is None else random.Random(seed))
    assert proposal.linear
    for form in FORMS.values():
        for linear in (True, False):
            if linear or seed is None:
                check(form(replace(proposal, linear=linear), choice, batch), items, proposal.columns)


def test_garbage_would_be_noticed() -> None:
    """Negative control: with sizes that take the garbage in, the verdicts differ, so the tests above are not blind to it."""
    rng, noticed = random.Random(0), 0
    for seed in range(60):
        items = [Case([(1, ROOT)], [1, rng.randrange(4)], frozenset(), 8, True) for _ in range(3)]
        proposal, choice, batch = inputs(items, random.Random(seed))
        leaking = replace(proposal, sizes=torch.full_like(proposal.sizes, proposal.columns))
        clean = replace(leaking, parents=leaking.parents.clamp(ROOT, proposal.columns - 1))
        wide = torch.where(clean.parents >= torch.arange(proposal.columns), ROOT, clean.parents)
        before, after = (vectorised(p, choice, batch) for p in (proposal, replace(clean, parents=wide)))
        noticed += not torch.equal(before.tokens, after.tokens)
    assert noticed > 10


@pytest.mark.parametrize("form", FORMS)
def test_every_small_chain_end(form: str) -> None:
    """All combinations of how far the guesses agree, the limit, the place of a stop token, and of an invalid choice."""
    for agree, room, stop, bad in itertools.product(range(4), range(1, 6), range(5), range(5)):
        truth = [10, 11, 12, 13]
        choices = [NONE if i == bad else t for i, t in enumerate(truth)]
        guesses = [t if i < agree else 40 for i, t in enumerate(truth[:3])]
        item = Case([(t, i - 1) for i, t in enumerate(guesses)], choices, frozenset(truth[stop : stop + 1]), room, True)
        proposal, choice, batch = inputs([item], None, extra=0)
        check(FORMS[form](proposal, choice, batch), [item], 3)


def test_the_limit_comes_before_a_choice_nobody_needs() -> None:
    item = Case([(5, ROOT)], [5, NONE], frozenset(), 1, True)
    proposal, choice, batch = inputs([item], None)
    for form in FORMS.values():
        assert form(proposal, choice, batch).finish.tolist() == [Finish.LENGTH.value]
    item.room = 2
    proposal, choice, batch = inputs([item], None)
    for form in FORMS.values():
        assert form(proposal, choice, batch).finish.tolist() == [Finish.ERROR.value]


def test_no_guesses_is_plain_decoding() -> None:
    requests = tuple(tiny.request([2], SamplingParams(max_tokens=4)) for _ in range(3))
    batch = Batch(requests, (1, 3, 1), (True, False, True), (0, 0, 0))
    choice = torch.tensor([[7], [NONE], [tiny.EOS]])
    rows = PassRows(*(torch.arange(3),) * 4)
    for got in (
        vectorised(Proposal.empty(3), choice, batch),
        walk(Proposal.empty(3), choice, batch),
        Coupled()(Proposal.empty(3), Scores(choice, rows, {}), batch),
    ):
        assert got.tokens.tolist() == [[7], [NONE], [tiny.EOS]] and got.counts.tolist() == [1, 0, 1]
        assert got.finish.tolist() == [Finish.RUNNING.value, Finish.RUNNING.value, Finish.STOP.value]
        assert got.path.shape == (3, 0) and got.accepted.tolist() == [0, 0, 0]


def test_arguments_are_left_alone() -> None:
    items = [Case([(1, ROOT), (2, 0)], [1, 2, 3], frozenset({2}), 8, True)]
    proposal, choice, batch = inputs(items, random.Random(1))
    copies = [t.clone() for t in (proposal.tokens, proposal.parents, proposal.sizes, choice)]
    for form in FORMS.values():
        form(proposal, choice, batch)
    assert all(
        torch.equal(a, b) for a, b in zip(copies, (proposal.tokens, proposal.parents, proposal.sizes, choice), strict=True)
    )


def test_agreeing_needs_every_ancestor() -> None:
    made = Proposal.trees([[(1, ROOT), (2, 0), (3, 1), (9, ROOT), (4, 3)]])
    assert agreeing(made, torch.tensor([[1, 2, 3, 0, 4, 0]])).tolist() == [[True, True, True, False, False]]
    assert agreeing(made, torch.tensor([[1, 5, 3, 0, 4, 0]])).tolist() == [[True, False, False, False, False]]


def test_rules_by_name() -> None:
    assert rule("coupled").lossless and set(RULES) >= {"coupled"}
    with pytest.raises(BadInput, match="unknown acceptance rule 'coupledd'; known: coupled"):
        rule("coupledd")
