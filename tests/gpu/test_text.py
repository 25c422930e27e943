"""The embedded model in bf16 on a card: whatever drafts, however requests are batched, the text is that of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider import scheduler
from outrider.bench.prompts import PROMPTS
from outrider.config import SamplingParams
from outrider.llm import LLM
from outrider.results import Result
from tests.gpu.conftest import MODEL, ROOM

STARTS = (
    "",
    "Answer in one paragraph. ",
    "Be brief. ",
    "Think step by step. ",
    "Explain to a child. ",
    "List ten facts. ",
    "Write a story about this. ",
    "Write Python code for this. ",
)
DRAFTS = (
    "eagle",
    "eagle:width=1",
    "medusa",
    "draft_model",
    "hybrid:members=suffix+eagle",
    "ngram",
    "ngram:max=3,min=1,depth=15",
    "suffix",
    "lookahead",
    "self:depth=4",
    "layer_skip:floor=0,depth=3",
    "layer_skip:search=yes,depth=3",
    "early_exit:exit=24,depth=3",
    f"draft_model:path={MODEL},layers=10,depth=4",
    f"draft_model:path={MODEL},layers=10,depth=3,width=3",
)


def prompts(count: int) -> list[str]:
    some = [start + prompt for start in STARTS for prompt in PROMPTS]
    return [f"{some[i % len(some)]} ({i})" for i in range(count)]


def texts(llm: LLM, many: list[str], params: SamplingParams) -> list[tuple[int, ...]]:
    return [r.token_ids for r in llm.generate(many, params)]


def drafted(results: list[Result]) -> int:
    return sum(r.stats.drafted for r in results)


def first_difference(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.fixture(scope="module")
def plain(llm: LLM) -> dict[float, list[tuple[int, ...]]]:
    llm.switch("none")
    return {t: texts(llm, prompts(64), SamplingParams(temperature=t, max_tokens=512, seed=11)) for t in (0.0, 1.0)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", DRAFTS)
def test_drafters(llm: LLM, plain: Any, draft: str, temperature: float) -> None:
    """64 prompts x 512 tokens: token ids equal to plain decoding, none differs."""
    llm.switch(draft, control="fixed")
    results = llm.generate(prompts(64), SamplingParams(temperature=temperature, max_tokens=512, seed=11))
    wrong = [
        (i, first_difference(r.token_ids, p))
        for i, (r, p) in enumerate(zip(results, plain[temperature], strict=True))
        if r.token_ids != p
    ]
    assert drafted(results) > 0
    assert wrong == []
    assert llm.drafter_name != "none"


def test_rounds_were_captured(llm: LLM, plain: Any) -> None:
    """The tests above mean something only if the rounds were graph replays."""
    machine: Any = llm._target.machine  # type: ignore[attr-defined]
    assert any(shape.columns for shape in machine.shapes) and any(not shape.columns for shape in machine.shapes)


class TestInvariant:
    """One text, whatever stands beside a request, however it was computed."""

    @pytest.fixture(scope="class")
    def expected(self, exact: LLM) -> dict[float, list[tuple[int, ...]]]:
        """One request at a time."""
        exact.switch("none", control="fixed")
        out = {}
        for t in (0.0, 1.0):
            params = SamplingParams(temperature=t, max_tokens=128, seed=5)
            out[t] = [texts(exact, [p], params)[0] for p in prompts(16)]
        return out

    @staticmethod
    def check(llm: LLM, expected: dict[float, list[tuple[int, ...]]], beside: int = 0) -> None:
        for t, right in expected.items():
            params = SamplingParams(temperature=t, max_tokens=128, seed=5)
            got = texts(llm, prompts(16 + beside), params)[:16]
            assert [i for i, (a, b) in enumerate(zip(got, right, strict=True)) if a != b] == []

    @pytest.mark.parametrize("beside", [0, 48])
    def test_batch(self, exact: LLM, expected: Any, beside: int) -> None:
        exact.switch("none", control="fixed")
        self.check(exact, expected, beside)

    @pytest.mark.parametrize("depth", [1, 3, 7, 15, 31, 47])
    def test_width(self, exact: LLM, expected: Any, depth: int) -> None:
        exact.switch(f"ngram:min=1,depth={depth}", control="fixed")
        self.check(exact, expected)

    def test_trees(self, exact: LLM, expected: Any) -> None:
        exact.switch(f"draft_model:path={MODEL},layers=6,depth=4,width=4", control="fixed")
        self.check(exact, expected)

    @pytest.mark.parametrize("chunk", [64, 192])
    def test_chunks(self, exact: LLM, expected: Any, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
        exact.switch("none", control="fixed")
        monkeypatch.setattr(scheduler, "CHUNK", chunk)
        self.check(exact, expected)

    def test_eager(self, exact: LLM, expected: Any) -> None:
        exact.switch("none", control="fixed")
        machine: Any = exact._target.machine  # type: ignore[attr-defined]
        machine.forget()
        machine.graphs = False
        try:
            self.check(exact, expected)
        finally:
            machine.graphs = True
            machine.forget()

    def test_preemption(self, expected: Any) -> None:
        small = LLM(MODEL, draft="none", device="cuda", max_model_len=1024, invariant=True, kv_tokens=1536)
        self.check(small, expected, beside=16)
        assert small.engine.scheduler.preempted > 0

    def test_restart(self, expected: Any) -> None:
        self.check(LLM(MODEL, **ROOM, invariant=True), expected)


def test_long_prompts_and_prefixes(exact: LLM) -> None:
    """A prompt that shares its beginning with one before is answered as if it had been alone."""
    exact.switch("none", control="fixed")
    base = " ".join(PROMPTS) * 4
    params = SamplingParams(temperature=1.0, max_tokens=64, seed=3)
    alone = [texts(exact, [base + f" Question {i}"], params)[0] for i in range(4)]
    together = texts(exact, [base + f" Question {i}" for i in range(4)], params)
    again = LLM(MODEL, **ROOM, invariant=True)
    assert alone == together == texts(again, [base + f" Question {i}" for i in range(4)], params)


def test_penalties_and_logprobs_take_the_plain_pass(exact: LLM) -> None:
    """What lanes cannot hold is decoded pass by pass, beside others that are not."""
    exact.switch("none", control="fixed")
    many = prompts(8)
    params = [SamplingParams(temperature=0.0, max_tokens=48, seed=1, repetition_penalty=1.3 if i % 2 else 1.0) for i in range(8)]
    alone = [exact.generate([p], [q])[0].token_ids for p, q in zip(many, params, strict=True)]
    assert [r.token_ids for r in exact.generate(many, params)] == alone


def test_filters(llm: LLM) -> None:
    """Top-k, top-p and min-p inside the graph, mixed in one batch, under a drafter."""
    many = prompts(32)
    kinds: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.8, "top_k": 40, "min_p": 0.01}]
    params = [SamplingParams(temperature=0.8, max_tokens=96, seed=i, **kinds[i % 4]) for i in range(32)]
    out = []
    for draft in ("none", "ngram:min=1", f"draft_model:path={MODEL},layers=10,depth=4"):
        llm.switch(draft, control="fixed")
        out.append([r.token_ids for r in llm.generate(many, params)])
    assert out[0] == out[1] == out[2]


def test_device_is_used(llm: LLM) -> None:
    assert llm._target.device == torch.device("cuda", torch.cuda.current_device()) or llm._target.device.type == "cuda"
