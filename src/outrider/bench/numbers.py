"""From measured runs to the numbers of a report.

tau = tokens / rounds and alpha = accepted / drafted, per request, as in `types.Stats`. Tokens per second are those written, over
all seconds of a run, reading the prompts included. A speed-up is the ratio of two runs that stand side by side; its interval is
Student's, over the logarithms of the pairs' ratios, so that half as fast and twice as fast are equally far from 1.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from .. import metrics
from ..plan.costs import Samples
from ..results import Result
from ..types import Stats, StepEvent
from .latency import Times
from .usage import Usage

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t, two-sided 95 %, for 1 to 10 degrees of freedom."""

GAIN, LOSS, UNCLEAR = "gains", "loses", "unclear"


@dataclass(slots=True, eq=False)
class Run:
    """One pass over a workload. Seconds of wall clock, on the host. On a GPU drafting counts what its launch takes, verifying
    the device's time where passes are captured (else their launch), and the wait for the device is in the rest. `open`: requests
    came by themselves, so that the machine was at times without work."""

    open: bool = False
    results: list[Result] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    times: Times = field(default_factory=Times)
    usage: Usage = field(default_factory=Usage)
    costs: Samples = field(default_factory=Samples)
    _last: float | None = None

    def hear(self, event: StepEvent) -> None:
        """Take in a round (a `Sink`)."""
        self.draft_seconds += event.draft_seconds
        self.verify_seconds += event.verify_seconds
        for item in event.committed:
            metrics.add(self.stats, item)
        now = time.perf_counter()
        self.times.hear(event, now)
        self._price(event, now)

    def _price(self, event: StepEvent, now: float) -> None:
        """Note what a round's parts took, by its deepest guess. Rounds that read prompts are left out. Being asked and staying
        silent is a price of drafting, and the rest of such a round is not that of a plain one, which may be launched ahead."""
        last, self._last = self._last, None if event.prefill else now
        if event.prefill or last is None or not any(item.tokens for item in event.committed):
            return
        batch, depth = len(event.committed), max((len(item.offered_at) for item in event.committed), default=0)
        asked = any(event.depths)
        self.costs.add("verify", batch, event.rows, event.verify_seconds)
        if asked:
            self.costs.add("draft", batch, depth, event.draft_seconds)
        if depth or not asked:
            self.costs.add("other", batch, depth, now - last - event.verify_seconds - event.draft_seconds)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.stats.tokens / self.seconds if self.seconds else 0.0

    @property
    def pace(self) -> float:
        """What speed-ups compare: tokens per second; where requests came by themselves, which no drafter hastens, tokens per
        second that their askers waited, from arrival to end."""
        waited = sum(self.times.answers) if self.open else self.seconds
        return self.stats.tokens / waited if waited else 0.0


def by_question(runs: Sequence[Run], questions: Sequence[int]) -> float:
    """Tokens per second of each question, averaged over the questions, then over the runs (Xia et al. 2024, Spec-Bench): the
    tokens of all its turns over the seconds from asking to answer. `questions` has the number of every prompt's question."""
    means = []
    for run in runs:
        tokens, seconds = dict.fromkeys(questions, 0), dict.fromkeys(questions, 0.0)
        for question, result in zip(questions, run.results, strict=True):
            tokens[question] += result.stats.tokens
            seconds[question] += result.stats.seconds
        means.append(statistics.fmean(tokens[q] / seconds[q] if seconds[q] else 0.0 for q in tokens))
    return statistics.fmean(means)


@dataclass(frozen=True, slots=True)
class Speedup:
    """Over all pairs: median, smallest and largest ratio, and the 95 % interval of the typical ratio (None for one pair)."""

    median: float
    min: float
    max: float
    low: float | None
    high: float | None
    pairs: tuple[float, ...]

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Speedup:
        """From the ratio of every pair, at least one, all above 0."""
        low, high = interval(ratios)
        return cls(statistics.median(ratios), min(ratios), max(ratios), low, high, tuple(ratios))

    @property
    def verdict(self) -> str:
        """Whether the interval lies above 1, below it, or neither."""
        if self.low is not None and self.low > 1:
            return GAIN
        return LOSS if self.high is not None and self.high < 1 else UNCLEAR


def interval(ratios: Sequence[float]) -> tuple[float | None, float | None]:
    """Student's 95 % interval of the geometric mean; None twice for a single ratio."""
    if len(ratios) < 2:
        return None, None
    logs = [math.log(r) for r in ratios]
    middle, half = statistics.fmean(logs), student(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle - half), math.exp(middle + half)


def student(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t; beyond the table the Cornish-Fisher expansion around 1.960 (error below 1e-3)."""
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    return 1.95996 + 2.37227 / freedom + 2.8225 / freedom**2


def together(stats: Sequence[Stats]) -> Stats:
    """Counters of several runs, added up; seconds are left out."""
    total = Stats()
    for one in stats:
        for name in ("tokens", "rounds", "drafted", "accepted"):
            setattr(total, name, getattr(total, name) + getattr(one, name))
        total.offered_at = _added(total.offered_at, one.offered_at)
        total.accepted_at = _added(total.accepted_at, one.accepted_at)
    return total


def _added(a: list[int], b: list[int]) -> list[int]:
    n = max(len(a), len(b))
    return [x + y for x, y in zip(a + [0] * (n - len(a)), b + [0] * (n - len(b)), strict=True)]
