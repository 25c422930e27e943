"""A report as one page of HTML that needs nothing else: no server, no network, no script to be read."""

from __future__ import annotations

import json
import shlex
from html import escape
from importlib import resources
from string import Template
from typing import Any

from . import figures, words
from .figures import drafted, unique
from .markup import folded, head, listed, record, section, table
from .plan import PLAIN
from .report import Report, Row
from .sweep import curves

MOST_SAID = 6
"""As many losses are told before the reader asks for more."""


def page(report: Report) -> str:
    """The whole file. The report needs a row; the JSON object is in it, too, under the id `result`."""
    template = Template(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    found = json.dumps(report.as_json()).replace("<", "\\u003c")
    sections = [_losses(report), figures.acceptance(report), figures.seconds(report), figures.waits(report), curves(report)]
    if drafted(report):
        sections.insert(0, figures.speed(report))
    body = f"{_head(report)}<main>{_alarm(report)}{''.join(sections)}{_cost(report)}{_numbers(report)}{_origin(report)}</main>"
    return template.substitute(title=escape(f"Outrider benchmark: {words.headline(report).text}"), body=body, json=found)


def _head(report: Report) -> str:
    """The headline, and the facts that it hangs on."""
    top, p = words.headline(report), report.provenance
    rows = drafted(report) or list(report.rows)
    facts = {
        "Same text": f"{sum(r.equal for r in rows)} of {sum(r.compared for r in rows)} answers",
        "Model": _model(report),
        "Machine": machine(report),
        "Measured": f"{str(p.get('date', ''))[:10]}, {report.settings.get('repeats')} pairs of runs",
    }
    shown = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return (
        '<header><div class="top"><span>Outrider benchmark</span><button id="theme" type="button" hidden>Theme</button></div>'
        f'<h1 class="{top.verdict or ""}">{escape(top.text)}</h1><p>{escape(top.below)}</p>'
        f'<dl class="facts">{shown}</dl></header>'
    )


def _model(report: Report) -> str:
    model = report.provenance.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    return f"{name or 'not known'}, {report.provenance.get('dtype', '')}".rstrip(", ")


def machine(report: Report) -> str:
    """The card, or the processor and how many of its cores."""
    p = report.provenance
    device, threads = str(p.get("device", "cpu")), p.get("threads")
    return f"{p.get('cpu', 'CPU')}, {threads} thread{'' if threads == 1 else 's'}" if device.startswith("cpu") else device


def _alarm(report: Report) -> str:
    """What a reader must not overlook."""
    lines = [*words.different(report), *words.notes(report)]
    if any(r.synthetic for r in report.rows):
        lines.append("* is not a real drafter: it replays known answers, to show what guesses of such a quality would bring.")
    if not lines:
        return ""
    return section("Beware", "", listed(lines), "beware")


def _losses(report: Report) -> str:
    said = words.losses(report)
    rest = folded(f"{len(said) - MOST_SAID} more", listed(said[MOST_SAID:])) if len(said) > MOST_SAID else ""
    return section("Where speculation loses", "", listed(said[:MOST_SAID]) + rest) if said else ""


def _cost(report: Report) -> str:
    """Memory, energy and warm-ups, per drafter."""
    body = ""
    for label in unique(r.label for r in report.rows):
        rows = [r for r in report.rows if r.label == label]
        joules = [r.joules for r in rows if r.joules is not None]
        energy = f"{sum(joules) / max(1, sum(r.tokens for r in rows)):.3g} J" if len(joules) == len(rows) else "not measured"
        peaks = (_bytes([r.peak_memory_bytes for r in rows]), _bytes([r.peak_device_memory_bytes for r in rows]))
        name = "plain" if rows[0].draft == PLAIN else label
        body += record(name, (*peaks, energy, f"{max(r.warmup_seconds for r in rows):.2f} s"))
    below = {"memory": "at its peak", "GPU memory": "at its peak", "energy": "per token", "warm-up": "longest, not counted"}
    shown = table("Table of memory and energy", (head("drafter"), *(head(*pair) for pair in below.items())), body)
    return section("What else it takes", f"Energy: {report.provenance.get('energy', 'not measured')}.", shown)


def _bytes(values: list[int | None]) -> str:
    known = [v for v in values if v is not None]
    return f"{max(known) / 2**30:.2f} GiB" if known else "none"


def _numbers(report: Report) -> str:
    """Every row with every counter, for those who want to check."""
    names = ("tokens/s", "speed-up", "tau", "alpha", "tokens", "passes", "guesses", "right", "same text", "runs")
    body = "".join(record(words.place(r, report), _counters(r), text=1) for r in report.rows)
    shown = table("Table of all numbers", (head("text"), head("drafter", text=True), *map(head, names)), body)
    hint = (
        "tau: tokens per pass of the model (plain decoding has 1). alpha: share of all guesses that were right. Counters are "
        "sums over the runs."
    )
    return section("All numbers", hint, folded("Show the table", shown))


def _counters(r: Row) -> tuple[str, ...]:
    s = r.speedup
    return (
        "plain" if r.draft == PLAIN else r.label,
        f"{r.tokens_per_second:.1f}",
        "" if s is None else f"{s.median:.2f} {words.interval(s)}",
        f"{r.tau:.2f}",
        f"{r.alpha:.0%}" if r.drafted else "",
        *(f"{n:,}" for n in (r.tokens, r.rounds, r.drafted, r.accepted)),
        f"{r.equal}/{r.compared}",
        str(r.runs),
    )


def _origin(report: Report) -> str:
    """Provenance: all that is needed to judge the numbers, or to repeat them."""
    pairs = {**_flat(report.provenance), **{f"setting: {k}": v for k, v in report.settings.items()}}
    items = "".join(
        f"<dt>{escape(k)}</dt><dd>{escape(_said(v))}</dd>" for k, v in pairs.items() if k not in ("command", "prompts")
    )
    command = shlex.join(str(part) for part in report.provenance.get("command", []))
    hashes = report.provenance.get("prompts", {})
    body = "".join(record(w.name, (w.source, str(hashes.get(w.name)), str(len(w.sha256))), text=2) for w in report.workloads)
    heads = (head("text"), head("source", text=True), head("SHA-256", text=True), head("prompts"))
    hint = (
        "Plain and drafted runs took turns on one loaded model, with the same prompts and seeds; warm-ups are not counted; every "
        "answer was compared with the plain one, token by token."
    )
    content = f'<p><code>{escape(command)}</code></p><dl class="from">{items}</dl>'
    return section("How this was measured", hint, content + folded("Prompts", table("Table of prompts", heads, body)))


def _flat(found: Any) -> dict[str, Any]:
    """Nested names with a space between them."""
    out: dict[str, Any] = {}
    for key, value in found.items():
        nested = isinstance(value, dict) and key != "prompts"
        out |= {f"{key} {k}": v for k, v in value.items()} if nested else {key: value}
    return out


def _said(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_said(v) for v in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_said(v)}" for k, v in value.items())
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
