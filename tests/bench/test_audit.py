"""The audit must find nothing where nothing is wrong, and what is wrong where something is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outrider import accept, registry
from outrider.accept import coupled
from outrider.bench import audit, compare, law, selftest
from outrider.bench.audit import Auditor, Plan, runnable
from outrider.bench.cases import GROUPS, TEMPERATURES, cases
from outrider.bench.faults import faults
from outrider.config import SamplingParams
from outrider.errors import BadInput, OutriderWarning
from outrider.llm import LLM
from outrider.models.target import ModelTarget

SMALL = Plan(("self",), ("coupled",), prompts=8, max_tokens=12)


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "LAW_SAMPLES", 256)


def test_nothing_is_found_where_nothing_is_wrong(llm: LLM, model_file) -> None:
    drafts = tuple(runnable(str(model_file), 3))
    assert {"ngram", "self"} <= set(drafts) and any(d.startswith("draft_model:path=") for d in drafts)
    heard = []
    report = Auditor(llm, replace(SMALL, drafts=drafts), lambda what, share: heard.append(share)).run()
    assert report.ok and not report.differences
    assert heard == sorted(heard) and heard[-1] == 1
    compared = {(x.method, x.temperature) for x in report.lines if x.rule == "coupled"}
    assert {(d, t) for d in (*drafts, "none") for t in TEMPERATURES} <= compared
    assert all(x.tokens > 0 and x.verdict == "exact" and x.divergences == x.near_ties == 0 for x in report.lines)
    assert all(x.drafted > 0 for x in report.lines if x.method == "self")
    assert any(x.method == "(law)" for x in report.lines)
    assert report.detects is not None and 0 < report.detects < 1


@pytest.mark.parametrize(
    "name", ["redraw after mismatch", "noise keyed by slot", "penalties of the wrong slot", "noise keyed by row"]
)
def test_a_planted_fault_is_reported(llm: LLM, name: str) -> None:
    with selftest.vectorised(), faults()[name]():
        report = Auditor(llm, replace(SMALL, drafts=("self:depth=3", "ngram:min=1"))).run()
    assert not report.ok
    bad = [x for x in report.lines if x.verdict == "fault"]
    assert sum(x.divergences for x in bad) == len([d for d in report.differences if not d.near_tie]) > 0


def test_a_fault_of_the_law_is_reported(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "LAW_SAMPLES", 2048)
    with faults()["noise reused by neighbours"]():
        report = Auditor(llm, replace(SMALL, drafts=())).run()
    assert {x.method for x in report.lines if x.verdict == "fault"} >= {"(law)"}


def test_a_lossy_rule_is_declared(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lossy(coupled.Coupled):
        name, lossless = "loose", False

    monkeypatch.setitem(accept.RULES, "loose", Lossy)
    report = Auditor(llm, replace(SMALL, rules=("loose",))).run()
    assert report.ok and [x.verdict for x in report.lines] == ["lossy, as declared"]


def test_another_lossless_rule_is_compared_when_greedy_and_by_its_laws(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(coupled.Coupled):
        name = "other"

    monkeypatch.setitem(accept.RULES, "other", Other)
    monkeypatch.setattr(audit.importlib.util, "find_spec", lambda name: True)
    error = [1e-15]
    monkeypatch.setattr(audit.importlib, "import_module", lambda name: SimpleNamespace(law_error=lambda rule: error[0]))
    report = Auditor(llm, replace(SMALL, rules=("other",))).run()
    assert report.ok and ("self", 0.0) in {(x.method, x.temperature) for x in report.lines if x.rule == "other"}
    error[0] = 1e-3
    report = Auditor(llm, replace(SMALL, rules=("other",), drafts=())).run()
    assert not report.ok and report.lines[-1].method == "(enumeration)"


def test_a_drafter_that_cannot_start(llm: LLM) -> None:
    plan = replace(SMALL, drafts=("draft_model:path=/nowhere/at/all",), strict=False)
    skipped = [x for x in Auditor(llm, plan).run().lines if x.verdict == "skipped"]
    assert skipped and "nowhere" in skipped[0].note
    with pytest.raises(Exception, match="nowhere"):
        Auditor(llm, replace(plan, strict=True)).run()


def test_a_drafter_that_fails_is_a_fault(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self, batch, budget):
        raise ZeroDivisionError

    monkeypatch.setattr(registry.get("ngram"), "propose", broken)
    with pytest.warns(OutriderWarning, match="switched off"):
        report = Auditor(llm, replace(SMALL, drafts=("ngram",))).run()
    assert not report.ok and not report.differences
    assert any("switched off" in x.note for x in report.lines)


def test_every_group_meets_every_temperature(llm: LLM) -> None:
    for heat in TEMPERATURES:
        for prompts in (1, 8, 20):
            made = cases(llm, heat, prompts, 16, 0)
            assert {c.group for c in made} == {name for name, _ in GROUPS}
            assert all(c.params.temperature == heat for c in made)
            assert len({c.params.seed for c in made}) == len(made)


# Near-ties


def _request(llm: LLM):
    return llm._request([5, 9, 70, 71], SamplingParams(temperature=1.0, top_p=0.9, seed=3))


def test_near_ties_and_faults(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    target = llm.engine.target
    assert isinstance(target, ModelTarget)
    [result] = llm.generate([[5, 9, 70, 71]], SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=1))
    [token] = result.token_ids
    request = _request(llm)
    logits = compare.plain_logits(target, request)
    scores = target.sampler.scores(logits, compare._slots(request, target.device))[0]
    target.release(request)
    best, second = scores.topk(2).indices.tolist()
    assert best == token
    found = compare.judge(target, _request(llm), best, second)
    gap = float(scores[best] - scores[second])
    assert not found.near_tie and found.gap == pytest.approx(gap)
    monkeypatch.setitem(compare.TOLERANCE, torch.float64, 0.51 * gap)
    assert compare.judge(target, _request(llm), best, second).near_tie
    assert not compare.judge(target, _request(llm), best, None).near_tie
    monkeypatch.setitem(compare.TOLERANCE, torch.float64, 0.49 * gap)
    assert not compare.judge(target, _request(llm), best, second).near_tie
    assert target.cache.free() == target.cache.capacity


@pytest.mark.parametrize(
    ("a", "b", "at"), [((), (), None), ((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((), (1,), 0)]
)
def test_first_divergence(a, b, at) -> None:
    assert compare.divergence(a, b) == compare.divergence(b, a) == at


# Switching drafters


def test_switch(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    plain = llm.generate("ab ab ab", params)[0]
    events = []
    llm.engine.sinks.append(events.append)
    llm.switch("self:depth=2")
    drafted = llm.generate("ab ab ab", params)[0]
    assert plain.token_ids == drafted.token_ids and drafted.stats.drafted > 0 and drafted.stats.drafter == "self"
    assert events
    with pytest.raises(BadInput, match="unknown drafter"):
        llm.switch("slef")
    stream = llm.stream("ab", params)
    next(stream)
    with pytest.raises(BadInput, match="running"):
        llm.switch("none")
    stream.close()
    llm.switch("none")
    assert llm.drafter_name == "none"


# The law test


def test_the_law_is_a_law() -> None:
    found = law.enumerate_law(SamplingParams(temperature=0.7, top_k=3), 2)
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    assert sum(p > 0 for p in found.values()) == 9


def test_the_bound_on_false_alarms_holds() -> None:
    """Counts of a fair die: the bound must be above how often so much information is seen."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(0, 6, (4000, 60), generator=generator)
    fair = {(v,): 1 / 6 for v in range(6)}
    seen = [law.divergence({(v,): int(c) for v, c in enumerate(row.bincount(minlength=6)) if c}, fair) for row in draws]
    for level in (6.0, 8.0, 10.0):
        assert sum(x >= level for x in seen) / len(seen) <= law.alarm(level, 5)
    assert law.alarm(3.0, 5) == 1.0 and law.alarm(60.0, 5) < law.ALARM < law.alarm(20.0, 5)
    assert law.divergence({(7,): 1}, fair) == float("inf") and law.alarm(float("inf"), 5) == 0


def test_another_law_is_noticed() -> None:
    counts = law.sample(SamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True), "coupled", 1536, 0)
    right, wrong = (law.enumerate_law(SamplingParams(temperature=t), 2) for t in (1.0, 0.7))
    cells = len(right) - 1
    assert law.alarm(law.divergence(counts, right), cells) > 1e-3
    assert law.alarm(law.divergence(counts, wrong), cells) < law.ALARM


def test_heads_are_audited_if_they_were_trained_for_the_model(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    place = tmp_path / "drafters" / "mine"
    place.mkdir(parents=True)
    (place / "card.json").write_text('{"method": "medusa", "fingerprint": "abc", "model": "m", "tau": 2.0}')
    (place / "config.json").write_text("{}")
    assert f"medusa:path={place}" in runnable("m", 3, "abc")
    assert not any(d.startswith(("medusa", "eagle")) for d in runnable("m", 3, "other") + runnable("m", 3))
