"""Reports made of invented runs, for what is done with a report."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from outrider.bench.latency import Times
from outrider.bench.numbers import Run
from outrider.bench.plan import PLAIN, Point
from outrider.bench.report import Asked, Name, Report, Row, row
from outrider.bench.usage import Usage
from outrider.bench.workloads import Prompt, Workload
from outrider.types import Stats

PROVENANCE = {
    "date": "2026-01-02T03:04:05Z", "command": ["outrider", "bench", "--quick"], "commit": "c0ffee", "outrider": "0.1.0",
    "torch": "2.13.0", "transformers": "5.24.0", "cpu": "A Processor", "cores": 2, "threads": 2, "device": "cpu, 2 threads",
    "model": {"name": "tiny", "sampled_sha256": "ab" * 32}, "dtype": "float32", "quantize": "none",
    "energy": "not measured (no GPU)",
}  # fmt: skip


BASE = Point()


def workload(name: str) -> Workload:
    return Workload(name, "built-in", tuple(Prompt(({"role": "user", "content": f"{name} {i}"},)) for i in range(3)))


def run(speed: float, drafted: int = 0) -> Run:
    """100 tokens at a speed, a tenth of the time spent drafting where there are guesses."""
    stats = Stats(tokens=100, rounds=100 - drafted // 2, drafted=drafted, accepted=drafted // 2)
    stats.offered_at, stats.accepted_at = ([drafted, drafted // 2], [drafted // 2, drafted // 8]) if drafted else ([], [])
    times = Times(first=[0.4, 0.5], tokens=[1 / speed] * 98, pauses=[2 / speed] * 49, answers=[50 / speed] * 2)
    seconds, usage = 100 / speed, Usage(memory=2**30)
    spent = {"draft_seconds": seconds / 10 * bool(drafted), "verify_seconds": seconds * 0.8, "seconds": seconds}
    results: Any = [SimpleNamespace(stats=Stats(tokens=33, seconds=seconds / 3))] * 3
    return Run(stats=stats, times=times, usage=usage, results=results, **spent)


def rows(name: str, draft: str, speeds: tuple[float, ...], point: Point = BASE, depth: int | None = None) -> tuple[Row, Row]:
    """Plain decoding at 100 tokens per second, more or less, and a drafter beside it."""
    plain = [run(100 * (1 + 0.01 * i)) for i in range(len(speeds))]
    runs = [run(s, drafted=40) for s in speeds]
    base = row(workload(name), Name(PLAIN, PLAIN, point), plain, plain, 3 * len(speeds), 0.5)
    mine = row(workload(name), Name(draft, draft.partition(":")[0], point, depth), runs, plain, 3 * len(speeds), 0.5)
    return tuple(replace(r, compared=3 * len(speeds)) for r in (base, mine))


def report(*pairs: tuple[Row, ...], **changes: Any) -> Report:
    found = {(r.workload, r.draft, r.point, r.depth): r for pair in pairs for r in pair}
    names = list(dict.fromkeys(r.workload for r in found.values()))
    prompts = {name: workload(name).sha256 for name in names}
    asked = tuple(Asked.of(workload(name)) for name in names)
    settings = {"drafts": ["none"], "max_tokens": 48, "seed": 0, "repeats": 3, "control": "goodput"}
    return replace(Report(tuple(found.values()), (), asked, settings, PROVENANCE | {"prompts": prompts}), **changes)


FAST, SLOW, EVEN = (201.0, 202.0, 203.0), (80.0, 81.0, 82.0), (100.0, 103.0, 101.0)
MIXED = report(rows("code", "guess", FAST), rows("creative", "guess", SLOW), rows("chat", "guess", EVEN))
"""Twice as fast on code, slower on creative, neither on chat."""
