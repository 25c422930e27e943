"""What watching costs: a trace's share of the time of real rounds, and that of the watch that is always on, by size of the batch.

    python benchmarks/watch_cost.py [--batches 1,16,64] [--out benchmarks/results/watch_cost_cpu.json]

The embedded model answers so many prompts at once; every call of the trace and of the watch is timed within the run itself. The
bar is 2 % of a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outrider import LLM, SamplingParams
from outrider.bench.provenance import provenance
from outrider.types import StepEvent

PROMPTS = ("Write a Python class for a stack.", "List ten rivers, one a line.", "Write a poem about rain.", "Count to thirty.")
TOKENS = 96
BAR = 0.02


class Timed:
    """Calls a sink, and remembers how long that took."""

    def __init__(self, hear: Callable[[StepEvent], None]) -> None:
        self._hear, self.seconds = hear, list[float]()

    def __call__(self, event: StepEvent) -> None:
        begun = time.perf_counter()
        self._hear(event)
        self.seconds.append(time.perf_counter() - begun)


def measure(llm: LLM, batch: int) -> dict[str, Any]:
    """Shares of the time of rounds without prompt tokens; microseconds a round, median."""
    [trace] = llm.engine.sinks
    timed, watched, ends = Timed(trace), Timed(llm.engine.watch.observe), list[tuple[float, int]]()
    llm.engine.sinks[:] = [timed, lambda event: ends.append((time.perf_counter(), event.prefill))]
    llm.engine.watch.observe = watched  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, label="cost")
    prompts = [llm.tokenizer.chat([{"role": "user", "content": PROMPTS[i % len(PROMPTS)]}]) for i in range(batch)]
    llm.generate(prompts, params)
    llm.engine.sinks[:] = [trace]
    del llm.engine.watch.observe
    kept = [i for i in range(1, len(ends)) if not ends[i][1] and not ends[i - 1][1]]
    rounds = [ends[i][0] - ends[i - 1][0] for i in kept]
    row: dict[str, Any] = {"batch": batch, "rounds": len(kept), "round_ms": 1e3 * statistics.median(rounds)}
    for name, one in (("trace", timed), ("watch", watched)):
        row[f"{name}_us"] = 1e6 * statistics.median(one.seconds[i] for i in kept)
        row[f"{name}_share"] = row[f"{name}_us"] / (1e3 * row["round_ms"])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,16,64" if torch.cuda.is_available() else "1,8")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(draft="ngram", control="fixed", trace=os.path.join(folder, "trace.jsonl"))
        for batch in map(int, given.batches.split(",")):
            measure(llm, batch)
            rows.append(measure(llm, batch))
            print("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()))
        llm.close()
        ok = all(row["trace_share"] <= BAR for row in rows)
        print(f"a trace takes {'at most' if ok else 'MORE THAN'} {BAR:.0%} of a round")
        if given.out is not None:
            facts = provenance(llm, "default")
            given.out.write_text(json.dumps({"provenance": facts, "bar": BAR, "met": ok, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
