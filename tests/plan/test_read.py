"""A benchmark's result as plan and doctor read it: conditions apart, no drafter that is none, nothing damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.plan import Point
from outrider.bench.report import Report
from outrider.cli.outlook import Result
from outrider.cli.plan import Ask, _outlooks
from outrider.errors import BadInput
from outrider.plan import diagnose
from outrider.plan.gather import from_report
from outrider.plan.read import read
from tests.bench.reports import FAST, SLOW, report, rows

COSTS = {"verify": {"1": [[1, 0.01], [4, 0.011]]}, "draft": {"1": [[1, 0.0001]]}, "other": {"1": [[0, 0.001], [1, 0.001]]}}
FOUR = {name: {"4": curve["1"]} for name, curve in COSTS.items()}
ASK = Ask("m", (), (1, 2), (), "r", None, "", (), (1, 16, 0.0))


def written(folder: Path, found: Report) -> str:
    made = replace(found, rows=tuple(replace(r, costs=COSTS) for r in found.rows))
    (folder / "result.json").write_text(json.dumps(made.as_json()))
    return str(folder)


def planned(path: str, ask: Ask = ASK) -> Result:
    result = Result("m")
    _outlooks(ask, from_report(read(path), ask.drafts, ask.depths, None), result)
    return result


def test_a_folder_is_as_good_as_its_file(tmp_path: Path) -> None:
    folder = written(tmp_path, report(rows("code", "guess", FAST)))
    found = read(folder)
    assert found.rows == read(f"{folder}/result.json").rows and (found.model, found.notes) == ("tiny", ())
    assert [(r.draft, r.batch, r.where) for r in found.rows] == [("guess", 1, "")]


def test_temperatures_are_planned_apart(tmp_path: Path) -> None:
    """What is right at temperature 0 is no reason to speculate at 1."""
    cold, warm = rows("code", "guess", FAST, Point(0.0)), rows("code", "guess", SLOW, Point(1.0))
    warm = tuple(replace(r, acceptance_by_position=(0.0,) * len(r.acceptance_by_position)) for r in warm)
    found = planned(written(tmp_path, report(cold, warm)))
    assert [(p["workload"], p["draft"]) for p in found.picks] == [("code (T = 0)", "guess"), ("code (T = 1)", "none")]
    assert [o.basis for o in found.outlooks] == ["T = 0", "T = 1"]


def test_measured_speed_ups_stand_beside_their_own_batch_and_depth(tmp_path: Path) -> None:
    path = written(tmp_path, report(rows("code", "guess", FAST, Point(), 2)))
    assert [f.measured for f in planned(path).outlooks[0].formulas] == [None, pytest.approx(2.0)]
    assert [f.measured for f in planned(path, replace(ASK, batches=(8,))).outlooks[0].formulas] == [None, None]


def test_every_batch_is_planned_from_the_rows_that_know_it(tmp_path: Path) -> None:
    one, four = rows("code", "guess", FAST, Point(0.0, 1)), rows("code", "guess", SLOW, Point(0.0, 4))
    found = report(tuple(replace(r, costs=COSTS) for r in one), tuple(replace(r, costs=FOUR) for r in four))
    (tmp_path / "result.json").write_text(json.dumps(found.as_json()))
    made = planned(str(tmp_path), replace(ASK, batches=(1, 4)))
    assert [(o.basis, [a.batch for a in o.advice]) for o in made.outlooks] == [("batch 1", [1]), ("batch 4", [4])]


def test_nobody_is_told_to_use_what_is_no_drafter(tmp_path: Path) -> None:
    base, mine = rows("code", "synthetic", FAST)
    found = planned(written(tmp_path, report((base, replace(mine, synthetic=True)))))
    assert found.outlooks[0].advice[0].depth and found.picks == []


def test_what_must_be_known_of_a_result(tmp_path: Path) -> None:
    base, mine = rows("code", "guess", FAST)
    notes = read(written(tmp_path, report((base, replace(mine, equal=1)), interrupted=True))).notes
    assert "differ from plain" in notes[0] and "interrupted" in notes[1]


def test_rows_are_judged_beside_others_of_their_conditions(tmp_path: Path) -> None:
    """In a sweep of temperatures, the good guesses of one are no measure for the other, nor the last row for the first."""
    cold = [rows(name, "guess", FAST, Point(0.0)) for name in ("code", "chat")]
    warm = [rows(name, "guess", FAST, Point(1.0)) for name in ("code", "chat")]
    warm = [(base, replace(mine, acceptance_by_position=(0.1, 0.0))) for base, mine in warm]
    found = {s.name: s for s in diagnose.of_report(read(written(tmp_path, report(*cold, *warm))))}
    assert found["guess on code (T = 0)"].remedy is None and found["guess on code (T = 1)"].remedy is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 1}, "has format 1"),
        ({"settings": None}, "damaged: ValueError: settings is no object"),
        ({"provenance": {"prompts": 3}}, "prompts is no object"),
        ({"results": [{"drafted": 1}]}, "damaged"),
    ],
)
def test_what_is_no_such_result(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    found = json.loads(json.dumps(report(rows("code", "guess", FAST)).as_json())) | change
    (tmp_path / "result.json").write_text(json.dumps(found))
    with pytest.raises(BadInput, match=words):
        read(str(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"tau": float("nan")}, {"tau": None}, {"paces": [1.0, None]}, {"paces": [1.0, float("inf")]}, {"alpha": "x"},
        {"rounds": -1}, {"acceptance_by_position": ["a"]}, {"costs": None}, {"drafted": True}, {"workload": 3},
        {"speedup": {"pairs": []}}, {"latency": {"first_token": {"p50": 1}}},
    ],
)  # fmt: skip
def test_numbers_that_no_measurement_gives(tmp_path: Path, change: dict[str, Any]) -> None:
    found = json.loads(json.dumps(report(rows("code", "guess", FAST)).as_json()))
    found["results"][1] |= change
    (tmp_path / "result.json").write_text(json.dumps(found))
    with pytest.raises(BadInput, match="damaged"):
        read(str(tmp_path))


def test_requests_that_came_by_themselves_are_no_ground_for_a_plan(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="batches of a known size"):
        read(written(tmp_path, report(rows("code", "guess", FAST, Point(0.0, None, 2.0)))))
