"""The section of docs/training.md on what the shipped drafters reach, from committed results and the drafters' cards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORKLOADS = ("code", "chat", "summarise", "question", "creative", "math")
ALL, EAGLE, PLAIN_CPU = "all", "eagle", "cpu"
PARTS = ("tau", "contexts", "speed")
CORES = 2
MISSING = "not measured"
WORDS = ("stretch", "bar", "below the bar")
MINUTE = 60.0


@dataclass(frozen=True)
class Bar:
    """What is asked for, at least and as a stretch; `less`: smaller is better."""

    what: str
    least: tuple[float, ...]
    stretch: tuple[float, ...]
    unit: str = "{:g}"
    less: bool = False

    def verdict(self, values: Sequence[float]) -> str:
        for word, wanted in zip(WORDS, (self.stretch, self.least), strict=False):
            if all(v <= w if self.less else v >= w for v, w in zip(values, wanted, strict=True)):
                return word
        return WORDS[-1]

    def line(self, measured: str, values: Sequence[float], where: str) -> str:
        asked = (" / ".join(self.unit.format(x) for x in some) for some in (self.least, self.stretch))
        return "| " + " | ".join((self.what, *asked, measured, where, self.verdict(values) if values else "")) + " |"


TAU = Bar("EAGLE-3, tree of up to 16 rows, T = 0: tau, code / all", (3.0, 2.6), (4.0, 3.3), "{:.1f}")
SAME = Bar("tau at T = 1 over tau at T = 0, on the same contexts", (0.9,), (1.0,), "{:.1f}")
FAST_GPU = Bar("speed over plain decoding, batch 1, one GPU, best shipped drafter, code / all", (2.0, 1.7), (2.6, 2.2), "{:.1f}x")
FAST_CPU = Bar("speed over plain decoding, 2 CPU cores, best shipped drafter, code / all", (1.6, 1.3), (2.0, 2.0), "{:.1f}x")
STEP = Bar("EAGLE draft step (one more level) on the GPU, inside the graph", (90,), (65,), "{:g} us", less=True)
TRAINING = Bar(
    "from nothing to a trained EAGLE-3 head, one GPU, summed over resumable commands", (25,), (15,), "{:g} minutes", less=True
)


@dataclass
class Place:
    """What was measured on one machine with so many threads (0: a GPU), by part: rows by what tells them apart."""

    name: str
    threads: int
    rows: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    about: list[str] = field(default_factory=list)

    def take(self, report: dict[str, Any]) -> None:
        where, asked = report["provenance"], report["settings"]
        for part in PARTS:
            for row in report.get(part, ()):
                key = (row["draft"], row["workload"], row.get("temperature"), row.get("control"))
                self.rows.setdefault(part, {})[key] = row
        self.about.append(
            f"torch {where['torch']}, {where['dtype']}, commit {str(where['commit'])[:7]}, {where['date'][:10]}: "
            f"{', '.join(part for part in PARTS if report.get(part))} on {asked['prompts']} prompts of each workload, "
            f"{asked['max_tokens']} tokens, {asked['pairs']} pairs" + ("" if report["complete"] else ", not to the end")
        )

    def find(self, part: str, *key: Any) -> dict[str, Any] | None:
        """A row of `draft, workload, temperature, control`."""
        return self.rows.get(part, {}).get(key)

    def drafts(self, part: str) -> list[str]:
        return list(dict.fromkeys(key[0] for key in self.rows.get(part, {})))


def places(files: Iterable[Path]) -> list[Place]:
    """All machines, a GPU first. Of equal rows that of more prompts counts, then the later one."""
    made = (json.loads(f.read_text()) for f in files)
    reports = sorted(made, key=lambda r: (r["settings"]["prompts"], str(r["provenance"]["date"])))
    found: dict[str, Place] = {}
    for report in reports:
        where = report["provenance"]
        threads = int(where["threads"]) if str(where["device"]).startswith(PLAIN_CPU) else 0
        name = f"{where['cpu']}, {threads} thread{'s'[: threads > 1]}" if threads else str(where["device"])
        found.setdefault(name, Place(name, threads)).take(report)
    return sorted(found.values(), key=lambda p: p.threads)


def interval(found: dict[str, Any], digits: int = 2) -> str:
    return "" if found["low"] is None else f" [{found['low']:.{digits}f}, {found['high']:.{digits}f}]"


def tau(row: dict[str, Any]) -> str:
    return f"{row['tau']:.2f}" + (f" ± {row['spread']:.2f}" if row["prompts"] > 1 else "")


def taus(place: Place) -> list[str]:
    rows = [place.find("tau", EAGLE, name, 0.0, None) for name in ("code", ALL)]
    if None in rows:
        return []
    known = [r for r in rows if r is not None]
    said = " / ".join(tau(r) for r in known)
    return [TAU.line(said, [r["tau"] for r in known], place.name)]


def same(place: Place) -> list[str]:
    row = place.find("contexts", EAGLE, ALL, None, None)
    if row is None:
        return []
    said = f"{row['ratio']:.2f}{interval(row)}, {row['contexts']:,} contexts"
    return [SAME.line(said, [row["ratio"]], place.name)]


def fast(place: Place, bar: Bar) -> list[str]:
    """The drafter and controller that were fastest over all."""
    found = place.rows.get("speed", {})
    whole = [key for key in found if key[1] == ALL and (key[0], "code", *key[2:]) in found]
    if not whole:
        return []
    draft, _, *rest = max(whole, key=lambda key: found[key]["speedup"]["median"])
    gains = [found[draft, name, *rest]["speedup"] for name in ("code", ALL)]
    said = " / ".join(f"{g['median']:.2f}x{interval(g)}" for g in gains)
    return [bar.line(f"{said}, `{draft}`, control {rest[-1]}", [g["median"] for g in gains], place.name)]


def steps(files: Iterable[Path]) -> list[str]:
    lines = []
    for file in sorted(files):
        report = json.loads(file.read_text())
        for name in ("eagle tree", "eagle chain"):
            took = report.get(name, {}).get("step_us")
            if took is not None:
                lines.append(STEP.line(f"{took:.0f} us, {name.removeprefix('eagle ')} of a random head", [took], report["card"]))
    return lines


def training(file: Path) -> tuple[list[str], list[str]]:
    """The line, and how it comes about. Phases that nobody timed count what their tokens make at the slowest speed seen."""
    if not file.exists():
        return [], []
    report = json.loads(file.read_text())
    seconds = [p["seconds"] or p["tokens"] / min(p["tokens_per_second"]) for p in report["phases"]]
    total = sum(seconds) / MINUTE
    said = "; ".join(f"{p['what']}: {s / MINUTE:.1f}" for s, p in zip(seconds, report["phases"], strict=True))
    line = TRAINING.line(f"{total:.1f} minutes", [total], report["card"])
    return [line], ["", f"Minutes of that: {said}. {report['note']}"]


def bars(found: Sequence[Place], results: Path) -> list[str]:
    """The table of what was asked for."""
    gpu, cpu = ([p for p in found if p.threads == threads] for threads in (0, CORES))
    trained, how = training(results / "gpu" / "training_h200.json")
    rows: list[tuple[Bar, list[str]]] = [
        (TAU, [line for p in found for line in taus(p)]),
        (SAME, [line for p in found for line in same(p)]),
        (FAST_GPU, [line for p in gpu for line in fast(p, FAST_GPU)]),
        (FAST_CPU, [line for p in cpu for line in fast(p, FAST_CPU)]),
        (STEP, steps((results / "gpu").glob("heads*.json"))),
        (TRAINING, trained),
    ]
    lines = ["| what | at least | stretch | measured | on | reached |", "|---|---|---|---|---|---|"]
    for bar, known in rows:
        lines += known or [bar.line(MISSING, (), "")]
    return lines + how


def cards(shipped: Path) -> list[str]:
    """What each drafter's card says."""
    lines = ["| drafter | tau, T = 0 | tau, T = 1 | trained on | training |", "|---|---|---|---|---|"]
    for file in sorted(shipped.glob("*/card.json")):
        card = json.loads(file.read_text())
        cells = [f"{r['tau']:.2f} ± {r['spread']:.2f}" for r in card["results"]]
        run, where = card["training"], card["provenance"]["device"]
        cells += [f"{card['data']['taught'] / 1e6:.1f} M tokens, {run['tokens'] / 1e6:.1f} M read"]
        lines.append(f"| `{card['method']}` | " + " | ".join([*cells, f"{run['seconds'] / MINUTE:.1f} minutes, {where}"]) + " |")
    return lines


def grid(title: str, place: Place, part: str, cell: Any) -> list[str]:
    """One part of one machine: a line for each drafter and condition, a column for each workload."""
    kinds = dict.fromkeys((key[0], *key[2:]) for key in place.rows.get(part, {}))
    if not kinds:
        return []
    lines = ["", title, "", "| drafter | | " + " | ".join((*WORKLOADS, ALL)) + " |", "|---|---|" + "---|" * (len(WORKLOADS) + 1)]
    for draft, temperature, control in kinds:
        rows = [place.find(part, draft, name, temperature, control) for name in (*WORKLOADS, ALL)]
        what = control or ("" if temperature is None else f"T = {temperature:g}")
        lines.append(f"| `{draft}` | {what} | " + " | ".join("" if r is None else cell(r) for r in rows) + " |")
    return lines


def gain(row: dict[str, Any]) -> str:
    found = row["speedup"]
    return f"{found['median']:.2f}{interval(found)}" + (" **loses**" if row["verdict"] == "loses" else "")


def depths(place: Place) -> list[str]:
    """Acceptance by position over all workloads."""
    lines = ["", "Share of the first, second, ... guesses that were kept, of those made, all six together:", ""]
    known = [(d, t, place.find("tau", d, ALL, t, None)) for d in place.drafts("tau") for t in (0.0, 1.0)]
    rows = [
        f"| `{d}` | T = {t:g} | {' '.join(f'{x:.2f}' for x in r['acceptance_by_position'])} | {r['equal']} of {r['prompts']} |"
        for d, t, r in known
        if r is not None
    ]
    return [*lines, "| drafter | | by position | texts equal to plain decoding |", "|---|---|---|---|", *rows] if rows else []


def machine(place: Place) -> list[str]:
    """Everything that was measured on one machine."""
    lines = ["", f"### On {place.name}", "", *(f"- {line}" for line in place.about)]
    lines += grid("Tau ± its standard error over prompts:", place, "tau", tau)
    lines += depths(place)
    same_contexts = "Tokens of one round at T = 1 over those at T = 0, from the same contexts [95 % interval over prompts]:"
    lines += grid(same_contexts, place, "contexts", lambda r: f"{r['ratio']:.2f}{interval(r)}")
    return lines + grid("Speed over plain decoding, median of pairs [95 % interval], one prompt at a time:", place, "speed", gain)


def section(results: Path, shipped: Path) -> str:
    """The section in Markdown."""
    found = places([*results.glob("trained_*.json"), *(results / "gpu").glob("trained_*.json")])
    lines = [
        "## What the shipped drafters reach",
        "",
        "Three drafters for the embedded model, SmolLM2-135M-Instruct, come with the package. Prompts are those of six workloads "
        f"({', '.join(WORKLOADS)}) on which nothing was trained; *all* is the six together. Written by `python "
        "benchmarks/report.py` from `benchmarks/results/`, which `benchmarks/trained.py` fills, and from the cards. "
        "What is *reached* goes by means and medians; how sure they are, the intervals tell.",
        "",
        *bars(found, results),
        "",
        "In their cards, on 48 held-out texts of the kind they were trained on:",
        "",
        *cards(shipped),
    ]
    return "\n".join(lines + [line for place in found for line in machine(place)])
