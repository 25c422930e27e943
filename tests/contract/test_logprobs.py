"""Log-probabilities with speculation on are those without it, and both are what the definition says."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache as memo

import pytest
import torch

from outrider import logprobs, oracle, registry
from outrider.accept import coupled
from outrider.config import SamplingParams
from outrider.types import Logprob, Request

from .. import probes, tiny
from .drafters import every
from .test_text import OPTIONS, PROMPTS, answers


def no_repeats(tokens: tuple[int, ...], scores: torch.Tensor) -> torch.Tensor:
    """A custom processor that looks at the whole path: the last three tokens may not come again."""
    scores[list(tokens[-3:])] = -math.inf
    return scores


def see_saw(tokens: tuple[int, ...], scores: torch.Tensor) -> torch.Tensor:
    """Favours odd or even tokens, by the parity of the path's sum."""
    return scores + 0.7 * ((torch.arange(len(scores)) + sum(tokens)) % 2)


ASKED = {"logprobs": 3, "logprobs_mode": "both", "prompt_logprobs": 2}
GROUPS = {
    **OPTIONS,
    "custom": SamplingParams(
        temperature=0.9, top_p=0.95, repetition_penalty=1.2, processors=(no_repeats, see_saw), max_tokens=28, ignore_eos=True
    ),
}


def made(option: str, prompts=PROMPTS, seed: int = 11, **changes) -> list[Request]:
    params = replace(GROUPS[option], **ASKED | changes)
    return [tiny.request(p, replace(params, seed=seed + i), bad_words=((7,), (3, 8))) for i, p in enumerate(prompts)]


def numbers(request: Request) -> tuple:
    return tuple(request.output), request.logprobs, request.processed_logprobs, request.prompt_logprobs


@memo
def plain(option: str) -> list[tuple]:
    """Each prompt alone, without a drafter, over the reference cache."""
    out = []
    for i, prompt in enumerate(PROMPTS):
        [request] = made(option, [prompt], 11 + i)
        tiny.World(cache="slots").run(registry.parse("none"), [request])
        out.append(numbers(request))
    return out


def known(option: str) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {tuple(p): n[0] for p, n in zip(PROMPTS, plain(option), strict=True)}


@pytest.mark.parametrize("form", ["host", "device"])
@pytest.mark.parametrize("option", GROUPS)
@pytest.mark.parametrize("name", every())
def test_equal_with_speculation_on_and_off(name: str, option: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, in fp64: tokens, raw and processed log-probabilities, ranks, prompt; in one ragged batch."""
    if form == "device":
        if option in ("greedy", "cool", "masks"):
            pytest.skip("one form for each option, both for some")
        monkeypatch.setattr(coupled, "walk", coupled.vectorised)
        monkeypatch.setattr(logprobs, "committed", lambda tokens: None)
    requests = made(option)
    tiny.World(cache="paged" if form == "host" else "slots").run(every()[name](known(option)), requests)
    assert [numbers(r) for r in requests] == plain(option)


@pytest.mark.parametrize("option", GROUPS)
def test_equal_to_the_definition(option: str) -> None:
    """A fresh forward over the whole text, softmax in plain Python, ranks by sorting."""
    model = tiny.model()
    for prompt, (output, raw, processed, reading) in zip(PROMPTS, plain(option), strict=True):
        tokens = [*prompt, *output]
        logits = model(torch.tensor([tokens])).logits[0].tolist()
        [twin] = made(option, [prompt])
        assert len(raw) == len(processed) == len(output) and len(reading) == len(prompt) - 1
        for i, token in enumerate(output):
            twin.tokens = tokens[: len(prompt) + i]
            row = logits[len(prompt) + i - 1]
            check(raw[i], row, token, 3)
            check(processed[i], tempered(oracle.process(row, twin), twin.params.temperature), token, 3)
        for i, entry in enumerate(reading):
            check(entry, logits[i], prompt[i + 1], 2)


def tempered(scores: list[float], heat: float) -> list[float]:
    return [s / heat for s in scores] if heat else scores


def check(entry: tuple[Logprob, ...], scores: list[float], token: int, k: int) -> None:
    top = max(scores)
    total = top + math.log(math.fsum(math.exp(s - top) for s in scores))
    order = sorted((v for v in range(len(scores)) if scores[v] > -math.inf), key=lambda v: (-scores[v], v))
    want = [token, *(v for v in order[:k] if v != token)]
    assert [e.token_id for e in entry] == want
    for e in entry:
        assert e.rank == order.index(e.token_id) + 1
        assert e.logprob == pytest.approx(scores[e.token_id] - total, abs=1e-6)


def test_the_whole_law_sums_to_one_and_the_chosen_token_comes_first() -> None:
    [request] = made("cool", PROMPTS[:1], logprobs=1000)
    tiny.World().run(registry.parse("self:depth=3"), [request])
    for token, raw, processed in zip(request.output, request.logprobs, request.processed_logprobs, strict=True):
        assert len(raw) == tiny.VOCAB and len(processed) <= 20
        for entry in (raw, processed):
            assert entry[0].token_id == token
            assert math.fsum(math.exp(e.logprob) for e in entry) == pytest.approx(1, abs=1e-5)
            assert sorted(e.rank for e in entry) == list(range(1, len(entry) + 1))


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_one_mode_alone(mode: str) -> None:
    requests = made("penalties", logprobs_mode=mode, prompt_logprobs=None)
    tiny.World().run(every()["bushy"](known("penalties")), requests)
    for request, (output, raw, processed, _) in zip(requests, plain("penalties"), strict=True):
        assert tuple(request.output) == output and request.logprobs == (raw if mode == "raw" else processed)
        assert request.processed_logprobs == request.prompt_logprobs == []
    assert plain("penalties")[0][1] != plain("penalties")[0][2]


def test_a_batch_mixes_those_who_ask_and_those_who_do_not() -> None:
    asking = [{}, {"logprobs": None}, {"logprobs": 0}, {"logprobs": 5, "logprobs_mode": "raw"}, {"prompt_logprobs": None}, {}]
    requests = [made("sampled", [p], 11 + i, **asking[i])[0] for i, p in enumerate(PROMPTS)]
    tiny.World().run(every()["draft_model:width=3"](known("sampled")), requests)
    for request, (output, raw, _, reading) in zip(requests, plain("sampled"), strict=True):
        assert tuple(request.output) == output
        k = request.params.logprobs
        assert len(request.logprobs) == (0 if k is None else len(output))
        if k is not None and k <= 3:
            assert request.logprobs == [tuple(e for e in row if e is row[0] or e.rank <= k) for row in raw]
        assert request.prompt_logprobs == (reading if request.params.prompt_logprobs is not None else [])


def test_who_asks_for_nothing_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_table", None)
    monkeypatch.setattr("outrider.models.layout.Layout.reading", None)
    world = tiny.World()
    seen = []
    right = world.target.score
    monkeypatch.setattr(world.target, "score", lambda *args: seen.append(right(*args)) or seen[-1])
    requests = made("sampled", logprobs=None, prompt_logprobs=None)
    world.run(registry.parse("self"), requests)
    assert seen and all(s.logits is s.prompt is None for s in seen)
    assert all(r.logprobs == r.prompt_logprobs == [] for r in requests)


@pytest.mark.parametrize("name", ["ngram", "bushy", "owner", "reader"])
def test_preemption_and_chunks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.scheduler.CHUNK", 5)
    world, requests = tiny.World(tokens=96), made("sampled")
    engine = world.engine(every()[name](known("sampled")))
    for request in requests:
        engine.add(request)
    while engine.step() is not None:
        pass
    assert engine.scheduler.preempted > 0
    assert [numbers(r) for r in requests] == plain("sampled")


def test_logprobs_end_where_the_text_ends() -> None:
    """At every offset of an accepted block: one entry per token, none for what was discarded."""
    whole = plain("sampled")[0]
    for end in range(7, 16):
        [request] = made("sampled", PROMPTS[:1], max_tokens=end + 1)
        tiny.World().run(probes.Replay({tuple(PROMPTS[0]): whole[0]}, depth=5), [request])
        assert numbers(request) == (whole[0][: end + 1], whole[1][: end + 1], whole[2][: end + 1], whole[3])


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("name", ["bushy", "self", "replay:32"])
def test_fp32_agrees_to_1e5(name: str, by_rows: bool) -> None:
    """Widths round differently in fp32, by some 1e-6 of the largest logit. By rows, 1e-5 holds even for logits far larger than
    a language model's; with stock kernels, for a calmer model. Texts may part at a near-tie; numbers before that are compared."""
    own = tiny.Decoder(tiny.model(dtype=torch.float32, initializer_range=0.35 if by_rows else 0.2), "fp32")
    slow, fast = made("cool"), made("cool")
    tiny.World(own=own, by_rows=by_rows).run(registry.parse("none"), slow)
    tiny.World(own=own, by_rows=by_rows).run(every()[name](answers("cool")), fast, may_fail=True)
    gaps = [gap for a, b in zip(slow, fast, strict=True) for gap in differences(a, b)]
    assert len(gaps) > 500 and max(gaps) < 1e-5


def differences(a: Request, b: Request) -> list[float]:
    """Of log-probabilities of the same token at the same place, as long as the texts are the same."""
    same = next((i for i, (x, y) in enumerate(zip(a.output, b.output, strict=False)) if x != y), len(a.output))
    gaps = [abs(x[0].logprob - y[0].logprob) for x, y in zip(a.prompt_logprobs, b.prompt_logprobs, strict=True)]
    for ones, twos in ((a.logprobs, b.logprobs), (a.processed_logprobs, b.processed_logprobs)):
        for one, two in zip(ones[:same], twos[:same], strict=True):
            other = {e.token_id: e.logprob for e in two}
            gaps += [abs(e.logprob - other[e.token_id]) for e in one if e.token_id in other]
    return gaps


def wrong_row(batch, proposal, verdict, asking):
    """The bug of llama.cpp#27972 and vllm#34497 in spirit: numbers of another slot of the block."""
    owners, rows, tokens = right_rows(batch, proposal, verdict, asking)
    return owners, torch.where(rows > 0, rows - 1, rows), tokens


right_rows = logprobs._rows


@pytest.mark.parametrize("bug", ["row before", "node as slot", "first request's base"])
def test_planted_bugs_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "row before":
        monkeypatch.setattr(logprobs, "_rows", wrong_row)
    elif bug == "node as slot":
        monkeypatch.setattr(
            logprobs, "_rows", lambda b, p, v, a: right_rows(b, p, replace(v, path=(v.path - 1).clamp(min=-1)), a)
        )
    else:
        monkeypatch.setattr(logprobs, "_rows", lambda b, p, v, a: right_rows(replace_ready(b), p, v, a))
    requests = made("sampled")
    tiny.World().run(every()["bushy"](known("sampled")), requests, may_fail=True)
    assert [numbers(r) for r in requests] != plain("sampled")


def replace_ready(batch):
    return replace(batch, ready=(False, *batch.ready[1:]))


def scores_with_ties() -> torch.Tensor:
    return torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, -math.inf], [0.0] * 6, [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5, 6, 9])
def test_ties_rank_by_id(k: int) -> None:
    scores = scores_with_ties()
    ids, values, ranks = logprobs.rank_rows(scores, torch.tensor([4, 3, 5]), k)
    assert ranks.tolist() == [4, 4, 6]
    order = [[1, 3, 2, 4, 0, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert ids[:, 1:].tolist() == [row[:k] for row in order] and values.dtype == torch.float32
    assert torch.equal(values, scores.double().log_softmax(1).gather(1, ids).float())


def test_best_of_random_rows_with_many_ties() -> None:
    made_ = torch.randint(0, 6, (200, 40), generator=torch.Generator().manual_seed(1)).double()
    for k in (1, 7, 40):
        right = made_.sort(dim=1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(logprobs.best(made_, k), right)
        assert torch.equal(logprobs._first_of_ties(made_, made_.gather(1, right[:, -1:]), k).sort(1).values, right.sort(1).values)
