"""`outrider bench`: how fast is which drafter here, on which kind of text, against plain decoding in the same run?"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BadInput
from . import options as o
from . import sweeps
from .audit import progress
from .bundle import Bundle
from .drafters import AUTO, HELP, check_draft, describe_drafters
from .guard import say
from .remote import KeyEnv, Timeout, Url
from .sweeps import values
from .workloads import Prompts, Workloads, columns, gathered, show_spec_bench

if TYPE_CHECKING:
    from ..bench.plan import Plan
    from ..bench.report import Report, Row
    from ..bench.workloads import Workload

PLAIN = "none"
QUICK = {"max_tokens": 48, "repeats": 3}
USUAL = {"max_tokens": 128, "repeats": 3}
EVERY, QUICK_PROMPTS = "all", 3
Drafts = Annotated[
    list[str],
    typer.Option(
        "--draft", metavar="SPEC", help="A drafter to measure (repeatable; default: none and auto); 'help' lists them all."
    ),
]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens per answer (default: 128).", show_default=False)]
Repeats = Annotated[
    int | None,
    typer.Option(min=1, help="Pairs of runs, plain and drafted; an interval needs two or more (default: 3).", show_default=False),
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many prompts of each workload.")]
Temperatures = Annotated[str, typer.Option("--temperature", metavar="T[,T...]", help="0 is greedy; 1 the model's own law.")]
Depths = Annotated[
    str | None,
    typer.Option("--depth", metavar="N[,N...]", help="Make every drafter look ahead just so far (default: as far as it pays)."),
]
Batches = Annotated[
    str | None,
    typer.Option("--batch", metavar="N[,N...]", help="How many prompts are answered together (default: 1).", show_default=False),
]
Rates = Annotated[
    str | None,
    typer.Option("--rate", metavar="R[,R...]", help="Requests per second that arrive by themselves (Poisson), like 2/s."),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="A first impression of every workload: 3 prompts, 48 tokens. Minutes on 2 CPU cores.")
]
Output = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Write the JSON object to PATH.json; or result.json and result.html into a folder."),
]
Html = Annotated[str | None, typer.Option(metavar="FILE", help="Write the result as one page that needs nothing else.")]
Seed = Annotated[int, typer.Option(min=0, help="The seed of every request, and of the times at which they arrive.")]

LEGEND = """tok/s: tokens written per second, prompts included, median of the runs
speed-up: tok/s over that of plain decoding beside it, median of the pairs [95 % interval]; LOSS where all of it lies below 1
tau: tokens per pass of the model (1 is plain decoding); alpha: share of the guesses that were right
d/v/o: percent of the time spent drafting, verifying, and on the rest
first, next ms: wait for the first token, and for each further one; median/99th percentile
equal: answers that were token for token the plain ones, of those compared"""
HEAD = ("workload", "drafter", "tok/s", "speed-up", "tau", "alpha", "d/v/o %", "first ms", "next ms", "equal", "")
LEFT = (0, 1, 10)
BY_RATE = "where requests arrive by themselves, speed-up compares how long answers take; tok/s then follows the arrivals"
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
    max_tokens: MaxTokens = None,
    temperature: Temperatures = "0",
    depth: Depths = None,
    batch: Batches = None,
    rate: Rates = None,
    seed: Seed = 0,
    repeats: Repeats = None,
    control: o.Control = "goodput",
    limit: Limit = None,
    prompts: Prompts = None,
    quick: Quick = False,
    endpoint: Url = None,
    api_key_env: KeyEnv = None,
    timeout: Timeout = 60.0,
    json: o.Json = False,
    output: Output = None,
    html: Html = None,
    trace: o.TraceFile = None,
    debug: o.Debug = False,
) -> None:
    """Measure drafters against plain decoding in the same run, text by text the same. Exit status 1 if a text differs.

    All prompts of all workloads take long on a CPU: --quick gives a first impression. Options that take several values are
    combined, every one with every other, and each combination is a row. docs/benchmarking.md explains all numbers."""
    if HELP in draft:
        typer.echo(describe_drafters())
        return
    sizes = (QUICK if quick else USUAL) | {n: v for n, v in (("max_tokens", max_tokens), ("repeats", repeats)) if v is not None}
    asked = gathered(workload or ([EVERY] if quick else []), prompts or (QUICK_PROMPTS if quick else None))
    sweep = _sweep(temperature, depth, batch, rate)
    if endpoint is not None:
        _remote(ctx, asked, sizes | _single(sweep) | {"limit": limit, "seed": seed}, Bundle.of(output, html))
        return
    plan = _plan(draft or [PLAIN, AUTO], asked, sizes | sweep | {"limit": limit, "seed": seed, "control": control})
    bundle = Bundle.of(output, html)
    options = o.ModelOptions(model, PLAIN, "coupled", device, dtype, None, threads, prefix_cache=False, quantize=quantize)
    report = _measure(plan, replace(options, trace=trace))
    bundle.write(report)
    _finish(report, json, show)


def _sweep(temperature: str, depth: str | None, batch: str | None, rate: str | None) -> dict[str, Any]:
    """The plan's values of the options that take several. Without a batch size, rates are measured alone."""
    rates = () if rate is None else values("--rate", rate, sweeps.rate)
    return {
        "temperatures": values("--temperature", temperature, float),
        "depths": (None,) if depth is None else values("--depth", depth, int),
        "batches": values("--batch", batch or "1", int) if batch is not None or not rates else (),
        "rates": rates,
    }


def _single(sweep: dict[str, Any]) -> dict[str, Any]:
    """A running server is asked under one condition at a time."""
    found = {name: sweep[many] for name, many in (("temperature", "temperatures"), ("batch", "batches"))}
    if sweep["rates"] or sweep["depths"] != (None,) or any(len(each) != 1 for each in found.values()):
        raise BadInput("with --endpoint give one --temperature and one --batch, and neither --rate nor --depth")
    return {name: each[0] for name, each in found.items()}


def _remote(ctx: typer.Context, workloads: tuple[Workload, ...], sizes: dict[str, Any], bundle: Bundle) -> None:
    """The same questions to a running server."""
    from ..bench import remote
    from .remote import connect, show

    given = ctx.params
    plan = remote.Plan(workloads, **sizes)
    server = connect(ctx, given["endpoint"], given["api_key_env"], given["timeout"])
    with progress() as tell:
        report = remote.measure(server, plan, tell)
    bundle.save(report.as_json())
    _finish(report, given["json"], show)


def _finish(report: Any, json: bool, show: Callable[[Any], None]) -> None:
    """Print a report, local or of a server, and end as it says."""
    if json:
        typer.echo(jsonlib.dumps(report.as_json()))
    else:
        show(report)
    if report.interrupted:
        raise KeyboardInterrupt
    if not report.ok:
        raise typer.Exit(1)


def _plan(drafts: list[str], workloads: tuple[Workload, ...], sizes: dict[str, Any]) -> Plan:
    """All that can be wrong with a request is found before a model is loaded for it."""
    from ..bench.plan import Plan
    from ..registry import lacks, parse

    for draft in drafts:
        check_draft(draft)
        if draft != AUTO and not lacks(draft, "path"):  # which may be found once the model is known
            parse(draft)
    plan = Plan(tuple(drafts), workloads, **sizes)
    for point in plan.points:
        plan.params(point)  # checks what SamplingParams checks
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


def show(report: Report) -> None:
    """The table with its legend, and what must be said in words: losses, divergences, what is not a real drafter."""
    from ..bench import words

    if not report.rows:
        say("nothing was measured yet")
        return
    _table(report)
    typer.echo("\n" + LEGEND)
    if any(r.rate is not None for r in report.rows):
        typer.echo(BY_RATE)
    if not str(report.provenance.get("device", "cpu")).startswith("cpu"):
        typer.echo(ON_GPU)
    if any(r.synthetic for r in report.rows):
        typer.echo(SYNTHETIC)
    typer.echo("\n" + words.headline(report).text + "\n\nWhere speculation loses:")
    said = [*words.losses(report), *words.different(report), words.sameness(report), *words.notes(report)]
    typer.echo("\n".join(said))
    show_spec_bench(report)


def _table(report: Report) -> None:
    columns([HEAD, *(cells(row, report) for row in report.rows)], LEFT)


def cells(row: Row, report: Report) -> tuple[str, ...]:
    """A row of the table."""
    from ..bench import words

    s, waits = row.speedup, row.latency
    parts = (row.draft_seconds, row.verify_seconds, row.other_seconds)
    shares = "/".join(f"{100 * p / row.seconds:.0f}" for p in parts) if row.seconds else ""
    said = {"loses": "LOSS", "gains": "", None: ""}.get(row.verdict, "unclear")
    notes = [said, "" if row.drafted or s is None else "no guesses", "switched off" if row.note else ""]
    return (
        words.place(row, report),
        row.label,
        f"{row.tokens_per_second:.1f}",
        "" if s is None else f"{s.median:.2f} {words.interval(s)}".rstrip(),
        f"{row.tau:.2f}",
        f"{row.alpha:.0%}" if row.drafted else "",
        shares,
        *(f"{1000 * w.p50:.0f}/{1000 * w.p99:.0f}" if w is not None else "" for w in (waits.first_token, waits.inter_token)),
        f"{row.equal}/{row.compared}" if row.equal == row.compared else f"{row.equal}/{row.compared} DIFFER",
        ", ".join(n for n in notes if n),
    )
