"""Are plans right? Speed-ups foretold by `outrider plan` against speed-ups measured in other runs, for every depth.

    python benchmarks/plan_check.py                # all drafters, depths 1 to 12; writes benchmarks/results/plan_cpu.json
    python benchmarks/plan_check.py --device cuda --out benchmarks/results/plan_gpu.json
    python benchmarks/plan_check.py --quick        # two drafters, three depths, short texts: to see that it works
    python benchmarks/plan_check.py --page         # write the tables of docs/planning.md from the results; runs nothing

Per drafter one measurement as `outrider plan` makes it (what was guessed at every place; seconds of steps), then pairs of whole
runs, plain and with a depth, as `outrider bench --depth` makes them, the depths taking turns. The two share prompts and seed, no
run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider import LLM
from outrider.bench.plan import Plan
from outrider.bench.provenance import provenance
from outrider.bench.report import Row
from outrider.bench.runner import Runner
from outrider.bench.workloads import Workload, find
from outrider.config import SamplingParams
from outrider.plan import formulas
from outrider.plan.acceptance import Record
from outrider.plan.measure import Found, Measurer
from outrider.plan.predict import predict, share

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "planning.md"
MODEL = "smollm2-135m-instruct"
DRAFTS = (
    "synthetic:rate=0.5",
    "synthetic:rate=0.7",
    "synthetic:rate=0.9",
    "ngram",
    "suffix",
    "layer_skip",
    "early_exit",
    f"draft_model:path={MODEL},layers=10",
)
BAR = 0.10
BEGIN, END = "<!-- checked -->", "<!-- /checked -->"


def check(llm: LLM, draft: str, given: argparse.Namespace, workload: Workload) -> list[dict[str, Any]]:
    """One drafter: what is foretold, then what is measured, depth by depth."""
    prompts = [p.encode(llm.tokenizer) for p in workload.prompts]
    params = SamplingParams(max_tokens=given.max_tokens, temperature=given.temperature, seed=0)
    measurer = Measurer(llm, prompts, params, repeats=given.repeats)
    found = measurer.run(draft, given.depths, (given.batch,))
    spec = measurer.deepened(draft, max(given.depths))
    plan = Plan(
        (spec,),
        (workload,),
        given.max_tokens,
        temperatures=(given.temperature,),
        batches=(given.batch,),
        depths=found.depths,
        repeats=given.repeats,
        control="fixed",
    )
    rows = []
    for row in Runner(llm, plan).run().rows:
        if row.speedup is not None and row.depth is not None:
            rows.append(compared(found, row.depth, given.batch) | measured(row))
            rows[-1]["error"] = rows[-1]["foretold"] / rows[-1]["measured"] - 1
            say(rows[-1])
    return rows


def compared(found: Found, depth: int, batch: int) -> dict[str, Any]:
    """What is foretold: from the record, from chances by position alone, and by the formulas."""
    full = predict(found.acceptance, found.costs, depth, batch)
    chances = found.acceptance.chances if isinstance(found.acceptance, Record) else found.acceptance
    rate, cost = found.acceptance.rate, share(found.costs, batch, depth)
    return {
        "draft": found.draft,
        "depth": depth,
        "foretold": full.speedup,
        "foretold_tau": full.tau,
        "foretold_tokens_per_second": [full.tokens_per_second, full.plain_tokens_per_second],
        "by_position": predict(chances, found.costs, depth, batch).speedup,
        "textbook": formulas.textbook(rate, depth, cost),
        "all_or_nothing": formulas.all_or_nothing(rate, depth),
        "rate": rate,
        "cost": cost,
    }


def measured(row: Row) -> dict[str, Any]:
    """What was measured."""
    assert row.speedup is not None
    return {
        "measured": row.speedup.median,
        "measured_tau": row.tau,
        "measured_tokens_per_second": [row.tokens_per_second, row.plain_tokens_per_second],
        "pairs": list(row.speedup.pairs),
        "equal": row.equal == row.compared,
    }


def say(row: dict[str, Any]) -> None:
    print(
        f"{row['draft']} depth {row['depth']}: foretold {row['foretold']:.3f}, measured {row['measured']:.3f} "
        f"({row['error']:+.1%}); tau {row['foretold_tau']:.2f} and {row['measured_tau']:.2f}",
        file=sys.stderr,
        flush=True,
    )


def tables(found: dict[str, Any]) -> list[str]:
    """A result in Markdown: per drafter the depths, then how far the formulas are off."""
    where, rows = found["provenance"], found["rows"]
    device = str(where.get("device") or "cpu")
    machine = where["cpu"] if device.startswith("cpu") else device
    errors = [abs(r["error"]) for r in rows]
    inside = sum(e <= BAR for e in errors)
    lines = [
        f"{where['model']['name']} on {machine}, {where['dtype']}, torch {where['torch']}, {where['date'][:10]}, commit "
        f"{str(where['commit'])[:7]}, load {where['load']:.1f} when it began; {settings(found)}.",
        "",
        f"{inside} of {len(rows)} predictions within {BAR:.0%}; median error {statistics.median(errors):.1%}, largest "
        f"{max(errors):.1%}." + (f" This result is {found['note']}." if "note" in found else ""),
        "",
        "Foretold / measured speed-up (error), by depth:",
        "",
    ]
    depths = sorted({r["depth"] for r in rows})
    lines += ["| drafter | " + " | ".join(str(d) for d in depths) + " |", "|---|" + "---|" * len(depths)]
    for draft in dict.fromkeys(r["draft"] for r in rows):
        mine = {r["depth"]: r for r in rows if r["draft"] == draft}
        lines.append(f"| {draft} | " + " | ".join(cell(mine.get(d)) for d in depths) + " |")
    lines += ["", "Median error, sign left out, by drafter:", ""]
    lines += ["| drafter | this plan | from chances by position alone | textbook | R K + (1 - R) |", "|---|---|---|---|---|"]
    for draft in dict.fromkeys(r["draft"] for r in rows):
        mine_ = [r for r in rows if r["draft"] == draft]
        cells = [off(mine_, name) for name in ("foretold", "by_position", "textbook", "all_or_nothing")]
        lines.append(f"| {draft} | " + " | ".join(cells) + " |")
    return lines


def settings(found: dict[str, Any]) -> str:
    s = found["settings"]
    return (
        f"workload {s['workload']}, {s['limit']} prompts, up to {s['max_tokens']} tokens, T = {s['temperature']:g}, "
        f"batch {s['batch']}, {s['repeats']} pairs"
    )


def cell(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['foretold']:.2f} / {row['measured']:.2f} ({row['error']:+.0%})"


def off(rows: Sequence[dict[str, Any]], name: str) -> str:
    return f"{statistics.median(abs(r[name] / r['measured'] - 1) for r in rows):.0%}"


def page() -> None:
    """The tables in docs/planning.md, from all results there are."""
    results = [json.loads(p.read_text()) for p in sorted((HERE / "results").glob("plan_*.json"))]
    body = "\n\n".join("\n".join(tables(found)) for found in results)
    text = PAGE.read_text()
    before, rest = text.split(BEGIN, 1)
    PAGE.write_text(f"{before}{BEGIN}\n{body}\n{END}{rest.split(END, 1)[1]}")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--draft", action="append", help="drafters to check (default: eight)")
    parser.add_argument("--depths", default="1-12")
    parser.add_argument("--workload", default="code")
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "plan_cpu.json")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if given.quick:
        given.draft, given.depths = given.draft or list(DRAFTS[1:4:2]), "1,4,8"
        given.limit, given.max_tokens, given.repeats = 2, 48, 1
    return given


def main() -> None:
    from outrider.cli.answer import frozen
    from outrider.cli.plan import numbers

    given = options()
    if given.page:
        page()
        return
    given.depths = numbers(given.depths, "--depths")
    workload = find(given.workload).first(given.limit)
    llm = LLM(given.model, draft="none", control="fixed", device=given.device, dtype=given.dtype, prefix_cache=False)
    names = ("workload", "limit", "max_tokens", "temperature", "batch", "repeats")
    found = {"provenance": provenance(llm, given.model), "settings": {n: getattr(given, n) for n in names}, "rows": []}
    with frozen():
        for draft in given.draft or DRAFTS:
            found["rows"] += check(llm, draft, given, workload)
            given.out.write_text(json.dumps(found, indent=1) + "\n")
    llm.close()
    errors = [abs(r["error"]) for r in found["rows"]]
    print(f"{sum(e <= BAR for e in errors)} of {len(errors)} within {BAR:.0%}; largest error {max(errors):.1%}")


if __name__ == "__main__":
    main()
