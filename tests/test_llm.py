"""The facade on a tiny saved model: bad input, streams, interruptions, broken scores."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.errors import BadInput, DrafterMismatch, OutriderWarning
from outrider.types import NONE

from .models.tiny_gguf import Tiny

VOCAB = 266
KNOWN = 265
CONTEXT = 128
PARAMS = SamplingParams(temperature=1.0, max_tokens=20, seed=7, ignore_eos=True, allowed_token_ids=(*range(100, 106), 263))
"""Few tokens, so that the text repeats itself and lookup has something to find."""
PROMPTS = ["hello hello", "abcabcabc", [10, 20, 30, 10, 20, 30]]


class Shuffled(Tiny):
    """The same shape, but ids mean something else."""

    def vocabulary(self) -> tuple[list[str], list[int], list[str]]:
        tokens, types, merges = super().vocabulary()
        return [*tokens[:4], *tokens[4:260][::-1], *tokens[260:]], types, merges


@contextmanager
def saved(folder: Path) -> Iterator[str]:
    """Tiny models on disk, and a cache for what is made of them; the path of the target."""
    Tiny().write(folder / "tiny.gguf")
    Shuffled().write(folder / "shuffled.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
        yield str(folder / "tiny.gguf")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with saved(tmp_path_factory.mktemp("models")) as path:
        yield path


def load(model: str, **options: Any) -> LLM:
    """With a fixed look-ahead: what is tested must happen, however long it takes."""
    return LLM(model, **{"draft": "ngram:min=1,depth=4", "control": "fixed", "dtype": "float64", **options})


@pytest.fixture(scope="module")
def shared(model: str) -> LLM:
    return load(model)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """One LLM for all tests; whatever a test does, all its memory must have come back."""
    yield shared
    check_clean(shared)


def check_clean(llm: LLM) -> None:
    assert llm.engine.scheduler.idle and free(llm) == llm._target.cache.capacity
    assert not llm._target.sampler._processors and not llm._inboxes


def free(llm: LLM) -> int:
    return llm._target.cache.free()


# Asking


def test_an_answer(llm: LLM) -> None:
    (result,) = llm.generate("hello", PARAMS)
    assert result.prompt == "hello" and result.prompt_token_ids == tuple(llm.tokenizer.encode("hello"))
    assert (result.finish_reason, result.seed, result.error, result.lossless) == ("length", 7, None, True)
    assert len(result.token_ids) == len(result.origins) == result.stats.tokens == 20
    assert result.text == llm.tokenizer.decode(result.token_ids)
    assert result.stats.drafter == llm.drafter_name == "ngram" and llm.max_model_len == CONTEXT


def test_generate_stream_and_batch_agree(llm: LLM, model: str) -> None:
    batch = llm.generate(PROMPTS, PARAMS)
    for prompt, result in zip(PROMPTS, batch, strict=True):
        (alone,) = llm.generate([prompt], PARAMS)
        chunks = list(llm.stream(prompt, PARAMS))
        assert alone.token_ids == result.token_ids == chunks[-1].result.token_ids
        assert "".join(c.text for c in chunks) == result.text == alone.text == chunks[-1].result.text
        assert tuple(t for c in chunks for t in c.token_ids) == result.token_ids
        assert tuple(o for c in chunks for o in c.origins) == chunks[-1].result.origins
        assert all(c.result is None for c in chunks[:-1])
    assert sum(r.stats.accepted for r in batch) > 0
    for options in ({"draft": "none"}, {"cache": "slots"}, {"draft": "self"}, {"invariant": True}, {"max_model_len": 64}):
        other = load(model, **options).generate(PROMPTS, PARAMS)
        assert [r.token_ids for r in other] == [r.token_ids for r in batch], options
        assert [r.text for r in other] == [r.text for r in batch]


def test_streams_may_be_read_in_turns(llm: LLM) -> None:
    """A round that one stream asks for serves the others too: nothing of theirs may be lost."""
    want = [r.text for r in llm.generate(PROMPTS, PARAMS)]
    streams, got = [llm.stream(p, PARAMS) for p in PROMPTS], ["", "", ""]
    results: list[Any] = [None] * 3
    done = [False] * 3
    turn = 0
    while not all(done):
        i = turn % 3 if turn % 5 else 0
        turn += 1
        chunk = next(streams[i], None)
        done[i] = chunk is None
        if chunk is not None:
            got[i] += chunk.text
            results[i] = chunk.result or results[i]
        if turn == 4:
            assert llm.generate(PROMPTS[1], PARAMS)[0].text == want[1], "in the midst of streams"
    assert got == want and [r.text for r in results] == want


def test_params_one_for_all_or_one_each(llm: LLM) -> None:
    each = [replace(PARAMS, seed=s, max_tokens=s) for s in (3, 4, 5)]
    results = llm.generate(PROMPTS, each)
    assert [(r.seed, len(r.token_ids)) for r in results] == [(3, 3), (4, 4), (5, 5)]
    with pytest.raises(BadInput, match="3 prompts but 2 params; give one for all, or one each"):
        llm.generate(PROMPTS, each[:2])
    with pytest.raises(BadInput, match="1 prompts but 0 params"):
        llm.generate("hello", [])


def test_seeds(llm: LLM) -> None:
    free_seed = replace(PARAMS, seed=None)
    one, two = llm.generate(["hello", "hello"], free_seed)
    assert one.seed != two.seed and one.token_ids != two.token_ids
    assert llm.generate("hello", replace(PARAMS, seed=one.seed))[0].token_ids == one.token_ids


def test_the_context_ends_the_text(llm: LLM) -> None:
    prompt = [5 + i % 200 for i in range(CONTEXT - 3)]
    (result,) = llm.generate([prompt], replace(PARAMS, max_tokens=1000))
    assert result.finish_reason == "length" and len(result.token_ids) == 3


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    result = llm.chat(messages, PARAMS)
    assert result.prompt_token_ids == tuple(llm.tokenizer.chat(messages))
    assert [c.result for c in llm.stream_chat(messages, PARAMS)][-1].text == result.text
    with pytest.raises(BadInput, match="role"):
        llm.chat([{"role": "nobody", "content": "x"}])


def test_auto_says_what_it_picked(model: str) -> None:
    llm = load(model, draft="auto")
    assert llm.drafter_name == "suffix" and any("draft=auto picked suffix" in n for n in llm.notices)


# Draft models


def test_a_draft_with_another_vocabulary(model: str) -> None:
    other = str(Path(model).with_name("shuffled.gguf"))
    with pytest.raises(DrafterMismatch, match=r"shuffled\.gguf .*tiny\.gguf .*do not share a tokenizer.*--draft ngram"):
        load(model, draft=f"draft_model:path={other},match=same")


@pytest.mark.parametrize("match", ["auto", "ids", "text"])
def test_a_draft_with_another_vocabulary_is_translated(llm: LLM, model: str, match: str) -> None:
    other = str(Path(model).with_name("shuffled.gguf"))
    want = [r.token_ids for r in llm.generate(PROMPTS, PARAMS)]
    translated = load(model, draft=f"draft_model:path={other},match={match}")
    results = translated.generate(PROMPTS, PARAMS)
    assert [r.token_ids for r in results] == want
    assert translated.drafter_name == "draft_model" and sum(r.stats.drafted for r in results) > 0


def test_the_target_as_its_own_draft(llm: LLM, model: str) -> None:
    want = [r.token_ids for r in llm.generate(PROMPTS, PARAMS)]
    for keys, sure in (("depth=3", True), ("depth=3,layers=1", False), ("depth=2,width=2", True)):
        own = load(model, draft=f"draft_model:path={model},{keys}")
        results = own.generate(PROMPTS, PARAMS)
        assert [r.token_ids for r in results] == want, keys
        for r in results:
            assert r.stats.drafted > 0 and (not sure or r.stats.acceptance_rate >= (0.5 if "width" in keys else 1.0))


def test_a_draft_with_more_layers_than_it_has(model: str) -> None:
    with pytest.raises(BadInput, match="layers"):
        load(model, draft=f"draft_model:path={model},layers=9")


@pytest.mark.parametrize("where", ["__init__", "start", "propose"])
def test_a_drafter_that_fails_is_named_and_replaced_by_none(llm: LLM, model: str, tmp_path: Path, where: str) -> None:
    body = {"start": "def start(self, start): 1 / 0", "propose": "pass", "__init__": "pass"}[where]
    file = tmp_path / "clumsy.py"
    file.write_text(
        "from outrider import Drafter, register\n\n@register('clumsy')\nclass Clumsy(Drafter):\n"
        f"    def __init__(self, config): {'1 / 0' if where == '__init__' else 'pass'}\n"
        f"    {body}\n    def propose(self, batch, budget): return 1 / 0\n"
    )
    if where == "__init__":
        with pytest.raises(BadInput, match="drafter 'clumsy' cannot be made: ZeroDivisionError"):
            load(model, draft=str(file))
        return
    want = llm.generate(PROMPTS, PARAMS)
    with pytest.warns(OutriderWarning, match="drafter 'clumsy' was switched off"):
        own = load(model, draft=str(file))
        results = own.generate(PROMPTS, PARAMS)
    assert own.drafter_name == "none" and [r.text for r in results] == [r.text for r in want]
    assert results[0].stats.drafter == "none"


# Stopping early


def test_interrupt_gives_what_there_is(llm: LLM) -> None:
    want = llm.generate("hello", PARAMS)[0]
    stream = llm.stream("hello", PARAMS)
    shown = next(stream).text + next(stream).text
    partial = llm.interrupt()
    assert partial is not None and partial.finish_reason == "abort"
    assert 2 <= len(partial.token_ids) < 20 and partial.token_ids == want.token_ids[: len(partial.token_ids)]
    assert partial.text.startswith(shown) and partial.stats.tokens == len(partial.token_ids)
    assert partial.text == llm.tokenizer.decode(partial.token_ids)
    assert free(llm) == llm._target.cache.capacity and next(stream, None) is None
    again = llm.interrupt()
    assert again is not None and again.text == partial.text, "asking twice adds nothing"


def test_interrupt_before_anything(model: str, llm: LLM) -> None:
    fresh = load(model)
    assert fresh.interrupt() is None
    stream = llm.stream("hello", PARAMS)
    partial = llm.interrupt()
    assert partial is not None and (partial.text, partial.token_ids, partial.finish_reason) == ("", (), "abort")
    del stream


def test_ctrl_c_within_a_round(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want, score, calls = llm.generate("hello", PARAMS)[0], llm._target.score, []

    def pressed(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return score(*args)

    monkeypatch.setattr(llm._target, "score", pressed)
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream("hello", PARAMS))
    partial = llm.interrupt()
    assert partial is not None and partial.finish_reason == "abort" and len(partial.token_ids) >= 3
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS)
    assert free(llm) == llm._target.cache.capacity
    monkeypatch.undo()
    assert llm.generate("hello", PARAMS)[0].token_ids == want.token_ids, "the next answer is not harmed"


def test_closing_a_stream_frees_its_memory(llm: LLM) -> None:
    stream = llm.stream("hello", PARAMS)
    next(stream)
    assert free(llm) < llm._target.cache.capacity
    stream.close()
    assert free(llm) == llm._target.cache.capacity and not llm._inboxes
    for i, _ in enumerate(llm.stream("hello", PARAMS)):
        if i == 2:
            break
    assert llm.engine.scheduler.idle


def test_close_stops_everything(model: str) -> None:
    llm = load(model)
    streams = [llm.stream(p, PARAMS) for p in PROMPTS]
    for s in streams:
        next(s)
    llm.close()
    assert llm.engine.scheduler.idle and free(llm) == llm._target.cache.capacity
    for s in streams:
        for _ in s:
            pass


# Scores that are no numbers


def poison(llm: LLM, monkeypatch: pytest.MonkeyPatch, prompt: tuple[int, ...], after: int) -> None:
    """From the `after`-th token on, the request with this prompt gets NaN: in its scores, in its memory, on the scratch page."""
    forward, cache = llm._target.decoder.forward, llm._target.cache

    def broken(layout: Any, *args: Any, **options: Any) -> Any:
        out = forward(layout, *args, **options)
        out = out if out.logits is None else replace(out, logits=out.logits.clone())
        for span in layout.spans:
            request = span.request
            if tuple(request.tokens[: request.prompt_len]) == prompt and len(request.output) >= after and out.logits is not None:
                rows = out.rows.request[layout.scored] == span.index
                out.logits[rows] = torch.nan
                for layer in range(len(llm._target.decoder.layers)):
                    cache.keys(layer)[cache.slots(request, 0, 1)] = torch.nan
                    cache.values(layer)[cache.scratch_slot] = torch.nan
        return out

    monkeypatch.setattr(llm._target.decoder, "forward", broken)


@pytest.mark.parametrize("after", [0, 1, 6])
def test_bad_scores_end_only_their_request(llm: LLM, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    want = llm.generate(PROMPTS, PARAMS)
    poison(llm, monkeypatch, want[1].prompt_token_ids, after)
    results = llm.generate(PROMPTS, PARAMS)
    assert [results[i].token_ids for i in (0, 2)] == [want[i].token_ids for i in (0, 2)]
    bad = results[1]
    assert bad.finish_reason == "error" and bad.error is not None and "not finite" in bad.error
    assert after <= len(bad.token_ids) < 20 and bad.token_ids == want[1].token_ids[: len(bad.token_ids)]
    assert bad.text == llm.tokenizer.decode(bad.token_ids)
    cache, layers = llm._target.cache, range(len(llm._target.decoder.layers))
    assert not any(cache.keys(layer).isnan().any() or cache.values(layer).isnan().any() for layer in layers), (
        "NaN is gone at once"
    )
    cache.wash()
    for layer in layers:
        assert not cache.keys(layer).any() and not cache.values(layer).any(), "something was left in memory that nobody owns"
    monkeypatch.undo()
    assert [r.token_ids for r in llm.generate(PROMPTS, PARAMS)] == [r.token_ids for r in want]


def test_a_stream_that_ends_in_an_error_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(llm, monkeypatch, tuple(llm.tokenizer.encode("hello")), 3)
    chunks = list(llm.stream("hello", PARAMS))
    assert chunks[-1].result is not None and chunks[-1].result.finish_reason == "error"


def test_when_every_token_is_forbidden(llm: LLM) -> None:
    params = SamplingParams(allowed_token_ids=(2,), min_tokens=3, max_tokens=9, seed=1)
    stuck, fine = llm.generate(["hello", "hello"], [params, PARAMS])
    assert (stuck.finish_reason, stuck.token_ids, stuck.text) == ("error", (), "")
    assert stuck.error is not None and "every token was forbidden" in stuck.error
    assert fine.finish_reason == "length"


# Stop strings and ids


def test_stop_strings(llm: LLM) -> None:
    want = llm.generate("hello", PARAMS)[0]
    cut = want.text[len(want.text) // 2 :][:3]
    for include in (False, True):
        params = replace(PARAMS, stop=[cut, "never there"], include_stop_str_in_output=include)
        (result,) = llm.generate("hello", params)
        end = want.text.index(cut) + (len(cut) if include else 0)
        assert (result.finish_reason, result.text) == ("stop", want.text[:end])
        assert "".join(c.text for c in llm.stream("hello", params)) == result.text
        assert result.token_ids == want.token_ids[: len(result.token_ids)]


def test_stop_tokens_are_committed_but_not_shown(llm: LLM) -> None:
    want = llm.generate("hello", PARAMS)[0]
    stop = want.token_ids[9]
    at = want.token_ids.index(stop)
    (result,) = llm.generate("hello", replace(PARAMS, stop_token_ids=(stop,)))
    assert result.finish_reason == "stop" and result.token_ids == want.token_ids[: at + 1]
    assert result.text == llm.tokenizer.decode(result.token_ids[:-1])


def test_eos_ends_unless_ignored(llm: LLM) -> None:
    sure = {"logit_bias": {2: 1e4}, "seed": 1, "max_tokens": 5}
    (result,) = llm.generate("hello", SamplingParams(**sure))
    assert (result.finish_reason, result.token_ids, result.text) == ("stop", (2,), "")
    (result,) = llm.generate("hello", SamplingParams(**sure, ignore_eos=True))
    assert (result.finish_reason, result.token_ids, result.text) == ("length", (2,) * 5, "")
    (result,) = llm.generate("hello", SamplingParams(**sure, ignore_eos=True, skip_special_tokens=False))
    assert result.text == "</s>" * 5


def test_bad_words_never_come(llm: LLM) -> None:
    word = llm.tokenizer.decode([llm.generate("abc", PARAMS)[0].token_ids[0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (result,) = llm.generate("abc", replace(PARAMS, bad_words=(word,)))
    assert result.token_ids[0] != llm.generate("abc", PARAMS)[0].token_ids[0]


def test_plain_decoding_on_request(llm: LLM) -> None:
    fast, slow = llm.generate(["abcabcabc"] * 2, [PARAMS, replace(PARAMS, depth=0)])
    assert fast.token_ids == slow.token_ids and slow.stats.drafted == 0 < fast.stats.drafted
    assert all(o == NONE for o in slow.origins) and slow.stats.rounds == 20
