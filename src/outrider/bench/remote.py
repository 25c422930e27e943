"""Measures a running server from outside: how long until the first piece, how long between pieces, how many tokens a second.

Every workload is asked `repeats` times by `batch` clients at once, streamed. What speculation did comes from the answers' own
`timings` where they have them, else from the server's counters before and after. A server that can be told to decode plainly
(this package's own) is measured so beside every run, the order alternating, and its texts are compared.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import BadInput
from .counters import Counters
from .endpoint import Endpoint, Patience, Reply, Unanswered
from .numbers import Speedup
from .workloads import Prompt, Workload

PLAIN: dict[str, Any] = {"speculation": {"draft": "none"}}
LEVELS = (50, 95, 99)

Tell = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask. `batch`: clients at once; `limit`: prompts per workload."""

    workloads: tuple[Workload, ...]
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    repeats: int = 3
    batch: int = 1
    limit: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The options of every request."""
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}


@dataclass(slots=True)
class Pass:
    """One pass over a workload: answers by prompt (None where one failed), and what the server counted meanwhile."""

    replies: list[Reply | None] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    counted: Counters = field(default_factory=Counters)

    @property
    def good(self) -> list[Reply]:
        return [r for r in self.replies if r is not None]

    @property
    def tokens(self) -> int:
        return sum(r.count for r in self.good)

    @property
    def speed(self) -> float:
        """Tokens per second over all clients."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Acceptance:
    """`length`: tokens per round that had guesses, the model's own included (None where rounds are not told); `rate`: share of
    the guesses that were kept; `by_position`: kept per round; `source`: `timings`, `metrics` or `gauges` (which
    cover more than this run)."""

    source: str
    rate: float | None
    length: float | None = None
    by_position: tuple[float, ...] = ()
    drafted: int | None = None
    accepted: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A workload. Milliseconds by percentile: `first` piece, `between` two pieces of one answer, and `per_token` after the first
    piece, one figure for each answer. `counted`: the server says how many tokens it wrote, else pieces were counted. `speedup`
    over plain decoding beside it; `equal` of `compared` answers were the plain ones."""

    workload: str
    answers: int
    failed: int
    tokens: int
    counted: bool
    seconds: float
    tokens_per_second: float
    first: dict[str, float]
    between: dict[str, float]
    per_token: dict[str, float]
    acceptance: Acceptance | None
    plain_tokens_per_second: float | None = None
    speedup: Speedup | None = None
    equal: int = 0
    compared: int = 0


@dataclass(slots=True)
class Report:
    """What was measured by now. `ok`: every request was answered, and no text differs from the plain one."""

    endpoint: Endpoint
    plan: Plan
    rows: list[Row] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        return not self.errors and all(row.equal == row.compared for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        e, plan = self.endpoint, self.plan
        settings = {name: getattr(plan, name) for name in ("max_tokens", "temperature", "seed", "repeats", "batch", "limit")}
        about = {"endpoint": e.url, "model": e.model, "native": e.native, "chat": e.chat}
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {**about, "date": date, "settings": settings, "rows": rows, "errors": self.errors, "interrupted": self.interrupted}


def measure(endpoint: Endpoint, plan: Plan, tell: Tell = lambda what, share: None) -> Report:
    """Everything; Ctrl-C, or a server that is gone, leaves what was measured by then. Raises `BadInput` where there is nothing
    to ask."""
    if not plan.workloads:
        raise BadInput("nothing to measure: name a workload")
    report = Report(endpoint, plan)
    try:
        for i, workload in enumerate(plan.workloads):
            tell(workload.name, i / len(plan.workloads))
            _workload(report, workload.first(plan.limit))
    except KeyboardInterrupt:
        report.interrupted = True
    except Unanswered as error:
        report.errors.append(f"given up: {error}")
    return report


def _workload(report: Report, workload: Workload) -> None:
    endpoint, plan = report.endpoint, report.plan
    runs, plain = list[Pass](), list[Pass]()
    run(endpoint, plan, workload.prompts[: plan.batch])  # warms up
    for repeat in range(plan.repeats):
        sides: list[tuple[list[Pass], dict[str, Any]]] = [(runs, {})]
        if endpoint.native:
            sides.insert(repeat % 2, (plain, PLAIN))
        for passes, more in sides:
            passes.append(run(endpoint, plan, workload.prompts, more))
    report.errors += [f"{workload.name}: {e}" for one in (*runs, *plain) for e in one.errors]
    report.rows.append(row(workload.name, runs, plain))


def run(endpoint: Endpoint, plan: Plan, prompts: Sequence[Prompt], more: dict[str, Any] | None = None) -> Pass:
    """Ask every prompt once, `plan.batch` at a time. Raises `Unanswered` for a server that is gone."""
    made, before, patience = Pass(), Counters.read(endpoint.metrics()), Patience()

    def ask(prompt: Prompt) -> Reply | None:
        try:
            reply = endpoint.ask(prompt.messages, **plan.body, **(more or {}))
        except Unanswered as error:
            made.errors.append(str(error))
            patience.failed(error)
            return None
        patience.heard()
        return reply

    started = time.perf_counter()
    pool = ThreadPoolExecutor(plan.batch)
    try:
        made.replies = list(pool.map(ask, prompts))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    made.seconds = time.perf_counter() - started
    made.counted = Counters.read(endpoint.metrics()).since(before)
    return made


def row(name: str, runs: Sequence[Pass], plain: Sequence[Pass]) -> Row:
    """The figures of all passes over a workload."""
    good = [reply for one in runs for reply in one.good]
    pairs = [(a, b) for a, b in zip(runs, plain, strict=False) if a.speed and b.speed]
    reference = next((one.replies for one in plain), [])
    texts = [(r.text, p.text) for one in runs for r, p in zip(one.replies, reference, strict=False) if r and p]
    seconds, tokens = sum(one.seconds for one in runs), sum(r.count for r in good)
    spans = [(r.moments[-1] - r.moments[0], r.count) for r in good if len(r.moments) > 1 and r.count > 1]
    return Row(
        workload=name,
        answers=len(good),
        failed=sum(len(one.errors) for one in runs),
        tokens=tokens,
        counted=all(r.tokens is not None for r in good),
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        first=percentiles([r.moments[0] for r in good if r.moments]),
        between=percentiles([b - a for r in good for a, b in zip(r.moments, r.moments[1:], strict=False)]),
        per_token=percentiles([span / (count - 1) for span, count in spans]),
        acceptance=acceptance(runs),
        plain_tokens_per_second=sum(p.tokens for p in plain) / sum(p.seconds for p in plain) if plain else None,
        speedup=Speedup.of([a.speed / b.speed for a, b in pairs]) if pairs else None,
        equal=sum(one == other for one, other in texts),
        compared=len(texts),
    )


def acceptance(runs: Sequence[Pass]) -> Acceptance | None:
    """From the answers if all of them tell, else from the server's counters, else from its gauges; None if nothing does."""
    replies = [reply for one in runs for reply in one.good]
    told = [(r.drafted, r.accepted or 0) for r in replies if r.drafted is not None]
    counters = [one.counted for one in runs]
    rounds, drafted, accepted = (sum(getattr(c, n) for c in counters) for n in ("rounds", "drafted", "accepted"))
    deepest = max((max(c.by_position, default=-1) for c in counters), default=-1)
    kept = tuple(sum(c.by_position.get(p, 0.0) for c in counters) / rounds for p in range(deepest + 1)) if rounds else ()
    length = 1 + accepted / rounds if rounds else None
    if replies and len(told) == len(replies):
        made, right = sum(d for d, _ in told), sum(a for _, a in told)
        return Acceptance("timings", right / made if made else None, length, kept, made, right)
    if counters and all(c.known for c in counters):
        return Acceptance("metrics", accepted / drafted if drafted else None, length, kept, int(drafted), int(accepted))
    last = counters[-1] if counters else Counters()
    return Acceptance("gauges", last.rate, last.length) if last.rate is not None or last.length is not None else None


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """`{"p50": ms, "p95": ms, "p99": ms}`, between neighbours by their distance; nothing for no values."""
    if not seconds:
        return {}
    return {f"p{level}": 1e3 * float(at) for level, at in zip(LEVELS, np.percentile(np.asarray(seconds), LEVELS), strict=True)}
