"""The benchmark on a tiny model: what is run in which order, what is counted, and that a wrong answer cannot hide."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import registry
from outrider.accept import coupled
from outrider.bench import compare, provenance
from outrider.bench.numbers import GAIN, LOSS, UNCLEAR, Speedup, interval, student, together
from outrider.bench.plan import Plan
from outrider.bench.report import finite
from outrider.bench.runner import Runner
from outrider.bench.workloads import Prompt, Workload
from outrider.config import SamplingParams
from outrider.errors import BadInput, OutriderError, OutriderWarning
from outrider.llm import LLM
from outrider.types import Stats

COPYCAT = str(Path(__file__).parents[2] / "examples" / "copycat.py")
TEXTS = ("ab ab ab ab", "hello hello", "x y z x y z")


def workload(name: str = "mine", texts: tuple[str, ...] = TEXTS) -> Workload:
    return Workload(name, "test", tuple(Prompt(({"role": "user", "content": t},)) for t in texts))


def plan(*drafts: str, temperature: float = 0.0, batch: int = 1, **changes) -> Plan:
    changes = {"temperatures": (temperature,), "batches": (batch,)} | changes
    return replace(Plan(drafts, (workload(),), max_tokens=16, repeats=2, control="fixed"), **changes)


def params() -> SamplingParams:
    one = plan("none")
    return one.params(one.points[0])


class Clock:
    """A second for every look, times what the drafter in use costs."""

    def __init__(self, llm: LLM, cost: dict[str, float]) -> None:
        self.llm, self.cost, self.now = llm, cost, 0.0

    def __call__(self) -> float:
        self.now += self.cost.get(self.llm.engine.drafter.name, 1.0)
        return self.now


def test_the_order_of_runs_and_what_is_measured(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, heard = [], []
    generate = LLM.generate

    def listen(self, prompts, params):
        asked.append((self.engine.drafter.name, len(prompts), params.max_tokens))
        return generate(self, prompts, params)

    monkeypatch.setattr(LLM, "generate", listen)
    runner = Runner(llm, plan("ngram", batch=2), lambda what, share: heard.append((what, share)))
    report = runner.run()
    full = [(name, size) for name, size, tokens in asked if tokens == 16]
    groups = {"none": [("none", 2), ("none", 1)], "ngram": [("ngram", 2), ("ngram", 1)]}
    order = ("none", "ngram", "ngram", "none")
    assert full == [("none", 2), ("ngram", 2), *itertools.chain(*(groups[x] for x in order))]
    assert sum(tokens == 8 for *_, tokens in asked) == 6  # before each run a few tokens that do not count
    assert [share for _, share in heard] == pytest.approx([0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    plain, drafted = report.rows
    assert (plain.draft, plain.speedup, plain.verdict, plain.tau, plain.drafted) == ("none", None, None, 1.0, 0)
    assert (drafted.runs, drafted.prompts, drafted.compared, drafted.equal) == (2, 3, 6, 6)
    assert plain.tokens == drafted.tokens == plain.rounds > drafted.rounds
    assert report.ok and not report.divergences and not llm.engine.sinks


def test_numbers_are_those_of_the_requests(llm: LLM) -> None:
    """The sums over a run's rounds, against the statistics the engine itself gives per request."""
    plain, drafted = Runner(llm, plan("self:depth=3", repeats=1, batch=3)).run().rows
    llm.switch("self:depth=3")
    prompts = [p.encode(llm.tokenizer) for p in workload().prompts]
    results = llm.generate(prompts, params())
    assert drafted.tokens == sum(r.stats.tokens for r in results) and drafted.rounds == sum(r.stats.rounds for r in results)
    assert drafted.alpha == sum(r.stats.accepted for r in results) / sum(r.stats.drafted for r in results) == 1.0
    assert drafted.acceptance_by_position == (1.0, 1.0, 1.0)
    assert drafted.tau == drafted.tokens / drafted.rounds > 3
    assert drafted.draft_seconds > 0 and drafted.verify_seconds > 0
    assert plain.draft_seconds == 0 and plain.other_seconds > 0  # nobody was asked: that is no drafting, but it takes its time
    assert drafted.draft_seconds + drafted.verify_seconds + drafted.other_seconds == pytest.approx(drafted.seconds)


def test_speed_by_a_fake_clock(llm: LLM) -> None:
    """Plain decoding takes a second per group, a drafter half of one, another four."""
    clock = Clock(llm, {"ngram": 0.5, "self": 4.0})
    report = Runner(llm, plan("ngram", "self", "none", "ngram", batch=3), clock=clock).run()
    assert [(r.draft, r.runs) for r in report.rows] == [("none", 4), ("ngram", 2), ("self", 2)]
    plain, fast, slow = report.rows
    per_run = plain.tokens / plain.runs
    assert plain.tokens_per_second == fast.plain_tokens_per_second == per_run
    assert fast.speedup is not None and slow.speedup is not None
    assert (fast.tokens_per_second, fast.speedup.median, fast.verdict) == (2 * per_run, 2.0, GAIN)
    assert (slow.tokens_per_second, slow.speedup.pairs, slow.verdict) == (per_run / 4, (0.25, 0.25), LOSS)
    assert (plain.warmup_seconds, fast.warmup_seconds, slow.warmup_seconds) == (1.0, 0.5, 4.0)
    assert [(r.workload, r.draft) for r in report.losses] == [("mine", "self")]


def test_plain_decoding_alone(llm: LLM) -> None:
    report = Runner(llm, plan("none", repeats=3, temperature=1.0, seed=5)).run()
    [row] = report.rows
    assert (row.runs, row.speedup, row.equal, row.compared, row.tau) == (3, None, 9, 9, 1.0)


def test_each_workload_by_itself(llm: LLM) -> None:
    two = (workload("one"), workload("two", TEXTS[:1]))
    report = Runner(llm, plan("ngram", workloads=two, repeats=1, limit=2)).run()
    assert [(r.workload, r.draft, r.prompts) for r in report.rows] == [
        ("one", "none", 2), ("one", "ngram", 2), ("two", "none", 1), ("two", "ngram", 1),
    ]  # fmt: skip
    assert all(r.verdict in (None, UNCLEAR) for r in report.rows)  # one pair shows no interval
    assert [len(w["sha256"]) for w in report.as_json()["workloads"]] == [2, 1]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_synthetic_drafter_is_told_the_answers(llm: LLM, temperature: float, batch: int) -> None:
    report = Runner(llm, plan("synthetic:rate=1,depth=3", temperature=temperature, repeats=1, batch=batch)).run()
    plain, told = report.rows
    assert (plain.synthetic, told.synthetic, told.drafter) == (False, True, "synthetic")
    assert told.alpha == 1.0 and told.tau > 3 and report.ok
    assert json.loads(json.dumps(report.as_json()))["results"][1]["synthetic"] is True


def test_auto_is_named(llm: LLM) -> None:
    row = Runner(llm, plan("auto", repeats=1)).run().rows[1]
    assert (row.draft, row.drafter, row.synthetic) == ("auto", "suffix", False)


def test_nothing_learned_is_carried_into_the_next_run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example drafter counts what follows what: in a second run over the same answers it would guess better."""
    table = {name: registry.get(name) for name in registry.names()}
    monkeypatch.setattr(registry, "_table", lambda: table)  # what this test registers is gone after it
    rounds, close = [], Runner._close

    def look(self, cell) -> None:
        rounds.extend((r.stats.rounds, r.stats.accepted) for r in cell.runs if cell.who.drafter == "copycat")
        close(self, cell)

    monkeypatch.setattr(Runner, "_close", look)
    assert Runner(llm, plan(COPYCAT, repeats=3)).run().ok
    assert len(rounds) == 3 and len(set(rounds)) == 1 and rounds[0][1] > 0
    llm.switch(COPYCAT)
    prompts = [p.encode(llm.tokenizer) for p in workload().prompts]
    first, second = (sum(r.stats.rounds for r in llm.generate(prompts, params())) for _ in range(2))
    assert second < first  # it does learn


# Answers that differ


def test_depths_take_turns_and_each_is_warm_before_it_counts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    generate = LLM.generate

    def listen(self, prompts, params):
        asked.append((self.engine.drafter.name, params.depth, params.max_tokens))
        return generate(self, prompts, params)

    monkeypatch.setattr(LLM, "generate", listen)
    report = Runner(llm, plan("self", depths=(1, 4), workloads=(workload(texts=TEXTS[:1]),))).run()
    pairs = [(name, depth) for name, depth, tokens in asked if tokens == 16][4:]  # after both depths' warm-ups
    plain = ("none", None)
    assert pairs == [plain, ("self", 1), plain, ("self", 4), ("self", 1), plain, ("self", 4), plain]
    assert {(depth, tokens) for name, depth, tokens in asked if name == "self"} == {(1, 9), (1, 16), (4, 12), (4, 16)}
    assert [(r.depth, r.runs, r.speedup and len(r.speedup.pairs)) for r in report.rows] == [(None, 4, None), (1, 2, 2), (4, 2, 2)]


def test_what_is_written_before_a_run_teaches_nobody(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that looks finished texts up would find the beginning of the answer it is about to be timed on."""
    known = []
    answer = Runner._answer

    def look(self, cell, group, run):
        if cell.who.draft == "suffix":
            known.append(llm.engine.drafter.drafter.finished.end)
        return answer(self, cell, group, run)

    monkeypatch.setattr(Runner, "_answer", look)
    Runner(llm, plan("suffix", workloads=(workload(texts=TEXTS[:1]),))).run()
    assert known == [0, 0, 0]


def test_a_fault_in_the_engine_is_found(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance that takes every guess: the text becomes the drafter's."""

    def gullible(proposal, choice, batch):
        says = choice.clone()
        says[:, : proposal.columns] = proposal.tokens
        return real(proposal, says, batch)

    real = coupled.walk
    monkeypatch.setattr(coupled, "walk", gullible)
    monkeypatch.setattr(coupled, "vectorised", gullible)
    report = Runner(llm, plan("synthetic:rate=0,depth=2", "ngram")).run()
    wrong = report.rows[1]
    assert not report.ok and wrong.equal < wrong.compared == 6
    assert report.as_json()["verdict"] == "different"
    found = [d for d in report.divergences if d.draft.startswith("synthetic")]
    assert found and all(not d.near_tie and d.want != d.got for d in found)
    assert len({d.prompt for d in found}) == len(found)  # once per prompt, however many runs


def test_a_divergence_has_its_place(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, count = LLM.generate, itertools.count()

    def spoil(self, prompts, params):
        results = generate(self, prompts, params)
        if params.max_tokens == 16 and len(prompts) == 3 and self.engine.drafter.name == "ngram" and next(count) == 1:
            ids = list(results[1].token_ids)
            ids[5] = (ids[5] + 1) % 200
            results[1] = replace(results[1], token_ids=tuple(ids))
            results[2] = replace(results[2], token_ids=results[2].token_ids[:4])
        return results

    monkeypatch.setattr(LLM, "generate", spoil)
    report = Runner(llm, plan("ngram", batch=3)).run()
    plain, drafted = report.rows
    assert (plain.equal, drafted.equal, drafted.compared) == (6, 4, 6)
    second, third = report.divergences
    assert (second.workload, second.draft, second.prompt, second.position) == ("mine", "ngram", 2, 5)
    assert second.got == (second.want + 1) % 200 and not second.near_tie and second.gap > 0
    assert (third.prompt, third.position, third.got, third.near_tie) == (3, 4, None, False)
    assert third.want is not None


def test_rounding_is_told_from_faults(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = LLM.generate

    def spoil(self, prompts, params):
        results = generate(self, prompts, params)
        if self.engine.drafter.name == "ngram":
            results[0] = replace(results[0], token_ids=(results[0].token_ids[0] ^ 1, *results[0].token_ids[1:]))
        return results

    monkeypatch.setattr(LLM, "generate", spoil)
    monkeypatch.setattr(compare, "judge", lambda *arguments: compare.Judgement(True, 1e-9))
    report = Runner(llm, plan("ngram", repeats=1, limit=1)).run()
    assert not report.ok and [(d.near_tie, d.gap) for d in report.divergences] == [(True, 1e-9)]


# What goes wrong


def test_ctrl_c_leaves_whole_pairs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, count = LLM.generate, itertools.count(1)

    def interrupted(self, prompts, params):
        if params.max_tokens == 16 and next(count) == 7:  # warm-ups 2, first pair 2, second pair 2, then the third
            raise KeyboardInterrupt
        return generate(self, prompts, params)

    monkeypatch.setattr(LLM, "generate", interrupted)
    runner = Runner(llm, plan("ngram", "self", batch=3, repeats=3))
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    report = runner.report(interrupted=True)
    assert [(r.draft, r.runs, r.compared) for r in report.rows] == [("none", 2, 6), ("ngram", 2, 6)]
    assert report.interrupted and report.ok and not llm.engine.sinks and llm.engine.scheduler.idle
    assert runner.report().rows == report.rows


def test_ctrl_c_before_anything_was_measured(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self, prompts, params):
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "generate", interrupted)
    runner = Runner(llm, plan("ngram"))
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    assert runner.report(interrupted=True).rows == ()


def test_a_drafter_that_was_switched_off_is_noted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self, batch, budget):
        raise ZeroDivisionError

    monkeypatch.setattr(registry.get("ngram"), "propose", broken)
    with pytest.warns(OutriderWarning, match="switched off"):
        report = Runner(llm, plan("ngram", repeats=1)).run()
    assert report.ok and "switched off" in report.rows[1].note and not report.rows[0].note


def test_a_drafter_that_cannot_start_is_found_before_measuring(llm: LLM) -> None:
    heard = []
    with pytest.raises(OutriderError, match="nowhere"):
        Runner(llm, plan("ngram", "draft_model:path=/nowhere/at/all"), lambda what, share: heard.append(what)).run()
    assert not heard


def test_a_prompt_that_does_not_fit(llm: LLM) -> None:
    long = workload(texts=("short", "long " * 100))
    with pytest.raises(BadInput, match="workload mine, prompt 2"):
        Runner(llm, plan("ngram", workloads=(long,))).run()


def test_an_answer_that_ends_in_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = LLM.generate

    def fail(self, prompts, params):
        return [replace(r, finish_reason="error", error="no valid scores") for r in generate(self, prompts, params)]

    monkeypatch.setattr(LLM, "generate", fail)
    with pytest.raises(OutriderError, match=r"prompt 1: no valid scores"):
        Runner(llm, plan("ngram")).run()


@pytest.mark.parametrize(
    "changes",
    [{"repeats": 0}, {"batch": 0}, {"limit": 0}, {"drafts": ()}, {"workloads": ()}, {"workloads": (workload(), workload())}],
)
def test_plans_that_cannot_be(changes) -> None:
    with pytest.raises(BadInput):
        plan("ngram", **changes)


# Statistics


def test_intervals() -> None:
    assert interval([1.5]) == (None, None)
    low, high = interval([2.0, 2.0, 2.0])
    assert low == high == pytest.approx(2.0)
    ratios = [1.1, 1.3, 1.2, 1.25]
    low, high = interval(ratios)
    assert low is not None and high is not None
    logs = [math.log(r) for r in ratios]
    half = 3.182 * statistics.stdev(logs) / 2
    assert (low, high) == pytest.approx((math.exp(statistics.fmean(logs) - half), math.exp(statistics.fmean(logs) + half)))
    turned = interval([1 / r for r in ratios])
    assert turned == pytest.approx((1 / high, 1 / low))


@pytest.mark.parametrize(("freedom", "want"), [(1, 12.7062), (2, 4.3027), (10, 2.2281), (11, 2.2010), (20, 2.0860), (99, 1.9842)])
def test_students_quantiles(freedom: int, want: float) -> None:
    assert student(freedom) == pytest.approx(want, abs=3e-3)


def test_verdicts() -> None:
    assert Speedup.of([1.5, 1.6, 1.55]).verdict == GAIN
    assert Speedup.of([0.5, 0.6, 0.55]).verdict == LOSS
    assert Speedup.of([0.9, 1.2, 1.0]).verdict == Speedup.of([0.2]).verdict == UNCLEAR
    s = Speedup.of([2.0, 1.0, 4.0])
    assert (s.median, s.min, s.max, s.pairs) == (2.0, 1.0, 4.0, (2.0, 1.0, 4.0))


def test_counters_add_up() -> None:
    a = Stats(tokens=5, rounds=3, drafted=4, accepted=2, offered_at=[3, 1], accepted_at=[2, 0])
    b = Stats(tokens=2, rounds=1, drafted=3, accepted=1, offered_at=[1, 1, 1], accepted_at=[1, 0, 0])
    total = together([a, b])
    assert (total.tokens, total.rounds, total.drafted, total.accepted) == (7, 4, 7, 3)
    assert (total.offered_at, total.accepted_at) == ([4, 2, 1], [3, 0, 0]) and a.offered_at == [3, 1]


def test_json_knows_no_infinities() -> None:
    assert finite({"a": (math.inf, 1.0), "b": [math.nan], "c": "x"}) == {"a": [None, 1.0], "b": [None], "c": "x"}


def test_provenance(llm: LLM, model_file, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/home/somebody/outrider/__main__.py", "bench"])
    assert provenance.provenance(llm, str(model_file))["command"] == ["outrider", "bench"]
    found = provenance.provenance(llm, str(model_file), ["outrider", "bench"])
    assert found["command"] == ["outrider", "bench"] and found["dtype"] == "float64" and found["torch"]
    assert found["model"]["bytes"] == model_file.stat().st_size and len(found["model"]["sampled_sha256"]) == 64
    assert provenance.weights_file("no/such-model") == provenance.weights_file("/no/such/model") == {}
    monkeypatch.setattr(provenance, "_git", lambda *arguments: None)
    assert provenance.commit() is None and provenance.version("no-such-package") is None
