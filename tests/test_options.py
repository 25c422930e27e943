"""What a request may ask for beyond a text, through the facade, on a tiny model: samples, processors, logprobs, stops."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from outrider import LLM, SamplingParams, noise, oracle
from outrider.cli.app import app
from outrider.control import Fixed
from outrider.engine import Engine
from outrider.errors import BadInput
from outrider.guard import Guard
from outrider.loading import start_for
from outrider.processors import Processors
from outrider.results import Result
from outrider.sampling import TextSampler
from outrider.scheduler import Scheduler
from outrider.text import REPLACEMENT, TextStream

from . import tiny
from .probes import Replay
from .test_sampling import calls, request, slots_of
from .test_text import STOPS, TOKENS, WORDY, Bytes, blocks, fallback, feed

PROMPT = [3, 4, 5, 2, 3, 4, 5, 6, 2, 3]
BASE = SamplingParams(temperature=1.0, max_tokens=24, seed=5, ignore_eos=True)
WORDS = replace(BASE, max_tokens=60, allowed_token_ids=(1, 2, 3, 4, 6, *(7 + b for b in "Aé🎉".encode())))
"""Texts of words, with now and then a whole or a broken character."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory: random weights in fp64, single bytes and a few words for a vocabulary."""
    path = tmp_path_factory.mktemp("tiny")
    tokenizer = fallback()._backend
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.save_pretrained(path)
    tiny.model(vocab_size=len(tokenizer), initializer_range=0.3).save_pretrained(path)
    return path


def load(folder: Path, draft: str, **options: object) -> LLM:
    """With a fixed look-ahead: guesses must be made, whether they pay or not."""
    return LLM(str(folder), draft=draft, control="fixed", dtype="float64", kv_tokens=2048, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def fast(folder: Path) -> Iterator[LLM]:
    llm = load(folder, "self:depth=4")
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def slow(folder: Path) -> Iterator[LLM]:
    llm = load(folder, "none")
    yield llm
    llm.close()


def same(a: Result, b: Result) -> None:
    """Everything but speed and who guessed what."""
    for name in ("text", "token_ids", "finish_reason", "seed", "logprobs", "processed_logprobs", "prompt_logprobs", "error"):
        assert getattr(a, name) == getattr(b, name), name


@settings(max_examples=150, deadline=None)
@given(call=calls())
def test_the_law_is_the_definitions(call) -> None:
    """`law` on both paths: processed, filtered, tempered scores; a shift per row does not matter."""
    usable, requests, rows, logits = call
    sampler, slots = TextSampler(logits.shape[1], usable), slots_of(requests, rows)
    device = sampler._device_law(sampler._admit(logits), slots).log_softmax(1)
    host = sampler.law(logits, slots).log_softmax(1)
    for i, (b, path) in enumerate(rows):
        heat = requests[b].params.temperature
        scores = torch.tensor(oracle.process(logits[i].tolist(), requests[b], path, usable)[:usable], dtype=torch.float64)
        if scores.isnan().any() or scores.max() == -math.inf:
            assert host[i].isnan().all() and device[i].isnan().all()
            continue
        want = ((scores - scores.max()) / (heat or 1)).log_softmax(0)
        for got in (host[i], device[i]):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


# Samples


@pytest.mark.parametrize("draft", ["none", "ngram", "self:depth=3"])
@pytest.mark.parametrize("cache", ["paged", "slots"])
def test_samples_differ_and_each_is_what_it_would_be_alone(folder: Path, draft: str, cache: str, slow: LLM) -> None:
    llm = load(folder, draft, cache=cache)
    params = replace(BASE, n=4, logprobs=2, prompt_logprobs=1)
    [result] = llm.generate([PROMPT], params)
    assert [r.index for r in result.samples] == [0, 1, 2, 3] and len({r.token_ids for r in result.samples}) == 4
    for sample in result.samples:
        alone = slow._request(PROMPT, replace(params, n=1))
        alone.key = noise.request_key(5, PROMPT, sample.index)
        slow.engine.add(alone)
        while slow.engine.step() is not None:
            pass
        same(sample, slow._result(alone, None, alone))
    cache_of = llm._target.cache
    assert cache_of.free() == cache_of.capacity


def test_one_sample_is_as_before(slow: LLM) -> None:
    [one], [many] = slow.generate([PROMPT], BASE), slow.generate([PROMPT], replace(BASE, n=3))
    assert one.samples == (one,) and one.index == 0 and one.logprobs is one.prompt_logprobs is None
    same(one, many)


@pytest.mark.parametrize("bug", ["nothing copied", "one token too few", "before it is read", "one key for all"])
def test_planted_bugs_of_samples_are_caught(folder: Path, slow: LLM, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = replace(BASE, n=3)
    [right] = slow.generate([PROMPT], params)
    llm = load(folder, "none")
    if bug == "nothing copied":
        monkeypatch.setattr(llm._target.cache, "copy", lambda source, target: None)
    elif bug == "before it is read":
        monkeypatch.setattr(Scheduler, "_must_wait", lambda self, request: False)
    elif bug == "one token too few":
        copy = llm._target.cache.copy
        monkeypatch.setattr(llm._target.cache, "copy", lambda source, target: copy(source[:-1], target[:-1]))
    else:
        monkeypatch.setattr(noise, "request_key", lambda seed, ids, sample=0, key=noise.request_key: key(seed, ids))
    [wrong] = llm.generate([PROMPT], params)
    assert [s.token_ids for s in wrong.samples] != [s.token_ids for s in right.samples]


def test_samples_share_the_prompt(folder: Path) -> None:
    llm = load(folder, "ngram")
    prompt = [2 + i % 40 for i in range(150)]
    events = []
    llm.engine.sinks.append(events.append)
    [result] = llm.generate([prompt], replace(BASE, n=3))
    assert sum(e.prefill for e in events) == 150, "the prompt is read once"
    assert len(result.samples) == 3


def test_samples_of_many_prompts_keep_the_order(fast: LLM, slow: LLM) -> None:
    prompts = [PROMPT, [7, 8, 9], [5] * 20]
    for params in (replace(BASE, n=2), [replace(BASE, n=n) for n in (1, 3, 2)]):
        ours, theirs = fast.generate(prompts, params), slow.generate(prompts, params)
        assert [r.prompt_token_ids for r in ours] == [tuple(p) for p in prompts]
        for a, b in zip(ours, theirs, strict=True):
            assert len(a.samples) == len(b.samples)
            for x, y in zip(a.samples, b.samples, strict=True):
                same(x, y)


def test_samples_under_tight_memory(folder: Path, slow: LLM) -> None:
    llm = load(folder, "self:depth=2")
    llm.engine.scheduler.max_requests = 2
    [ours], [theirs] = llm.generate([PROMPT], replace(BASE, n=5)), slow.generate([PROMPT], replace(BASE, n=5))
    for x, y in zip(ours.samples, theirs.samples, strict=True):
        same(x, y)


def test_preempted_samples_read_the_prompt_again() -> None:
    """A pool too small for three samples at once: they give way, come back, and copy what there is."""
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, seed=1)
    prompt = tiny.prompts(1, seed=9, low=20, high=20)[0]
    outputs = []
    for tokens in (4096, 128):
        first = tiny.request(prompt, params)
        made = [first] + [tiny.request(prompt, params, twin=first, index=i) for i in (1, 2)]
        for i, r in enumerate(made):
            r.key = noise.request_key(1, prompt, i)
        world = tiny.World(tokens=tokens)
        engine = world.engine(tiny.draft_model(2, depth=3))
        for r in made:
            engine.add(r)
        while engine.step() is not None:
            pass
        outputs.append([r.output for r in made])
        assert (engine.scheduler.preempted > 0) == (tokens == 128) and world.cache.free() == world.cache.capacity
    assert outputs[0] == outputs[1] and len({tuple(o) for o in outputs[0]}) == 3


def test_stream_of_samples(fast: LLM) -> None:
    params = replace(BASE, n=3, logprobs=1)
    chunks = list(fast.stream(PROMPT, params))
    whole = fast.generate([PROMPT], params)[0].samples
    for index, sample in enumerate(whole):
        mine = [c for c in chunks if c.index == index]
        assert "".join(c.text for c in mine) == sample.text and [c.result is None for c in mine].count(False) == 1
        same(mine[-1].result, sample)
        assert tuple(entry for c in mine for entry in c.logprobs) == sample.logprobs


# Log-probabilities through the facade


def test_chunks_carry_theirs_and_text_is_spelled(fast: LLM, slow: LLM) -> None:
    params = replace(BASE, logprobs=2, logprobs_mode="both", prompt_logprobs=0)
    [ours], [theirs] = fast.generate([PROMPT], params), slow.generate([PROMPT], params)
    same(ours, theirs)
    assert ours.stats.accepted > 0
    assert ours.prompt_logprobs[0] is None and len(ours.prompt_logprobs) == len(PROMPT)
    assert [p[0].token_id for p in ours.prompt_logprobs[1:]] == PROMPT[1:]
    spelled = {t: TextStream(fast.tokenizer).piece(t) for t in (3, 4, 6, 1)}
    assert spelled == {3: " the", 4: "cat", 6: "ing", 1: "</s>"}
    assert all(e.text == TextStream(fast.tokenizer).piece(e.token_id) for place in ours.logprobs for e in place)
    chunks = list(fast.stream(PROMPT, params))
    assert tuple(e for c in chunks for e in c.logprobs) == ours.logprobs
    assert tuple(e for c in chunks for e in c.processed_logprobs) == ours.processed_logprobs


@pytest.mark.parametrize("at", range(3, 12))
def test_nothing_leaks_past_a_stop_string(fast: LLM, slow: LLM, at: int) -> None:
    """sglang#31599, vllm PR#47616: ids and log-probabilities end with the token that completes the stop string."""
    [whole] = slow.generate([PROMPT], WORDS)
    stop = whole.text[2 * at : 2 * at + 4]
    params = replace(WORDS, stop=(stop, "zzz" + stop), logprobs=0)
    [ours], [theirs] = fast.generate([PROMPT], params), slow.generate([PROMPT], params)
    same(ours, theirs)
    assert len(ours.logprobs) == len(ours.token_ids) == len(ours.origins) < len(whole.token_ids)


def test_unasked_is_none_and_wrong_is_named() -> None:
    for options, field in (
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs"),
        ({"logprobs_mode": "cooked"}, "logprobs_mode"),
        ({"n": 0}, "n"),
        ({"processors": (3,)}, "processors"),
    ):
        with pytest.raises(BadInput, match=rf"^{field} must"):
            SamplingParams(**options)  # type: ignore[arg-type]


# Custom processors


def test_processors_see_their_own_path(fast: LLM, slow: LLM) -> None:
    """With speculation each slot's own guesses are in `tokens`: only then are the texts equal."""
    calls = []

    def parity(tokens: tuple[int, ...], scores: torch.Tensor) -> torch.Tensor:
        calls.append(tokens)
        scores[torch.arange(len(scores)) % 3 == sum(tokens) % 3] = -math.inf
        return scores

    params = replace(BASE, processors=(parity,), repetition_penalty=1.3, min_p=0.01, logprobs=1)
    [ours], [theirs] = fast.generate([PROMPT], params), slow.generate([PROMPT], params)
    same(ours, theirs)
    tokens = [*PROMPT, *ours.token_ids]
    assert all(tokens[i] % 3 != sum(tokens[:i]) % 3 for i in range(len(PROMPT), len(tokens)))
    assert ours.stats.accepted > 10 and all(c[: len(PROMPT)] == tuple(PROMPT) for c in calls)


def test_a_processor_that_is_shown_the_wrong_path_is_caught(fast: LLM, slow: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang and TGI give every position of a block the same history."""

    def parity(tokens: tuple[int, ...], scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(torch.arange(len(scores)) % 3 == sum(tokens) % 3, -math.inf)

    params = replace(BASE, processors=(parity,))
    [right] = slow.generate([PROMPT], params)
    customise = Processors.customise
    monkeypatch.setattr(Processors, "customise", lambda self, row, path: customise(self, row, ()))
    [wrong] = fast.generate([PROMPT], params)
    assert wrong.token_ids != right.token_ids


def test_processors_come_after_masks_and_before_temperature() -> None:
    seen = []

    def look(tokens: tuple[int, ...], scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores.clone())
        return scores

    def last_wins(tokens: tuple[int, ...], scores: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(len(scores)) == 3, 100.0, scores)

    made = request(temperature=0.5, logit_bias={2: 1.5}, allowed_token_ids=(1, 2), processors=(look, last_wins))
    for choose in (TextSampler(5).choose, lambda z, s: TextSampler(5)._device_law(z, s).argmax(1)):
        z = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
        assert choose(z, slots_of([made], [(0, [])])).tolist() == [3]
        assert seen.pop().tolist() == [-math.inf, 2.0, 4.5, -math.inf, -math.inf]
        assert z.tolist() == [[1.0, 2.0, 3.0, 4.0, 5.0]]


def raises(tokens: tuple[int, ...], scores: torch.Tensor) -> torch.Tensor:
    if len(tokens) == len(PROMPT) + 7:
        raise ValueError("seven is enough")
    return scores


def shrinks(tokens: tuple[int, ...], scores: torch.Tensor) -> torch.Tensor:
    return scores[: 9 if len(tokens) >= len(PROMPT) + 7 else None]


def forgets(tokens: tuple[int, ...], scores: torch.Tensor) -> torch.Tensor | None:
    return scores if len(tokens) < len(PROMPT) + 7 else None


def breaks(tokens: tuple[int, ...], scores: torch.Tensor) -> torch.Tensor:
    return scores if len(tokens) < len(PROMPT) + 7 else scores * math.nan


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (raises, "raises raised ValueError: seven is enough"),
        (shrinks, "shrinks returned shape (9,)"),
        (forgets, "forgets returned NoneType"),
        (breaks, "breaks returned NaN"),
    ],
)
def test_a_failing_processor_ends_its_request_alone(folder: Path, slow: LLM, bad, words: str) -> None:
    [healthy] = slow.generate([PROMPT], BASE)
    for draft in ("none", "ngram", "self:depth=4"):
        llm = load(folder, draft)
        broken, fine = llm.generate([PROMPT, PROMPT], [replace(BASE, processors=(bad,)), BASE])
        assert broken.finish_reason == "error" and words in broken.error
        assert broken.token_ids == healthy.token_ids[:7]
        same(fine, healthy)


def test_a_failure_off_the_path_harms_nobody(fast: LLM, slow: LLM) -> None:
    """A processor that fails only on guesses that plain decoding never meets."""
    [plain] = slow.generate([PROMPT], BASE)
    tokens = (*PROMPT, *plain.token_ids)

    def picky(given: tuple[int, ...], scores: torch.Tensor) -> torch.Tensor:
        assert given == tokens[: len(given)]
        return scores

    drafter = Replay({tuple(PROMPT): plain.token_ids}, depth=4, spoil=0.3)
    guard = Guard(drafter, fast._target.vocab_size)
    guard.start(start_for(fast._target, drafter, "tiny", None))
    made = fast._request(PROMPT, replace(BASE, processors=(picky,)))
    engine = Engine(fast._target, guard, Scheduler(fast._target.cache, 4), fast.accept, Fixed(drafter))
    engine.add(made)
    while engine.step() is not None:
        pass
    assert made.output == list(plain.token_ids)
    assert made.stats.drafted > made.stats.accepted > 0 and made.error is None and len(made.failures) < 20


# min_tokens, ignore_eos, stop strings


def definition(tokens: list[int], stops: list[str], include: bool, least: int) -> tuple[str, int]:
    """The text ends with the first token, after `least` ones, that completes a stop string: whose last character it brings."""
    plain = Bytes()
    before = ""
    for used in range(1, len(tokens) + 1):
        text = plain.decode(tokens[:used])
        safe = text.rstrip(REPLACEMENT) if used < len(tokens) else text
        ends = [(at, -len(s)) for s in stops for at in range(len(safe)) if safe.startswith(s, at) and at + len(s) > len(before)]
        if ends and used > least:
            at, size = min(ends)
            return safe[: at - size if include else at], used
        before = safe if len(safe) > len(before) else before
    return plain.decode(tokens), len(tokens)


@settings(max_examples=300, deadline=None)
@given(
    tokens=TOKENS | WORDY,
    cuts=st.lists(st.integers(0, 60), max_size=8),
    stops=STOPS,
    include=st.booleans(),
    least=st.integers(0, 12),
)
def test_min_tokens_with_stop_strings(tokens: list[int], cuts: list[int], stops: list[str], include: bool, least: int) -> None:
    """Whatever the split: no stop before `least` tokens, none remembered from then, no piece shown twice or taken back."""
    text, used, pieces = feed(TextStream(Bytes(), stops, include, min_tokens=least), blocks(tokens, cuts))
    assert (text, used) == definition(tokens, stops, include, least)
    assert "".join(pieces) == text


@pytest.mark.parametrize("least", range(0, 14))
def test_min_tokens_through_the_engine(fast: LLM, slow: LLM, least: int) -> None:
    """Every kind of stop at once; with `least` = 0 the text ends early, so the test has something to delay."""
    params = replace(WORDS, ignore_eos=False, stop=("the", "cat", "éA"), stop_token_ids=(2,), min_tokens=least)
    [ours], [theirs] = fast.generate([PROMPT], params), slow.generate([PROMPT], params)
    same(ours, theirs)
    assert ours.finish_reason == "stop" and least < len(ours.token_ids) and (least or len(ours.token_ids) < 5)
    assert not {1, 2} & set(ours.token_ids[:least])


def test_ignore_eos_goes_on_and_shows_nothing_of_it(fast: LLM, slow: LLM) -> None:
    eos = replace(BASE, logit_bias={1: 4.0}, ignore_eos=False)
    for params in (eos, replace(eos, ignore_eos=True)):
        [ours], [theirs] = fast.generate([PROMPT], params), slow.generate([PROMPT], params)
        same(ours, theirs)
        assert (ours.finish_reason == "length") == params.ignore_eos == (len(ours.token_ids) == 24)
        assert 1 in ours.token_ids and "</s>" not in ours.text
    assert ours.token_ids.index(1) < 23


def test_no_partial_stop_string_or_character_is_ever_shown(fast: LLM) -> None:
    [whole] = fast.generate([PROMPT], WORDS)
    assert "\ufffd" in whole.text
    for at in range(0, len(whole.text) - 4, 5):
        stop = (whole.text[at : at + 3], whole.text[at + 1 : at + 6])
        chunks = list(fast.stream(PROMPT, replace(WORDS, stop=stop)))
        shown = "".join(c.text for c in chunks)
        assert shown == chunks[-1].result.text and not any(s in shown for s in stop)
        assert chunks[-1].result.finish_reason == "stop"


# Complaints about other engines (spec/peers.md, section 10)


def test_min_p_and_logit_bias_reach_every_position_of_a_block(fast: LLM) -> None:
    """vllm#42744, #38202: rejected, or applied to the bonus token only. A bias that forces one token must win everywhere."""
    [biased] = fast.generate([PROMPT], replace(BASE, logit_bias={6: 1e4}))
    assert set(biased.token_ids) == {6} and biased.stats.accepted > 10
    [greedy] = fast.generate([PROMPT], replace(BASE, temperature=0.0))
    [narrow] = fast.generate([PROMPT], replace(BASE, min_p=1.0))
    assert narrow.token_ids == greedy.token_ids and narrow.stats.accepted > 10


def test_penalties_count_every_token_of_a_block(fast: LLM, slow: LLM) -> None:
    """sglang PR#33643, #28179; TRT-LLM PR#17701: penalties that miss tokens of a step, or are ignored."""
    params = replace(BASE, frequency_penalty=50.0, temperature=0.0)
    [ours], [theirs] = fast.generate([PROMPT], params), slow.generate([PROMPT], params)
    same(ours, theirs)
    assert len(set(ours.token_ids)) == len(ours.token_ids) and ours.stats.accepted > 10
    [free] = fast.generate([PROMPT], replace(params, frequency_penalty=0.0))
    assert len(set(free.token_ids)) < len(free.token_ids)


def test_defaults_sample_at_temperature_one(fast: LLM) -> None:
    """TRT-LLM PR#19390: an unset temperature is 1, not greedy."""
    seeds = {r.token_ids for r in fast.generate([PROMPT] * 6, [SamplingParams(seed=s, max_tokens=8) for s in range(6)])}
    assert len(seeds) == 6
    [unset], [one] = (fast.generate([PROMPT], SamplingParams(seed=3, **t)) for t in ({}, {"temperature": 1.0}))
    same(unset, one)


def test_no_logprob_is_zero_or_missing_under_speculation(fast: LLM) -> None:
    """llama.cpp#27972, vllm#34497, #17876, sglang#10660."""
    [ours] = fast.generate([PROMPT], replace(BASE, logprobs=0))
    assert ours.stats.accepted > 10 and len(ours.logprobs) == len(ours.token_ids)
    for token, (entry,) in zip(ours.token_ids, ours.logprobs, strict=True):
        assert entry.token_id == token and -50 < entry.logprob < 0


# Command line


def test_command_line(folder: Path) -> None:
    from typer.testing import CliRunner

    def run(*options: str):
        base = ["generate", "the cat", "--model", str(folder), "--dtype", "float64", "--max-tokens", "6", "--seed", "2", "--raw"]
        return CliRunner().invoke(app, [*base, "--temperature", "1", "--ignore-eos", *options])

    found = json.loads(run("--json", "--logprobs", "2", "--n", "3").stdout)
    assert [len(s["token_ids"]) for s in found["samples"]] == [6] * 3 and len({s["text"] for s in found["samples"]}) > 1
    assert found["logprobs"] == found["samples"][0]["logprobs"] and len(found["logprobs"]) == 6
    assert set(found["logprobs"][0][0]) == {"token_id", "logprob", "rank", "text"} and len(found["logprobs"][0]) in (2, 3)
    plain = json.loads(run("--json").stdout)
    assert "logprobs" not in plain and "samples" not in plain and plain["token_ids"] == found["token_ids"]
    several = run("--n", "2")
    assert several.exit_code == 0 and "answer 2 of 2" in several.stderr
    assert run("--logprobs", "2").exit_code == 2
