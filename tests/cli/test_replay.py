"""`outrider replay`: rounds, summary, pictures; whatever the file holds."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from outrider.cli import rounds as module
from outrider.watch import reader

HEAD = {"outrider_trace": 1, "model": "tiny", "drafter": "ngram", "controller": "fixed", "rule": "coupled", "text": False}


def share(**more):
    found = {"id": 3, "rule": "coupled", "depth": 4, "drafted": 3, "accepted": 2, "tokens": 3, "offered": [1, 1, 1]}
    return found | {"origins": [0, 0, -1]} | more


def one(number: int, *shares, **more):
    found = {"round": number, "at": number / 10, "draft": 0.001, "verify": 0.08, "other": 0.019, "batch": len(shares), "rows": 4}
    return found | {"prefill": 0, "drafter": "ngram", "requests": list(shares)} | more


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    plain = share(id=4, depth=0, drafted=0, accepted=0, tokens=1, offered=[], origins=[-1])
    rounds = [one(1, share(label="code"), plain, control="on: it pays"), one(2, share(label="code", finish="stop"), plain)]
    rounds += [one(3, share(id=5, accepted=0, tokens=1, origins=[-1]))]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (HEAD, *rounds)))
    return path


def test_each_round_is_shown_and_summed_up(run, trace):
    result = run("replay", str(trace))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["1", "3", "code", "ahead", "4", "++xo"]
    assert lines[1].split() == ["1", "4", "ahead", "0", "o"] and lines[2].strip() == "controller on: it pays"
    assert lines[3].split()[-2:] == ["++xo", "stop"] and lines[5].split()[-1] == "xxxo"
    assert "+: accepted guess" in result.stderr
    for part in ("3 rounds, 9 tokens in 0.30 s", "tau 1.80", "alpha 44% of 9", "1: 67%  2: 67%  3: 0%", "1 by stop"):
        assert part in result.stdout
    assert re.search(r"code +6 +3\.00 +67% +4\.0", result.stdout) and re.search(r"unlabelled +3 ", result.stdout)


def test_json_has_the_same_numbers(run, trace):
    found = json.loads(run("replay", str(trace), "--json").stdout)
    assert found["trace"] == HEAD and found["rounds"] == 3 and found["accepted"] == 4
    assert found["labels"]["code"]["acceptance_by_position"] == [1.0, 1.0, 0.0]
    assert [stretch["depth"] for stretch in found["over_time"]] == [2.0, 2.0, 4.0]
    assert found["over_time"][2]["tokens_per_second"] == pytest.approx(10)


def test_text_is_painted_with_colours_or_brackets(run, traced_text, monkeypatch):
    result = run("replay", str(traced_text))
    assert "[b]{-x-}c" in result.stdout and "\x1b" not in result.stdout
    [first, *_] = reader.read(traced_text).rounds
    console = Console(force_terminal=True, color_system="standard", width=200, highlight=False)
    with console.capture() as caught:
        module.show(console, first)
    assert "\x1b[32m+" in caught.get() and "\x1b[4;32mb" in caught.get()


@pytest.fixture
def traced_text(tmp_path: Path) -> Path:
    pieces = [["a\n", "own"], ["b", "accepted"], ["x", "rejected"], ["c\x1b[2J", "own"]]
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps(HEAD | {"text": True}) + "\n" + json.dumps(one(1, share(pieces=pieces, label="\x1b]0;x"))) + "\n")
    return path


def test_it_can_be_played_in_time(run, trace, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    assert run("replay", str(trace), "--speed", "2").exit_code == 0
    assert slept == pytest.approx([0.05, 0.05])


def test_a_cut_trace_is_shown_as_far_as_it_goes(run, trace):
    trace.write_bytes(trace.read_bytes()[:-9])
    result = run("replay", str(trace), "--summary")
    assert result.exit_code == 0 and "cut short" in result.stderr and "2 rounds" in result.stdout
    assert "ahead" not in result.stdout


@pytest.mark.parametrize("kind", ["html", "svg"])
def test_pictures_are_self_contained(run, trace, tmp_path, kind):
    path = tmp_path / f"p.{kind}"
    assert run("replay", str(trace), "--plot", str(path), "--summary").exit_code == 0
    text = path.read_text()
    assert "src=" not in text and "href=" not in text
    drawn = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    words = [e.text for e in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"first guesses accepted", "levels looked ahead", "tokens per second"} <= set(words)
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}polyline"))) == 3
    if kind == "html":
        assert "tau 1.80" in text


def test_png(run, trace, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "p.png"
    assert run("replay", str(trace), "--plot", str(path), "--summary").exit_code == 0
    assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["{trace}", "--plot", "p.gif"], ".html, .svg or .png"),
        (["{trace}", "--plot", "no/such/p.svg"], "directory that exists"),
        (["{trace}", "--speed", "0"], "above 0"),
        (["nowhere.jsonl"], "cannot read"),
        (["{other}"], "no trace"),
    ],
)
def test_what_can_be_wrong(run, trace, tmp_path, options, said):
    other = tmp_path / "other.jsonl"
    other.write_text("hello\n")
    result = run("replay", *(word.format(trace=trace, other=other) for word in options))
    assert result.exit_code == 2 and said in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "damage", [{"offered": "abc"}, {"tokens": None}, {"label": 5}, {"pieces": [["a", "who"]]}, {"surplus": 1}, {"origins": [[]]}]
)
def test_damaged_values_are_no_bug(run, tmp_path, damage):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(HEAD) + "\n" + json.dumps(one(1, share(**damage))) + "\n")
    result = run("replay", str(path))
    assert result.exit_code == 2 and "damaged" in result.stderr


def test_a_trace_without_rounds(run, trace):
    trace.write_text(json.dumps(HEAD) + "\n")
    result = run("replay", str(trace), "--plot", str(trace.with_suffix(".svg")))
    assert result.exit_code == 0 and "no rounds" in result.stdout
