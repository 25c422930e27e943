"""What `outrider plan` found, as a table with reasons, or as JSON."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .guard import say

if TYPE_CHECKING:
    from ..plan.fit import Day, Fit
    from ..plan.outlook import Outlook
    from ..plan.pairs import Judgement

GIB = 2**30
SHOWN = 6
"""Depths in the table of formulas."""


@dataclass(slots=True)
class Result:
    """All that was found."""

    model: str
    outlooks: list[Outlook] = field(default_factory=list)
    pairs: list[tuple[str, Judgement]] = field(default_factory=list)
    fits: list[tuple[str, Fit]] = field(default_factory=list)
    days: list[tuple[str, int, Day]] = field(default_factory=list)
    wanted: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def picks(self) -> list[dict[str, Any]]:
        """The best real drafter by workload and batch; `none`, at depth 0, where nobody gains."""
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for one in (o for o in self.outlooks if not o.synthetic):
            for a in one.advice:
                fresh = {"workload": one.workload, "batch": a.batch, "draft": "none", "depth": 0, "speedup": 1.0}
                best = found.setdefault((one.workload, a.batch), fresh)
                if a.depth and a.speedup > best["speedup"]:
                    best.update(draft=one.draft, depth=a.depth, speedup=a.speedup)
        return list(found.values())

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        return {
            "model": self.model,
            "outlooks": [one.as_json() for one in self.outlooks],
            "picks": self.picks,
            "pairs": [asdict(judged) | {"spec": draft} for draft, judged in self.pairs],
            "memory": [asdict(f) | {"draft": draft, "total": f.total, "fits": f.fits} for draft, f in self.fits],
            "days": [asdict(d) | {"draft": draft, "batch": batch} for draft, batch, d in self.days],
            "wanted": self.wanted,
            "notes": self.notes,
        }


def report(result: Result, json: bool, output: str | None) -> None:
    """Print and write what was found."""
    from ..bench.report import finite

    found = finite(result.as_json())
    if output is not None:
        try:
            Path(output).write_text(jsonlib.dumps(found, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            say(f"warning: cannot write {output}: {error.strerror or error}")
    if json:
        typer.echo(jsonlib.dumps(found))
    else:
        show(result)


def show(result: Result) -> None:
    """In words and tables."""
    for draft, judged in result.pairs:
        head = f"{draft}: REFUSED" if judged.refused else f"{draft}: {judged.share:.0%} of the model"
        typer.echo("; ".join((head, *judged.reasons)))
    for one in result.outlooks:
        _outlook(one)
    typer.echo("" if result.outlooks else "nothing is left to plan")
    for pick in result.picks:
        choice = f"{pick['draft']}, {pick['depth']} deep: {pick['speedup']:.2f}x" if pick["depth"] else "do not speculate"
        typer.echo(f"for {pick['workload']}, batch {pick['batch']}: {choice}")
    for draft, fits in result.fits:
        typer.echo(_memory(draft, fits))
    for name, batch, day in result.days:
        typer.echo(_day(name, batch, day))
    if result.wanted:
        typer.echo(f"draft to look for: {result.wanted}")
    for note in result.notes:
        typer.echo(f"note: {note}")


def _outlook(one: Outlook) -> None:
    """One drafter on one kind of text."""
    kind = "measured" if one.measured_costs else "estimated from the data sheet, not measured"
    name = f"{one.draft}{' (no real drafter)' if one.synthetic else ''} on {one.workload}"
    name += f", measured at {one.basis}" if one.basis else ""
    typer.echo(f"\n{name}: guesses right {one.rate:.0%}, one costs {one.cost:.3f} plain passes; costs {kind}")
    depths = sorted({p.depth for p in one.grid})
    rows = [("batch", *(f"K={k}" for k in depths), "best")]
    for advice in one.advice:
        found = {p.depth: p for p in one.grid if p.batch == advice.batch}
        best = f"K={advice.depth}: {advice.speedup:.2f}x, {advice.tokens_per_second:,.0f} tok/s" if advice.depth else "none"
        rows.append((str(advice.batch), *(f"{found[k].speedup:.2f}" for k in depths), best))
    _table(rows)
    for advice in one.advice:
        typer.echo(f"  batch {advice.batch}: {advice.why}{_needed(advice.needed) if advice.depth else ''}")
    step = max(1, len(one.formulas) // SHOWN)
    lines = [("formulas", "this plan", "(1-a^(K+1))/((1-a)(Kc+1))", "R K + (1-R)", "measured")]
    for f in (f for i, f in enumerate(one.formulas) if i % step == 0 or f.measured):
        lines.append(
            (
                f"K={f.depth}",
                f"{f.foretold:.2f}",
                _beside(f.textbook, f),
                _beside(f.all_or_nothing, f),
                _seen(f.measured, f.foretold),
            )
        )
    _table(lines)


def _needed(needed: float | None) -> str:
    return "" if needed is None else f"; breaks even where {needed:.0%} of the guesses are right"


def _beside(value: float, formula: Any) -> str:
    """A formula's figure, and how far it is from what was measured, or else from what is foretold."""
    right = formula.measured or formula.foretold
    return f"{value:.2f} ({value / right - 1:+.0%})" if right else f"{value:.2f}"


def _seen(measured: float | None, foretold: float) -> str:
    return "" if not measured else f"{measured:.2f} (this plan {foretold / measured - 1:+.0%})"


def _table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  " + "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)).rstrip())


def _memory(draft: str, fits: Fit) -> str:
    """One line on memory."""
    named = {"weights": fits.weights, "drafter": fits.draft, "KV": fits.kv, "work": fits.work}
    parts = ", ".join(f"{name} {held / GIB:.1f}" for name, held in named.items())
    verdict = "fits" if fits.fits else "DOES NOT FIT"
    return (
        f"memory on {fits.card} with draft {draft}: {parts} of {fits.room / GIB:.1f} GiB for {fits.requests} texts of "
        f"{fits.length:,} tokens: {verdict}; room for {fits.most:,}"
    )


def _day(name: str, batch: int, day: Day) -> str:
    """One line on a day's work."""
    money = "" if day.saved_money is None else f", {day.saved_money:,.2f} in money"
    return (
        f"a day with {name}, batch {batch}: {day.hours:,.1f} GPU hours instead of {day.plain_hours:,.1f}: "
        f"{day.saved_hours:,.1f} saved{money}"
    )
