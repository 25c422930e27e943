"""Showing an answer as it comes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import groupby

from rich.console import Console

from ..results import Chunk
from ..watch.pieces import Mark, Piece, Pieces

STYLES = {Mark.OWN: "", Mark.ACCEPTED: "underline green", Mark.REJECTED: "dim strike red"}
"""How each mark looks on a terminal with colours."""
PLAIN = {Mark.OWN: "{}", Mark.ACCEPTED: "[{}]", Mark.REJECTED: "{{-{}-}}"}
"""How each mark looks everywhere else."""
LEGEND = (
    (Mark.ACCEPTED, "green underlined", "[text]", "accepted guess"),
    (Mark.OWN, "plain", "text", "the model's own token"),
    (Mark.REJECTED, "[struck out]", "{-text-}", "rejected guess"),
)


class Paper(Console):
    """Standard output, without highlighting. A reader that went away is an error like any other: rich would exit on the spot."""

    def __init__(self) -> None:
        super().__init__(file=sys.stdout, highlight=False)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def has_colour(console: Console) -> bool:
    """False for pipes and files, for dumb terminals and under NO_COLOR."""
    return console.is_terminal and console.color_system is not None and not console.no_color


class Painter:
    """Writes streamed text to stdout; with `marks`, every piece shows whether it was guessed.

    `decode` turns token ids into text. Nothing is written under `silent`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], marks: bool = False, silent: bool = False) -> None:
        self._console = Paper()
        self._pieces = Pieces(decode) if marks and not silent else None
        self._silent = silent
        self.shown = ""

    def show(self, chunk: Chunk) -> None:
        """Write what this chunk made printable."""
        self.shown += chunk.text
        if self._pieces is not None:
            self._write(self._pieces.take(chunk))
        elif not self._silent and chunk.text:
            self._write([(chunk.text, Mark.OWN)])

    def finish(self, text: str) -> None:
        """Write what of the whole `text` was still held back (after Ctrl-C), and end the line."""
        if self._silent:
            return
        rest = text[len(self.shown) :] if text.startswith(self.shown) else ""
        self._write([(rest, Mark.OWN)] if self._pieces is None else self._pieces.split(rest))
        if not text.endswith("\n"):
            self._write([("\n", Mark.OWN)])

    def _write(self, pieces: Sequence[Piece]) -> None:
        paint(self._console, pieces)
        sys.stdout.flush()


def paint(console: Console, pieces: Sequence[Piece]) -> None:
    """Write `pieces` with colours where the console has them, with brackets where not; never wraps or adds anything."""
    colour = has_colour(console)
    for mark, run in groupby(pieces, key=lambda piece: piece[1]):
        text = "".join(text for text, _ in run)
        if mark is Mark.REJECTED:
            text = text.replace("\n", "\\n")
        if not text:
            continue
        if not colour:
            console.out(PLAIN[mark].format(text), end="")
        elif mark is Mark.OWN:
            console.out(text, end="")
        else:
            console.out(f"[{text}]" if mark is Mark.REJECTED else text, style=STYLES[mark], end="")


def paint_legend() -> None:
    """Say on stderr what the marks on stdout mean."""
    err = Console(stderr=True, highlight=False)
    colour = has_colour(Paper())
    for mark, look, plain, meaning in LEGEND:
        err.out(f"{look if colour else plain}: {meaning}", style=STYLES[mark] if colour else None, end="")
        err.out("   ", end="")
    err.out("")
