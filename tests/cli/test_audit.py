"""`outrider audit`: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.bench import audit as bench
from outrider.bench import selftest
from outrider.bench.faults import faults
from tests.models.tiny_gguf import Tiny

FIELDS = {"method", "rule", "temperature", "tokens", "divergences", "near_ties", "verdict"}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bench, "LAW_SAMPLES", 256)
    Tiny(kind="Q4_1").write(tmp_path / "tiny.gguf")
    return str(tmp_path / "tiny.gguf")


def small(model: str, *more: str) -> list[str]:
    return ["audit", "--model", model, "--dtype", "float64", "--prompts", "2", "--max-tokens", "8", *more]


def test_json_of_a_sound_engine(run, model: str) -> None:
    result = run(*small(model, "--draft", "self", "--accept", "coupled", "--json"))
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["verdict"] == "exact" and report["false_alarm_rate"] == 1e-9 and report["power"] == 0.99
    assert all(set(line) >= FIELDS for line in report["lines"])
    assert {line["temperature"] for line in report["lines"] if line["method"] == "self"} == {0.0, 0.7, 1.0}
    assert "self, coupled" in result.stderr


def test_a_table_for_people(run, model: str) -> None:
    result = run(*small(model, "--draft", "ngram"))
    assert result.exit_code == 0, result.output
    assert "no fault found" in result.stdout and "false alarms" in result.stdout and "ngram" in result.stdout


def test_a_fault_ends_with_1(run, model: str) -> None:
    with selftest.vectorised(), faults()["redraw after mismatch"]():
        result = run(*small(model, "--draft", "draft_model:path=" + model + ",layers=1", "--accept", "coupled"))
    assert result.exit_code == 1
    assert "FAULT" in result.stdout and "instead of" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--draft", "nosuch"], "unknown drafter"),
        (["--draft", "none"], "name a drafter"),
        (["--accept", "nosuch"], "unknown acceptance rule"),
        (["--model", "/no/such/model"], "no model"),
    ],
)
def test_bad_usage_ends_with_2(run, options: list[str], words: str) -> None:
    result = run("audit", *options)
    assert result.exit_code == 2 and words in result.stderr


def test_self_test(run, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [p for p in selftest.plants() if p.name in ("stale kv", "noise keyed by slot")]
    monkeypatch.setattr(selftest, "plants", lambda: few)
    result = run("audit", "--self-test", "--json")
    assert result.exit_code == 0
    assert [(p["name"], p["caught"]) for p in json.loads(result.stdout)["planted"]] == [(p.name, True) for p in few]
    blind = [selftest.Plant("unseen", p.fault, lambda seed: False) for p in few]
    monkeypatch.setattr(selftest, "plants", lambda: blind)
    result = run("audit", "--self-test")
    assert result.exit_code == 1 and "MISSED" in result.stdout
