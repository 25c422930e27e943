"""The contract: whatever the drafter, cache, batch or options, the text is that of plain decoding, token for token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache as memo
from typing import Any

import pytest
import torch

from outrider import registry
from outrider.accept import coupled
from outrider.config import SamplingParams
from outrider.engine import Engine, Pending
from outrider.scheduler import Scheduler
from outrider.types import Batch

from .. import probes, tiny
from .drafters import every

PROMPTS = tiny.prompts(6, seed=3)
OPTIONS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=28),
    "sampled": SamplingParams(temperature=1.0, max_tokens=28, ignore_eos=True),
    "cool": SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.02, max_tokens=28),
    "penalties": SamplingParams(
        temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.2, max_tokens=28, ignore_eos=True
    ),
    "masks": SamplingParams(
        temperature=1.0,
        logit_bias={5: 2.0, 9: -4.0, tiny.EOS: 2.5},
        allowed_token_ids=(1, *range(4, 40)),
        stop_token_ids=(11,),
        min_tokens=9,
        max_tokens=28,
    ),
}


def requests(params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS, seed: int = 11) -> list:
    return [tiny.request(p, replace(params, seed=seed + i), bad_words=((7,), (3, 8))) for i, p in enumerate(prompts)]


@memo
def plain(option: str, family: str = "llama", seed: int = 11) -> tuple[tuple[int, ...], ...]:
    """Each prompt decoded alone, without a drafter, over the contiguous reference cache."""
    out = []
    for i, prompt in enumerate(PROMPTS):
        world = tiny.World(family, cache="slots")
        out.append(tuple(world.run(registry.parse("none"), requests(OPTIONS[option], [prompt], seed + i))[0]))
    return tuple(out)


def answers(option: str, family: str = "llama", seed: int = 11) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {tuple(p): a for p, a in zip(PROMPTS, plain(option, family, seed), strict=True)}


@pytest.mark.parametrize(("cache", "form"), [("paged", "walk"), ("slots", "vectorised")])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", every())
def test_ragged_batch_equals_plain(name: str, option: str, cache: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coupled, "walk", getattr(coupled, form))
    drafter = every()[name](answers(option))
    made = requests(OPTIONS[option])
    assert tuple(map(tuple, tiny.World(cache=cache).run(drafter, made))) == plain(option)
    for request in made:
        check_statistics(request)


@pytest.mark.parametrize("name", every())
@pytest.mark.parametrize("family", [f for f in tiny.FAMILIES if f != "llama"])
def test_other_architectures(family: str, name: str) -> None:
    if name.startswith(("draft_model", "sleeper", "merger")):
        pytest.skip("the draft is cut from the llama; its own KV is tested there")
    drafter = every()[name](answers("sampled", family))
    assert tuple(map(tuple, tiny.World(family).run(drafter, requests(OPTIONS["sampled"])))) == plain("sampled", family)


@pytest.mark.parametrize("name", every())
def test_tight_memory_preempts_and_changes_nothing(name: str) -> None:
    world = tiny.World(tokens=96)
    drafter = every()[name](answers("sampled"))
    engine_runs = world.run(drafter, requests(OPTIONS["sampled"]))
    assert tuple(map(tuple, engine_runs)) == plain("sampled")


@pytest.mark.parametrize("name", every())
def test_by_rows_equals_blocks(name: str) -> None:
    drafter = every()[name](answers("cool"))
    assert tuple(map(tuple, tiny.World(by_rows=True).run(drafter, requests(OPTIONS["cool"])))) == plain("cool")


@pytest.mark.parametrize("depth", range(1, 33))
def test_every_depth(depth: int) -> None:
    drafter = probes.Replay(answers("penalties"), depth=depth, spoil=0.1, seed=depth)
    assert tuple(map(tuple, tiny.World().run(drafter, requests(OPTIONS["penalties"])))) == plain("penalties")


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("option", ["greedy", "sampled", "penalties"])
def test_self_draft_commits_all(option: str, depth: int) -> None:
    """The target drafting for itself is always right, so every round commits depth + 1 tokens (but the first, which reads the
    prompt, and the last). This finds cache holes and shifted positions at once."""
    params = replace(OPTIONS[option], ignore_eos=True, max_tokens=1 + 4 * (depth + 1))
    for made in (registry.parse(f"self:depth={depth}"), tiny.draft_model(3, depth=depth)):
        ours = requests(params)
        tiny.World().run(made, ours)
        for request in ours:
            assert (request.stats.rounds, request.stats.accepted) == (5, 4 * depth), made.name


@pytest.mark.parametrize("nap", [1, 7, 100])
def test_idle_drafter_catches_up(nap: int) -> None:
    """A draft equal to the target accepts everything in every round in which it is awake."""
    sleeper = probes.Sleeper(tiny.draft_model(3, depth=3), nap)
    params = SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True, seed=2)
    request = tiny.request(PROMPTS[0], params)
    tiny.World().run(sleeper, [request])
    full = request.stats.drafted // 3
    assert full >= 1 and request.stats.accepted == request.stats.drafted


@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("kind", ["eos", "stop_id", "length"])
def test_the_end_at_every_block_offset(kind: str, offset: int) -> None:
    """Force the end to fall on each offset of an accepted block of 6; nothing after it may survive anywhere."""
    whole = plain("sampled")[0]
    prompt, end = PROMPTS[0], 7 + offset
    token = whole[end]
    if kind != "length" and token in whole[:end]:
        end = whole.index(token)
    base = SamplingParams(temperature=1.0, max_tokens=28, ignore_eos=True, seed=11)
    if kind == "length":
        request = tiny.request(prompt, replace(base, max_tokens=end + 1), bad_words=((7,), (3, 8)))
    elif kind == "stop_id":
        request = tiny.request(prompt, replace(base, stop_token_ids=(token,)), bad_words=((7,), (3, 8)))
    else:
        request = tiny.request(prompt, base, bad_words=((7,), (3, 8)))
        request.stop_ids = frozenset({token})
    drafter = probes.Replay({tuple(prompt): whole}, depth=5)
    (got,) = tiny.World().run(drafter, [request])
    assert tuple(got) == whole[: end + 1]
    assert request.stats.tokens == end + 1 and request.stats.accepted <= end + 1
    check_statistics(request)


def test_one_token_requests_are_not_drafted_for() -> None:
    request = tiny.request(PROMPTS[0], SamplingParams(max_tokens=1, seed=1))
    tiny.World().run(registry.parse("self"), [request])
    assert request.stats.drafted == 0 and request.stats.tokens == 1


def test_context_end_inside_a_block() -> None:
    prompt = PROMPTS[1]
    params = SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True, seed=4)
    runs = []
    for drafter in (registry.parse("none"), registry.parse("self:depth=7")):
        request = tiny.request(prompt, params, limit=33)
        runs.append(tiny.World(max_len=len(prompt) + 33).run(drafter, [request])[0])
        assert len(request.output) == 33
    assert runs[0] == runs[1]


def test_draft_context_shorter_than_the_targets() -> None:
    short = tiny.draft_model(3, depth=3)
    world = tiny.World()
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=4)
    engine = world.engine(short)
    short.decoder = _limited(short.decoder, 40)
    request = tiny.request(PROMPTS[1][:10], params)
    engine.add(request)
    while engine.step() is not None:
        pass
    assert engine.drafter.working and request.stats.drafted > 0
    again = tiny.request(PROMPTS[1][:10], params)
    assert tiny.World().run(registry.parse("none"), [again])[0] == request.output


def _limited(decoder, length):
    import copy

    other = copy.copy(decoder)
    other.max_len = length
    return other


@pytest.mark.parametrize("chunk", [3, 5])
def test_prompt_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("outrider.scheduler.CHUNK", chunk)
    for name in ("ngram", "reader", "draft_model", "owner"):
        drafter = every()[name](answers("cool"))
        assert tuple(map(tuple, tiny.World().run(drafter, requests(OPTIONS["cool"])))) == plain("cool")


def test_seed_and_prompt_decide_alone() -> None:
    one, two = (requests(OPTIONS["sampled"], PROMPTS[:1], seed=s) for s in (1, 2))
    world = tiny.World()
    first, other = world.run(registry.parse("none"), one), world.run(registry.parse("none"), two)
    assert first != other
    late = requests(OPTIONS["sampled"], list(itertools.chain(PROMPTS[3:], PROMPTS[:1])), seed=1)
    late[-1].key = one[0].key
    assert world.run(registry.parse("ngram"), late)[-1] == first[0]


def check_statistics(request) -> None:
    """What is counted adds up, with nothing from after the end."""
    stats = request.stats
    assert stats.tokens == len(request.output) == len(request.origins)
    assert sum(o >= 0 for o in request.origins) == stats.accepted <= stats.drafted
    assert stats.rounds <= stats.tokens <= stats.rounds + stats.drafted
    assert all(0 <= a <= o for a, o in zip(stats.accepted_at, stats.offered_at, strict=True))


@dataclass(frozen=True)
class Told:
    """What a captured round would answer, of one that was not."""

    round: Pending

    def read(self) -> tuple[list[list[int]], list[Any]]:
        verdict, proposal = self.round.verdict, self.round.proposal
        heads = torch.stack([verdict.accepted, verdict.counts, verdict.finish], dim=1)
        parts = (proposal.sizes, proposal.tokens, proposal.parents, proposal.source)
        path = torch.cat([verdict.path, torch.zeros_like(verdict.tokens)], dim=1)[:, : verdict.tokens.shape[1]]
        return torch.cat([heads, verdict.tokens, path], dim=1).tolist(), [part.tolist() for part in parts]

    def seconds(self) -> float:
        return 1e-3


@pytest.mark.parametrize("tokens", [4096, 420])
@pytest.mark.parametrize("option", ["greedy", "sampled"])
@pytest.mark.parametrize("name", every())
def test_launched_before_the_last_round_was_told(name: str, option: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the next round begins before anybody hears of the last one, also of those who ended, given memory."""
    inner, part, parted = Engine._round, Scheduler.part, []

    def round_(self: Engine, batch: Batch, guess: bool) -> Pending:
        pending = inner(self, batch, guess)
        return replace(pending, answer=Told(pending)) if set(batch.pending) == {1} and all(batch.ready) else pending

    def parts(self: Scheduler, batch: Batch, ends: Sequence[int]) -> bool:
        found = part(self, batch, ends)
        parted.append(found and any(ends) and bool(self.running))
        return found

    expected, drafter = plain(option), every()[name](answers(option))
    monkeypatch.setattr(Engine, "_round", round_)
    monkeypatch.setattr(Engine, "_blind", lambda self, pending: False)
    monkeypatch.setattr(Scheduler, "part", parts)
    assert tuple(map(tuple, tiny.World(tokens=tokens).run(drafter, requests(OPTIONS[option])))) == expected
    assert any(parted) or tokens == 420 or option == "sampled"  # where all write as many tokens, all may end at once
