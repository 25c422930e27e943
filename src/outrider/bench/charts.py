"""Charts of the benchmark's page, as HTML and SVG written here. Colours are classes of the page; every value is also in a table.

Bars are rows of a grid whose drawing is an SVG of percentages, so that they get wider or narrower and their text does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

MARKS = ("circle", "square", "triangle", "diamond")
"""Lines differ by colour, by dash pattern, and by these."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One row: `name` on the left, `value` in words on the right, drawing `parts`: `(from, to, class, title)` in units of the
    axis, and whiskers `(low, high)`. `group` is a heading above the row where it differs from the row before."""

    group: str
    name: str
    value: str
    parts: tuple[tuple[float, float, str, str], ...] = ()
    whisker: tuple[float, float] | None = None
    dots: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Axis:
    """From 0 to `end`, with numbers at `ticks`, a line at `mark` and a `unit` in words."""

    end: float
    ticks: tuple[float, ...]
    unit: str
    mark: float | None = None

    def at(self, value: float) -> str:
        """Where a value lies, in percent; nothing lies outside."""
        return f"{100 * min(max(value / self.end, 0.0), 1.0):.2f}%"


def axis(most: float, unit: str, mark: float | None = None) -> Axis:
    """With at most eight round numbers."""
    most = max(most if most > 0 and math.isfinite(most) else 0.0, mark or 0.0) or 1.0
    step = next(s for s in _steps(most) if most / s <= 6)
    end = max(most * 1.02, mark * 1.15 if mark is not None else 0.0)
    return Axis(end, tuple(i * step for i in range(int(end / step + 1e-9) + 1)), unit, mark)


def _steps(most: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from too small on."""
    scale = 10.0 ** math.floor(math.log10(most) - 1)
    return [scale * m for m in (1, 2, 5, 10, 20, 50, 100)]


def bars(rows: Sequence[Bar], scale: Axis, label: str, kind: str = "") -> str:
    """A chart of horizontal bars. `label` says to those who do not see it what it shows, and where the values are.
    `kind`: `short` where the values beside it are."""
    out, group = [], None
    for row in rows:
        if row.group != group and row.group:
            out.append(f'<div class="group">{escape(row.group)}</div>')
        group = row.group
        out.append(
            f'<div class="bar"><span class="name">{escape(row.name)}</span>{_drawing(row, scale)}'
            f'<span class="value">{escape(row.value)}</span></div>'
        )
    ticks = "".join(f'<text x="{scale.at(t)}" y="14" class="{_anchor(t, scale)}">{t:g}</text>' for t in scale.ticks)
    foot = f'<svg height="18" aria-hidden="true">{ticks}</svg>'
    out.append(f'<div class="bar axis"><span class="name"></span>{foot}<span class="value"></span></div>')
    out.append(f'<p class="unit">{escape(scale.unit)}</p>')
    return f'<div class="bars {kind}" role="img" aria-label="{escape(label)}">{"".join(out)}</div>'


def _anchor(tick: float, scale: Axis) -> str:
    """Numbers at the ends stay inside."""
    return "start" if tick == 0 else "end" if tick > 0.97 * scale.end else "middle"


def _drawing(row: Bar, scale: Axis) -> str:
    out = [f'<line x1="{scale.at(t)}" x2="{scale.at(t)}" y1="0" y2="100%" class="grid"/>' for t in scale.ticks]
    for start, end, kind, title in row.parts:
        width = f"{max(0.0, float(scale.at(end)[:-1]) - float(scale.at(start)[:-1])):.2f}%"
        name = f"<title>{escape(title)}</title>"
        out.append(f'<rect x="{scale.at(start)}" width="{width}" y="18%" height="64%" class="{kind}">{name}</rect>')
    if scale.mark is not None:
        out.append(f'<line x1="{scale.at(scale.mark)}" x2="{scale.at(scale.mark)}" y1="0" y2="100%" class="mark"/>')
    if row.whisker is not None:
        low, high = (scale.at(v) for v in row.whisker)
        out.append(f'<line x1="{low}" x2="{high}" y1="50%" y2="50%" class="whisker"/>')
        ends = [scale.at(v) for v in row.whisker if v <= scale.end]  # one that reaches beyond the chart has no end in it
        out += [f'<line x1="{x}" x2="{x}" y1="30%" y2="70%" class="whisker"/>' for x in ends]
    out += [f'<circle cx="{scale.at(v)}" cy="50%" r="4.5" class="{kind}"/>' for v, kind in row.dots]
    return f'<svg height="24" aria-hidden="true">{"".join(out)}</svg>'


@dataclass(frozen=True, slots=True)
class Line:
    """A named series of points; `key` picks colour, dashes and marker, the same in every chart of a page."""

    name: str
    key: int
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """A small chart of lines: its title, axes' names and y's range from 0. `mark`: a line across; `percent`: y in percent."""

    title: str
    x: str
    y: str
    most: float
    mark: float | None = None
    percent: bool = False

    def say(self, value: float) -> str:
        """A value of y in words."""
        return f"{100 * value:.0f}%" if self.percent else f"{value:g}"


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 300, 190, 48, 12, 10, 40


def lines(plot: Plot, series: Sequence[Line]) -> str:
    """One small chart with its title."""
    xs = sorted({x for line in series for x, _ in line.points})
    across, up = _across(xs), _up(plot.most)
    scale = axis(plot.most, "")
    out = [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(t):.1f}" y2="{up(t):.1f}" class="grid"/>'
        f'<text x="{LEFT - 6}" y="{up(t) + 4:.1f}" class="end">{plot.say(t)}</text>'
        for t in scale.ticks
        if t <= plot.most
    ]
    if plot.mark is not None and plot.mark <= plot.most:
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(plot.mark):.1f}" y2="{up(plot.mark):.1f}" class="mark"/>')
    said = "; ".join(f"{line.name}: " + ", ".join(f"{x:g} {plot.say(round(y, 3))}" for x, y in line.points) for line in series)
    shown = xs if len(xs) <= 8 else xs[:: math.ceil(len(xs) / 8)]
    out += [f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 16}" class="middle">{x:g}</text>' for x in shown]
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" class="middle soft">{escape(plot.x)}</text>')
    for line in series:
        at = [(across(x), up(y)) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        out.append(f'<polyline points="{path}" class="line series{line.key % 4}"/>')
        titles = [f"{line.name}: {x:g}, {plot.say(round(y, 3))}" for x, y in line.points]
        out += [_marker(line.key, x, y, title) for (x, y), title in zip(at, titles, strict=True)]
    head = f"<figcaption>{escape(plot.title)}</figcaption>" if plot.title else ""
    box = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.y + ". " + said)}">'
    return f'<figure class="plot">{head}{box}{"".join(out)}</svg></figure>'


def _across(xs: Sequence[float]) -> Callable[[float], float]:
    """Values at equal distances, whatever they are: 1, 4, 32 read well so."""
    room = WIDTH - LEFT - RIGHT - 24
    step = room / max(1, len(xs) - 1)
    return lambda x: LEFT + 12 + (room / 2 if len(xs) == 1 else step * xs.index(x))


def _up(most: float) -> Callable[[float], float]:
    return lambda y: TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(max(y / most, 0.0), 1.0))


def _marker(key: int, x: float, y: float, title: str) -> str:
    shape = {
        "circle": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"',
        "square": f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"',
        "triangle": f'<path d="M{x:.1f},{y - 5:.1f} l5,9 h-10 z"',
        "diamond": f'<path d="M{x:.1f},{y - 5.5:.1f} l5,5.5 l-5,5.5 l-5,-5.5 z"',
    }[MARKS[key % 4]]
    return f'{shape} class="point series{key % 4}"><title>{escape(title)}</title>{"</" + shape[1:].split()[0] + ">"}'


def legend(names: Sequence[tuple[int, str]]) -> str:
    """Which line is whose, by colour, dashes and marker."""
    if len(names) < 2:
        return ""
    items = "".join(
        f'<li><svg width="34" height="14" aria-hidden="true"><line x1="0" x2="34" y1="7" y2="7" class="line series{key % 4}"/>'
        f"{_marker(key, 17, 7, name)}</svg>{escape(name)}</li>"
        for key, name in names
    )
    return f'<ul class="legend">{items}</ul>'
