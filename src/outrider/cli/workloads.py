"""What is asked, on the command line: names and files of workloads, and Spec-Bench's table of what came of its questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from .guard import say

if TYPE_CHECKING:
    from ..bench.report import Report
    from ..bench.workloads import Workload

Workloads = Annotated[
    list[str],
    typer.Option(
        "--workload",
        metavar="NAME|FILE",
        help="A workload by name ('all' for every one), a file of prompts, requests or conversations (.jsonl, .json, .txt), or "
        "spec_bench:FILE (repeatable; default: ten each of code, chat, summarise, question, creative, repetitive).",
    ),
]
Prompts = Annotated[int | None, typer.Option(min=1, help="So many prompts of each workload, evenly spread and always the same.")]
SPEC_BENCH = ("task", "drafter", "questions", "accepted", "tok/s", "plain tok/s", "speed-up")


def gathered(names: Sequence[str], prompts: int | None) -> tuple[Workload, ...]:
    """Workloads by name, and how files were read said."""
    from ..bench.workloads import gather

    found = gather(names, prompts)
    for w in found:
        if w.reader:
            say(f"{w.source}: {len(w.prompts)} {'prompt' if len(w.prompts) == 1 else 'prompts'}, read as {w.reader}")
    return found


def show_spec_bench(report: Report) -> None:
    """Spec-Bench's own numbers, if its questions were asked."""
    from ..bench.spec_bench import summary

    lines = []
    for e in summary(report):
        gain = "" if e.speedup is None else f"{e.speedup:.2f}"
        speeds = (f"{e.tokens_per_second:.1f}", f"{e.plain_tokens_per_second:.1f}", gain)
        task = f"{e.task} ({e.conditions})" if e.conditions else e.task
        lines.append((task, e.draft, str(e.questions), f"{e.mean_accepted_tokens:.2f}", *speeds))
    if lines:
        batch = (
            "" if {r.batch for r in report.rows} == {1} else "; NOT its protocol, which asks one question at a time (--batch 1)"
        )
        typer.echo(f"\nSpec-Bench: mean accepted tokens per pass; speeds are means over questions, all turns together{batch}")
        columns([SPEC_BENCH, *lines], left=(0, 1))


def columns(lines: Sequence[Sequence[str]], left: Sequence[int]) -> None:
    """Columns as wide as their widest cell, whatever the terminal's width: a cut number is worse than a wrapped line. Those
    numbered `left` begin alike, the others end alike."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        typer.echo("  ".join(padded).rstrip())
