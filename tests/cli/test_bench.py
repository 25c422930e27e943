"""`outrider bench`: what it prints, and its exit status."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import registry
from outrider.bench import saved, versus, words
from outrider.bench.numbers import Speedup
from outrider.bench.runner import Runner
from outrider.cli.bundle import Bundle
from outrider.errors import BadInput
from outrider.llm import LLM
from tests.bench.reports import EVEN, FAST, report, rows
from tests.models.tiny_gguf import Tiny

ROW = {"tokens_per_second", "speedup", "tau", "alpha", "acceptance_by_position", "draft_seconds", "verify_seconds"}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    Tiny(kind="Q4_1").write(tmp_path / "tiny.gguf")
    return str(tmp_path / "tiny.gguf")


@pytest.fixture
def small(model: str, tmp_path: Path) -> list[str]:
    """A command on two short prompts."""
    file = tmp_path / "short.txt"
    file.write_text("ab ab ab ab\n\nhello hello\n\nleft out")
    sizes = ("--max-tokens", "12", "--repeats", "2", "--limit", "2", "--control", "fixed")
    return ["bench", "--model", model, "--dtype", "float64", "--workload", str(file), *sizes]


def test_json(run, small: list[str], tmp_path: Path) -> None:
    result = run(*small, "--draft", "ngram", "--draft", "synthetic:rate=1", "--json", "--output", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads((tmp_path / "out.json").read_text())
    assert (report["verdict"], report["interrupted"], report["divergences"]) == ("equal", False, [])
    rows = report["results"]
    assert [(r["workload"], r["draft"], r["synthetic"]) for r in rows] == [
        ("short", "none", False), ("short", "ngram", False), ("short", "synthetic:rate=1", True),
    ]  # fmt: skip
    assert all(set(r) >= ROW for r in rows) and all(r["equal"] == r["compared"] > 0 for r in rows)
    assert set(rows[1]["speedup"]) == {"median", "min", "max", "low", "high", "pairs"} and rows[2]["alpha"] == 1.0
    assert report["settings"]["repeats"] == 2 and len(report["workloads"][0]["sha256"]) == 2
    assert {"commit", "torch", "device", "dtype", "threads", "platform", "command", "date"} <= set(report["provenance"])
    assert "short: ngram" in result.stderr and "100% done" in result.stderr


def test_a_trace_of_all_runs_by_workload(run, small: list[str], tmp_path: Path) -> None:
    assert run(*small, "--draft", "ngram", "--repeats", "1", "--trace", str(tmp_path / "t.jsonl")).exit_code == 0
    result = run("replay", str(tmp_path / "t.jsonl"), "--json")
    found = json.loads(result.stdout)
    assert set(found["drafters"]) == {"none", "ngram"} and found["labels"]["short"]["drafted"] > 0


def test_a_table_for_people(run, small: list[str]) -> None:
    result = run(*small, "--draft", "auto", "--draft", "synthetic:rate=1,depth=3", "--temperature", "1", "--batch", "2")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split()[:4] == ["workload", "drafter", "tok/s", "speed-up"]
    assert [line.split()[1] for line in lines[1:4]] == ["none", "auto", "synthetic:rate=1,depth=3*"]
    assert "auto (suffix)" in lines[2] and "100%" in lines[3]
    assert "tau:" in result.stdout and "not a real drafter" in result.stdout
    assert "8 of 8 answers are those of plain decoding" in result.stdout


def test_the_default_drafters(run, small: list[str]) -> None:
    rows = json.loads(run(*small, "--json").stdout)["results"]
    assert [(r["draft"], r["drafter"]) for r in rows] == [("none", "none"), ("auto", "suffix")]


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = LLM.generate

    def spoiled(self, prompts, params):
        results = generate(self, prompts, params)
        if self.engine.drafter.name == "ngram":
            ids = results[0].token_ids
            results[0] = replace(results[0], token_ids=(*ids[:2], (ids[2] + 1) % 200, *ids[3:]))
        return results

    monkeypatch.setattr(LLM, "generate", spoiled)


def test_a_text_that_differs_ends_with_1(run, small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    result = run(*small, "--draft", "ngram")
    assert result.exit_code == 1
    assert "0/4 DIFFER" in result.stdout and "0 of 4 answers" in result.stdout
    assert "DIFFERENT TEXT (FAULT): short, ngram, prompt 1: token 2 is" in result.stdout
    result = run(*small, "--draft", "ngram", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["verdict"] == "different"


def test_losses_are_named(run, small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = Runner.__init__

    def slow(self, llm, plan, tell, **more) -> None:
        now = [0.0]

        def clock() -> float:
            now[0] += 2.0 if llm.engine.drafter.name == "ngram" else 1.0
            return now[0]

        real(self, llm, plan, tell, clock, **more)

    monkeypatch.setattr(Runner, "__init__", slow)
    result = run(*small, "--draft", "ngram")
    assert result.exit_code == 0, result.output
    assert "0.50 [0.50, 0.50]" in result.stdout and result.stdout.splitlines()[2].endswith("LOSS")
    assert "On short, ngram is slower than plain decoding: 0.50 times its speed, at most 0.50. Its" in result.stdout


@pytest.mark.parametrize(("after", "words"), [(6, "interrupted: this is what was measured by then"), (1, "nothing was measured")])
def test_ctrl_c(run, small: list[str], monkeypatch: pytest.MonkeyPatch, after: int, words: str) -> None:
    passes, calls = Runner._run, []

    def interrupted(self, cell, prompts):
        calls.append(cell)
        if len(calls) == after:
            raise KeyboardInterrupt
        return passes(self, cell, prompts)

    monkeypatch.setattr(Runner, "_run", interrupted)
    result = run(*small, "--draft", "ngram")
    assert result.exit_code == 130 and words in result.output and "interrupted" in result.stderr
    assert ("ngram" in result.stdout) == (after == 6)


def test_ctrl_c_with_json(run, small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self, cell, prompts):
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "_run", interrupted)
    result = run(*small, "--json")
    assert result.exit_code == 130 and json.loads(result.stdout)["interrupted"] is True


def test_a_drafter_that_was_switched_off_is_said(run, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {name: registry.get(name) for name in registry.names()}
    monkeypatch.setattr(registry, "_table", lambda: table)  # what this test registers is gone after it
    file = tmp_path / "broken.py"
    file.write_text(
        "from outrider import Drafter, register\n@register('broken')\nclass Broken(Drafter):\n    def __init__(self, config):\n"
        "        pass\n    def propose(self, batch, budget):\n        raise ZeroDivisionError\n"
    )
    result = run(*small, "--draft", str(file))
    assert result.exit_code == 0, result.output
    assert "no guesses, switched off" in result.stdout and "its numbers are not the drafter's" in result.stdout


def test_weights_of_a_drafter_are_told_apart(run, small: list[str], model: str, tmp_path: Path) -> None:
    """`auto` may find another file tomorrow, and a path another model."""
    draft = f"draft_model:path={model}"
    assert run(*small, "--draft", draft, "--repeats", "1", "--output", str(tmp_path / "a")).exit_code == 0
    found = saved.read(tmp_path / "a")
    mine = found.provenance["drafters"][draft]
    assert mine["path"] == model and mine["sampled_sha256"] == found.provenance["model"]["sampled_sha256"]
    other = {**found.provenance, "drafters": {draft: {**mine, "sampled_sha256": "0"}}}
    assert versus.compare(found, found).notes == ()
    assert versus.compare(found, replace(found, provenance=other)).notes == (f"other weights of the drafter {draft}",)


def test_names_that_no_encoding_can_write(run, small: list[str], tmp_path: Path) -> None:
    """Linux allows file names that are not UTF-8; an hour of measuring must not end with one."""
    odd = tmp_path / "odd\udcff.txt"
    try:
        odd.write_text("ab ab")
    except (OSError, UnicodeError):
        pytest.skip("no such names here")
    result = run(*small, "--draft", "ngram", "--repeats", "1", "--workload", str(odd), "--output", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert "odd\\udcff" in result.stdout and "odd\\udcff" in (tmp_path / "out" / "result.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("output", "html", "said"), [("x.json", "x.json", "both name"), ("", None, "need a path")])
def test_files_that_would_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, html: str | None, said: str):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=said):
        Bundle.of(output, html)


def test_what_cannot_be_written_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # nothing is forbidden to root
    with pytest.raises(BadInput, match="not writable"):
        Bundle.of(str(tmp_path), None)


def test_a_folder_with_numbers_and_page(run, small: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "result"
    result = run(*small, "--draft", "ngram", "--output", str(folder), "--html", str(tmp_path / "other.html"))
    assert result.exit_code == 0, result.output
    assert [p.name for p in folder.iterdir()] == ["result.json"] and f"wrote {folder / 'result.json'}" in result.stderr
    assert (tmp_path / "other.html").read_text().startswith("<!doctype html>")
    run(*small, "--draft", "ngram", "--output", str(folder), "--max-tokens", "4")
    assert sorted(p.name for p in folder.iterdir()) == ["result.html", "result.json"]


def test_a_sweep(run, small: list[str]) -> None:
    once = ("--draft", "ngram", "--repeats", "1")
    result = run(*small, *once, "--depth", "1, 2", "--temperature", "0,1", "--rate", "100/s", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["results"]
    assert {(r["temperature"], r["batch"], r["rate"]) for r in rows} == {(t, None, 100) for t in (0, 1)}
    assert [r["depth"] for r in rows[:3]] == [None, 1, 2] and len(rows) == 6
    text = run(*small, *once, "--batch", "1,2").stdout
    assert "short (T = 0, batch 2)" in text and "Where speculation loses:" in text


def test_quick_takes_a_few_of_everything(run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def stop(llm, plan, *more, **others):
        plans.append(plan)
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "__init__", lambda self, *given, **named: stop(*given, **named))
    run("bench", "--model", model, "--quick")
    run("bench", "--model", model, "--quick", "--limit", "1", "--max-tokens", "5")
    run("bench", "--model", model)
    assert [(p.limit, p.max_tokens, p.repeats) for p in plans] == [(None, 48, 3), (1, 5, 3), (None, 128, 3)]
    assert [{len(w.prompts) for w in p.workloads} for p in plans] == [{3}, {3}, {10}]
    assert len(plans[0].workloads) > len(plans[2].workloads) and plans[0].drafts == ("none", "auto")


@pytest.fixture
def two_results(tmp_path: Path) -> tuple[str, str]:
    """The second is half as fast on code."""
    files = tmp_path / "a.json", tmp_path / "b.json"
    for file, speeds in zip(files, (FAST, EVEN), strict=True):
        file.write_text(json.dumps(report(rows("code", "guess", speeds)).as_json()))
    return str(files[0]), str(files[1])


def test_compare(run, two_results: tuple[str, str], tmp_path: Path) -> None:
    result = run("compare", *two_results)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and lines[0].endswith("no difference beyond noise") and lines[1].endswith("slower")
    assert "0.502 [0.4" in lines[1] and "on average over 2 cells" in result.stdout
    assert run("compare", *two_results, "--fail-on-slower").exit_code == 1
    assert run("compare", *two_results, "--fail-on-slower", "--tolerance", "0.6").exit_code == 0
    assert run("compare", *reversed(two_results), "--fail-on-slower").exit_code == 0
    found = json.loads(run("compare", *two_results, "--by", "speedup", "--json").stdout)
    assert [c["verdict"] for c in found["cells"]] == ["slower"]


def test_compare_what_cannot_be(run, two_results: tuple[str, str], tmp_path: Path) -> None:
    other = json.loads(Path(two_results[1]).read_text())
    other["provenance"]["device"] = "another card"
    file = tmp_path / "c.json"
    file.write_text(json.dumps(other))
    result = run("compare", two_results[0], str(file))
    assert result.exit_code == 0 and "not comparable: other device (cpu, 2 threads, another card)" in result.stdout
    assert run("compare", two_results[0], str(file), "--fail-on-slower").exit_code == 2
    assert "ignored: other device" in run("compare", two_results[0], str(file), "--ignore", "device").stdout
    result = run("compare", two_results[0], str(tmp_path / "nowhere.json"))
    assert result.exit_code == 2 and "cannot read" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--draft", "nosuch"], "unknown drafter"),
        (["--draft", "ngram:nosuch=1"], "has no key"),
        (["--workload", "nosuch"], "no workload"),
        (["--workload", "code", "--workload", "code"], "two workloads"),
        (["--repeats", "0"], "--repeats"),
        (["--temperature", "-1"], "temperature"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--output", "/no/such/directory/x.json"], "--output"),
        (["--output", "/dev/null"], "neither a .json file nor a folder"),
        (["--html", "/no/such/directory/x.html"], "--html"),
        (["--depth", "1,x"], "--depth"),
        (["--depth", "0"], "depth must be at least 1"),
        (["--batch", "1.5"], "--batch"),
        (["--rate", "-1"], "rate must be"),
        (["--temperature", "0,,1"], "--temperature"),
        (["--model", "/no/such/model"], "no model"),
    ],
)
def test_bad_usage_ends_with_2(run, options: list[str], words: str) -> None:
    result = run("bench", *options)
    assert result.exit_code == 2 and words in result.output


def test_files_say_how_they_were_read_and_spec_bench_gets_its_table(run, model: str, tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    rag, qa = ({"question_id": i, "category": c, "turns": ["ab ab"]} for i, c in enumerate(("rag", "qa")))
    file.write_text("\n".join(json.dumps(x) for x in (rag, rag | {"turns": ["x"]}, qa)))
    small = ("bench", "--model", model, "--dtype", "float64", "--draft", "ngram", "--max-tokens", "6", "--repeats", "1")
    result = run(*small, "--workload", f"spec_bench:{file}", "--prompts", "1", "--output", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    assert f"spec_bench:{file}: 1 prompt, read as Spec-Bench questions" in result.stderr
    table = result.stdout.partition("Spec-Bench: ")[2].splitlines()
    assert [line.split()[:3] for line in table[2:]] == [
        [task, draft, count] for task, count in (("qa", "1"), ("rag", "1"), ("overall", "2")) for draft in ("none", "ngram")
    ]
    lines = json.loads((tmp_path / "out.json").read_text())["spec_bench"]
    assert [line["task"] for line in lines] == ["qa", "qa", "rag", "rag", "overall", "overall"]
    result = run(*small, "--workload", str(file), "--prompts", "2", "--batch", "2")
    assert f"{file}: 2 prompts, read as Spec-Bench questions" in result.stderr and "Spec-Bench: " not in result.stdout


def test_prompts_too_long_for_the_model(run, model: str) -> None:
    result = run("bench", "--model", model, "--workload", "summarise", "--draft", "ngram")
    assert result.exit_code == 2 and "workload summarise, prompt 1" in result.stderr


def test_help_lists_drafters(run) -> None:
    result = run("bench", "--draft", "help")
    assert result.exit_code == 0 and "NOT A REAL DRAFTER" in result.stdout


def test_a_wide_interval_is_kept_short() -> None:
    assert words.interval(Speedup.of([0.5, 9.0])) == "[0.00, 100+]"
    assert words.interval(Speedup.of([0.5])) == ""
