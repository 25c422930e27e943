"""`outrider bench`: how fast is which drafter here, on which kind of text, against plain decoding in the same run?"""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BadInput
from . import options as o
from .audit import progress
from .drafters import AUTO, HELP, check_draft, describe_drafters
from .guard import say
from .remote import KeyEnv, Timeout, Url

if TYPE_CHECKING:
    from ..bench.numbers import Speedup
    from ..bench.remote import Report as RemoteReport
    from ..bench.report import Report, Row
    from ..bench.runner import Plan

PLAIN = "none"
Drafts = Annotated[
    list[str],
    typer.Option(
        "--draft", metavar="SPEC", help="A drafter to measure (repeatable; default: none and auto); 'help' lists them all."
    ),
]
Workloads = Annotated[
    list[str],
    typer.Option(
        "--workload",
        metavar="NAME|FILE",
        help="code, chat, summarise, question, creative, repetitive, or a .jsonl or .txt file (repeatable; default: all six).",
    ),
]
Repeats = Annotated[int, typer.Option(min=1, help="Pairs of runs, plain and drafted; an interval needs two or more.")]
Batch = Annotated[int, typer.Option(min=1, help="How many prompts are answered together.")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many prompts of each workload.")]
Output = Annotated[str | None, typer.Option(metavar="PATH", help="Write the JSON object to a file as well.")]
Seed = Annotated[int, typer.Option(min=0, help="The seed of every request.")]

LEGEND = """tok/s: tokens written per second, prompts included, median of the runs
speed-up: tok/s over that of plain decoding beside it, median of the pairs [95 % interval]; LOSS where all of it lies below 1
tau: tokens per pass of the model (1 is plain decoding); alpha: share of the guesses that were right
d/v/o: percent of the time spent drafting, verifying, and on the rest
equal: answers that were token for token the plain ones, of those compared"""
HEAD = ("workload", "drafter", "tok/s", "speed-up", "tau", "alpha", "d/v/o %", "equal", "")
LEFT = (0, 1, 8)
ON_GPU = "on a GPU, verifying is the device's time where rounds are captured; what host and device do at once counts once"
SYNTHETIC = "* not a real drafter: it replays known answers, to show what guesses of such a quality would bring"


def bench(
    ctx: typer.Context,
    draft: Drafts = [],  # noqa: B006 - typer copies the default
    workload: Workloads = [],  # noqa: B006
    model: o.Model = o.DEFAULT_MODEL,
    device: o.Device = "auto",
    dtype: o.Dtype = "auto",
    quantize: o.Quantize = "none",
    threads: o.Threads = None,
    max_tokens: o.MaxTokens = 128,
    temperature: o.Temperature = 0.0,
    seed: Seed = 0,
    repeats: Repeats = 3,
    batch: Batch = 1,
    control: o.Control = "goodput",
    limit: Limit = None,
    endpoint: Url = None,
    api_key_env: KeyEnv = None,
    timeout: Timeout = 60.0,
    json: o.Json = False,
    output: Output = None,
    debug: o.Debug = False,
) -> None:
    """Measure drafters against plain decoding in the same run, text by text the same. Exit status 1 if a text differs.

    Six workloads of ten prompts each take a while on a CPU: --limit 3 --workload code gives a first impression."""
    if HELP in draft:
        typer.echo(describe_drafters())
        return
    sizes = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "repeats": repeats, "batch": batch}
    if endpoint is not None:
        _check_output(output)
        _remote(ctx, workload, sizes | {"limit": limit})
        return
    plan = _plan(draft or [PLAIN, AUTO], workload, sizes | {"limit": limit, "control": control})
    _check_output(output)
    report = _measure(
        plan, o.ModelOptions(model, PLAIN, "coupled", device, dtype, None, threads, prefix_cache=False, quantize=quantize)
    )
    if output is not None:
        _write(output, report)
    if json:
        typer.echo(jsonlib.dumps(report.as_json()))
    else:
        show(report)
    if report.interrupted:
        raise KeyboardInterrupt
    if not report.ok:
        raise typer.Exit(1)


def _remote(ctx: typer.Context, workloads: list[str], sizes: dict[str, Any]) -> None:
    """The same questions to a running server."""
    from ..bench import remote
    from ..bench import workloads as known
    from .remote import connect, show

    given = ctx.params
    plan = remote.Plan(tuple(known.find(name) for name in workloads or known.names()), **sizes)
    server = connect(ctx, given["endpoint"], given["api_key_env"], given["timeout"])
    with progress() as tell:
        report = remote.measure(server, plan, tell)
    if given["output"] is not None:
        _write(given["output"], report)
    if given["json"]:
        typer.echo(jsonlib.dumps(report.as_json()))
    else:
        show(report)
    if report.interrupted:
        raise KeyboardInterrupt
    if not report.ok:
        raise typer.Exit(1)


def _plan(drafts: list[str], workloads: list[str], sizes: dict[str, Any]) -> Plan:
    """All that can be wrong with a request is found before a model is loaded for it."""
    from ..bench import workloads as known
    from ..bench.runner import Plan
    from ..registry import lacks, parse

    for draft in drafts:
        check_draft(draft)
        if draft != AUTO and not lacks(draft, "path"):  # which may be found once the model is known
            parse(draft)
    plan = Plan(tuple(drafts), tuple(known.find(name) for name in workloads or known.names()), **sizes)
    assert plan.params  # checks what SamplingParams checks
    return plan


def _measure(plan: Plan, options: o.ModelOptions) -> Report:
    """The report; Ctrl-C leaves what was measured by then, if anything."""
    from ..bench.provenance import provenance
    from ..bench.runner import Runner
    from .answer import loaded

    with loaded(options) as llm, progress() as tell:
        runner = Runner(llm, plan, tell, provenance=provenance(llm, options.model))
        try:
            return runner.run()
        except KeyboardInterrupt:
            return runner.report(interrupted=True)


def _check_output(output: str | None) -> None:
    """`BadInput` now rather than after an hour of measuring."""
    if output is None:
        return
    path = Path(output)
    if path.is_dir() or not path.parent.is_dir():
        raise BadInput(f"--output {output}: give a file in a directory that exists")


def _write(output: str, report: Report | RemoteReport) -> None:
    try:
        Path(output).write_text(jsonlib.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        say(f"warning: cannot write {output}: {error.strerror or error}; the object follows on standard error")
        say(jsonlib.dumps(report.as_json()))


def show(report: Report) -> None:
    """The table with its legend, and what must be said in words: losses, divergences, what is not a real drafter."""
    if not report.rows:
        say("nothing was measured yet")
        return
    _table(report)
    typer.echo("\n" + LEGEND)
    if not str(report.provenance.get("device", "cpu")).startswith("cpu"):
        typer.echo(ON_GPU)
    if any(r.synthetic for r in report.rows):
        typer.echo(SYNTHETIC)
    typer.echo("\n" + "\n".join(sentences(report)))


def _table(report: Report) -> None:
    """Columns as wide as their widest cell, whatever the terminal's width: a cut number is worse than a wrapped line."""
    lines = [HEAD, *(cells(row) for row in report.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = [c.ljust(w) if i in LEFT else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        typer.echo("  ".join(padded).rstrip())


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table."""
    name = (f"{row.draft} ({row.drafter})" if row.draft == AUTO else row.draft) + ("*" if row.synthetic else "")
    s = row.speedup
    parts = (row.draft_seconds, row.verify_seconds, row.other_seconds)
    shares = "/".join(f"{100 * p / row.seconds:.0f}" for p in parts) if row.seconds else ""
    said = {"loses": "LOSS", "gains": "", None: ""}.get(row.verdict, "unclear")
    notes = [said, "" if row.drafted or s is None else "no guesses", "switched off" if row.note else ""]
    return (
        row.workload,
        name,
        f"{row.tokens_per_second:.1f}",
        "" if s is None else f"{s.median:.2f} {_spread(s)}".rstrip(),
        f"{row.tau:.2f}",
        f"{row.alpha:.0%}" if row.drafted else "",
        shares,
        f"{row.equal}/{row.compared}" if row.equal == row.compared else f"{row.equal}/{row.compared} DIFFER",
        ", ".join(n for n in notes if n),
    )


def _spread(speedup: Speedup) -> str:
    """The interval; that of two pairs that disagree reaches far, which three digits show as well as nine."""
    if speedup.low is None or speedup.high is None:
        return ""
    high = f"{speedup.high:.2f}" if speedup.high < 100 else "100+"
    return f"[{speedup.low:.2f}, {high}]"


def sentences(report: Report) -> list[str]:
    """What a reader must not overlook."""
    lines = []
    for row in report.losses:
        assert row.speedup is not None and row.speedup.high is not None
        lines.append(
            f"LOSS: on {row.workload}, {row.draft} is slower than plain decoding: {row.speedup.median:.2f} times its speed, "
            f"at most {row.speedup.high:.2f}; do not speculate there"
        )
    if any(row.speedup is not None for row in report.rows) and not report.losses:
        lines.append("no drafter was slower than plain decoding beyond doubt")
    lines += [f"{row.workload}, {row.draft}: {row.note}; its numbers are not the drafter's" for row in report.rows if row.note]
    for d in report.divergences:
        kind = "near-tie, decided by rounding" if d.near_tie else "FAULT"
        lines.append(
            f"DIFFERENT TEXT ({kind}): {d.workload}, {d.draft}, prompt {d.prompt}: token {d.position} is {d.got} instead of "
            f"{d.want}; gap between the two best scores {d.gap:.2g}"
        )
    drafted = [r for r in report.rows if r.speedup is not None] or report.rows
    same, compared = sum(r.equal for r in drafted), sum(r.compared for r in drafted)
    lines.append(
        f"{same} of {compared} answers are those of plain decoding" + ("" if report.ok else ", which must be all of them")
    )
    if report.interrupted:
        lines.append("interrupted: this is what was measured by then")
    return lines
