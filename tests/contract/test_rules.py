"""Every drafter under every rule: the plain text at T = 0, the model's law at T > 0, and the labels that lossy rules carry."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import cache as memo
from pathlib import Path

import pytest
import torch

from outrider import oracle, registry
from outrider.accept import RULES, PerRequest, rule
from outrider.bench.chance import chi_squared
from outrider.config import SamplingParams
from outrider.drafters._eagle import EaglePupil, EagleTraining
from outrider.drafters._medusa import MedusaPupil, MedusaTraining
from outrider.drafters.draft_model import DraftModel
from outrider.errors import OutriderWarning
from outrider.models.hf import Decoder, truncate
from outrider.protocols import Drafter
from outrider.types import NONE, Batch, Budget, Proposal, Scores, StepEvent, Verdict

from .. import heads, probes, tiny
from .drafters import every
from .test_text import OPTIONS, PROMPTS, answers, check_statistics, plain, requests

LOSSLESS = ("rejection", "block", "traversal")
CLASSICAL = tuple(name for name in RULES if name != "coupled")
WORDS = 8
"""Vocabulary of the law tests."""


def under(name: str, option: str) -> list:
    made = requests(OPTIONS[option])
    for request in made:
        request.rule = name
    return made


@pytest.mark.parametrize("accept", CLASSICAL)
@pytest.mark.parametrize("name", every())
def test_greedy_text_is_the_plain_text(name: str, accept: str) -> None:
    """At T = 0 all laws are certain, so every rule leaves one text, whatever the drafter."""
    made = under(accept, "greedy")
    assert tuple(map(tuple, tiny.World().run(every()[name](answers("greedy")), made, accept))) == plain("greedy")
    for request in made:
        check_statistics(request)


@pytest.mark.parametrize("accept", CLASSICAL)
@pytest.mark.parametrize("name", every())
def test_sampling_runs_sound(name: str, accept: str) -> None:
    """At T > 0 the texts are the rule's own; drafters stay on, masks hold, what is counted adds up."""
    option = "penalties" if accept in ("rejection", "traversal") else "masks"
    made = under(accept, option)
    tiny.World().run(every()[name](answers(option)), made, accept)
    for request in made:
        check_statistics(request)
        assert request.error is None
        assert option != "masks" or all(t in {1, *range(4, 40)} for t in request.output)
        assert request.lossless == (accept in LOSSLESS)


@pytest.mark.parametrize("accept", LOSSLESS)
@pytest.mark.parametrize("option", ["sampled", "penalties"])
def test_self_draft_is_always_accepted(option: str, accept: str) -> None:
    """q = p: acceptance is exactly 1, every round commits depth + 1 tokens."""
    params = replace(OPTIONS[option], ignore_eos=True, max_tokens=1 + 4 * 4)
    for made in (registry.parse("self:depth=3"), tiny.draft_model(3, depth=3)):
        ours = requests(params)
        for request in ours:
            request.rule = accept
        tiny.World().run(made, ours, accept)
        for request in ours:
            assert (request.stats.rounds, request.stats.accepted) == (5, 12), made.name


def test_disjoint_supports_are_never_accepted() -> None:
    """The draft may only write what the target may not."""
    shift = Shifted()
    for accept in LOSSLESS:
        ours = [tiny.request(p, SamplingParams(max_tokens=12, allowed_token_ids=(4, 5, 6), seed=3), rule=accept) for p in PROMPTS]
        tiny.World().run(shift, ours, accept)
        assert sum(r.stats.drafted for r in ours) > 20 and sum(r.stats.accepted for r in ours) == 0


class Shifted(Drafter):
    """Draws tokens 10 to 13 with a known q."""

    name = "shifted"
    depth = nodes = 2

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        made = Proposal.chains([[10 + (r.id + d) % 4 for d in range(budget.depth[b])] for b, r in enumerate(batch.requests)])
        q = torch.zeros(len(batch), made.columns + 1, tiny.VOCAB)
        q[..., 10:14] = 0.25
        return replace(made, q=q)


# The law, through the real engine


@memo
def small(layers: int) -> Decoder:
    made = tiny.model(vocab_size=WORDS, seed=5, initializer_range=0.2)
    return Decoder(truncate(made, layers), f"small-{layers}")


def small_draft(width: int = 1, depth: int = 2) -> DraftModel:
    made = DraftModel(DraftModel.Config(path="small", depth=depth, width=width))
    made.start = lambda start: made.bind(small(2), start)  # type: ignore[method-assign]
    return made


PROMPT = (2, 5, 3, 4)
LAWS = {
    "plain": SamplingParams(temperature=1.0),
    "cool": SamplingParams(temperature=0.7, top_k=5, top_p=0.9),
    "penalties": SamplingParams(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.5),
}


def law(params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """Enumerated with transformers' forward pass and the processors' definition."""
    model = tiny.model(vocab_size=WORDS, seed=5, initializer_range=0.2)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for word, mass in found.items():
            request = tiny.request([*PROMPT, *word], params)
            request.prompt_len = len(PROMPT)
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([request.tokens])).logits[0, -1]
            scores = torch.tensor(oracle.process(logits.tolist(), request), dtype=torch.float64)
            for v, p in enumerate((scores / params.temperature).softmax(0).tolist()):
                longer[(*word, v)] = mass * p
        found = longer
    return found


def write(drafter: Drafter, accept: str, params: SamplingParams, count: int) -> Counter[tuple[int, ...]]:
    """Texts of `count` seeds."""
    counts: Counter[tuple[int, ...]] = Counter()
    for start in range(0, count, 256):
        seeds = range(start, min(start + 256, count))
        ours = [tiny.request(PROMPT, replace(params, seed=s + 1), rule=accept) for s in seeds]
        world = tiny.World(tokens=16 * 256, own=small(3))
        counts.update(tuple(t) for t in world.run(drafter, ours, accept, max_requests=256))
    return counts


def p_value(drafter: Drafter, accept: str, option: str = "plain", count: int = 3072, length: int = 4) -> float:
    params = replace(LAWS[option], max_tokens=length, ignore_eos=True)
    wide = law(params, length)
    counts = write(drafter, accept, params, count)
    return min(chi_squared(*marginal(counts, wide, n)) for n in (2, 3))


def marginal(counts: Counter[tuple[int, ...]], wide: dict[tuple[int, ...], float], length: int) -> tuple[Counter, Counter]:
    """Of the first token after the prefill's and those after it: the first `length` tokens of texts."""
    few: Counter[tuple[int, ...]] = Counter()
    mass: Counter[tuple[int, ...]] = Counter()
    for word, n in counts.items():
        few[word[:length]] += n
    for word, p in wide.items():
        mass[word[:length]] += p  # type: ignore[assignment]
    return few, mass


@pytest.mark.parametrize("option", ["plain", *(pytest.param(o, marks=pytest.mark.slow) for o in LAWS if o != "plain")])
@pytest.mark.parametrize("accept", LOSSLESS)
def test_chains_follow_the_law(accept: str, option: str) -> None:
    assert p_value(small_draft(), accept, option) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("accept", LOSSLESS)
def test_drawn_trees_follow_the_law(accept: str) -> None:
    assert p_value(small_draft(width=3), accept) > 1e-4
    assert p_value(small_draft(width=2), accept, "cool") > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("accept", LOSSLESS)
def test_certain_guesses_follow_the_law(accept: str) -> None:
    assert p_value(Fixed(), accept) > 1e-4
    assert p_value(registry.parse("ngram:min=1,depth=2"), accept) > 1e-4
    assert p_value(Silent(small_draft(width=2)), accept) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("accept", LOSSLESS)
def test_a_stop_rule_that_reads_the_past_keeps_the_law(accept: str) -> None:
    """Looking ahead further or not at all, by what came before the draft, changes nothing."""
    assert p_value(Moody(small_draft()), accept) > 1e-4


@memo
def small_heads(kind: str) -> Path:
    """Random heads for the model of the law tests."""
    whole = tiny.model(vocab_size=WORDS, seed=5, initializer_range=0.2, dtype=torch.float32)
    rows = {"embeddings": whole.get_input_embeddings().weight, "head": whole.get_output_embeddings().weight}
    teacher = heads.teacher(config=whole.config.to_dict(), counts=torch.arange(WORDS), **rows)
    torch.manual_seed(1)
    pupil = EaglePupil(teacher, EagleTraining()) if kind == "eagle" else MedusaPupil(teacher, MedusaTraining(heads=2))
    heads.scrambled(pupil.module, size=0.1)
    path = heads.room()
    pupil.save(path)
    return path


@pytest.mark.parametrize("spec", ["eagle:width=2,depth=2,nodes=4", "eagle:width=1,depth=2", "medusa:nodes=5"])
@pytest.mark.parametrize(
    "accept", ["rejection", *(pytest.param(r, marks=pytest.mark.slow) for r in LOSSLESS if r != "rejection")]
)
def test_heads_follow_the_law(accept: str, spec: str) -> None:
    """Draws from a head's distribution, with the probabilities that the rule is told."""
    name, _, rest = spec.partition(":")
    assert p_value(registry.parse(f"{name}:path={small_heads(name)},{rest}"), accept) > 1e-4


def test_heads_that_drop_what_they_drew_are_found() -> None:
    assert p_value(Dropper(registry.parse(f"eagle:path={small_heads('eagle')},width=1,depth=2")), "rejection") < 1e-8


class Fixed(Drafter):
    """The same tree whatever comes: guesses without q."""

    name = "fixed"
    depth, nodes = 2, 4

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        tree = [(3, -1), (6, -1), (1, 0), (3, 1)]
        return Proposal.trees(
            [tree if n >= 4 and d >= 2 else tree[: 2 if n >= 2 else 0] for d, n in zip(budget.depth, budget.nodes, strict=True)]
        )


class Moody(probes.Sleeper):
    """Drafts only where the last token is even."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner, 1)

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        awake = [r.tokens[-1] % 2 == 0 for r in batch.requests]
        return self.inner.propose(
            batch, Budget(*(tuple(n * a for n, a in zip(part, awake, strict=True)) for part in (budget.depth, budget.nodes)))
        )


class LookThenDrop(probes.Sleeper):
    """Drafts, looks, and keeps quiet about guesses of one kind."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner, 1)

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        made = self.inner.propose(batch, budget)
        if not made.columns:
            return made
        sizes = made.sizes.where(made.tokens[:, 0] % 2 == 0, 0)
        return replace(made, sizes=sizes)


class Dropper(LookThenDrop):
    """The same, around a drafter that needs to see every round."""

    def observe(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        self.inner.observe(batch, proposal, verdict, scores)


class WrongHeat(probes.Sleeper):
    """Tells a q that is flatter than the one that drew."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner, 1)

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        made = self.inner.propose(batch, budget)
        if made.q is None:
            return made
        flat = made.q**0.3
        return replace(made, q=(flat / flat.sum(2, keepdim=True)).nan_to_num(0.0))


@pytest.mark.parametrize("bug", [LookThenDrop, WrongHeat])
def test_the_law_tests_find_bugs(bug: type[probes.Sleeper]) -> None:
    assert p_value(bug(small_draft()), "rejection") < 1e-8


def test_the_law_tests_find_lossy_rules() -> None:
    assert p_value(small_draft(), "typical") < 1e-8


def test_classical_rules_accept_more_of_drawn_guesses_than_of_certain_ones() -> None:
    """That q reaches the rule shows in what is accepted."""
    taken = {}
    for name, drafter in {"drawn": small_draft(), "silent": Silent(small_draft())}.items():
        ours = [
            tiny.request(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, seed=s + 1), rule="rejection") for s in range(60)
        ]
        tiny.World(own=small(3)).run(drafter, ours, "rejection")
        taken[name] = sum(r.stats.accepted for r in ours) / sum(r.stats.drafted for r in ours)
    assert taken["drawn"] > taken["silent"] + 0.1


class Silent(probes.Sleeper):
    """Does not tell what drew its guesses: exact, but worse."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner, 1)

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        return replace(self.inner.propose(batch, budget), q=None)


class Nonsense(Drafter):
    """Tells a q that is no law, or of another vocabulary."""

    name = "nonsense"
    depth = nodes = 2

    def __init__(self, q: torch.Tensor) -> None:
        self.q = q

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        made = Proposal.chains([[3] * d for d in budget.depth])
        return replace(made, q=self.q.expand(len(batch), made.columns + 1, -1))


@pytest.mark.parametrize(
    "q", [torch.full((49,), 1 / 49), torch.full((48,), 0.5), torch.full((48,), math.nan), torch.eye(48)[3] * 2 - 1 / 48]
)
def test_a_q_that_is_no_law_switches_the_drafter_off(q: torch.Tensor) -> None:
    engine = tiny.World().engine(Nonsense(q), "rejection")
    request = tiny.request(PROMPTS[0], SamplingParams(max_tokens=12, ignore_eos=True, seed=1), rule="rejection")
    engine.add(request)
    with pytest.warns(OutriderWarning, match="unsound"):
        while engine.step() is not None:
            pass
    assert len(request.output) == 12 and request.stats.drafted == 0


# Mixed batches, labels


def test_one_batch_may_mix_rules() -> None:
    """Coupled requests keep their text; the others get what they get alone."""
    names = ["coupled", *RULES][: len(PROMPTS)]
    for drafter in (lambda: tiny.draft_model(2, depth=3, width=2), lambda: tiny.draft_model(2, depth=3)):
        mixed = requests(OPTIONS["sampled"])
        for request, name in zip(mixed, names, strict=True):
            request.rule = name
        events: list[StepEvent] = []
        engine = tiny.World().engine(drafter())
        engine.accept = PerRequest()
        engine.sinks.append(events.append)
        for request in mixed:
            engine.add(request)
        while engine.step() is not None:
            pass
        assert engine.drafter.working, engine.drafter.reason
        for i, (request, name) in enumerate(zip(mixed, names, strict=True)):
            alone = requests(OPTIONS["sampled"])[i]
            alone.rule = name
            assert tiny.World().run(drafter(), [alone], name)[0] == request.output, name
        assert tuple(mixed[0].output) == plain("sampled")[0]
        told = {c.request.rule: c.request.lossless for event in events for c in event.committed}
        assert told == {name: rule(name).lossless for name in names}


def test_texts_do_not_depend_on_who_shares_the_batch() -> None:
    """Streams are the request's own: alone or together, the text is the same."""
    for accept in CLASSICAL:
        together = under(accept, "sampled")
        texts = tiny.World().run(tiny.draft_model(2, depth=3), together, accept)
        last = under(accept, "sampled")[-1:]
        assert tiny.World().run(tiny.draft_model(2, depth=3), last, accept)[0] == texts[-1]


class Peeker(Drafter):
    """Looks at what the engine hands out."""

    name = "peeker"
    depth = nodes = 2
    seen: list[torch.Tensor]

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        return Proposal.chains([[3] * d for d in budget.depth])

    def observe(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        self.seen = [*getattr(self, "seen", []), *([] if scores.processed is None else [scores.processed])]


def test_processed_scores_are_made_only_for_rules_that_read_them() -> None:
    coupled, classical = Peeker(), Peeker()
    tiny.World().run(coupled, requests(OPTIONS["cool"]))
    made = under("rejection", "cool")
    tiny.World().run(classical, made, "rejection")
    assert not coupled.seen and classical.seen
    rows = torch.cat([t.flatten(0, 1) for t in classical.seen])
    rows = rows[~rows.isnan().any(1)].double().softmax(1)
    assert bool(((rows > 0).sum(1) <= 20).all()), "top_k=20 filters before the rule sees anything"
    assert int(NONE) == -1 and len(list(itertools.islice(rows, 10))) == 10
