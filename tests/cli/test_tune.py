"""`outrider tune`: what it prints, what it keeps, and its exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from outrider.bench.tune import Tuner
from tests.bench.test_tune import row
from tests.models.tiny_gguf import Tiny


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command on four short prompts."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    Tiny(kind="Q4_1").write(tmp_path / "tiny.gguf")
    file = tmp_path / "short.txt"
    file.write_text("ab ab ab ab\n\nhello hello\n\none two\n\nthree")
    sizes = ("--max-tokens", "6", "--repeats", "2", "--trials", "3")
    return ["--model", str(tmp_path / "tiny.gguf"), "--dtype", "float64", "--workload", str(file), *sizes]


def wins(monkeypatch: pytest.MonkeyPatch, by: float = 1.5) -> None:
    monkeypatch.setattr(Tuner, "measure", lambda self, spec, workload, repeats: row([by, by, by * 1.01]))


@pytest.mark.parametrize("method", ["layer_skip", "early_exit"])
def test_measured_for_real(run, small: list[str], method: str) -> None:
    result = run("tune", method, *small, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["method"] == method and set(found["options"]) >= {"depth", "floor"}
    assert found["held_out"]["equal"] == found["held_out"]["compared"] == 4
    assert found["enabled"] == (found["speedup"] > 1 and found["held_out"]["verdict"] != "loses")
    assert found["provenance"]["command"] and found["provenance"]["model"] and len(found["prompts"]["held-out"]) == 2
    path = Path(found.pop("path"))
    assert json.loads(path.read_text()) == found and path.name == f"{method}-{found['fingerprint']}.json"
    assert "trial 3 of 3, best so far" in result.stderr


def test_a_winner_is_put_to_use(run, small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wins(monkeypatch)
    result = run("tune", "early_exit", *small)
    assert result.exit_code == 0, result.output
    assert "best of 3 trials: --draft early_exit:exit=1" in result.stdout and "1.50 [" in result.stdout
    assert "from now on --draft early_exit uses it" in result.stdout
    answer = run("generate", "ab ab", *small[:4], "--draft", "early_exit", "--control", "fixed", "--max-tokens", "8", "--json")
    assert answer.exit_code == 0 and "guess" not in answer.stderr
    assert json.loads(answer.stdout)["stats"]["drafter"] == "early_exit"


def test_a_loser_is_not(run, small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wins(monkeypatch, 0.8)
    result = run("tune", "early_exit", *small)
    assert result.exit_code == 0 and "LOSS: not put to use" in result.stdout
    answer = run("generate", "ab ab", *small[:4], "--draft", "early_exit", "--control", "fixed", "--max-tokens", "8", "--json")
    assert "gives no guesses: the best that tuning found" in answer.stderr and "0.80 times" in answer.stderr
    assert json.loads(answer.stdout)["stats"]["drafted"] == 0


def test_ctrl_c_keeps_the_trials(run, small: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []

    def measure(self, spec, workload, repeats):
        calls.append(spec)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return row([1.5, 1.5])

    monkeypatch.setattr(Tuner, "measure", measure)
    output = str(tmp_path / "found.json")
    result = run("tune", "early_exit", *small, "--output", output)
    assert result.exit_code == 130 and not Path(output).exists()
    assert "2 trials are kept" in result.stderr and "--draft early_exit:exit=1" in result.stderr
    result = run("tune", "early_exit", *small, "--output", output)
    assert result.exit_code == 0 and len(calls) == 5, "one trial more, and the verdict"
    assert json.loads(Path(output).read_text())["search"]["trials"] == 3


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("ngram",), "no options to search for"),
        (("layer_skp",), "did you mean 'layer_skip'"),
        (("early_exit", "--limit", "2", "--workload", "nothing"), "no workload 'nothing'"),
        (("early_exit", "--output", "/nowhere/at/all.json"), "give a file in a directory that exists"),
    ],
)
def test_bad_input(run, command: tuple[str, ...], words: str) -> None:
    result = run("tune", *command)
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output


def test_without_optuna(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    result = run("tune", "layer_skip")
    assert result.exit_code == 2 and 'pip install "outrider[tune]"' in result.output


def test_help_shows_an_example(run) -> None:
    result = run("tune", "--help")
    assert result.exit_code == 0 and "Example: outrider tune layer_skip" in result.output
