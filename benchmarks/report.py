"""Write the numbers of README.md and docs/training.md from the committed results, so that no figure is typed by hand.

python benchmarks/report.py            # rewrite both pages between their markers
python benchmarks/report.py --check    # exit 1 if one is out of date
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import trained_table

from outrider.plan.tasks import TASKS
from outrider.trained import SHIPPED

HERE = Path(__file__).parent
RESULTS = HERE / "results"
BEGIN, END = "<!-- numbers -->", "<!-- /numbers -->"
PUBLISHED = {task.name: f"{task.low:.0%} to {task.high:.0%}" for task in TASKS}


def tables(core: dict[str, Any]) -> str:
    """The numbers section in Markdown."""
    where, widths, against = core["provenance"], core["widths"], core["transformers"]
    outside, work = core["outside"], core["repetitive"]["by_task"]
    lines = [
        "## Numbers",
        "",
        f"SmolLM2-135M-Instruct in fp32 on {where['cpu']} ({where['capability']}), torch {where['torch']}, transformers "
        f"{where['transformers']}, {where['date']}; medians of interleaved runs, `{where['command']}`.",
        "",
        "| what | measured |",
        "|---|---|",
        "| plain decoding, tokens per second and, in brackets, of transformers `generate` in the same run | "
        f"{against['tokens_per_second']} ({against['transformers_tokens_per_second']}): median ratio of the pairs "
        f"{against['ratio']:.2f}, texts equal in {against['equal_texts']} |",
        "| a pass over 1 / 2 / 4 / 8 / 16 tokens, ms | "
        + " / ".join(f"{widths[f'ms_{n}_rows']:.1f}" for n in (1, 2, 4, 8, 16))
        + f" (8 to 1: {widths['ratio_8_to_1']:.2f}) |",
        f"| time outside model passes, greedy / T = 0.7 with top_p 0.95 | {outside['greedy']['share']:.1%} / "
        f"{outside['sampled']['share']:.1%} of a run |",
        f"| `outrider generate`, process start to first text, warm cache | {core['first_token']['seconds']:.1f} s |",
        "",
        "Prompt lookup against plain decoding, same prompts, same tokens out (checked). It pays where the answer repeats its "
        "context; on free prose it brings little, and it can lose:",
        "",
        "| task | speed-up (range) | tokens per round | guesses accepted |",
        "|---|---|---|---|",
    ]
    for task, row in work.items():
        low, high = row["range"]
        speed = f"{row['speedup']:.2f} ({low:.2f} to {high:.2f})"
        lines.append(f"| {task} | {speed} | {row['tokens_per_round']:.2f} | {row['acceptance_rate']:.0%} |")
    return "\n".join(lines)


def acceptance(found: list[dict[str, Any]]) -> str:
    """Share of guesses accepted and tokens per pass by task and drafter, from one or several results under the same conditions,
    in Markdown."""
    rows = {(r["workload"], r["draft"]): r for result in found for r in result["results"] if r["draft"] != "none"}
    drafts = list(dict.fromkeys(draft for _, draft in rows))
    tasks = sorted({task for task, _ in rows}, key=lambda task: (task not in PUBLISHED, task))
    equal, compared = (sum(r[key] for r in rows.values()) for key in ("equal", "compared"))
    lines = [
        *_conditions(found[0]),
        f"{equal} of {compared} answers were those of plain decoding.",
        "",
        f"| task | prompts | published | {' | '.join(f'`{draft}`' for draft in drafts)} |",
        "|---|---|---|" + "---|" * len(drafts),
    ]
    for task in tasks:
        cells = [f"{r['alpha']:.0%} ({r['tau']:.2f})" if (r := rows.get((task, draft))) else "" for draft in drafts]
        prompts = max(r["prompts"] for (name, _), r in rows.items() if name == task)
        lines.append(f"| {task} | {prompts} | {PUBLISHED.get(task, '')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _conditions(result: dict[str, Any]) -> list[str]:
    """What was asked, and what the published ranges are and are not."""
    where, asked = result["provenance"], result["settings"]
    return [
        "### Acceptance by task",
        "",
        f"Share of guesses accepted and, in brackets, tokens per pass: {where['model']['name']} in {where['dtype']}, "
        f"T = {asked['temperatures'][0]:g}, up to {asked['max_tokens']} tokens, {where['date'][:10]}. Every drafter looks as "
        f"far ahead as it likes (`--control {asked['control']}`), so speed has no influence; these runs say nothing about it.",
        "",
        "*Published* are the ranges that articles on serving repeat for trained draft models of larger targets. They trace back "
        "to no one measurement, and others differ ([arXiv:2604.14682](https://arxiv.org/abs/2604.14682) finds more accepted in "
        "chat than in code). Lookups guess seldom on new text; `layer_skip`, not tuned here, stops where it is unsure; "
        "`lookahead` tries several guesses for one place, of which at most one is right. Tokens per pass say what came of it. "
        "What the trained drafters of the package reach is told in [docs/training.md](docs/training.md).",
        "",
    ]


def speeds(machines: list[list[dict[str, Any]]]) -> str:
    """Speed-up by workload and drafter on each machine, in Markdown."""
    lines = [
        "### Every drafter, six kinds of text",
        "",
        "Speed-up over plain decoding beside it, one request at a time, prompts included (`outrider bench`); differences of a "
        "few percent are noise. `auto` takes what comes with the package for this model: suffix lookup together with "
        "the EAGLE head, on both kinds of machine.",
    ]
    for found in machines:
        lines += race(found)
    return "\n".join(lines)


def race(found: list[dict[str, Any]]) -> list[str]:
    """One machine's results; where two have the same cell, the later one counts."""
    rows = {(r["workload"], r["draft"]): r for result in found for r in result["results"] if r["draft"] != "none"}
    drafts = list(dict.fromkeys(draft for _, draft in rows))
    where, asked = found[0]["provenance"], found[0]["settings"]
    equal, compared = (sum(r[key] for r in rows.values()) for key in ("equal", "compared"))
    gpu = not str(where["device"]).startswith("cpu")
    machine = where["device"] if gpu else f"{where['cpu']}, {where['threads']} threads"
    prompts = max(r["prompts"] for r in rows.values())
    lines = [
        "",
        f"**{machine}**, {where['dtype']}, torch {where['torch']}, {where['date'][:10]}: {prompts} prompts of each kind, T = "
        f"{asked['temperatures'][0]:g}, up to {asked['max_tokens']} tokens, `--control {asked['control']}`, medians of "
        f"{asked['repeats']} interleaved pairs. {equal} of {compared} answers were those of plain decoding."
        + (f" {found[0]['head']}" if "head" in found[0] else ""),
        "",
        f"| text | plain, tokens per second | {' | '.join(f'`{draft}`' for draft in drafts)} |",
        "|---|---|" + "---|" * len(drafts),
    ]
    for task in dict.fromkeys(task for task, _ in rows):
        cells = [f"{r['speedup']['median']:.2f}x" if (r := rows.get((task, draft))) else "" for draft in drafts]
        plain = next(r for (name, _), r in rows.items() if name == task)["plain_tokens_per_second"]
        lines.append(f"| {task} | {plain:.0f} | {' | '.join(cells)} |")
    return lines


def updated(page: str, section: str) -> str:
    """The page with its numbers section replaced."""
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{section}\n{END}{rest.split(END, 1)[1]}"


def sections() -> dict[str, str]:
    """What goes between the markers of each page, by its path."""
    core = json.loads((RESULTS / "core_cpu.json").read_text())
    asked, cpu, gpu = (
        [json.loads(f.read_text()) for f in sorted(RESULTS.glob(g))]
        for g in ("acceptance*_cpu.json", "drafting*_cpu.json", "gpu/drafting*.json")
    )
    return {
        "README.md": f"{tables(core)}\n\n{speeds([cpu, gpu])}\n\n{acceptance(asked)}",
        "docs/training.md": trained_table.section(RESULTS, SHIPPED),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    for name, section in sections().items():
        path = HERE.parent / name
        old = path.read_text()
        new = updated(old, section)
        if given.check and new != old:
            sys.exit(f"{name} is out of date: run python benchmarks/report.py")
        if new != old:
            path.write_text(new)


if __name__ == "__main__":
    main()
