"""What `audit` does with two servers, and what it shows of them."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BadInput
from .remote import connect, given, key, table

if TYPE_CHECKING:
    from ..bench.parity import Line, Report

_PANEL = "Servers"
Against = Annotated[str | None, typer.Option(metavar="URL", help="The server to compare it with.", rich_help_panel=_PANEL)]
AgainstModel = Annotated[str | None, typer.Option(metavar="NAME", help="What the model is called there.", rich_help_panel=_PANEL)]
AgainstKeyEnv = Annotated[
    str | None, typer.Option(metavar="VAR", help="The environment variable of that server's key.", rich_help_panel=_PANEL)
]
HEAD = ("what", "compared", "differ", "rate", "near ties", "parts at", "verdict")
MOST = 10
"""Differences that are shown."""


def audit_servers(ctx: typer.Context, progress: Any) -> None:
    """Two servers against each other. Exit status 1 for a difference that neither rounding nor unlike seeds explain."""
    from ..bench import parity
    from ..bench.endpoint import Endpoint

    values = ctx.params
    if values["endpoint"] is None or values["against"] is None:
        raise BadInput("to compare two servers give both --endpoint URL and --against URL")
    plan = parity.Plan(values["prompts"], values["max_tokens"], values["seed"])
    timeout, env = values["timeout"], values["against_key_env"]
    own = values["against_model"] or (values["model"] if given(ctx, ("model",)) else None)
    first = connect(ctx, values["endpoint"], values["api_key_env"], timeout)
    second = Endpoint.find(values["against"], own, key(env), timeout)
    with progress() as tell:
        report = parity.audit(first, second, plan, tell)
    if values["json"]:
        typer.echo(jsonlib.dumps(report.as_json()))
    else:
        show(report)
    if not report.ok:
        raise typer.Exit(1)


def show(report: Report) -> None:
    """The table, the first differences, and how to read them."""
    from ..bench.endpoint import printable

    typer.echo(f"endpoint  {report.first.url} ({printable(report.first.model)})")
    typer.echo(f"against   {report.second.url} ({printable(report.second.model)})\n")
    table([HEAD, *(cells(line) for line in report.lines)], left=(0, 6))
    typer.echo("")
    for d in report.differences[:MOST]:
        where = f"character {d.character}" + ("" if d.token is None else f" (token {d.token})")
        gap = "" if d.gap is None else f"; {d.gap:.2g} nats between the two best" + (" (near-tie)" if d.near_tie else "")
        typer.echo(f"{d.kind}, prompt {d.prompt}: {where}: {d.first!r} against {d.second!r}{gap}")
    more = len(report.differences) - MOST
    if more > 0:
        typer.echo(f"and {more} more (--json has them all)")
    for text in list(dict.fromkeys(report.errors))[:5]:
        typer.echo(f"FAILED: {text}")
    if not (report.first.native and report.second.native):
        typer.echo("a seed means the same to servers of one make only: seeded texts that differ between makes are no fault")
    typer.echo(f"{'no fault found' if report.ok else 'FAULT'} in {report.seconds:.0f} s")


def cells(line: Line) -> tuple[str, ...]:
    """A row of the table."""
    verdict = line.verdict.upper() if line.verdict == "fault" else line.verdict
    figures = f"largest {line.largest:.2g}, mean {line.mean:.2g} nats" if line.largest is not None else ""
    notes = ", ".join(n for n in (line.note, figures) if n)
    return (
        line.kind,
        str(line.compared),
        str(line.differ),
        "" if line.rate is None else f"{line.rate:.0%}",
        str(line.near_ties) if line.largest is None and line.compared else "",
        "" if line.first is None else f"{line.first:.0f}",
        f"{verdict} ({notes})" if notes else verdict,
    )
