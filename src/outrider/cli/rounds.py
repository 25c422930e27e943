"""Recorded rounds as `outrider replay` shows them."""

from __future__ import annotations

import sys

from rich.console import Console

from ..types import NONE
from ..watch.pieces import Mark
from ..watch.reader import Round, Share
from .guard import say
from .painter import STYLES, has_colour, paint, paint_legend
from .replay import printable

SIGNS = ((Mark.ACCEPTED, "+", "accepted guess"), (Mark.REJECTED, "x", "rejected guess"), (Mark.OWN, "o", "the model's own token"))
"""One for each token, and for each level of guesses that was turned down."""


def show(console: Console, one: Round) -> None:
    """A line for each request of a round: its number, request and label, depth, marks of its tokens, and the text if there is."""
    for share in one.requests:
        name = printable(f"{share.id} {share.label}" if share.label else f"{share.id}")
        console.out(f"{one.round:>6}  {name:<12.24}  ahead {share.depth:>2}  ", end="")
        _marks(console, share)
        if share.pieces is not None:
            _text(console, share)
        console.out(f"  {share.finish}" if share.finish else "")
    if one.control:
        console.out(f"        controller {printable(one.control)}")
    sys.stdout.flush()


def _style(mark: Mark, console: Console) -> str | None:
    """A sign's colour, without lines through it."""
    return STYLES[mark].replace("strike ", "").replace("underline ", "") or None if has_colour(console) else None


def legend(text: bool) -> None:
    """Say on stderr what the signs mean, and the looks of the text if there is any."""
    say("   ".join(f"{sign}: {meaning}" for _, sign, meaning in SIGNS))
    if text:
        paint_legend()


def _marks(console: Console, share: Share) -> None:
    """One sign per token: kept guesses, levels whose guess was turned down, the model's own."""
    kept = sum(origin != NONE for origin in share.origins)
    turned_down = sum(offered and not right for offered, right in zip(share.offered, share.kept, strict=True))
    counts = (kept, turned_down, len(share.origins) - kept)
    for (mark, sign, _), count in zip(SIGNS, counts, strict=True):
        console.out(sign * count, style=_style(mark, console), end="")
    console.out(" " * max(1, 10 - sum(counts)), end="")


def _text(console: Console, share: Share) -> None:
    """The text, on one line."""
    shown = ((text.replace("\n", "\\n").replace("\t", "\\t"), mark) for text, mark in share.pieces or ())
    paint(console, [(printable(text), Mark(mark)) for text, mark in shown])
