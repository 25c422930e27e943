"""Measuring on a tiny model: what was guessed and what rounds cost must be what fixed look-ahead then meets."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from outrider.bench.plan import Plan
from outrider.bench.runner import Runner
from outrider.bench.workloads import Prompt, Workload
from outrider.config import SamplingParams
from outrider.llm import LLM
from outrider.models.rounds import Machine
from outrider.plan.acceptance import Chances
from outrider.plan.costs import Samples, Table, typical
from outrider.plan.measure import WARM, Measurer
from outrider.plan.predict import predict
from outrider.plan.stretches import Asked, Stretches, right
from tests.models.tiny_gguf import Tiny

TEXTS = ("one two one two one two one two three", "a b c d a b c d a b", "the cat sat on the mat and the cat sat")
COSTS = Table({"verify": {1: ((1.0, 1.0),)}})


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("tiny")
    patch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
    Tiny(kind="Q4_1").write(folder / "tiny.gguf")
    made = LLM(str(folder / "tiny.gguf"), draft="none", control="fixed", device="cpu", dtype="float64", prefix_cache=False)
    yield made
    made.close()
    patch.undo()


def measurer(llm: LLM) -> Measurer:
    prompts = [llm.tokenizer.encode(text) for text in TEXTS]
    return Measurer(llm, prompts, SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0))


def test_the_collector_does_not_look_at_the_model_while_something_is_measured(llm: LLM) -> None:
    frozen = list[int]()

    def clock() -> float:
        frozen.append(gc.get_freeze_count())
        return time.perf_counter()

    found = measurer(llm)
    found.clock = clock
    found.run("ngram", (1,), (1,))
    assert min(frozen) > 1000
    frozen.clear()
    prompts = tuple(Prompt(({"role": "user", "content": text},)) for text in TEXTS)
    Runner(llm, Plan(("ngram",), (Workload("mine", "test", prompts),), 8, repeats=1), clock=clock).run()
    assert min(frozen) > 1000 and not gc.get_freeze_count()


def test_a_tree_against_a_text() -> None:
    tree = [(5, -1), (6, -1), (7, 1), (8, 1), (9, 3)]
    assert right(tree, [6, 8, 9, 1]) == 3 and right(tree, [5, 7]) == 1 and right(tree, [4]) == 0 and right([], [1]) == 0


def rest_of_plain_rounds(llm: LLM, wall: Callable[[int], float]) -> list[float]:
    """What is booked beside passes of a second each, for 101 plain rounds told after `wall` seconds, of which every 20th does not
    count."""
    now, samples = [0.0], Samples()
    control = Stretches(llm.engine.drafter.drafter, (2,), samples, lambda: now[0])
    item = SimpleNamespace(request=SimpleNamespace(id=1), tokens=(1,))
    event = SimpleNamespace(committed=(item,), prefill=0, rows=1, verify_seconds=1.0, draft_seconds=0.0, depths=(0,))
    control.wake(1)
    for number in range(101):
        control._open.append(Asked((1,), 0, counts=number % 20 > 0))
        now[0] += wall(number)
        control.observe(event)  # type: ignore[arg-type]
    control.close()
    return samples.parts["other"][1, 0]


def test_a_round_that_was_told_late_and_the_short_one_after_it_count_with_their_mean(llm: LLM) -> None:
    found = rest_of_plain_rounds(llm, lambda number: 6.0 if number % 20 == 10 else 0.1 if 10 < number % 20 < 16 else 1.1)
    assert len(found) == 95
    assert typical(found) == pytest.approx((6.0 + 5 * 0.1 + 13 * 1.1) / 19 - 1.0)


def test_a_stall_is_no_round(llm: LLM) -> None:
    found = rest_of_plain_rounds(llm, lambda number: 30.0 if number in (30, 70) else 1.1)
    assert typical(found) == pytest.approx(0.1)


@pytest.mark.parametrize("vain", [True, False])
def test_a_pass_that_goes_on_from_a_draft_is_no_plain_one(llm: LLM, vain: bool) -> None:
    """Where a draft that found nothing left its states, one row takes a fifth of a pass; plain rounds take all of it."""
    now, samples = [0.0], Samples()
    control = Stretches(llm.engine.drafter.drafter, (2, 3), samples, lambda: now[0])
    item = SimpleNamespace(request=SimpleNamespace(id=1), tokens=(1,))
    control.wake(1)
    for number in range(40):
        depth, rows = (0, 1) if number % 2 else (2, 1 if vain else 3)
        control._open.append(Asked((1,), depth, counts=True))
        now[0] += 2.0
        seconds = 1.0 if not depth else 0.2 if vain else 0.4
        event = SimpleNamespace(committed=(item,), prefill=0, rows=rows, verify_seconds=seconds, draft_seconds=0.5 * (depth > 0))
        control._last = now[0] - 2.0
        control.observe(event)  # type: ignore[arg-type]
    control.close()
    table = samples.table(True)
    assert table.plain(1) == pytest.approx(1.0)
    assert table.verify(1, 1) == pytest.approx(0.2 if vain else 1.0) and table.verify(1, 3) == pytest.approx(0.2 if vain else 0.4)


@pytest.mark.parametrize("known", [True, False])
def test_texts_written_in_a_slow_moment_do_not_count(llm: LLM, known: bool) -> None:
    """Two prompts, one of which takes longer to read, written five times each; twice the host is slow, in reading, too. What a
    depth takes on one text and not on another is no slow moment."""
    now, samples = [0.0], Samples()
    control = Stretches(llm.engine.drafter.drafter, (2, 3), samples, lambda: now[0])
    item = SimpleNamespace(request=SimpleNamespace(id=1), tokens=(1,))
    for text in range(10):
        control.wake(1, text % 2)
        slow = 1.5 if text in (4, 7) else 1.0
        for depth in (0, 0, 0, 2, 2, 2):
            control._open.append(Asked((1,), depth, counts=True))
            now[0] += 1.0 + slow * (0.1 + 0.1 * (depth > 0) * (1 + text % 2))
            drafting = 0.05 * slow * (depth > 0)
            event = SimpleNamespace(committed=(item,), prefill=0, rows=1, verify_seconds=1.0, draft_seconds=drafting)
            control.observe(event)  # type: ignore[arg-type]
        if known:
            control.read(slow * (3.0 + text % 2))
    control.close()
    plain, guessing = (typical(samples.parts["other"][1, depth]) for depth in (0, 2))
    assert (plain == pytest.approx(0.1, abs=1e-3)) == known
    assert (guessing == pytest.approx(0.2, abs=5e-3)) == known, "both texts, in their proportion"


@pytest.mark.parametrize(
    "draft",
    [
        "synthetic:rate=0.7",
        "ngram:min=1",
        "suffix",
        "layer_skip:attention=1,mlp=1,floor=0",
        "hybrid:members=ngram(min=1;depth=6)+layer_skip(attention=1;mlp=1;floor=0;depth=6)",
    ],
)
def test_rounds_of_every_depth_are_foretold(llm: LLM, draft: str) -> None:
    spec = measurer(llm).deepened(draft, 6)
    record = measurer(llm).guesses(spec)
    assert record.depth == 6
    plain = [llm.tokenizer.encode(text) for text in TEXTS]
    for depth in (1, 6):
        params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0, seed=0, depth=depth)
        llm.switch("none", control="fixed")
        answers = llm.generate(plain, params)
        llm.switch(spec, control="fixed")
        if draft.startswith("synthetic"):
            for result in answers:
                llm.engine.drafter.drafter.record(result.prompt_token_ids, params, result.token_ids)
        llm.generate([plain[0]], replace(params, max_tokens=WARM, depth=None))
        if not draft.startswith("synthetic"):  # finished texts teach some drafters
            llm.engine.drafter.renew()
        stats = [llm.generate([prompt], params)[0].stats for prompt in plain]
        tau = sum(s.tokens for s in stats) / sum(s.rounds for s in stats)
        assert predict(record, COSTS, depth, 1).tau == pytest.approx(tau, rel=0.02)


def test_costs_of_every_depth_are_there(llm: LLM) -> None:
    found = measurer(llm).run("synthetic:rate=0.7", (1, 3, 6), (1, 2))
    parts = found.costs.parts
    assert set(parts["verify"]) == {1, 2}
    assert {size for size, _ in parts["draft"][1]} == {1.0, 3.0, 6.0}
    assert {size for size, _ in parts["other"][1]} == {0.0, 1.0, 3.0, 6.0}
    assert {1.0, 2.0, 7.0} <= {size for size, _ in parts["verify"][1]} and 2.0 in {size for size, _ in parts["verify"][2]}
    assert found.costs.reading(1) > 0 and found.costs.context[1] > 30
    assert predict(found.acceptance, found.costs, 6, 2).known


def test_a_drafter_that_must_be_scored_to_learn(llm: LLM) -> None:
    found = measurer(llm).run("lookahead", (1, 6), (1,))
    assert found.depths == (6,) and isinstance(found.acceptance, Chances) and len(found.acceptance.accept) >= 1


def test_costs_are_measured_on_texts_that_the_drafter_has_not_met(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a lookup finds the answer it wrote before, and is another drafter than in the runs that are foretold."""
    sizes: list[int] = []
    measuring = measurer(llm)
    timed = Measurer._timed

    def watched(self: Measurer, group: list[list[int]], control: Stretches, which: int = 0) -> object:
        found = timed(self, group, control, which)
        store = getattr(llm.engine.drafter.drafter, "finished", None)
        sizes.append(0 if store is None else store.end)
        return found

    monkeypatch.setattr(Measurer, "_timed", watched)
    measuring.run("suffix", (1, 3), (1,))
    kept = [size for size in sizes if size]
    assert len(kept) > 3 and max(kept) <= 31, "one answer, and its end"


def test_nothing_stands_in_for_what_is_measured(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = object.__new__(Machine)
    machine.patient, seen = True, list[bool]()
    monkeypatch.setattr(Measurer, "_machine", property(lambda self: machine))
    monkeypatch.setattr(Measurer, "_run", lambda self, *given: seen.append(machine.patient))
    measurer(llm).run("suffix", (1,), (1,))
    assert seen == [False] and machine.patient
    monkeypatch.setattr(Measurer, "_run", lambda self, *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measurer(llm).run("suffix", (1,), (1,))
    assert machine.patient, "whatever happens"
