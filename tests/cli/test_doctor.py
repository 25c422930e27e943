"""`outrider doctor` and `outrider models`."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from outrider.cli import doctor
from outrider.models import embedded
from tests.models.tiny_gguf import Tiny


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    Tiny(kind="Q4_1").write(tmp_path / "tiny.gguf")
    return str(tmp_path / "tiny.gguf")


def findings(result) -> dict[tuple[str, str], dict]:
    return {(f["topic"], f["name"]): f for f in json.loads(result.stdout)["findings"]}


def test_a_healthy_setup(run, model: str) -> None:
    result = run("doctor", "--model", model, "--draft", f"draft_model:path={model},layers=1", "--json")
    assert result.exit_code == 0, result.output
    found = findings(result)
    assert "KiB per token" in found["model", "KV memory"]["value"]
    assert "% of the model" in found["drafter", "size"]["value"]
    assert "matches" in found["drafter", "vocabulary"]["value"]
    assert found["versions", "torch"]["value"] == metadata.version("torch")
    assert json.loads(result.stdout)["ok"]


def test_a_model_that_is_not_there(run, model: str) -> None:
    result = run("doctor", "--model", model + "x")
    assert result.exit_code == 1
    assert "cannot be used" in result.stdout and "did you mean" in result.stdout


def test_a_draft_of_another_family(run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.drafters import draft_model
    from outrider.errors import DrafterMismatch

    def mismatch(*args: object) -> None:
        raise DrafterMismatch("the vocabularies differ")

    monkeypatch.setattr(draft_model, "check_vocabulary", mismatch)
    result = run("doctor", "--model", model, "--draft", f"draft_model:path={model}")
    assert result.exit_code == 1
    assert "does not fit" in result.stdout and "vocabularies differ" in result.stdout


def test_missing_and_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["numpy>=999", "no-such-package-at-all", "rich"])
    found = {f.name: f for f in doctor.versions()}
    assert "999" in (found["numpy"].remedy or "") and found["no-such-package-at-all"].remedy
    assert found["rich"].remedy is None


@pytest.mark.parametrize("options", [["--draft", "nosuch"], ["--draft", "ngram:max=x"], ["--dtype", "int3"]])
def test_bad_usage(run, model: str, options: list[str]) -> None:
    assert run("doctor", "--model", model, *options).exit_code == 2


def test_models_lists_what_there_is(run, model: str) -> None:
    before = json.loads(run("models", "--json").stdout)["models"]
    assert [(m["kind"], m["bytes"]) for m in before] == [("embedded", embedded.SIZE)]
    assert run("doctor", "--model", model).exit_code == 0
    after = json.loads(run("models", "--json").stdout)["models"]
    [copy] = [m for m in after if m["kind"] == "cached"]
    assert copy["name"] == "tiny.gguf" and copy["bytes"] > 0 and Path(copy["path"]).is_dir()
    assert "tiny.gguf" in run("models").stdout


def test_models_without_the_embedded_one(run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.errors import ModelNotFound

    def missing() -> Path:
        raise ModelNotFound("not installed; run: pip install x")

    monkeypatch.setattr(embedded, "find", missing)
    result = run("models")
    assert result.exit_code == 0 and "pip install x" in result.stdout.replace("\n", " ")


def test_a_short_run_explains_acceptance(run, model: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("one two one two one two\n\na b c a b c a b c\n")
    short = ["--workload", str(tmp_path / "short.txt"), "--max-tokens", "24", "--temperature", "1", "--json"]
    result = run("doctor", "--model", model, "--draft", f"draft_model:path={model},layers=1", *short)
    assert result.exit_code in (0, 1), result.output
    found = {name: f for (topic, name), f in findings(result).items() if topic == "acceptance"}
    assert {"tokenizer", "chat template", "numbers", "context", "context length", "depth, texts", "temperature"} <= set(found)
    assert "of the guesses right" in found[f"domain: {tmp_path / 'short.txt'}"]["value"]


def test_a_result_is_explained(run, model: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("one two one two one two\n\na b c a b c a b c\n")
    ask = ["--workload", str(tmp_path / "short.txt"), "--max-tokens", "100", "--repeats", "1", "--depth", "2"]
    out = tmp_path / "bench.json"
    assert run("bench", "--model", model, "--draft", "synthetic:rate=1", *ask, "--output", str(out)).exit_code == 0
    result = run("doctor", "--from", str(out))
    assert result.exit_code == 1 and "the depth cuts off good guesses" in result.stdout
    assert run("doctor", "--from", str(out), "--draft", "ngram").exit_code == 2
    assert run("doctor", "--from", str(tmp_path / "none.json")).exit_code == 2
