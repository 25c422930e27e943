"""Write the README's numbers from the committed results, so that no figure is typed by hand.

python benchmarks/report.py            # rewrite README.md between its markers
python benchmarks/report.py --check    # exit 1 if it is out of date
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BEGIN, END = "<!-- numbers -->", "<!-- /numbers -->"


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


def updated(readme: str, section: str) -> str:
    """The README with its numbers section replaced."""
    before, rest = readme.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{section}\n{END}{rest.split(END, 1)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    path = HERE.parent / "README.md"
    old = path.read_text()
    new = updated(old, tables(json.loads((HERE / "results" / "core_cpu.json").read_text())))
    if given.check:
        sys.exit(0 if new == old else "README.md is out of date: run python benchmarks/report.py")
    path.write_text(new)


if __name__ == "__main__":
    main()
