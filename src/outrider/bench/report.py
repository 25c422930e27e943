"""What a benchmark found: rows, divergences, and all that is needed to judge or repeat them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plan.costs import merged
from .numbers import LOSS, Run, Speedup, together
from .workloads import Workload


@dataclass(frozen=True, slots=True)
class Row:
    """A drafter on a workload. `draft` is the spec as given, `drafter` the name behind it; counters and seconds are sums over
    `runs` runs, so that draft, verify and other seconds make up all seconds. `equal` of `compared` answers were the plain ones.
    `plain_tokens_per_second` and `speedup` (None for plain decoding itself) are of the plain runs beside these. `synthetic`: the
    answers were known beforehand, so this is no real drafter. `note`: what else must be known. `offered_by_position`: share of
    the rounds that had such a guess; `costs`: seconds of a round's parts, drafted and plain, by batch and size (`plan/costs`)."""

    workload: str
    draft: str
    drafter: str
    synthetic: bool
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
    note: str = ""
    offered_by_position: tuple[float, ...] = ()
    costs: Mapping[str, Any] = field(default_factory=dict)


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


@dataclass(frozen=True, slots=True)
class Report:
    """All of it, whether or not it came to its end."""

    rows: tuple[Row, ...]
    divergences: tuple[Divergence, ...]
    workloads: tuple[Workload, ...]
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
            "verdict": "equal" if self.ok else "different",
            "interrupted": self.interrupted,
            "results": [dataclasses.asdict(row) for row in self.rows],
            "losses": [{"workload": row.workload, "draft": row.draft} for row in self.losses],
            "divergences": [dataclasses.asdict(d) for d in self.divergences],
            "workloads": [
                {"name": w.name, "source": w.source, "prompts": len(w.prompts), "sha256": [p.sha256 for p in w.prompts]}
                for w in self.workloads
            ],
            "settings": dict(self.settings),
            "provenance": dict(self.provenance),
        }
        return {name: finite(value) for name, value in found.items()}


def finite(value: Any) -> Any:
    """The same value without infinities and NaN, which JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True)
class Name:
    """Who was measured: see `Row`."""

    draft: str
    drafter: str
    synthetic: bool = False
    note: str = ""


def row(workload: Workload, who: Name, runs: Sequence[Run], plain: Sequence[Run], equal: int, warmup: float) -> Row:
    """One row from the runs of a drafter and of plain decoding beside them, pair by pair (the same ones for plain decoding
    itself). At least one run each; `equal` of their answers agree."""
    stats = together([r.stats for r in runs])
    drafts, verifies, seconds = (sum(getattr(r, n) for r in runs) for n in ("draft_seconds", "verify_seconds", "seconds"))
    ratios = [a.speed / b.speed for a, b in zip(runs, plain, strict=True) if a.speed and b.speed]
    speedup = Speedup.of(ratios) if ratios and runs is not plain else None
    return Row(
        workload=workload.name,
        draft=who.draft,
        drafter=who.drafter,
        synthetic=who.synthetic,
        prompts=len(workload.prompts),
        runs=len(runs),
        tokens_per_second=statistics.median(r.speed for r in runs),
        plain_tokens_per_second=statistics.median(r.speed for r in plain),
        speedup=speedup,
        verdict=speedup.verdict if speedup is not None else None,
        tau=stats.tokens / stats.rounds if stats.rounds else 0.0,
        alpha=stats.accepted / stats.drafted if stats.drafted else 0.0,
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
        note=who.note,
        offered_by_position=tuple(n / max(1, stats.rounds) for n in stats.offered_at),
        costs=merged(r.costs for r in (*runs, *(() if runs is plain else plain))).table(asked=False).as_json(),
    )
