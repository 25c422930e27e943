"""`outrider replay`: a trace, round by round and in numbers."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import BadInput
from ..watch.pieces import Mark
from . import options as o
from .guard import say
from .painter import STYLES, Paper, has_colour, paint, paint_legend

if TYPE_CHECKING:
    from rich.console import Console

    from ..watch.digest import Digest, Tally
    from ..watch.reader import Recording, Round, Share

Speed = Annotated[float | None, typer.Option(metavar="X", help="Play it in time: 1 as fast as it was, 2 twice as fast.")]
Plot = Annotated[str | None, typer.Option(metavar="FILE", help="Draw acceptance, depth and speed: .html, .svg or .png.")]
Only = Annotated[bool, typer.Option("--summary", help="Leave out the rounds.")]
SIGNS = ((Mark.ACCEPTED, "+", "accepted guess"), (Mark.REJECTED, "x", "rejected guess"), (Mark.OWN, "o", "the model's own token"))
"""One for each token, and for each level of guesses that was turned down."""
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
    text = "\n".join(map(_printable, report(recording.head, digest)))
    if plot is not None:
        plots.save(plots.picture(digest, _title(recording.head)), text, Path(plot))
        say(f"wrote {plot}")
    typer.echo(jsonlib.dumps({"trace": recording.head, **digest.as_json()}) if json else text)


def _title(head: dict[str, object]) -> str:
    return ", ".join(str(head[name]) for name in ("model", "drafter", "controller") if head.get(name))


def _shown(recording: Recording, speed: float | None) -> Iterator[Round]:
    """The rounds, each written as it comes; in time, if there is a speed."""
    console = Paper()
    _legend(bool(recording.head.get("text")))
    before = None
    for one in recording.rounds:
        if speed is not None and before is not None:
            time.sleep(min(LONGEST_WAIT, max(0.0, one.at - before) / speed))
        before = one.at
        show(console, one)
        yield one


def show(console: Console, one: Round) -> None:
    """A line for each request of a round: its number, request and label, depth, marks of its tokens, and the text if there is."""
    for share in one.requests:
        name = _printable(f"{share.id} {share.label}" if share.label else f"{share.id}")
        console.out(f"{one.round:>6}  {name:<12.24}  ahead {share.depth:>2}  ", end="")
        _marks(console, share)
        if share.pieces is not None:
            _text(console, share)
        console.out(f"  {share.finish}" if share.finish else "")
    if one.control:
        console.out(f"        controller {_printable(one.control)}")
    sys.stdout.flush()


def _style(mark: Mark, console: Console) -> str | None:
    """A sign's colour, without lines through it."""
    return STYLES[mark].replace("strike ", "").replace("underline ", "") or None if has_colour(console) else None


def _legend(text: bool) -> None:
    """Say on stderr what the signs mean, and the looks of the text if there is any."""
    say("   ".join(f"{sign}: {meaning}" for _, sign, meaning in SIGNS))
    if text:
        paint_legend()


def _marks(console: Console, share: Share) -> None:
    """One sign per token: kept guesses, levels whose guess was turned down, the model's own."""
    from ..types import NONE

    kept = sum(origin != NONE for origin in share.origins)
    turned_down = sum(offered and not right for offered, right in zip(share.offered, share.kept, strict=True))
    counts = (kept, turned_down, len(share.origins) - kept)
    for (mark, sign, _), count in zip(SIGNS, counts, strict=True):
        console.out(sign * count, style=_style(mark, console), end="")
    console.out(" " * max(1, 10 - sum(counts)), end="")


def _text(console: Console, share: Share) -> None:
    """The text, on one line."""
    shown = ((text.replace("\n", "\\n").replace("\t", "\\t"), mark) for text, mark in share.pieces or ())
    paint(console, [(_printable(text), Mark(mark)) for text, mark in shown])


def _printable(text: str) -> str:
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
