"""The section of the benchmark's page that shows what a sweep found: speed-up against depth, temperature, batch size or rate."""

from __future__ import annotations

from collections.abc import Sequence

from . import words
from .charts import Line, Plot, legend, lines
from .figures import MOST_SERIES, SWEPT, drafted, unique
from .markup import section
from .report import CELL, Report, Row

ALL = "all kinds of text"


def curves(report: Report) -> str:
    """One group of charts per option that took several values; the others stay at their first."""
    groups = "".join(_group(report, name) for name in SWEPT)
    if not groups:
        return ""
    hint = (
        "Speed-up over plain decoding under the same conditions (dashed line: as fast as plain). Where several options were "
        "varied, the others stand at their first value."
    )
    return section("What changes it", hint, groups)


def _group(report: Report, name: str) -> str:
    rows = _along(drafted(report), name)
    if len({getattr(r, name) for r in rows}) < 2:
        return ""
    drafts = unique(r.draft for r in rows)[:MOST_SERIES]
    texts = unique(r.workload for r in rows)
    most = 1.05 * max([r.speedup.median for r in rows if r.speedup] + [1.1])
    panels = ([ALL] if len(texts) > 1 else []) + texts
    charts = "".join(_panel(rows, name, text, drafts, most) for text in panels)
    return f'<h3>By {SWEPT[name]}</h3>{legend(list(enumerate(drafts)))}<div class="plots">{charts}</div>'


def _along(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows that differ in nothing but `name`, the workload and the drafter."""
    able = [r for r in rows if getattr(r, name) is not None]
    if not able:
        return []
    held = [c for c in CELL if c not in ("workload", "draft", name)]
    first = {c: getattr(able[0], c) for c in held}
    return [r for r in able if all(getattr(r, c) == first[c] for c in held)]


def _panel(rows: Sequence[Row], name: str, text: str, drafts: Sequence[str], most: float) -> str:
    series = []
    for key, draft in enumerate(drafts):
        mine = [r for r in rows if r.draft == draft and text in (ALL, r.workload)]
        values = sorted({getattr(r, name) for r in mine})
        at = [(float(v), words.average([r for r in mine if getattr(r, name) == v]).median) for v in values]
        series.append(Line(draft, key, tuple(at)))
    return lines(Plot(text, SWEPT[name], f"{text}: speed-up", most, 1.0), series)
