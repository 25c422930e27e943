"""A benchmark's result as a plan reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..bench import report as bench
from ..bench import saved
from ..errors import BadInput
from .acceptance import Chances
from .costs import Table

FIXED = "fixed"


@dataclass(frozen=True, slots=True)
class Measured:
    """One drafter on one workload, as it was measured. `depth`: how far it looked ahead in every round, None where a controller
    changed that; `costs`: None in results of older versions; `speedup`: median against plain decoding beside it;
    `accepted_share_at_end`: share of the rounds in which the last guess that could be made was right; `rounds`: of one run, since
    all repeat the same texts; `where`: the conditions that tell it from rows of the same drafter and workload, empty where there
    are none; `synthetic`: no real drafter."""

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
    where: str = ""
    synthetic: bool = False

    @property
    def tested(self) -> float:
        """Rounds that had a guess."""
        return self.rounds * self.chances.offer[0]


@dataclass(frozen=True, slots=True)
class Report:
    """All rows with guesses. `model`, `device` and `dtype` as the result names them; `notes`: what a reader must know of it."""

    rows: tuple[Measured, ...]
    model: str
    device: str
    dtype: str
    source: str
    notes: tuple[str, ...] = ()


def read(path: str) -> Report:
    """From the file or the folder of `outrider bench --output`. Raises `BadInput` for anything else, and for one without guesses.
    Rows of requests that came by themselves are left out: their batches were of all sizes."""
    found = saved.read(Path(path))
    rows = [r for r in found.rows if r.drafted and r.acceptance_by_position and r.batch is not None]
    if not rows:
        raise BadInput(
            f"{path} has no drafter that made guesses for batches of a known size; measure one with outrider bench --draft"
        )
    several = [name for name in ("temperature", "batch", "depth") if len({getattr(r, name) for r in rows}) > 1]
    steady = found.settings.get("control") == FIXED
    model, where = found.provenance.get("model"), found.provenance
    name = model.get("name", "") if isinstance(model, Mapping) else model or ""
    return Report(
        tuple(_row(row, steady, several) for row in rows),
        str(name),
        str(where.get("device", "")),
        str(where.get("dtype", "")),
        path,
        _notes(found, path),
    )


def _notes(found: bench.Report, path: str) -> tuple[str, ...]:
    said = [] if found.ok else [f"{path} has answers that differ from plain decoding: a fault, whatever the speed"]
    return tuple(said + ([f"{path} was interrupted: some of what was asked is not in it"] if found.interrupted else []))


def _row(row: bench.Row, steady: bool, several: list[str]) -> Measured:
    survival, offered = row.acceptance_by_position, row.offered_by_position or (1.0,)
    conditions = {"temperature": f"T = {row.temperature:g}", "batch": f"batch {row.batch}", "depth": f"depth {row.depth}"}
    return Measured(
        workload=row.workload,
        draft=row.draft,
        chances=Chances.of_survival(survival, offered),
        costs=Table.of_json(row.costs) if row.costs else None,
        batch=row.batch or 1,
        depth=min(len(survival), row.depth or len(survival)) if steady or row.depth is not None else None,
        temperature=row.temperature,
        speedup=row.speedup.median if row.speedup is not None else 0.0,
        tau=row.tau,
        alpha=row.alpha,
        accepted_share_at_end=survival[-1] * offered[min(len(survival), len(offered)) - 1],
        rounds=row.rounds // max(1, row.runs),
        note=row.note,
        where=", ".join(conditions[name] for name in several),
        synthetic=row.synthetic,
    )
