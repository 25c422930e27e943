"""Foretold speed against measured speed on a clock that only passes of models move: what is left is the plan's own error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.bench.plan import Plan
from outrider.bench.runner import Runner
from outrider.bench.workloads import Prompt, Workload
from outrider.config import SamplingParams
from outrider.llm import LLM
from outrider.models.hf import Decoder
from outrider.models.parts import parts_of
from outrider.plan.measure import Measurer
from outrider.plan.predict import predict
from tests.models.tiny_gguf import Tiny

TEXTS = ("one two one two one two one two three", "a b c d a b c d a b", "the cat sat on the mat and the cat sat")


class Clock:
    """Seconds of work: each half of a layer costs something, each row of a pass more, and more so where the text is long."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def charge(self, decoder: Decoder, layout: Any, layers: Any) -> None:
        parts = parts_of(range(decoder.num_layers) if layers is None else layers, decoder.num_layers)
        halves = sum(p.attention + p.mlp for p in parts)
        rows, longest = len(layout.tokens), int(layout.rows.position.max()) + 1
        self.now += 0.0005 * halves * (1.0 + 0.06 * rows + 0.002 * longest)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Clock, str]]:
    patch, clock = pytest.MonkeyPatch(), Clock()
    file = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    patch.setenv("OUTRIDER_CACHE", str(file.parent / "cache"))
    Tiny(kind="Q4_1").write(file)
    forward = Decoder.forward

    def counted(self: Decoder, layout: Any, cache: Any, *rest: Any, **named: Any) -> Any:
        clock.charge(self, layout, named.get("layers", rest[1] if len(rest) > 1 else None))
        return forward(self, layout, cache, *rest, **named)

    patch.setattr(Decoder, "forward", counted)
    patch.setattr(time, "perf_counter", clock)
    llm = LLM(str(file), draft="none", control="fixed", device="cpu", dtype="float64", prefix_cache=False)
    yield llm, clock, str(file)
    llm.close()
    patch.undo()


def check(world: tuple[LLM, Clock, str], draft: str, batch: int, depths: tuple[int, ...], length: int) -> None:
    llm, clock, file = world
    workload = Workload("mine", "test", tuple(Prompt(({"role": "user", "content": text},)) for text in TEXTS[: length // 16]))
    prompts = [p.encode(llm.tokenizer) for p in workload.prompts]
    measurer = Measurer(llm, prompts, SamplingParams(max_tokens=length, temperature=0.0, seed=0), clock=clock)
    found = measurer.run(draft.format(file), depths, (batch,))
    spec = measurer.deepened(draft.format(file), max(depths))
    for depth in depths:
        plan = Plan((spec,), (workload,), length, repeats=1, batches=(batch,), control="fixed", depths=(depth,))
        row = Runner(llm, plan, clock=clock).run().rows[-1]
        assert row.speedup is not None and row.equal == row.compared
        foretold = predict(found.acceptance, found.costs, depth, batch)
        assert foretold.tau == pytest.approx(row.tau, rel=0.02)
        assert foretold.speedup == pytest.approx(row.speedup.median, rel=0.04)
        assert foretold.plain_tokens_per_second == pytest.approx(row.plain_tokens_per_second, rel=0.04)


@pytest.mark.parametrize(("draft", "batch"), [("synthetic:rate=0.7", 2), ("draft_model:path={},layers=1", 1)])
def test_speed_is_foretold(world: tuple[LLM, Clock, str], draft: str, batch: int) -> None:
    check(world, draft, batch, (1, 5), 32)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("draft", "batch"),
    [
        ("synthetic:rate=0.5", 1),
        ("synthetic:rate=0.7", 3),
        ("synthetic:rate=0.9", 1),
        ("ngram:min=1", 1),
        ("suffix", 1),
        ("draft_model:path={},layers=1", 1),
        ("layer_skip:attention=1,mlp=1,floor=0.3", 1),
    ],
)
def test_speed_is_foretold_at_every_depth(world: tuple[LLM, Clock, str], draft: str, batch: int) -> None:
    check(world, draft, batch, tuple(range(1, 13)), 48)
