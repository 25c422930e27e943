"""Pages that carry figures say what the committed results say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from outrider.plan.tasks import TASKS
from outrider.train import again
from outrider.train.data import Writing
from outrider.train.loop import Recipe
from outrider.train.run import method
from outrider.version import VERSION

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("script", ["report.py", "performance.py"])
def test_pages_are_up_to_date(script: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_acceptance_of_every_task_with_a_published_range_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text().split("### Acceptance by task")[1]
    found = [json.loads(file.read_text()) for file in RESULTS.glob("acceptance*_cpu.json")]
    alphas = {(r["workload"], r["draft"]): r["alpha"] for result in found for r in result["results"]}
    for task in TASKS:
        [line] = re.findall(rf"^\| {task.name} \| .*$", readme, flags=re.MULTILINE)
        assert f"| {task.low:.0%} to {task.high:.0%} |" in line
        for draft in ("ngram", "suffix", "lookahead", "layer_skip"):
            assert f" {alphas[task.name, draft]:.0%} (" in line
    assert all(result["settings"]["control"] == "fixed" and "speeds" in result["note"] for result in found)


def test_results_name_no_directories() -> None:
    for file in RESULTS.rglob("*.json"):
        assert not re.findall(r'"(?:/[\w.-]+){2,}', file.read_text()), file.name


def test_provenance_names_the_version_of_the_source() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
    for card in (ROOT / "src" / "outrider" / "shipped").glob("*/card.json"):
        told = json.loads(card.read_text())["provenance"]["outrider"]
        assert told and f"Outrider {told}," in (card.parent / "README.md").read_text()


@pytest.mark.parametrize("name", again.names())
def test_the_shipped_cards_lead_to_the_run_they_tell_of(name: str) -> None:
    card = again.read(again.SHIPPED + name)
    asked = again.settings(card)
    assert method(again.spec(card))[2] == method(card["command"].split()[2])[2] == card["options"]
    assert asdict(Recipe(**asked["recipe"])) == card["training"]["recipe"]
    writing = Writing(**asked["writing"])
    told = {k: card["data"][k] for k in ("model", "fingerprint", "settings")}
    assert writing.identity(card["model"], card["fingerprint"]) == told and writing.tokens == card["data"]["taught"]
