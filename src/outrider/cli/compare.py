"""`outrider compare`: two results of `outrider bench`, cell by cell."""

from __future__ import annotations

import dataclasses
import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options as o
from .guard import say

if TYPE_CHECKING:
    from ..bench.versus import Cell, Comparison

First = Annotated[str, typer.Argument(metavar="A", help="The earlier result: a .json file, or the folder of --output.")]
Second = Annotated[str, typer.Argument(metavar="B", help="The later result, which is judged.")]
By = Annotated[
    str,
    typer.Option(help="speed (tokens per second), or speedup (over plain decoding beside it: for machines that are not quiet)."),
]
Tolerance = Annotated[float, typer.Option(help="Differences below this share do not count, like 0.03.")]
Ignore = Annotated[
    list[str],
    typer.Option(metavar="NAME", help="Compare although this differs: torch, cpu, threads, prompts, ... (repeatable)."),
]
Fail = Annotated[bool, typer.Option("--fail-on-slower", help="Exit status 1 if any cell is slower, 2 if none can be compared.")]


def compare(
    first: First,
    second: Second,
    by: By = "speed",
    tolerance: Tolerance = 0.0,
    ignore: Ignore = [],  # noqa: B006 - typer copies the default
    fail_on_slower: Fail = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Say for every cell of two benchmark results whether the second is faster or slower beyond noise, or why they cannot be
    compared (another card, other prompts, other versions)."""
    from ..bench import saved, versus

    found = versus.compare(saved.read(Path(first)), saved.read(Path(second)), by, tolerance, ignore)
    if json:
        typer.echo(jsonlib.dumps(dataclasses.asdict(found)))
    else:
        show(found)
    if fail_on_slower and not found.comparable:
        say("error: nothing could be compared; measure both on the same machine, with the same prompts and versions")
        raise typer.Exit(2)
    if fail_on_slower and found.slower:
        raise typer.Exit(1)


def show(found: Comparison) -> None:
    """A line per cell, then the average and what else differs."""
    names = [max((len(getattr(c, name)) for c in found.cells), default=0) for name in ("name", "label")]
    for cell in found.cells:
        start = f"{cell.name.ljust(names[0])}  {cell.label.ljust(names[1])}"
        typer.echo(f"{start}  {_ratio(cell):>20}  {cell.verdict}" + (f": {cell.why}" if cell.why else ""))
    if found.ratio is not None and len(found.comparable) > 1:
        typer.echo(f"\non average over {len(found.comparable)} cells: {_ratio(found)} times the speed of the first result")
    for note in found.notes:
        typer.echo(note)


def _ratio(cell: Cell | Comparison) -> str:
    if cell.ratio is None:
        return ""
    return f"{cell.ratio:.3f}" + (f" [{cell.low:.3f}, {cell.high:.3f}]" if cell.low is not None and cell.high is not None else "")
