"""A benchmark's result as a plan reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadInput
from .acceptance import Chances
from .costs import Table

FIXED = "fixed"


@dataclass(frozen=True, slots=True)
class Measured:
    """One drafter on one workload, as it was measured. `depth`: how far it looked ahead in every round, None where a controller
    changed that; `costs`: None in results of older versions; `speedup`: median against plain decoding beside it;
    `accepted_share_at_end`: share of the rounds in which the last guess that could be made was right."""

    workload: str
    draft: str
    chances: Chances
    costs: Table | None
    batch: int
    depth: int | None
    temperature: float
    speedup: float
    tau: float
    alpha: float
    accepted_share_at_end: float
    rounds: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All rows with guesses. `model`, `device` and `dtype` as the result names them."""

    rows: tuple[Measured, ...]
    model: str
    device: str
    dtype: str
    source: str


def read(path: str) -> Report:
    """From a file of `outrider bench --output`. Raises `BadInput` for anything else, and for one without guesses."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise BadInput(f"{path} is not JSON ({error}); give a file that outrider bench --output wrote") from None
    try:
        settings, where = found["settings"], found["provenance"]
        rows = tuple(_row(row, settings) for row in found["results"] if row["drafted"] and row["batch"] is not None)
        model = where.get("model") or {}
        report = Report(rows, str(model.get("name", "")), str(where.get("device", "")), str(where.get("dtype", "")), path)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path} is not a result of outrider bench ({error!r:.80}); write one with --output") from None
    if not report.rows:
        raise BadInput(f"{path} has no drafter that made guesses; measure one with outrider bench --draft")
    return report


def _row(row: Mapping[str, Any], settings: Mapping[str, Any]) -> Measured:
    survival = [float(a) for a in row["acceptance_by_position"]]
    offered = [float(o) for o in row.get("offered_by_position") or ()] or [1.0]
    steady = settings.get("control") == FIXED or row["depth"] is not None
    speedup = row.get("speedup") or {}
    return Measured(
        workload=str(row["workload"]),
        draft=str(row["draft"]),
        chances=Chances.of_survival(survival, offered),
        costs=Table.of_json(row["costs"]) if row.get("costs") else None,
        batch=int(row["batch"]),
        depth=min(len(survival), row["depth"] or len(survival)) if steady else None,
        temperature=float(row["temperature"]),
        speedup=float(speedup.get("median") or 0.0),
        tau=float(row["tau"]),
        alpha=float(row["alpha"]),
        accepted_share_at_end=survival[-1] * offered[min(len(survival), len(offered)) - 1],
        rounds=int(row["rounds"]),
        note=str(row.get("note") or ""),
    )
