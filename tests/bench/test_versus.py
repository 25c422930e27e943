"""Two results against each other: the ratio, its interval, and what must not be compared."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.bench import saved
from outrider.bench.report import Report
from outrider.bench.versus import APART, FASTER, SAME, SLOWER, compare, welch
from outrider.errors import BadInput
from tests.bench.reports import EVEN, FAST, MIXED, SLOW, report, rows


def verdicts(a: Report, b: Report, **options) -> dict[str, str]:
    return {f"{c.key[0]} {c.label}": c.verdict for c in compare(a, b, **options).cells}


def test_faster_slower_and_neither() -> None:
    later = report(rows("code", "guess", EVEN), rows("creative", "guess", FAST), rows("chat", "guess", EVEN))
    found = verdicts(MIXED, later)
    assert [found[f"{name} guess"] for name in ("code", "creative", "chat")] == [SLOWER, FASTER, SAME]
    assert all(found[f"{name} none"] == SAME for name in ("code", "creative", "chat"))
    [cell] = compare(MIXED, later).slower
    assert cell.ratio == pytest.approx(0.5, abs=0.01) and cell.low < cell.ratio < cell.high < 1
    assert set(verdicts(MIXED, later, tolerance=0.6).values()) == {SAME, FASTER}


def test_the_same_result_is_no_faster_than_itself() -> None:
    found = compare(MIXED, MIXED)
    assert {c.verdict for c in found.cells} == {SAME} and found.ratio == pytest.approx(1) and not found.notes


def test_speedups_forgive_a_slower_machine() -> None:
    def slower(r):
        return replace(r, paces=tuple(p / 2 for p in r.paces))

    later = replace(MIXED, rows=tuple(map(slower, MIXED.rows)))
    assert set(verdicts(MIXED, later).values()) == {SLOWER}
    found = verdicts(MIXED, later, by="speedup")
    assert set(found.values()) == {SAME} and len(found) == 3


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("device", "NVIDIA H200", "other device (cpu, 2 threads, NVIDIA H200)"),
        ("torch", "2.12.0", "other torch (2.13.0, 2.12.0)"),
        ("model", {"name": "tiny", "sampled_sha256": "0"}, "other weights of tiny"),
        ("model", {"name": "large"}, "other model (tiny, large)"),
    ],
)
def test_what_is_not_comparable(name: str, value, why: str) -> None:
    later = replace(MIXED, provenance={**MIXED.provenance, name: value})
    found = compare(MIXED, later)
    assert {c.verdict for c in found.cells} == {APART} and {c.why for c in found.cells} == {why} and found.ratio is None
    ignored = compare(MIXED, later, ignore=[name])
    assert {c.verdict for c in ignored.cells} == {SAME} and ignored.notes == (f"ignored: {why}",)


def test_other_prompts_concern_one_workload() -> None:
    prompts = {**MIXED.provenance["prompts"], "code": "other"}
    found = compare(MIXED, replace(MIXED, provenance={**MIXED.provenance, "prompts": prompts}))
    assert {c.key[0] for c in found.cells if c.why == "other prompts"} == {"code"} and len(found.comparable) == 4


def test_settings_and_what_only_one_has() -> None:
    other = replace(MIXED, settings={**MIXED.settings, "max_tokens": 7})
    assert {c.why for c in compare(MIXED, other).cells} == {"other max_tokens (48, 7)"}
    found = compare(report(rows("code", "guess", FAST)), report(rows("code", "other", FAST)))
    assert sorted(c.why for c in found.cells) == ["", "only in the first result", "only in the second result"]


def test_an_other_commit_is_what_one_compares() -> None:
    found = compare(MIXED, replace(MIXED, provenance={**MIXED.provenance, "commit": "decade"}, interrupted=True))
    assert len(found.comparable) == 6
    assert found.notes == ("commit: c0ffee, then decade", "the second result was interrupted")


def test_a_single_run_proves_nothing() -> None:
    found = compare(report(rows("code", "guess", FAST[:1])), report(rows("code", "guess", SLOW[:1])))
    assert {c.verdict for c in found.cells} == {APART} and found.ratio is None
    assert all("single run" in c.why and c.ratio is not None and c.low is None for c in found.cells)


@pytest.mark.parametrize("options", [{"by": "luck"}, {"ignore": ["luck"]}, {"tolerance": 1.0}, {"tolerance": math.nan}])
def test_options_that_cannot_be(options) -> None:
    with pytest.raises(BadInput):
        compare(MIXED, MIXED, **options)


def test_welch_on_a_known_example() -> None:
    """Logarithms 0, 1, 2 against 3, 5: means 1 and 4, variances 1/3 + 1 of the means, 1.71 degrees of freedom, taken as 1."""
    ratio, low, high = welch([1, math.e, math.e**2], [math.e**3, math.e**5])
    assert math.log(ratio) == pytest.approx(3)
    assert (math.log(low), math.log(high)) == pytest.approx((3 - 12.706 * math.sqrt(4 / 3), 3 + 12.706 * math.sqrt(4 / 3)))
    assert welch([2, 2], [4, 4]) == pytest.approx((2, 2, 2))
    assert all(math.isfinite(v) for v in welch([1e-300, 1.0], [1.0, 1e308]))  # absurd, but no reason to break


# Files


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(MIXED.as_json()))
    for path in (tmp_path, tmp_path / "result.json"):
        again = saved.read(path)
        assert again.rows == MIXED.rows and again.workloads == MIXED.workloads and again.as_json() == MIXED.as_json()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "no result"),
        ('{"results": [], "provenance": {}}', "has format 1"),
        ('{"results": [{}], "provenance": {}, "format": 2}', "damaged"),
    ],
)
def test_files_that_are_no_results(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(BadInput, match=words):
        saved.read(file)
    with pytest.raises(BadInput, match="cannot read"):
        saved.read(tmp_path / "nowhere.json")
