"""What a benchmark found: rows, divergences, and all that is needed to judge or repeat them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plan.costs import merged
from . import spec_bench
from .latency import Latency, latency
from .numbers import LOSS, Run, Speedup, by_question, together
from .plan import Point
from .usage import Usage
from .workloads import Workload

FORMAT = 2
"""Of the JSON object. 1 had no sweeps, no latencies, and no speeds of single runs."""


CELL = ("workload", "draft", "temperature", "batch", "rate", "depth")
"""What tells the rows of a report apart."""


@dataclass(frozen=True, slots=True)
class Row:
    """A drafter on a workload under some conditions: `temperature`, `batch` or `rate` (see `Point`), and the `depth` it was told
    to look ahead, if any. `draft` is the spec as given, `drafter` the name behind it; counters and seconds are sums over
    `runs` runs, so that draft, verify and other seconds make up all seconds. `equal` of `compared` answers were the plain ones.
    `plain_tokens_per_second` and `speedup` (None for plain decoding itself) are of the plain runs beside these. `synthetic`: the
    answers were known beforehand, so this is no real drafter. `paces` are what the speed-ups compare, run by run (`Run.pace`);
    `joules` are None where the card does not count them. `note`: what else must be known. `question_speed` and
    `plain_question_speed` are means over the `questions` conversations (see `numbers.by_question`). `offered_by_position`: share
    of the rounds that had such a guess; `costs`: seconds of a round's parts, drafted and plain, by batch and size
    (`plan/costs`)."""

    workload: str
    draft: str
    drafter: str
    synthetic: bool
    temperature: float
    batch: int | None
    rate: float | None
    depth: int | None
    prompts: int
    runs: int
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: Speedup | None
    verdict: str | None
    tau: float
    alpha: float
    acceptance_by_position: tuple[float, ...]
    draft_seconds: float
    verify_seconds: float
    other_seconds: float
    seconds: float
    rounds: int
    tokens: int
    drafted: int
    accepted: int
    equal: int
    compared: int
    warmup_seconds: float
    paces: tuple[float, ...]
    latency: Latency
    peak_memory_bytes: int | None
    peak_device_memory_bytes: int | None
    joules: float | None
    joules_per_token: float | None
    note: str = ""
    questions: int = 0
    question_speed: float = 0.0
    plain_question_speed: float = 0.0
    offered_by_position: tuple[float, ...] = ()
    costs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def point(self) -> Point:
        """The conditions, without what concerns the drafter alone."""
        return Point(self.temperature, self.batch, self.rate)

    @property
    def label(self) -> str:
        """The drafter as tables name it: what `auto` picked, and the depth where it was set."""
        given = self.draft.rpartition("/")[2] if self.draft.endswith(".py") else self.draft
        name = given if given.startswith(self.drafter) else f"{given} ({self.drafter})"
        return name + ("" if self.depth is None else f", depth {self.depth}") + ("*" if self.synthetic else "")


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an answer first differs from the plain one; tokens are None where a text had ended, `prompt` counts from 1 and
    `position` from 0. `near_tie`: rounding explains it (see `compare.py`); `gap`: between the two best scores there."""

    workload: str
    draft: str
    prompt: int
    position: int
    want: int | None
    got: int | None
    near_tie: bool
    gap: float
    temperature: float = 0.0
    batch: int | None = 1
    rate: float | None = None
    depth: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A workload as it was asked: its prompts are told by their hashes."""

    name: str
    source: str
    sha256: tuple[str, ...]

    @classmethod
    def of(cls, workload: Workload) -> Asked:
        """Of the prompts that were asked, not of those left out."""
        return cls(workload.name, workload.source, tuple(p.sha256 for p in workload.prompts))


@dataclass(frozen=True, slots=True)
class Report:
    """All of it, whether or not it came to its end."""

    rows: tuple[Row, ...]
    divergences: tuple[Divergence, ...]
    workloads: tuple[Asked, ...]
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """Whether every answer was the plain one."""
        return all(row.equal == row.compared for row in self.rows)

    @property
    def losses(self) -> tuple[Row, ...]:
        """Where speculation is slower, beyond doubt."""
        return tuple(row for row in self.rows if row.verdict == LOSS)

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`; numbers that are not finite become null."""
        found = {
            "format": FORMAT,
            "verdict": "equal" if self.ok else "different",
            "interrupted": self.interrupted,
            "results": [dataclasses.asdict(row) for row in self.rows],
            "losses": [{name: getattr(row, name) for name in CELL} for row in self.losses],
            "divergences": [dataclasses.asdict(d) for d in self.divergences],
            "workloads": [
                {"name": w.name, "source": w.source, "prompts": len(w.sha256), "sha256": list(w.sha256)} for w in self.workloads
            ],
            "settings": dict(self.settings),
            "provenance": dict(self.provenance),
        }
        lines = [dataclasses.asdict(line) for line in spec_bench.summary(self)]
        return {name: finite(value) for name, value in (found | ({"spec_bench": lines} if lines else {})).items()}


def finite(value: Any) -> Any:
    """The same value without infinities and NaN, which JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True)
class Name:
    """Who was measured, and under which conditions: see `Row`."""

    draft: str
    drafter: str
    point: Point
    depth: int | None = None
    synthetic: bool = False
    note: str = ""


def row(workload: Workload, who: Name, runs: Sequence[Run], plain: Sequence[Run], equal: int, warmup: float) -> Row:
    """One row from the runs of a drafter and of plain decoding beside them, pair by pair (the same ones for plain decoding
    itself). At least one run each; `equal` of their answers agree."""
    stats, used = together([r.stats for r in runs]), Usage.over([r.usage for r in runs])
    drafts, verifies, seconds = (sum(getattr(r, n) for r in runs) for n in ("draft_seconds", "verify_seconds", "seconds"))
    ratios = [a.pace / b.pace for a, b in zip(runs, plain, strict=True) if a.pace and b.pace]
    speedup = Speedup.of(ratios) if ratios and runs is not plain else None
    return Row(
        workload=workload.name,
        draft=who.draft,
        drafter=who.drafter,
        synthetic=who.synthetic,
        temperature=who.point.temperature,
        batch=who.point.batch,
        rate=who.point.rate,
        depth=who.depth,
        prompts=len(workload.prompts),
        runs=len(runs),
        tokens_per_second=statistics.median(r.speed for r in runs),
        plain_tokens_per_second=statistics.median(r.speed for r in plain),
        speedup=speedup,
        verdict=speedup.verdict if speedup is not None else None,
        tau=_share(stats.tokens, stats.rounds),
        alpha=_share(stats.accepted, stats.drafted),
        acceptance_by_position=tuple(a / max(o, 1) for a, o in zip(stats.accepted_at, stats.offered_at, strict=True)),
        draft_seconds=drafts,
        verify_seconds=verifies,
        other_seconds=max(0.0, seconds - drafts - verifies),
        seconds=seconds,
        rounds=stats.rounds,
        tokens=stats.tokens,
        drafted=stats.drafted,
        accepted=stats.accepted,
        equal=equal,
        compared=sum(len(r.results) for r in runs),
        warmup_seconds=warmup,
        paces=tuple(r.pace for r in runs),
        latency=latency([r.times for r in runs]),
        peak_memory_bytes=used.memory,
        peak_device_memory_bytes=used.device_memory,
        joules=used.joules,
        joules_per_token=None if used.joules is None else _share(used.joules, stats.tokens),
        note=who.note,
        questions=len(set(workload.questions)),
        question_speed=by_question(runs, workload.questions),
        plain_question_speed=by_question(plain, workload.questions),
        offered_by_position=tuple(n / max(1, stats.rounds) for n in stats.offered_at),
        costs=merged(r.costs for r in (*runs, *(() if runs is plain else plain))).table(asked=False).as_json(),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
