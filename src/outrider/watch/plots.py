"""Pictures of a trace: acceptance, depth and speed over the rounds, as SVG, a self-contained HTML page, or PNG."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadInput
from .digest import Digest

WIDTH, HEIGHT, LEFT, RIGHT, TOP, GAP = 760, 130, 56, 16, 34, 44
BLUE, INK, GRID, MARK = "#2563eb", "#374151", "#e5e7eb", "#b45309"
BINS = 300


@dataclass(frozen=True, slots=True)
class Panel:
    """One curve: points `(round, value)`, with a gap where the value is None."""

    title: str
    points: Sequence[tuple[float, float | None]]

    @property
    def most(self) -> float:
        """A round number that no value exceeds."""
        highest = max((v for _, v in self.points if v is not None), default=0.0)
        if highest <= 0:
            return 1.0
        unit = 10.0 ** math.floor(math.log10(highest))
        return next(step * unit for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if highest <= step * unit * 1.000001)

    @property
    def runs(self) -> list[list[tuple[float, float]]]:
        """The points between gaps."""
        found: list[list[tuple[float, float]]] = [[]]
        for at, value in self.points:
            if value is None:
                found.append([])
            else:
                found[-1].append((at, value))
        return [run for run in found if run]


@dataclass(frozen=True, slots=True)
class Picture:
    """Panels above one another that share the rounds `1..rounds`; `marks` are vertical lines with a word each."""

    title: str
    panels: Sequence[Panel]
    rounds: int
    marks: Sequence[tuple[float, str]] = ()


def picture(digest: Digest, title: str) -> Picture:
    """The three panels of a trace."""
    bins = list(digest.series.binned(BINS))
    panels = (
        Panel("first guesses accepted", [(at, alpha) for at, alpha, _, _ in bins]),
        Panel("levels looked ahead", [(at, depth) for at, _, depth, _ in bins]),
        Panel("tokens per second", [(at, speed) for at, _, _, speed in bins]),
    )
    return Picture(title, panels, len(digest.series))


def svg(drawn: Picture) -> str:
    """The picture as one SVG element."""
    height = TOP + len(drawn.panels) * (HEIGHT + GAP) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(LEFT, 16, drawn.title, weight="bold"),
    ]
    for i, panel in enumerate(drawn.panels):
        parts += _panel(panel, TOP + 16 + i * (HEIGHT + GAP), _x(drawn))
    bottom = height - GAP + 20
    for at, word in drawn.marks:
        x = _x(drawn)(at)
        line = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOP + 16}" y2="{bottom - 14}"'
        parts.append(f'<line {line} stroke="{MARK}" stroke-dasharray="4 3"/>')
        parts.append(_text(x + 3, TOP + 28, word, colour=MARK))
    parts.append(_text(LEFT, bottom, "round 1"))
    parts.append(_text(WIDTH - RIGHT, bottom, f"{drawn.rounds}", "end"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(drawn: Picture) -> Callable[[float], float]:
    step = (WIDTH - LEFT - RIGHT) / max(1, drawn.rounds - 1)
    return lambda at: LEFT + (at - 1) * step


def _panel(panel: Panel, top: int, x: Callable[[float], float]) -> list[str]:
    """Title, grid and curve."""
    most, parts = panel.most, [_text(LEFT, top - 6, panel.title)]
    for share in (0.0, 0.5, 1.0):
        y = top + HEIGHT * (1 - share)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{share * most:g}", "end"))
    for run in panel.runs:
        points = " ".join(f"{x(at):.1f},{top + HEIGHT * (1 - value / most):.1f}" for at, value in run)
        if len(run) == 1:
            points += " " + points
        parts.append(f'<polyline points="{points}" fill="none" stroke="{BLUE}" stroke-width="1.5" stroke-linecap="round"/>')
    return parts


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = INK, weight: str = "normal") -> str:
    said = html.escape(words)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}">{said}</text>'


def page(drawn: Picture, summary: str) -> str:
    """A page that needs nothing else: the picture, and the summary as text."""
    title = html.escape(drawn.title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        "<style>body{max-width:800px;margin:2em auto;font-family:sans-serif}pre{overflow-x:auto}</style></head>\n"
        f"<body>{svg(drawn)}<pre>{html.escape(summary)}</pre></body></html>\n"
    )


def png(drawn: Picture, path: Path) -> None:
    """The picture through matplotlib. Raises `BadInput` where that is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInput("PNG needs matplotlib: pip install 'outrider[train]', or give the plot a name in .html or .svg") from None
    figure = Figure(figsize=(9, 2.4 * len(drawn.panels)), layout="constrained")
    axes: Any = figure.subplots(len(drawn.panels), sharex=True, squeeze=False)
    figure.suptitle(drawn.title)
    for axis, panel in zip(axes[:, 0], drawn.panels, strict=True):
        axis.set_title(panel.title, loc="left", fontsize="medium")
        axis.plot([at for at, _ in panel.points], [math.nan if v is None else v for _, v in panel.points], color=BLUE, lw=1)
        axis.set_ylim(0, panel.most)
        axis.grid(color=GRID)
        for at, _ in drawn.marks:
            axis.axvline(at, color=MARK, ls="--", lw=1)
    axes[-1, 0].set_xlabel("round")
    figure.savefig(path, format="png", dpi=110)


def save(drawn: Picture, summary: str, path: Path) -> None:
    """Write HTML, SVG or PNG, as the name says. Raises `BadInput` for other names, and where the file cannot be written."""
    check(path)
    try:
        if path.suffix == ".png":
            png(drawn, path)
        else:
            path.write_text(svg(drawn) if path.suffix == ".svg" else page(drawn, summary), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write the plot {path}: {error.strerror or error}") from None


def check(path: Path) -> None:
    """Raises `BadInput` for a name that says no kind of picture that there is."""
    if path.suffix not in (".html", ".svg", ".png"):
        raise BadInput(f"cannot plot to {path}: give a name in .html, .svg or .png")
    if path.is_dir() or not path.parent.is_dir():
        raise BadInput(f"cannot plot to {path}: give a file in a directory that exists")
