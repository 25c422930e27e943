"""`outrider audit`: does speculation change anything, here, with this model?"""

from __future__ import annotations

import dataclasses
import json as jsonlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BadInput
from . import options as o
from .drafters import HELP, describe_drafters
from .guard import say
from .parity import Against, AgainstKeyEnv, AgainstModel, audit_servers
from .remote import KeyEnv, Timeout, Url

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..bench.audit import Report
    from ..bench.selftest import Caught

ALL = "all"
Draft = Annotated[str, typer.Option(metavar="SPEC|all", help="The drafter to audit, or all that can run on the model.")]
Accept = Annotated[str, typer.Option(metavar="RULE|all", help="The acceptance rule to audit, or all.")]
Prompts = Annotated[
    int, typer.Option(min=1, help="Prompts per temperature. At least eight requests are made, one per group of options.")
]
MaxTokens = Annotated[
    int, typer.Option(min=8, help="Most tokens per answer: with 20, an audit of all drafters takes minutes on 2 CPU cores.")
]
Seed = Annotated[int, typer.Option(min=0, help="Other seeds for all requests.")]
SelfTest = Annotated[bool, typer.Option("--self-test", help="Plant known bugs in a tiny engine, one by one, and catch each.")]


def audit(
    ctx: typer.Context,
    draft: Draft = ALL,
    accept: Accept = ALL,
    prompts: Prompts = 20,
    model: o.Model = o.DEFAULT_MODEL,
    device: o.Device = "auto",
    dtype: o.Dtype = "auto",
    quantize: o.Quantize = "none",
    threads: o.Threads = None,
    max_tokens: MaxTokens = 20,
    seed: Seed = 0,
    self_test: SelfTest = False,
    endpoint: Url = None,
    against: Against = None,
    against_model: AgainstModel = None,
    api_key_env: KeyEnv = None,
    against_key_env: AgainstKeyEnv = None,
    timeout: Timeout = 60.0,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Check that speculation changes nothing: token by token against plain decoding at T = 0, 0.7 and 1, with every group of
    options, alone and in batches. Exit status 1 if it finds a fault.

    With --endpoint and --against, two servers are compared instead: greedy texts, texts for a seed, log-probabilities."""
    if draft == HELP:
        typer.echo(describe_drafters())
        return
    if endpoint is not None or against is not None:
        audit_servers(ctx, progress)
        return
    if self_test:
        _self_test(json)
        return
    options = o.ModelOptions(model, "none", "coupled", device, dtype, None, threads, quantize=quantize)
    report = _audit((draft, accept), (prompts, max_tokens, seed), options)
    if json:
        typer.echo(jsonlib.dumps(as_json(report)))
    else:
        _show(report)
    if not report.ok:
        raise typer.Exit(1)


def _audit(what: tuple[str, str], size: tuple[int, int, int], options: o.ModelOptions) -> Report:
    from ..accept import RULES, rule
    from ..bench.audit import Auditor, Plan, runnable
    from .answer import loaded
    from .drafters import check_draft

    draft, accept = what
    if accept != ALL:
        rule(accept)
    if draft not in (ALL, "none"):
        check_draft(draft)
    if draft == "none":
        raise BadInput("--draft none is what everything else is compared with; name a drafter, or all")
    rules = tuple(RULES) if accept == ALL else (accept,)
    with loaded(options) as llm, progress() as tell:
        target: Any = llm.engine.target
        layers, weights = int(target.decoder.num_layers), str(target.fingerprint)
        drafts = tuple(runnable(options.model, layers, weights)) if draft == ALL else (draft,)
        plan = Plan(drafts, rules, *size, strict=draft != ALL)
        return Auditor(llm, plan, tell).run()


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr, or lines where that is no terminal; yields what to call with a description and a share."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, share: say(f"{share:4.0%} {what}")
        return
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


def as_json(report: Report) -> dict[str, Any]:
    """The object of `--json`."""
    return {
        "verdict": "exact" if report.ok else "fault",
        "model": report.model,
        "fingerprint": report.fingerprint,
        "lines": [dataclasses.asdict(line) for line in report.lines],
        "differences": [dataclasses.asdict(d) | {"gap": _finite(d.gap)} for d in report.differences],
        "false_alarm_rate": 1e-9,
        "power": 0.99,
        "detects": report.detects,
        "seconds": report.seconds,
    }


def _finite(x: float) -> float | None:
    return x if x < float("inf") else None


def _show(report: Report) -> None:
    from rich.table import Table

    from .painter import Paper

    paper = Paper()
    table = Table(box=None, pad_edge=False, title_justify="left")
    for name in ("method", "rule", "T"):
        table.add_column(name)
    for name in ("tokens", "accepted", "divergences", "near ties"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for x in report.lines:
        heat = "" if x.temperature is None else f"{x.temperature:g}"
        guesses = f"{x.accepted}/{x.drafted}" if x.drafted else ""
        verdict = x.verdict.upper() if x.verdict == "fault" else x.verdict
        cells = (x.method, x.rule, heat, str(x.tokens), guesses, str(x.divergences), str(x.near_ties))
        table.add_row(*cells, f"{verdict} ({x.note})" if x.note else verdict)
    paper.print(table)
    for d in report.differences:
        kind = "near-tie" if d.near_tie else "FAULT"
        where = "alone" if d.alone else "in a batch"
        typer.echo(
            f"{kind}: {d.method}, {d.rule}, T = {d.temperature:g}, {d.group}, {where}, prompt {d.prompt[:40]!r}: "
            f"token {d.position} is {d.got} instead of {d.want}; gap between the two best scores {d.gap:.2g}"
        )
    typer.echo(_summary(report))


def _summary(report: Report) -> str:
    faults = sum(x.verdict == "fault" for x in report.lines)
    print_ = ", ".join(f"{k} {v}" for k, v in report.fingerprint.items())
    said = f"{faults} line(s) with faults" if faults else "no fault found"
    rate = report.detects
    power = f"; a drafter that changed {rate:.2%} of its tokens would be found out with probability 0.99 or more" if rate else ""
    return (
        f"{said} in {report.seconds:.0f} s ({report.model}; {print_})\n"
        f"false alarms: fewer than 1e-9 a run{power}; --self-test shows that known bugs are caught"
    )


def _self_test(json: bool) -> None:
    """Plant every fault; exit status 1 if one is missed, or seen where there is none."""
    import torch

    from ..bench import selftest

    torch.set_num_threads(1)  # the models are tiny
    plants = selftest.plants()
    results: list[Caught] = []
    with progress() as tell:
        for i, plant in enumerate(plants):
            tell(plant.name, i / len(plants))
            results.append(selftest.run(plant))
    missed = [r for r in results if not r.ok]
    if json:
        planted = [dataclasses.asdict(r) for r in results]
        typer.echo(jsonlib.dumps({"verdict": "fault" if missed else "caught", "planted": planted, "power": 0.99}))
    else:
        for r in results:
            state = "caught" if r.ok else "seen without being planted" if r.caught else "MISSED"
            typer.echo(f"{r.name:32} {state}, seed {r.seeds} of {selftest.TRIES}, {r.seconds:.2f} s")
        typer.echo(f"{len(results) - len(missed)} of {len(results)} planted faults caught (power per fault 0.99 or more)")
    if missed:
        raise typer.Exit(1)
