"""The classical and lossy rules: enumerated laws, planted bugs, vectorised forms against their plain twins."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch

from outrider import noise, oracle
from outrider.accept import PerRequest, coupled, lossless, rule
from outrider.accept.block import chain
from outrider.accept.plain import PLAIN, Guesses, Steps, Streams
from outrider.accept.sift import Round, first, pick, settle, sift, upward
from outrider.bench import exact
from outrider.config import SamplingParams
from outrider.errors import BadInput
from outrider.types import NONE, ROOT, Batch, Finish, PassRows, Proposal, Scores

from . import tiny

LOSSLESS = ("rejection", "block", "traversal")
LOSSY = ("typical", "threshold")
VOCAB = 6


@pytest.mark.parametrize("name", LOSSLESS)
def test_enumerated_law(name: str) -> None:
    assert exact.law_error(name) < exact.TOLERANCE


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_rules_are_lossy(name: str) -> None:
    """What is labelled lossy changes the law, and the enumeration sees it."""
    assert exact.law_error(name) > 1e-3 and not lossless(name)


@pytest.mark.parametrize("bug", exact.planted())
def test_planted_bugs_are_found(bug: str) -> None:
    assert exact.law_error("rejection", bug) > 1e-4


def test_token_rejection_may_key_drafts_by_position_but_block_may_not() -> None:
    """What is asked of the streams is no more than what is needed: only rules that look ahead spoil a position's number."""
    wrong = exact.Subject(PLAIN["rejection"], drafting=exact.ByPosition)
    assert exact.text_error(wrong, exact.LONG, 3) < exact.TOLERANCE
    assert exact.planted()["draft noise keyed by position under block"]() > 1e-2


def test_the_enumeration_counts_everything_once() -> None:
    """Probabilities of all branches sum to 1, also where a number is asked twice."""

    def run(chance: exact.Chance) -> int:
        source = exact.Keyed(chance, 0)
        return sum(source.below(1, s, share, 1.0) for s, share in ((1, 0.3), (1, 0.7), (2, 0.5), (1, 0.2)))

    found = list(exact.outcomes(run))
    assert math.isclose(sum(m for m, _ in found), 1.0)
    assert math.isclose(sum(m for m, v in found if v == 4), 0.2 * 0.5)  # u1 < 0.2 and u2 < 0.5


# Vectorised forms


def law(rng: random.Random, support: int) -> list[float]:
    kept = rng.sample(range(VOCAB), support)
    weights = [rng.expovariate(1) if v in kept else 0.0 for v in range(VOCAB)]
    return [w / sum(weights) for w in weights]


def case(rng: random.Random, linear: bool, drawn: bool) -> Guesses:
    """A random tree: children without replacement from the slot's q, or deterministic ones."""
    size = rng.randrange(0, 7)
    q = [law(rng, rng.randrange(2, VOCAB + 1)) for _ in range(size + 1)]
    tokens: list[int] = []
    parents: list[int] = []
    for column in range(size):
        parent = column - 1 if linear else rng.randrange(-1, column)
        taken = {t for t, above in zip(tokens, parents, strict=True) if above == parent}
        able = [v for v in range(VOCAB) if v not in taken and (not drawn or q[parent + 1][v] > 0)]
        if not able:
            break
        tokens.append(rng.choice(able))
        parents.append(parent)
    p = [law(rng, rng.randrange(1, VOCAB + 1)) for _ in range(len(tokens) + 1)]
    for token, parent in zip(tokens, parents, strict=True):  # agree now and then, so that paths get long
        weight = rng.choice((0.0, 0.5, 0.9))
        p[parent + 1] = [(1 - weight) * a + weight * (v == token) for v, a in enumerate(p[parent + 1])]
    told = q[: len(p)] if drawn else [[0.0] * VOCAB for _ in p]
    return Guesses(tokens, parents, p, told)


def together(items: list[Guesses], linear: bool) -> tuple[Proposal, Scores, Batch]:
    """One ragged batch of all cases."""
    made = Proposal.trees([list(zip(g.tokens, g.parents, strict=True)) for g in items])
    columns, shape = made.columns, (len(items), made.columns + 1, VOCAB)
    p, q = torch.full(shape, math.nan, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for b, given in enumerate(items):
        p[b, : len(given.p)] = torch.tensor(given.p, dtype=torch.float64).log()
        q[b, : len(given.q)] = torch.tensor(given.q, dtype=torch.float64)
    requests = tuple(
        tiny.request([2, 3 + i % 5], SamplingParams(max_tokens=99, ignore_eos=True, seed=i + 1)) for i in range(len(items))
    )
    batch = Batch(requests, (1,) * len(items), (True,) * len(items), (99,) * len(items))
    empty = torch.zeros(0, dtype=torch.int64)
    scores = Scores(torch.full((len(items), columns + 1), NONE), PassRows(empty, empty, empty, empty), {}, processed=p)
    if linear:
        parents = torch.arange(-1, columns - 1).expand(len(items), columns)
        made = replace(made, linear=True, parents=parents)
    return replace(made, q=q), scores, batch


@pytest.mark.parametrize("form", ["walk", "vectorised"])
@pytest.mark.parametrize("kind", ["chains", "trees", "certain"])
@pytest.mark.parametrize("name", PLAIN)
def test_vectorised_equals_plain(name: str, kind: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coupled, "walk", getattr(coupled, form))
    rng, lengths = random.Random(f"{name}{kind}"), Counter[int]()
    for _ in range(15):
        linear = kind == "chains" or (kind == "certain" and rng.random() < 0.5)
        items = [case(rng, linear, kind != "certain") for _ in range(24)]
        proposal, scores, batch = together(items, linear)
        verdict = rule(name)(proposal, scores, batch)
        for b, given in enumerate(items):
            plain = PLAIN["traversal" if name == "block" and not linear else name]
            path, last = plain(Steps(given, Streams(batch.requests[b].key, 2)))
            count = len(path)
            assert int(verdict.accepted[b]) == count and int(verdict.counts[b]) == count + 1
            assert verdict.path[b, :count].tolist() == path
            assert verdict.tokens[b, : count + 1].tolist() == [given.tokens[j] for j in path] + [last]
            lengths[count] += 1
    assert len(lengths) >= 4, "the cases are too easy: paths of several lengths must occur"


def test_block_equals_traversal_on_chains() -> None:
    rng = random.Random(4)
    for drawn in (True, False):
        items = [case(rng, True, drawn) for _ in range(200)]
        proposal, scores, batch = together(items, True)
        one, two = rule("block")(proposal, scores, batch), rule("traversal")(proposal, scores, batch)
        assert torch.equal(one.tokens, two.tokens) and torch.equal(one.path, two.path)


def flag_law(name: str, world: exact.World) -> dict[exact.Word, float]:
    """The law of a round's tokens from the tables of the vectorised form: over all drafts, outcomes of tests, and draws."""
    total: dict[exact.Word, float] = defaultdict(float)
    drafting = exact.Drafting(world)
    for mass, given in exact.outcomes(lambda chance: drafting.guesses((), exact.Keyed(chance, 0))):
        linear = all(parent == j - 1 for j, parent in enumerate(given.parents))
        n = len(given.tokens)
        flags = torch.tensor(list(itertools.product([False, True], repeat=n)))
        shape = torch.tensor(given.p, dtype=torch.float64).log()[None]
        made = replace(
            Proposal.trees([list(zip(given.tokens, given.parents, strict=True))]),
            q=torch.tensor(given.q, dtype=torch.float64)[None],
            linear=linear,
        )
        scores = Scores(torch.full((1, n + 1), NONE), None, {}, processed=shape)  # type: ignore[arg-type]
        r = Round.of(made, scores)
        if name == "block" and linear:
            odds, rest = chain(r)
        else:
            sifted = sift(r, bottom_up=name != "rejection")
            odds = (sifted.share / sifted.whole).clamp(0, 1) if name == "rejection" else sifted.level[:, 1:]
            rest = sifted.rest
        chance = torch.where(flags, odds, 1 - odds).prod(1)
        wide = Round(made, r.p, r.q, *(t.expand(len(flags), n) for t in (r.above, r.live, r.tokens)))
        kept = flags if name == "rejection" else upward(wide, flags)
        keep = first(wide, kept)
        for row, weight in enumerate(chance.tolist()):
            word, slot = (), 0
            while True:
                children = [j for j in given.children(slot) if keep[row, j] > 0]
                if not children:
                    break
                best = max(children, key=lambda j: int(keep[row, j]))
                word, slot = (*word, given.tokens[best]), best + 1
            left = rest[0, slot] / rest[0, slot].sum()
            for v, share in enumerate(left.tolist()):
                total[(*word, v)] += mass * weight * share
    return total


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize(
    "world", [exact.World(4, (1, 1, 1)), exact.World(4, (2, 1)), exact.World(3, (2, 2)), exact.World(4, (2,), "zeros")]
)
def test_enumerated_law_of_the_vectorised_form(name: str, world: exact.World) -> None:
    got, length = flag_law(name, world), len(world.shape) + 1
    for word in itertools.product(range(world.vocab), repeat=length):
        mass = sum(got[word[:n]] * world.text(word[n:], word[:n]) for n in range(1, length + 1) if word[:n] in got)
        assert abs(mass - world.text(word)) < exact.TOLERANCE


def test_same_law_is_always_accepted_and_a_foreign_one_never() -> None:
    rng = random.Random(2)
    chains = [case(rng, True, True) for _ in range(300)]
    same = [replace(g, p=[*g.q[:-1], g.p[-1]]) for g in chains]
    for name in LOSSLESS:
        proposal, scores, batch = together(same, True)
        # p goes through a logarithm and back, so a test may be off by rounding: give the rule the very same numbers
        proposal = replace(proposal, q=scores.processed.softmax(2).nan_to_num(0.0))
        assert torch.equal(rule(name)(proposal, scores, batch).accepted, proposal.sizes), name
        apart = [replace(g, p=[[float(a == 0) / max(1, sum(b == 0 for b in row)) for a in row] for row in g.q]) for g in chains]
        usable = [g for g in apart if all(sum(row) > 0.99 for row in g.p)]
        proposal, scores, batch = together(usable, True)
        assert len(usable) > 30 and rule(name)(proposal, scores, batch).accepted.sum() == 0


def test_invalid_scores_end_in_an_error_not_in_a_guess() -> None:
    given = Guesses([1, 2], [ROOT, 0], [[1 / VOCAB] * VOCAB] * 3, [[0.0] * VOCAB] * 3)
    for name in PLAIN:
        proposal, scores, batch = together([given], False)
        scores.processed[0, 0] = math.nan
        verdict = rule(name)(proposal, scores, batch)
        assert (int(verdict.counts), int(verdict.finish)) == (0, Finish.ERROR)


def test_a_child_that_q_could_not_draw_is_not_kept() -> None:
    """A test of u * 0 < p would keep whatever an unsound drafter puts there."""
    given = Guesses([1], [ROOT], [[0.5, 0.5, 0, 0, 0, 0]] * 2, [[1.0, 0, 0, 0, 0, 0]] * 2)
    proposal, scores, _ = together([given], False)
    r = Round.of(proposal, scores)
    top, bottom = sift(r, bottom_up=False), sift(r, bottom_up=True)
    assert float(top.share) == 0 and float(bottom.level[0, 1]) == 0
    assert float(chain(Round.of(*together([given], True)[:2]))[0]) == 0


def test_pick_is_inverse_transform() -> None:
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    u = torch.tensor([0.0, 0.4999, 0.5, 0.7499, 0.75, 1 - 2.0**-52], dtype=torch.float64)
    assert pick(weights.expand(6, -1), u).tolist() == [1, 1, 3, 3, 4, 4]
    assert pick(torch.zeros(2, 3), torch.zeros(2)).tolist() == [NONE, NONE]
    assert pick(torch.tensor([[1.0, math.nan]]), torch.zeros(1)).tolist() == [NONE]


def test_uniforms_equal_their_definition() -> None:
    rng = random.Random(0)
    rows = [(rng.getrandbits(64), rng.randrange(99), rng.randrange(9999)) for _ in range(50)]
    keys, nodes, starts = (
        torch.tensor(c) for c in ([k - 2**64 if k >= 2**63 else k for k, _, _ in rows], *list(zip(*rows, strict=True))[1:])
    )
    for purpose in (noise.DRAFT, noise.ACCEPT, noise.RESIDUAL):
        got = noise.uniforms(keys, purpose, nodes, starts).tolist()
        assert got == [oracle.uniform(k, purpose, n, s) for k, n, s in rows]


def test_stream_noise_is_philox_of_its_fields_and_nothing_is_shared() -> None:
    key = torch.tensor([7])
    row = noise.stream_gumbel(key, torch.tensor([3]), torch.tensor([20]), 10)[0].tolist()
    words = [oracle.philox4x64((v // 4 + 1, 0, 3, 20), (7, noise.DRAFT))[v % 4] for v in range(10)]
    assert row == [oracle.single(-math.log(-math.log(((w >> 12) + 0.5) * 2.0**-52))) for w in words]
    others = [(7, 4, 20, 1), (7, 3, 21, 1), (8, 3, 20, 1), (7, 3, 20, 2)]
    for k, node, start, purpose in others:
        other = noise.stream_gumbel(torch.tensor([k]), torch.tensor([node]), torch.tensor([start]), 10, purpose)[0].tolist()
        assert not set(other) & set(row)


def test_specs_of_rules() -> None:
    assert rule("typical:eps=0.05,delta=0.2").eps == 0.05
    assert rule("threshold:share=1").share == 1
    for bad in ("greedy", "typical:x=1", "rejection:eps=1", "threshold:share=2", "threshold:share=a"):
        with pytest.raises(BadInput):
            rule(bad)
    assert [name for name in ("coupled", *PLAIN) if not lossless(name)] == list(LOSSY)


def test_one_batch_mixes_rules() -> None:
    """Each request's verdict is what its own rule gives alone, in the batch's order."""
    rng = random.Random(8)
    items = [case(rng, False, True) for _ in range(30)]
    proposal, scores, batch = together(items, False)
    names = [rng.choice(("coupled", *PLAIN)) for _ in items]
    choice = torch.tensor([[rng.randrange(VOCAB) for _ in range(proposal.columns + 1)] for _ in items])
    scores = replace(scores, choice=choice)
    for request, name in zip(batch.requests, names, strict=True):
        request.rule = name
    mixed = PerRequest()(proposal, scores, batch)
    for name in set(names):
        alone = rule(name)(proposal, scores, batch)
        rows = [b for b, n in enumerate(names) if n == name]
        for field in ("path", "accepted", "tokens", "counts", "finish"):
            assert torch.equal(getattr(mixed, field)[rows], getattr(alone, field)[rows])


def test_settle_follows_the_first_kept_sibling() -> None:
    given = Guesses([1, 2, 3], [ROOT, ROOT, 1], [[1 / VOCAB] * VOCAB] * 4, [[0.0] * VOCAB] * 4)
    proposal, scores, batch = together([given], False)
    r = Round.of(proposal, scores)
    certain = torch.zeros(1, 4, VOCAB, dtype=torch.float64)
    certain[..., 5] = 1
    verdict = settle(r, first(r, torch.tensor([[False, True, True]])), certain, batch)
    assert verdict.tokens.tolist() == [[2, 3, 5, NONE]] and verdict.path.tolist() == [[1, 2, NONE]]
