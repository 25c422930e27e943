"""What the facade says to input that cannot be honoured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.errors import BadInput, ModelNotFound, OutOfMemory, OutriderError

from .test_llm import CONTEXT, KNOWN, PARAMS, VOCAB, check_clean, load, saved


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with saved(tmp_path_factory.mktemp("models")) as path:
        yield path


@pytest.fixture(scope="module")
def shared(model: str) -> LLM:
    return load(model)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """One LLM for all tests; whatever is refused must leave nothing behind."""
    yield shared
    check_clean(shared)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "the prompt is empty"),
        ([], "no prompts"),
        ([[]], "the prompt is empty"),
        (["hello", ""], "the prompt is empty"),
        ([-1, 5], r"prompt token -1 is not in the vocabulary of tiny\.gguf \(0 to 265\)"),
        ([5, VOCAB], "prompt token 266 is not in the vocabulary"),
        ([[5], [10**12]], "prompt token 1000000000000 is not"),
        ([[5, "a"]], "a prompt is text or a list of token ids, got"),
        ([[5, 1.5]], "a prompt is text or a list of token ids"),
        ([5, "a"], "a prompt is text or a list of token ids"),
        (5, "a prompt is text or a list of token ids, got 5"),
        (None, "a prompt is text or a list of token ids, got None"),
        ([5] * CONTEXT, r"the prompt has 128 tokens, but the context of tiny\.gguf holds 128.*shorten the prompt"),
        ("hello " * 200, "the prompt has"),
    ],
)
def test_bad_prompts(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        llm.generate(prompts, PARAMS)


@pytest.mark.parametrize("prompt", ["", [VOCAB], [5] * CONTEXT, 5])
def test_bad_prompts_of_a_stream_are_told_at_once(llm: LLM, prompt: Any) -> None:
    with pytest.raises(BadInput):
        llm.stream(prompt, PARAMS)


def test_token_ids_may_come_from_numpy_or_torch(llm: LLM) -> None:
    want = llm.generate([[10, 20, 30]], PARAMS)[0]
    for ids in (np.array([10, 20, 30]), torch.tensor([10, 20, 30]), (10, 20, 30), range(10, 31, 10)):
        assert llm.generate([ids], PARAMS)[0].token_ids == want.token_ids
        assert all(type(i) is int for i in llm.generate([ids], PARAMS)[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {KNOWN: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("allowed_token_ids", (5, KNOWN)),
        ("stop_token_ids", (9999,)),
    ],
)
def test_ids_that_do_not_exist(llm: LLM, field: str, value: Any) -> None:
    with pytest.raises(BadInput, match=rf"{field}: token id -?\d+ does not exist"):
        llm.generate("hello", replace(PARAMS, **{field: value}))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"draft": "ngarm"}, BadInput, "unknown drafter 'ngarm'; did you mean 'ngram'"),
        ({"draft": "ngram:width=2"}, BadInput, "has no key width"),
        ({"draft": "/no/where.py"}, BadInput, "no drafter file"),
        ({"accept": "rejecting"}, BadInput, "unknown acceptance rule 'rejecting'; known: coupled"),
        ({"cache": "pagged"}, BadInput, "unknown cache 'pagged'; use paged or slots"),
        ({"device": "toaster"}, BadInput, "device 'toaster' cannot be used here"),
        ({"device": "cuda:77"}, BadInput, "device 'cuda:77' cannot be used here"),
        ({"dtype": "int3"}, BadInput, "unknown dtype 'int3'; use auto, float32"),
        ({"max_model_len": 129}, BadInput, "max_model_len must be between 2 and 128"),
        ({"max_model_len": 1}, BadInput, "max_model_len must be between 2 and 128"),
        ({"max_model_len": -5}, BadInput, "max_model_len must be between 2 and 128"),
        ({"kv_tokens": 127}, BadInput, "kv_tokens must be at least 128, got 127"),
        ({"kv_tokens": 0}, BadInput, "kv_tokens must be at least 128, got 0"),
        ({"kv_tokens": -64}, BadInput, "kv_tokens must be at least 128"),
        ({"kv_tokens": 10**13}, OutOfMemory, "KV memory for 10000000000000 tokens takes .*lower kv_tokens"),
        ({"draft": "draft_model:path=/no/where"}, ModelNotFound, "no model '/no/where'"),
        ({"draft": "draft_model"}, BadInput, "needs path"),
    ],
)
def test_bad_options(model: str, options: dict[str, Any], error: type[OutriderError], message: str) -> None:
    with pytest.raises(error, match=message):
        load(model, **options)


def test_options_that_cannot_be_right_are_refused_before_the_model_is_read() -> None:
    for options in ({"cache": "x"}, {"kv_tokens": 1}, {"dtype": "x"}, {"device": "x"}, {"draft": "x"}, {"accept": "x"}):
        with pytest.raises(BadInput):
            LLM("/no/such/model", **options)


def test_too_little_memory_for_one_request(model: str) -> None:
    """The pool holds less than the context, so that one request may not fit."""
    llm = load(model, kv_tokens=128, draft="none")
    llm._target.cache.capacity = 64
    with pytest.raises(OutOfMemory, match="raise kv_tokens or lower max_tokens"):
        llm.generate(["hello", [5] * 60], PARAMS)
    assert llm.engine.scheduler.idle and llm.generate("hello", PARAMS)[0].finish_reason == "length"


def test_text_can_be_left_out(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)
    with_text, without = llm.generate(["abc"] * 2, [params, replace(params, detokenize=False)])
    assert with_text.text and not without.text and with_text.token_ids == without.token_ids
    assert [c.token_ids for c in llm.stream("abc", replace(params, detokenize=False))]
    with pytest.raises(BadInput, match="leave detokenize on"):
        SamplingParams(stop="x", detokenize=False)
