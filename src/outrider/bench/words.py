"""A report in words: the headline, where speculation loses and why, and what a reader must not overlook."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .numbers import GAIN, LOSS, UNCLEAR, Speedup
from .plan import Point
from .report import Divergence, Report, Row

FEW_RIGHT, MUCH_DRAFTING = 0.3, 0.2
"""Below this share of right guesses, above this share of the time, they are named as the reason of a loss."""
ALIKE = (0.9, 1.1)
"""Speed-ups between these that noise explains are no difference; beyond them it takes more runs to tell."""
FEW = 6
"""As many doubtful cases are named."""


@dataclass(frozen=True, slots=True)
class Headline:
    """The result in one line, what it holds for, and the verdict on it (None where nothing was compared)."""

    text: str
    below: str
    verdict: str | None


def headline(report: Report) -> Headline:
    """Of the best real drafter over all workloads, under the first conditions that were measured. One that gains beyond noise
    goes before one that only seems to gain more."""
    compared = [r for r in report.rows if r.speedup is not None and not r.synthetic]
    if not report.ok:
        wrong = sum(r.compared - r.equal for r in report.rows)
        return Headline(
            "The texts differ", f"{wrong} answers are not those of plain decoding: a fault, whatever the speed.", LOSS
        )
    if not compared:
        return Headline("No drafter was compared with plain decoding", "Name one with --draft.", None)
    compared = [r for r in compared if r.point == compared[0].point]
    groups = [[r for r in compared if r.label == label] for label in dict.fromkeys(r.label for r in compared)]
    best = max(groups, key=lambda rows: (average(rows).verdict == GAIN, average(rows).median))
    found, one = average(best), best[0]
    alone = len({r.draft for r in compared if r.drafter == one.drafter}) == 1
    name = (one.drafter if alone else one.draft) + ("" if one.depth is None else f" at depth {one.depth}")
    text = {
        GAIN: f"{name} answers {times(found.median)} as fast",
        LOSS: f"{name} answers at {times(found.median)} the plain speed",
        UNCLEAR: f"{name} makes no difference beyond noise ({times(found.median)})",
    }[found.verdict]
    if found.verdict == UNCLEAR and not ALIKE[0] < found.median < ALIKE[1]:
        text = f"{name} answered {times(found.median)} as fast, but the runs differ too much to be sure"
    if found.low is None and found.verdict == UNCLEAR:
        text = f"{name} answered {times(found.median)} as fast in the one pair of runs"
    return Headline(f"{text}, same text", f"{_reach(best)}; {one.point.words}.", found.verdict)


def average(rows: Sequence[Row]) -> Speedup:
    """Of one drafter over its rows: the geometric mean of their medians. The interval is made of the geometric means of the rows'
    first pairs, of their second pairs, and so on: what noise may have done to the average over these workloads."""
    known = [r.speedup for r in rows if r.speedup is not None]
    means = Speedup.of([statistics.geometric_mean(ratios) for ratios in zip(*(s.pairs for s in known), strict=False)])
    return replace(means, median=statistics.geometric_mean([s.median for s in known]))


def _reach(rows: Sequence[Row]) -> str:
    """Where the drafter is best and worst."""
    known = sorted((r.speedup.median, r.workload) for r in rows if r.speedup is not None)
    (low, worst), (high, best) = known[0], known[-1]
    if len(known) == 1:
        return f"On {best}, against plain decoding beside it"
    return f"On average over {len(known)} kinds of text, from {times(low)} on {worst} to {times(high)} on {best}"


def times(ratio: float) -> str:
    """`1.8×`; near 1 and below, two digits."""
    return f"{ratio:.2f}×" if ratio < 1.2 else f"{ratio:.1f}×"


def interval(speedup: Speedup) -> str:
    """`[1.10, 1.40]`; that of two pairs that disagree reaches far, which three digits show as well as nine."""
    if speedup.low is None:
        return ""
    high = f"{speedup.high:.2f}" if speedup.high is not None and speedup.high < 100 else "100+"
    return f"[{speedup.low:.2f}, {high}]"


def place(row: Row | Divergence, report: Report) -> str:
    """`code`, and the conditions where there were several."""
    several = len({r.point for r in report.rows}) > 1
    return f"{row.workload} ({Point(row.temperature, row.batch, row.rate)})" if several else row.workload


def losses(report: Report) -> list[str]:
    """One sentence per row that is slower beyond doubt, with what explains it; then of those that may be."""
    lines = [f"On {place(r, report)}, {r.label} {_loss(r)}." for r in report.losses]
    doubtful = [r for r in report.rows if r.verdict == UNCLEAR and r.speedup is not None and r.speedup.median < 1]
    if doubtful:
        named = [f"{r.label} on {place(r, report)} ({times(r.speedup.median)})" for r in doubtful if r.speedup]
        more = f", and {len(named) - FEW} more" if len(named) > FEW else ""
        lines.append(f"Perhaps slower, but not beyond noise: {', '.join(named[:FEW])}{more}.")
    if any(r.speedup is not None for r in report.rows) and not report.losses:
        lines[:0] = _together(report) or ["No drafter was slower than plain decoding beyond doubt."]
    return lines


def _together(report: Report) -> list[str]:
    """What loses on average although no kind of text shows it alone."""
    rows = [r for r in report.rows if r.speedup is not None]
    lines = []
    for point, label in dict.fromkeys((r.point, r.label) for r in rows):
        mine = [r for r in rows if (r.point, r.label) == (point, label)]
        found = average(mine)
        if found.verdict == LOSS and len(mine) > 1:
            at = f" ({point})" if len({r.point for r in rows}) > 1 else ""
            speed = f"{found.median:.2f} times the plain speed {interval(found)}"
            lines.append(f"Over all {len(mine)} kinds of text together{at}, {label} is slower: {speed}; no kind shows it alone.")
    return lines


def _loss(row: Row) -> str:
    """How much slower, and why."""
    assert row.speedup is not None and row.speedup.high is not None
    most = f"{row.speedup.high:.2f}" if row.speedup.high < 0.995 else "just below 1"
    said = f"is slower than plain decoding: {row.speedup.median:.2f} times its speed, at most {most}"
    return f"{said}. {_reason(row)}; do not speculate there"


def _reason(row: Row) -> str:
    share = row.draft_seconds / row.seconds if row.seconds else 0.0
    if not row.drafted:
        return "It made no guesses, and looking for them costs time"
    if share > MUCH_DRAFTING:
        return f"Drafting took {share:.0%} of the time, for {row.tau:.2f} tokens per pass"
    if row.alpha < FEW_RIGHT:
        return f"Only {row.alpha:.0%} of its guesses were right"
    return f"Its {row.tau:.2f} tokens per pass do not pay for the wider passes that check guesses"


def different(report: Report) -> list[str]:
    """A sentence for every prompt whose answer is not the plain one."""
    return [
        f"DIFFERENT TEXT ({'near-tie, decided by rounding' if d.near_tie else 'FAULT'}): {place(d, report)}, {d.draft}, "
        f"prompt {d.prompt}: token {d.position} is {d.got} instead of {d.want}; gap between the two best scores {d.gap:.2g}"
        for d in report.divergences
    ]


def sameness(report: Report) -> str:
    """How many answers are those of plain decoding."""
    drafted = [r for r in report.rows if r.speedup is not None] or report.rows
    same, compared = sum(r.equal for r in drafted), sum(r.compared for r in drafted)
    return f"{same} of {compared} answers are those of plain decoding" + ("" if report.ok else ", which must be all of them")


def notes(report: Report) -> list[str]:
    """Drafters that were switched off, and an end before the end."""
    off = [f"{place(r, report)}, {r.draft}: {r.note}; its numbers are not the drafter's" for r in report.rows if r.note]
    return off + (["interrupted: this is what was measured by then"] if report.interrupted else [])
