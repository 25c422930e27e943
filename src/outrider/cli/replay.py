"""`outrider replay`: a trace, round by round and in numbers."""

from __future__ import annotations

import json as jsonlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import BadInput
from . import options as o
from .guard import say

if TYPE_CHECKING:
    from ..watch.digest import Digest, Tally
    from ..watch.reader import Recording, Round

Speed = Annotated[float | None, typer.Option(metavar="X", help="Play it in time: 1 as fast as it was, 2 twice as fast.")]
Plot = Annotated[str | None, typer.Option(metavar="FILE", help="Draw acceptance, depth and speed: .html, .svg or .png.")]
Only = Annotated[bool, typer.Option("--summary", help="Leave out the rounds.")]
LONGEST_WAIT = 5.0
"""Seconds that a pause may last at most, however long it was."""


def replay(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A file that --trace wrote.")],
    speed: Speed = None,
    plot: Plot = None,
    summary: Only = False,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Show a trace: what each round guessed, kept and wrote, then the summary. No model is loaded."""
    from ..watch import plots, reader
    from ..watch.digest import Digest

    if speed is not None and not 0 < speed < 1e6:
        raise BadInput(f"--speed must be above 0, got {speed:g}; 1 is as fast as it was")
    if plot is not None:
        plots.check(Path(plot))
    recording, digest = reader.read(trace), Digest()
    for one in _shown(recording, speed) if not (summary or json) else recording.rounds:
        digest.add(one)
    for note in recording.notes:
        say(f"note: {note}")
    text = "\n".join(map(printable, report(recording.head, digest)))
    if plot is not None:
        plots.save(plots.picture(digest, _title(recording.head)), text, Path(plot))
        say(f"wrote {plot}")
    typer.echo(jsonlib.dumps({"trace": recording.head, **digest.as_json()}) if json else text)


def _title(head: dict[str, object]) -> str:
    return ", ".join(str(head[name]) for name in ("model", "drafter", "controller") if head.get(name))


def _shown(recording: Recording, speed: float | None) -> Iterator[Round]:
    """The rounds, each written as it comes; in time, if there is a speed."""
    from .painter import Paper
    from .rounds import legend, show

    console = Paper()
    legend(bool(recording.head.get("text")))
    before = None
    for one in recording.rounds:
        if speed is not None and before is not None:
            time.sleep(min(LONGEST_WAIT, max(0.0, one.at - before) / speed))
        before = one.at
        show(console, one)
        yield one


def printable(text: str) -> str:
    """A trace may come from anywhere: nothing in it may command the terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def report(head: dict[str, object], digest: Digest) -> list[str]:
    """The summary for people."""
    total, seconds = digest.all, digest.seconds
    if not digest.rounds:
        return ["the trace has no rounds"]
    speed = total.tokens / seconds if seconds else 0.0
    ended = ", ".join(f"{count} by {name}" for name, count in digest.ended.items()) or "none"
    parts = [f"{name} {100 * part / seconds:.0f} %" for name, part in _times(digest)] if seconds else []
    lines = [
        _title(head),
        f"{digest.rounds} rounds, {total.tokens} tokens in {seconds:.2f} s ({speed:.1f} a second); answers ended: {ended}",
        f"tau {total.tau:.2f} tokens per round and request, alpha {total.alpha:.0%} of {total.drafted} guesses; "
        f"time: {', '.join(parts)}",
        "drafter: " + ", ".join(f"{name} in {count} rounds" for name, count in digest.drafters.items()),
    ]
    positions = [f"{i}: {k / o:.0%}" for i, (k, o) in enumerate(zip(total.kept, total.offered, strict=True), 1) if o]
    lines.append("accepted by position  " + ("  ".join(positions) or "no guesses"))
    lines += ["", *aligned([("label", "tokens", "tau", "alpha", "depth"), *(_row(n, t) for n, t in digest.labels.items())])]
    stretches = [
        (f"{at:.0f}", "" if alpha is None else f"{alpha:.0%}", f"{depth:.1f}", f"{rate:.1f}")
        for at, alpha, depth, rate in digest.over_time
    ]
    return lines + ["", *aligned([("around round", "first accepted", "depth", "tok/s"), *stretches])]


def _times(digest: Digest) -> tuple[tuple[str, float], ...]:
    return ("draft", digest.draft), ("verify", digest.verify), ("other", digest.other)


def _row(name: str, tally: Tally) -> tuple[str, ...]:
    depth = tally.depth / tally.shares if tally.shares else 0.0
    return name, str(tally.tokens), f"{tally.tau:.2f}", f"{tally.alpha:.0%}" if tally.drafted else "", f"{depth:.1f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table's lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))) for row in rows]
