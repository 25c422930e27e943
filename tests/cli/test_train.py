"""`outrider train`: options, what it says, and that the tiny model's drafter is better afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
