"""Traces: they say what happened, survive what can happen to files, and harm nobody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import SamplingParams
from outrider.errors import BadInput, OutriderWarning
from outrider.types import NONE, Committed, Finish, StepEvent
from outrider.watch import files, parquet, reader
from outrider.watch.files import Rolling, aside
from outrider.watch.trace import Trace

from .. import tiny
from .conftest import PARAMS


def event(tokens: int = 3, **more) -> StepEvent:
    """A round of one request that kept all its guesses."""
    request = tiny.request([1, 2])
    origins = (0,) * (tokens - 1) + (NONE,)
    item = Committed(request, (5,) * tokens, origins, tokens - 1, tokens - 1, (1,) * (tokens - 1), (), "", Finish.RUNNING)
    return StepEvent((item,), draft_seconds=0.001, verify_seconds=0.01, seconds=0.02, prefill=0, rows=4, depths=(4,), **more)


def begun(path: Path, **options) -> Trace:
    trace = Trace(path, **options)
    trace.begin({"model": "tiny"}, lambda: ("someone", "because"), lambda ids: "".join(map(chr, ids)))
    return trace


def test_a_trace_adds_up_to_the_results_statistics(load, tmp_path):
    path = tmp_path / "t.jsonl"
    llm = load(trace=path)
    results = llm.generate(["hello hello", "abcabcabc"], [PARAMS, replace(PARAMS, label="letters", max_tokens=9)])
    found = reader.read(path)
    assert found.head["drafter"] == "ngram" and found.head["controller"] == "fixed" and not found.head["text"]
    rounds = list(found.rounds)
    assert [r.round for r in rounds] == list(range(1, len(rounds) + 1)) and not found.notes
    assert all(r.seconds > 0 and r.drafter == "ngram" and r.batch == len(r.requests) for r in rounds)
    for result, label in zip(results, (None, "letters"), strict=True):
        shares = [s for r in rounds for s in r.requests if s.label == label]
        stats = result.stats
        assert sum(s.tokens for s in shares) == stats.tokens == len(result.token_ids)
        assert (sum(s.drafted for s in shares), sum(s.accepted for s in shares)) == (stats.drafted, stats.accepted)
        assert tuple(o for s in shares for o in s.origins) == result.origins
        assert shares[-1].finish == "length" and {s.rule for s in shares} == {"coupled"} and shares[0].prompt_tokens
        assert max(s.depth for s in shares) == 4
    assert "hello" not in path.read_text()
    llm.close()


def test_text_is_written_only_if_asked_for_and_is_the_answer(traced, load):
    rounds = list(reader.read(traced).rounds)
    shares = [s for r in rounds for s in r.requests if s.label == "code"]
    assert shares[0].prompt == "hello hello"
    told = "".join(text for s in shares for text, mark in s.pieces or () if mark != "rejected")
    assert told == load().generate("hello hello", PARAMS)[0].text
    assert {mark for s in shares for _, mark in s.pieces or ()} == {"own", "accepted", "rejected"}


def test_nothing_is_watched_from_outside_without_a_trace(load):
    assert not load().engine.sinks


def test_lines_are_there_at_once_and_survive_a_kill(tmp_path):
    path = tmp_path / "t.jsonl"
    code = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tests.watch.test_trace import begun, event
trace = begun(Path({str(path)!r}))
for _ in range(50):
    trace(event())
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    assert len(list(reader.read(path).rounds)) == 50


def test_a_cut_last_line_is_forgiven_and_said_a_damaged_one_is_not(tmp_path):
    path = tmp_path / "t.jsonl"
    trace = begun(path)
    for _ in range(5):
        trace(event())
    trace.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    found = reader.read(path)
    assert len(list(found.rounds)) == 4 and "cut short" in found.notes[0]
    rows = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([*rows[:3], rows[3][:-20] + b"\n", *rows[4:]]))
    with pytest.raises(BadInput, match="line 4: no round"):
        list(reader.read(path).rounds)


@pytest.mark.parametrize("text", ["", "hello\n", "[1]\n", '{"round": 1}\n', '{"outrider_trace": 99}\n', "\x00\xff\n"])
def test_what_is_no_trace(tmp_path, text):
    path = tmp_path / "t.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(BadInput, match="trace"):
        reader.read(path)


def test_what_cannot_be_written_is_refused_before_a_model_is_loaded(tmp_path):
    (tmp_path / "mine.jsonl").write_text("precious\n")
    for path in (tmp_path, tmp_path / "no" / "t.jsonl", tmp_path / "mine.jsonl"):
        with pytest.raises(BadInput):
            Trace(path)
    with pytest.raises(BadInput, match="trace_mib"):
        Trace(tmp_path / "t.jsonl", mib=0)
    assert (tmp_path / "mine.jsonl").read_text() == "precious\n"
    (tmp_path / "t.3.jsonl").write_text("precious\n")
    with pytest.raises(BadInput, match=r"t\.3\.jsonl exists and is no trace"):
        Trace(tmp_path / "t.jsonl")


def test_full_files_are_put_aside_and_the_oldest_deleted(tmp_path):
    path = tmp_path / "t.jsonl"
    trace = begun(path, mib=0.01)
    for _ in range(400):
        trace(event())
    trace.close()
    kept = [aside(path, age) for age in range(files.KEPT)]
    assert sorted(kept) == sorted(tmp_path.iterdir())
    assert all(p.stat().st_size <= 0.01 * 2**20 for p in kept)
    assert all(p.stat().st_mode & 0o077 == 0 for p in kept), "they may hold prompts"
    numbers = [r.round for p in reversed(kept) for r in reader.read(p).rounds]
    assert numbers == list(range(numbers[0], 401))
    begun(path).close()
    assert not list(reader.read(path).rounds) and list(reader.read(aside(path, 1)).rounds)[-1].round == 400


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_ends_the_trace_with_one_warning_and_no_request(load):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        llm = load(trace="/dev/full")
        [result] = llm.generate("hello hello", PARAMS)
    assert result.finish_reason == "length"
    [warning] = [w for w in heard if issubclass(w.category, OutriderWarning)]
    assert "tracing has stopped" in str(warning.message)


def test_text_that_cannot_be_told_ends_the_trace_and_no_request(tmp_path):
    def broken(ids: object) -> str:
        raise RuntimeError("no such token")

    trace = Trace(tmp_path / "t.jsonl", text=True)
    trace.begin({}, lambda: ("a", "b"), broken)
    with pytest.warns(OutriderWarning, match="no such token"):
        trace(event())
    trace(event())
    assert not list(reader.read(tmp_path / "t.jsonl").rounds)


def test_half_a_line_written_is_a_full_disk(tmp_path, monkeypatch):
    out = Rolling(tmp_path / "t.jsonl", b"{}\n", 10**6)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    with pytest.warns(OutriderWarning, match="no space left"):
        out.write(b"a whole line\n")
    out.write(b"more\n")
    other = Rolling(tmp_path / "u.jsonl", b"{}\n", 10**6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.write(b"a whole line\n")  # raises nothing, whatever is done with warnings
    monkeypatch.undo()
    assert (tmp_path / "t.jsonl").read_bytes() == b"{}\na who"


def test_parquet_without_pyarrow_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadInput, match=r"outrider\[trace\]"):
        Trace(tmp_path / "t.parquet")


def test_parquet_holds_what_the_lines_held(tmp_path, traced):
    pytest.importorskip("pyarrow")
    path = tmp_path / "t.parquet"
    trace = begun(path)
    trace.close()
    assert path.is_file() and not files.lines_of(path).exists()
    files.lines_of(path).write_bytes(traced.read_bytes())
    assert len(list(reader.read(path).rounds)) == 0  # the finished one
    path.unlink()
    unfinished = reader.read(path)
    want = list(unfinished.rounds)
    assert "never finished" in unfinished.notes[0]
    parquet.convert(path)
    got = reader.read(path)
    assert list(got.rounds) == want and got.head["drafter"] == "ngram"
    (tmp_path / "bad.parquet").write_bytes(b"PAR1nonsense")
    with pytest.raises(BadInput, match="no trace"):
        reader.read(tmp_path / "bad.parquet")


def test_parquet_of_earlier_runs_is_put_aside_and_other_parquet_left_alone(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "t.parquet"
    for run in range(3):
        trace = begun(path, mib=0.01)
        for _ in range(60 if run == 2 else run):
            trace(event())
        trace.close()
    kept = [aside(path, age) for age in range(files.KEPT)]
    assert sorted(kept) == sorted(tmp_path.iterdir())
    rounds = [[r.round for r in reader.read(p).rounds] for p in kept]
    assert all(p.stat().st_mode & 0o077 == 0 for p in kept)
    assert rounds[1] + rounds[0] == list(range(1, 61)) and rounds[2:] == [[1], []]
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "mine.parquet")
    with pytest.raises(BadInput, match="no trace"):
        Trace(tmp_path / "mine.parquet")


@pytest.mark.parametrize(("old", "new"), [('"depth":4', f'"depth":{10**400}'), ('"at":', f'"at":-{10**30},"x":'), ("[1", "[1e3")])
def test_numbers_that_no_round_has(tmp_path, old, new):
    path = tmp_path / "t.jsonl"
    trace = begun(path)
    trace(event())
    trace.close()
    text = path.read_text()
    path.write_text(text.replace(old, new, 1))
    assert path.read_text() != text
    with pytest.raises(BadInput, match="damaged"):
        list(reader.read(path).rounds)


def test_a_pipe_is_no_trace():
    reading, writing = os.pipe()
    os.write(writing, b'{"outrider_trace": 1}\n')
    os.close(writing)
    with pytest.raises(BadInput, match="save it in one first"):
        reader.read(f"/dev/fd/{reading}")
    os.close(reading)


def test_a_trace_goes_on_when_the_drafter_is_switched(load, tmp_path):
    llm = load(trace=tmp_path / "t.jsonl")
    llm.generate("hello hello", PARAMS)
    llm.switch("none")
    llm.generate("hello hello", SamplingParams(max_tokens=3, ignore_eos=True))
    llm.close()
    drafters = [r.drafter for r in reader.read(tmp_path / "t.jsonl").rounds]
    assert drafters[0] == "ngram" and drafters[-1] == "none"


def test_why_the_controller_changed_its_mind_is_told_when_it_does(load, tmp_path):
    llm = load(trace=tmp_path / "t.jsonl", control="adaptive")
    llm.generate("hello hello", PARAMS)
    llm.close()
    told = [r.control for r in reader.read(tmp_path / "t.jsonl").rounds if r.control is not None]
    assert told and len(set(told)) == len(told) and any(t.startswith("on:") for t in told)


def test_lines_are_json_of_the_fields_that_are_documented(traced):
    first, *rest = map(json.loads, traced.read_text().splitlines())
    assert first["outrider_trace"] == files.VERSION
    for one in rest:
        assert {"round", "at", "draft", "verify", "other", "batch", "rows", "prefill", "drafter", "requests"} <= one.keys()
        for item in one["requests"]:
            assert {"id", "rule", "depth", "drafted", "accepted", "tokens", "offered", "origins"} <= item.keys()
