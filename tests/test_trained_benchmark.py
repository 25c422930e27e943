"""The benchmark of the trained drafters: rounds from given contexts, and the page that is made of its results."""

from __future__ import annotations

import argparse
import json

import pytest
from benchmarks import trained, trained_table

from outrider import LLM
from outrider.train import tiny


@pytest.fixture(scope="module")
def study():
    llm = LLM(str(tiny.directory()), draft="none", device="cpu", prefix_cache=False)
    prompts = {"one": [[1, 5, 9, 7]], "two": [[1, 8, 3], [4, 4, 6, 2, 9]]}
    return trained.Study(llm, "tiny", argparse.Namespace(max_tokens=12), prompts, float("inf"))


@pytest.mark.parametrize("depth", [1, 4])
def test_the_round_behind_a_context_is_a_whole_one(study, depth):
    rows = trained.contexts(study, f"self:depth={depth}")
    assert [r["workload"] for r in rows] == ["one", "two", "all"]
    for row in rows:  # the model drafts for itself: everything is accepted, but at the end of a text
        assert row["tau_0"] <= depth + 1 and row["tau_1"] <= depth + 1 and row["guessed"] == 1
    whole = trained.rounds(study, list(trained.places(study)), 1.0)
    assert max(whole) == (depth, depth + 1)


def test_plain_decoding_commits_one_token_wherever_it_begins(study):
    row = trained.contexts(study, "none")[-1]
    assert (row["tau_0"], row["tau_1"], row["ratio"], row["guessed"]) == (1, 1, 1, 0)


def test_the_interval_is_over_prompts():
    alike = trained.ratio([[(2, 3)] * 4, [(2, 3)] * 2])
    assert (alike["ratio"], alike["low"], alike["high"]) == (1.5, 1.5, 1.5)
    apart = trained.ratio([[(1, 1)], [(1, 3)]])
    assert apart["ratio"] == 2 and apart["low"] == 1 and apart["high"] == 3
    assert trained.ratio([[(1, 2)]])["low"] is None


def report(prompts, date, tau, device="cuda"):
    where = {"device": device, "cpu": "C", "threads": 2, "date": date, "torch": "2", "dtype": "float32", "commit": None}
    rows = [
        {"draft": "eagle", "workload": w, "temperature": 0.0, "tau": tau, "spread": 0.1, "prompts": prompts, "equal": prompts}
        | {"acceptance_by_position": [0.5]}
        for w in ("code", "all")
    ]
    settings = {"prompts": prompts, "max_tokens": 8, "pairs": 2}
    return {"complete": True, "settings": settings, "provenance": where, "tau": rows}


def test_the_page_shows_what_was_measured_and_what_was_not(tmp_path):
    (tmp_path / "gpu").mkdir()
    for name, made in {"a": report(9, "1", 4.5), "b": report(2, "2", 1.5), "c": report(5, "3", 2.0, "cpu, 2 threads")}.items():
        (tmp_path / f"trained_{name}.json").write_text(json.dumps(made))
    page = trained_table.section(tmp_path, tmp_path / "none")
    assert "| 4.50 ± 0.10 / 4.50 ± 0.10 | cuda | stretch |" in page, "more prompts count for more than a later date"
    assert "| 2.00 ± 0.10 / 2.00 ± 0.10 | C, 2 threads | below the bar |" in page
    assert page.count(trained_table.MISSING) == 5


def test_a_bar_is_reached_by_all_its_values():
    assert trained_table.TAU.verdict([3.0, 2.6]) == "bar"
    assert trained_table.TAU.verdict([4.1, 2.5]) == "below the bar"
    assert trained_table.STEP.verdict([65]) == "stretch" and trained_table.STEP.verdict([91]) == "below the bar"
