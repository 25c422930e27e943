"""`outrider train`: options, what it says, and that the tiny model's drafter is better afterwards."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from outrider.cli.app import app
from outrider.cli.train import _plan, shown
from outrider.train import again
from outrider.train.run import trainable

SIZES = ["--write", "4000", "--steps", "60"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("OUTRIDER_HOME", "OUTRIDER_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path


def test_a_drafter_for_the_tiny_model(run, home, monkeypatch):
    monkeypatch.setattr("sys.argv", ["outrider", "train", "draft_model:layers=1", "--model", "tiny"])
    out = run("train", "draft_model:layers=1", "--model", "tiny", "--device", "cpu", *SIZES, "--json")
    assert out.exit_code == 0, out.output
    made = json.loads(out.stdout)
    curve = made["card"]["curve"]
    assert curve[-1]["acceptance"] > 0.2 and made["card"]["results"][0]["tau"] > 1.3
    assert made["card"]["command"] == "outrider train draft_model:layers=1 --model tiny"
    again = run("train", "draft_model:layers=1", "--model", "tiny", "--device", "cpu", *SIZES)
    assert again.exit_code == 0 and "by depth" in again.stdout and "--draft auto finds it" in again.stdout


def test_commands_of_cards_name_no_directories(tmp_path):
    (tmp_path / "b").mkdir()
    given = ["train", f"draft_model:init={tmp_path}/b,layers=1", "--out=/x/y", "--texts", "texts/of/mine", "--data", "~/c.txt"]
    given += ["--model", "org/name", "--minutes", "1"]
    reduced = ["train", "draft_model:init=b,layers=1", "--out=y", "--texts", "mine", "--data", "c.txt", *given[-4:]]
    assert shown(given) == reduced
    assert shown(["train", "ship/eagle"]) == ["train", "ship/eagle"]


def documented() -> list[list[str]]:
    """Commands in docs/training.md, shells' continuation lines joined."""
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = text.split("```")[1::2]
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines() if " train " in line]
    return [line[line.index("train") :] for line in lines if line[0] in ("outrider", "torchrun")]


CARD = {
    "method": "medusa",
    "options": {"heads": 2, "rows": "own"},
    "data": {"taught": 5000, "settings": {"batch": 16, "seed": 3, "temperatures": [0.0, 1.0], "files": ["abc"]}},
    "training": {"recipe": {"steps": 40, "rate": 1e-3}},
}


@pytest.mark.parametrize("command", documented(), ids=" ".join)
def test_documented_commands_are_understood(command, tmp_path):
    """As far as a plan, with nothing loaded. NAME is any drafter that came with the package, DIR one with a card."""
    (tmp_path / "card.json").write_text(json.dumps(CARD))
    for name in again.names() if "ship/NAME" in command else ["NAME"]:
        words = [word.replace("NAME", name).replace("DIR", str(tmp_path)) for word in command[1:]]
        given = typer.main.get_command(app).commands["train"].make_context("train", words).params
        if given["method"] != "help":
            plan = _plan(given)
            assert plan.method.partition(":")[0] in trainable()


def test_a_card_becomes_the_plan_that_it_tells_of(tmp_path):
    (tmp_path / "card.json").write_text(json.dumps(CARD))
    words = [str(tmp_path / "card.json"), "--steps", "50"]
    plan = _plan(typer.main.get_command(app).commands["train"].make_context("train", words).params)
    assert (plan.method, plan.recipe.steps, plan.recipe.rate) == ("medusa:heads=2,rows=own", 50, 1e-3)
    assert (plan.writing.tokens, plan.writing.seed, plan.writing.temperatures, plan.writing.files) == (5000, 3, (0.0, 1.0), ())


def test_no_time_at_all(run, home):
    out = run("train", "draft_model", "--model", "tiny", "--device", "cpu", "--minutes", "0")
    assert out.exit_code == 0 and "run the same command again" in out.stderr


def test_a_home_that_no_shell_expanded(run, home, monkeypatch):
    monkeypatch.setenv("HOME", str(home))
    out = run("train", "draft_model", "--model", "tiny", "--device", "cpu", "--minutes", "0", "--out", "~/x", "--json")
    assert json.loads(out.stdout)["out"] == str(home / "x")


@pytest.mark.slow
def test_killed_it_goes_on(home):
    """kill -9 in the middle, wherever that is; then the same command."""
    command = [sys.executable, "-m", "outrider", "train", "draft_model:layers=1", "--model", "tiny", "--device", "cpu", *SIZES]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list((home / "OUTRIDER_CACHE").rglob("shard-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    done = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stage"] == "done"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ngram"], "has nothing to train"),
        (["draft_model:depth=3"], "has no key depth"),
        (["draft_model", "--data", "missing.jsonl"], "cannot be read"),
        (["draft_model", "--out", __file__], "is a file"),
        (["draft_model", "--rate", "0"], "--rate"),
        (["draft_model", "--model", "no-such-model"], "no model"),
        (["draft_model", "--out", "a,b"], "comma"),
    ],
)
def test_bad_input_is_one_line(run, home, arguments, message):
    out = run("train", *(arguments if "--model" in arguments else [*arguments, "--model", "tiny"]))
    assert out.exit_code == 2 and message in out.stderr and "Traceback" not in out.output


def test_help_lists_methods_and_their_options(run):
    out = run("train", "help")
    assert out.exit_code == 0 and "draft_model" in out.stdout and "rows=target" in out.stdout
