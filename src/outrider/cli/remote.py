"""What `bench` and `audit` do with servers instead of a model of their own."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import BadInput

if TYPE_CHECKING:
    from ..bench.endpoint import Endpoint as Server
    from ..bench.remote import Report, Row

_PANEL = "Servers"
Url = Annotated[
    str | None,
    typer.Option(
        "--endpoint", metavar="URL", help="Ask an OpenAI-compatible server instead of loading a model.", rich_help_panel=_PANEL
    ),
]
KeyEnv = Annotated[
    str | None,
    typer.Option("--api-key-env", metavar="VAR", help="The environment variable that holds the key.", rich_help_panel=_PANEL),
]
Timeout = Annotated[float, typer.Option(help="Longest silence of a server, in seconds.", rich_help_panel=_PANEL)]
OURS = ("device", "dtype", "quantize", "threads", "control", "draft", "accept", "self_test")
"""Options of a model that is loaded here."""

LEGEND = """first: ms from asking to the first piece of text, between: ms from piece to piece (50th / 95th / 99th percentile)
a token: median ms per token after the first piece; tok/s: tokens over all clients, prompts included
kept: share of the guesses that were right, and tau: tokens per round that had guesses, as the server tells them"""
HEAD = ("workload", "answers", "tok/s", "first", "between", "a token", "kept", "tau", "speed-up", "equal")


def given(ctx: typer.Context, names: Collection[str]) -> list[str]:
    """Which of these options the user gave."""
    return [n for n in names if n in ctx.params and str(getattr(ctx.get_parameter_source(n), "name", "")) != "DEFAULT"]


def connect(ctx: typer.Context, url: str, key_env: str | None, timeout: float) -> Server:
    """The server at `url`. Raises `BadInput` for options that only a model loaded here has."""
    from ..bench.endpoint import Endpoint

    wrong = given(ctx, OURS)
    if wrong:
        names = ", ".join("--" + name.replace("_", "-") for name in wrong)
        raise BadInput(f"{names}: a server decides that for itself; leave it out with --endpoint")
    model = str(ctx.params["model"]) if given(ctx, ("model",)) else None
    return Endpoint.find(url, model, key(key_env), timeout)


def key(name: str | None) -> str | None:
    """The API key in an environment variable. Raises `BadInput` if there is none."""
    if name is None:
        return None
    value = os.environ.get(name, "").strip()
    if not value or not value.isascii() or not value.isprintable():
        wrong = "no key" if value else "not set"
        raise BadInput(f"--api-key-env {name}: that environment variable is {wrong}; export the key in it")
    return value


def table(lines: list[tuple[str, ...]], left: Collection[int] = (0,)) -> None:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        typer.echo("  ".join(padded).rstrip())


def show(report: Report) -> None:
    """The table, its legend, and what must not be overlooked."""
    from ..bench.endpoint import printable

    typer.echo(f"{printable(report.endpoint.model)} at {report.endpoint.url}, {report.plan.batch} client(s) at once\n")
    table([HEAD, *(cells(row) for row in report.rows)])
    typer.echo("\n" + LEGEND)
    for line in sentences(report):
        typer.echo(line)


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table."""
    found, speedup = row.acceptance, row.speedup
    return (
        row.workload,
        f"{row.answers}" + (f" ({row.failed} failed)" if row.failed else ""),
        f"{row.tokens_per_second:.1f}" + ("" if row.counted else "*"),
        _three(row.first),
        _three(row.between),
        f"{row.per_token['p50']:.1f}" if row.per_token else "",
        "" if found is None or found.rate is None else f"{found.rate:.0%}",
        "" if found is None or found.length is None else f"{found.length:.2f}",
        "" if speedup is None else f"{speedup.median:.2f}",
        f"{row.equal}/{row.compared}" if row.compared else "",
    )


def _three(values: dict[str, float]) -> str:
    return " / ".join(f"{v:.1f}" if v < 100 else f"{v:.0f}" for v in values.values())


def sentences(report: Report) -> list[str]:
    """Where the figures come from, and what went wrong."""
    lines = []
    if any(not row.counted for row in report.rows):
        lines.append("* the server does not say how many tokens it wrote: pieces were counted")
    if report.rows and all(row.acceptance is None for row in report.rows):
        lines.append("the server tells nothing about speculation, neither in its answers nor at /metrics")
    sources = {row.acceptance.source for row in report.rows if row.acceptance is not None}
    if "gauges" in sources:
        lines.append("kept and tau are the server's own averages of late, not of this run alone")
    if report.endpoint.native:
        lines.append("speed-up: over plain decoding on the same server, asked in turns; equal: answers that were the plain ones")
    lines += [f"FAILED: {text}" for text in dict.fromkeys(report.errors)][:5]
    if report.interrupted:
        lines.append("interrupted: this is what was measured by then")
    return lines
