"""Sections of the benchmark's page that show measurements: tables first, charts of the same numbers after them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from . import words
from .charts import Axis, Bar, Line, Plot, axis, bars, legend, lines
from .latency import Percentiles
from .markup import folded, head, record, section, swatches
from .markup import table as grid
from .numbers import GAIN, LOSS, UNCLEAR, Speedup
from .plan import PLAIN, Point
from .report import Report, Row

SIGNS = {GAIN: "▲", UNCLEAR: "≈", LOSS: "▼", None: ""}
MEANINGS = {GAIN: "faster", UNCLEAR: "no difference beyond noise", LOSS: "slower"}
MOST_SERIES = 4
"""More lines than this in one chart are told apart by nobody."""
SWEPT = {
    "depth": "guesses ahead",
    "temperature": "temperature",
    "batch": "prompts answered together",
    "rate": "requests per second",
}


def unique(values: Iterable[str]) -> list[str]:
    """Each once, in order."""
    return list(dict.fromkeys(values))


def points(report: Report) -> list[Point]:
    """The conditions that were measured, the first of which the charts show."""
    return list(dict.fromkeys(r.point for r in report.rows))


def drafted(report: Report, point: Point | None = None) -> list[Row]:
    """Rows that were compared with plain decoding."""
    return [r for r in report.rows if r.speedup is not None and point in (None, r.point)]


def shown(report: Report) -> dict[str, int]:
    """Drafters in charts, by label, numbered; of each the deepest where there are too many."""
    rows = drafted(report, points(report)[0])
    if len(unique(r.label for r in rows)) > MOST_SERIES:
        deepest = {r.draft: r for r in sorted(rows, key=lambda r: r.depth or 0)}
        rows = [deepest[draft] for draft in unique(r.draft for r in rows)]
    return {label: i for i, label in enumerate(unique(r.label for r in rows)[:MOST_SERIES])}


def speed(report: Report) -> str:
    """Speed-up by workload and drafter: the table and, under the first conditions, the chart."""
    first, *others = points(report)
    keys = swatches([(v, f"{SIGNS[v]} {MEANINGS[v]}") for v in (GAIN, UNCLEAR, LOSS)])
    more = "".join(folded(f"{p}: {_best(report, p)}", table(report, p)) for p in others)
    layout = {1: "pair one", 2: "pair"}.get(len(unique(r.label for r in drafted(report, first))), "")
    both = f'<div class="{layout}">{speed_chart(report, first)}{table(report, first)}</div>'
    hint = (
        f"How many times as fast as plain decoding, which ran beside it ({first}). In brackets: where the true value lies with "
        "95 % confidence, for these prompts on this machine."
    )
    return section("Speed-up by kind of text", hint, keys + both + more, "speed")


def _best(report: Report, point: Point) -> str:
    labels = unique(r.label for r in drafted(report, point))
    speed, label = max((words.average(_of(report, point, label)).median, label) for label in labels)
    return f"{words.times(speed)} with {label}"


def _of(report: Report, point: Point, label: str) -> list[Row]:
    return [r for r in drafted(report, point) if r.label == label]


def table(report: Report, point: Point) -> str:
    """Workloads by drafters, and their average."""
    rows = drafted(report, point)
    labels, names = unique(r.label for r in rows), unique(r.workload for r in rows)
    cells = {(r.workload, r.label): r for r in rows}
    body = ""
    for name in names:
        plain = next((r for r in report.rows if (r.workload, r.draft, r.point) == (name, PLAIN, point)), None)
        speeds = "" if plain is None else f"{plain.tokens_per_second:.1f}"
        found = "".join(_cell(cells.get((name, label))) for label in labels)
        body += f'<tr><th scope="row">{escape(name)}</th><td>{speeds}</td>{found}</tr>'
    if len(names) > 1:
        total = "".join(_verdict(words.average(_of(report, point, label))) for label in labels)
        body += f'<tr class="total"><th scope="row">average</th><td></td>{total}</tr>'
    return grid("Table of speed-ups", (head("text"), head("plain", "tokens/s"), *map(head, labels)), body)


def _cell(row: Row | None) -> str:
    return "<td></td>" if row is None or row.speedup is None else _verdict(row.speedup)


def _verdict(speedup: Speedup) -> str:
    kind = speedup.verdict
    between = words.interval(speedup) or "one pair"
    return f'<td class="{kind}"><b>{SIGNS[kind]} {speedup.median:.2f}×</b><small>{between}</small></td>'


def speed_chart(report: Report, point: Point) -> str:
    """Bars with intervals, and a line where plain decoding is."""
    rows = [r for r in drafted(report, point) if r.speedup is not None]
    several = len(unique(r.label for r in rows)) > 1
    most = max(r.speedup.median for r in rows if r.speedup)
    highs = [r.speedup.high for r in rows if r.speedup and r.speedup.high is not None]
    scale = axis(max(most, min(max(highs, default=most), 1.6 * most)), "times as fast as plain decoding (dashed line)", 1.0)
    drawn = []
    for r in rows:
        s = r.speedup
        assert s is not None
        title = f"{r.workload}, {r.label}: {s.median:.2f}× {words.interval(s)}"
        reach = None if s.low is None else (s.low, s.high if s.high is not None else 2 * scale.end)
        value = f"{SIGNS[s.verdict]} {s.median:.2f}×"
        name = r.label if several else r.workload
        drawn.append(Bar(r.workload if several else "", name, value, ((0.0, s.median, s.verdict, title),), reach))
    return bars(drawn, scale, "Bars of the speed-ups in the table, with their intervals", "short")


def acceptance(report: Report) -> str:
    """How many of the first, second, ... guesses were right, per workload."""
    first, keys = points(report)[0], shown(report)
    rows = [r for r in drafted(report, first) if r.label in keys and r.acceptance_by_position]
    if not rows:
        return ""
    plots = ""
    for name in unique(r.workload for r in rows):
        series = [
            Line(r.label, keys[r.label], tuple((float(i), share) for i, share in enumerate(r.acceptance_by_position, 1)))
            for r in rows
            if r.workload == name
        ]
        plots += lines(Plot(name, "place of the guess", f"{name}: share of guesses that were right", 1.0, percent=True), series)
    hint = (
        "Of the first guess of a round, of the second, and so on: the share that the model itself would have written, of all "
        "that were made. A wrong guess makes those after it useless."
    )
    key = legend([(key, label) for label, key in keys.items()])
    return section("How often guesses are right", hint, f'{key}<div class="plots">{plots}</div>')


def seconds(report: Report) -> str:
    """Time per token, split into drafting, the model's passes and the rest: over all workloads, and folded for each."""
    first, keys = points(report)[0], shown(report)
    rows = [r for r in report.rows if r.point == first and (r.draft == PLAIN or r.label in keys) and r.tokens]
    each = [_stack(r.workload, [r]) for r in rows]
    key = swatches([("draft", "drafting"), ("verify", "the model's passes"), ("other", "the rest")])
    hint = (
        "Milliseconds per token written, reading the prompt included; shorter is better. In brackets: percent of drafting, of "
        "the model's passes, and of the rest."
    )
    label = "Stacked bars of the time per token; their values stand beside them"
    if len(unique(r.workload for r in rows)) == 1:
        return section("Where the time goes", hint, key + bars(each, _scale(each, "ms per token"), label))
    every = [_stack("", [r for r in rows if r.label == name]) for name in unique(r.label for r in rows)]
    content = bars(every, _scale(every, "ms per token, all kinds of text together"), label)
    return section(
        "Where the time goes", hint, key + content + folded("By kind of text", bars(each, _scale(each, "ms per token"), label))
    )


def _scale(stacks: Sequence[Bar], unit: str) -> Axis:
    return axis(max((bar.parts[-1][1] for bar in stacks), default=1.0), unit)


def _stack(group: str, rows: Sequence[Row]) -> Bar:
    """The time per token of one drafter's rows together."""
    total, tokens = sum(r.seconds for r in rows) or 1e-12, sum(r.tokens for r in rows)
    spent = {kind: sum(getattr(r, f"{kind}_seconds") for r in rows) for kind in ("draft", "verify", "other")}
    parts, start = [], 0.0
    for kind, share in spent.items():
        end = start + 1000 * share / tokens
        parts.append((start, end, kind, f"{kind}: {end - start:.2f} ms, {share / total:.0%}"))
        start = end
    shares = "/".join(f"{100 * share / total:.0f}" for share in spent.values())
    return Bar(group, "plain" if rows[0].draft == PLAIN else rows[0].label, f"{start:.1f} ms ({shares} %)", tuple(parts))


def waits(report: Report) -> str:
    """Percentiles of the first token's and the further tokens' latency."""
    first, keys = points(report)[0], shown(report)
    rows = [r for r in report.rows if r.point == first and (r.draft == PLAIN or r.label in keys)]
    key = "".join(
        f'<li><svg width="14" height="14" aria-hidden="true"><circle cx="7" cy="7" r="4.5" class="p{p}"/></svg>{name}</li>'
        for p, name in ((50, "half of all waits are shorter (p50)"), (90, "90 % (p90)"), (99, "99 % (p99)"))
    )
    charts = "".join(
        f"<div><h3>{title}</h3>{_ranges([(r, getattr(r.latency, kind)) for r in rows], title)}</div>"
        for kind, title in (("first_token", "Until the first token"), ("inter_token", "For each further token"))
    )
    hint = (
        "Tokens that come together share their wait, so that the second chart compares with plain decoding; the pauses between "
        "pieces of text, which are longer, are in the table."
    )
    more = folded("All percentiles as a table", _wait_table(report))
    content = f'<ul class="legend">{key}</ul><div class="pair">{charts}</div>{more}'
    return section("How long a reader waits", hint, content)


def _ranges(rows: Sequence[tuple[Row, Percentiles | None]], title: str) -> str:
    known = [(r, p) for r, p in rows if p is not None]
    if not known:
        return '<p class="hint">Nothing was written that could show it.</p>'
    scale = axis(1000 * max(p.p99 for _, p in known), "ms")
    drawn = [
        Bar(
            r.workload,
            "plain" if r.draft == PLAIN else r.label,
            f"{p.p50:.2f} / {p.p90:.2f} / {p.p99:.2f} s"
            if p.p99 >= 1
            else f"{1000 * p.p50:.0f} / {1000 * p.p90:.0f} / {1000 * p.p99:.0f} ms",
            ((1000 * p.p50, 1000 * p.p99, "wait", f"{r.workload}, {r.label}"),),
            None,
            ((1000 * p.p99, "p99"), (1000 * p.p90, "p90"), (1000 * p.p50, "p50")),
        )
        for r, p in known
    ]
    return bars(drawn, scale, f"{title}: percentiles, whose values stand beside them and in the table")


def _wait_table(report: Report) -> str:
    kinds = {"first_token": "first token", "inter_token": "further token", "pause": "pause", "answer": "whole answer"}
    body = "".join(
        record(words.place(r, report), (r.label, *(_milliseconds(getattr(r.latency, kind)) for kind in kinds)), text=1)
        for r in report.rows
    )
    heads = [head("text"), head("drafter", text=True), *(head(name, "p50 / p90 / p99 ms") for name in kinds.values())]
    return grid("Table of latencies", heads, body)


def _milliseconds(p: Percentiles | None) -> str:
    return "" if p is None else f"{1000 * p.p50:.1f} / {1000 * p.p90:.1f} / {1000 * p.p99:.1f}"
