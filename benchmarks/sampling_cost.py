"""What choosing tokens costs: `TextSampler.choose` per option group and number of rows, on the CPU.

    python benchmarks/sampling_cost.py [--vocab 49152] [--rounds 101] [--json]

Every round takes new rows, new positions and all groups in turn, so that no cache of noise or data flatters a group. The
rows are synthetic: a long normal tail and 200 favourites, of which T = 0.7 with top_p 0.95 keeps about 10, now and then
hundreds, as with a language model. Reports the median and quartiles in milliseconds per call.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from outrider.config import SamplingParams
from outrider.sampling import TextSampler
from outrider.types import Request, Slots

GROUPS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy, repetition 1.2": {"temperature": 0, "repetition_penalty": 1.2},
    "T 0.7, top_p 0.95": {"temperature": 0.7, "top_p": 0.95},
    "T 0.7, top_k 50": {"temperature": 0.7, "top_k": 50},
    "T 0.7, top_k 50, top_p 0.95": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
    "T 0.7, min_p 0.05": {"temperature": 0.7, "min_p": 0.05},
    "T 0.7, top_p 0.95, repetition 1.2": {"temperature": 0.7, "top_p": 0.95, "repetition_penalty": 1.2},
    "T 1": {"temperature": 1},
}
ROWS = (1, 4, 8)
PROMPT = 512


def logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """`[rows, vocab]` fp32 that look like a language model's."""
    rng = np.random.default_rng(seed)
    z = rng.normal(0, 2.0, (rows, vocab)).astype(np.float32)
    for row in z:
        favourites = (vocab * rng.random(200) ** 3).astype(np.int64)  # frequent tokens have low ids
        row[favourites] += np.linspace(10, 2, 200).astype(np.float32) * rng.uniform(0.8, 1.9)
    return torch.from_numpy(z)


def measure(vocab: int, rounds: int) -> dict[tuple[str, int], list[float]]:
    """Seconds of every call, by (group, rows): the slots of a chain of `rows - 1` guesses."""
    torch.manual_seed(0)
    prompt = torch.randint(vocab, (PROMPT,)).tolist()
    sampler = TextSampler(vocab)
    requests = {
        name: Request(i, list(prompt), PROMPT // 2, SamplingParams(**options), key=i, seed=0)
        for i, (name, options) in enumerate(GROUPS.items())
    }
    times: dict[tuple[str, int], list[float]] = {(name, n): [] for name in GROUPS for n in ROWS}
    for turn in range(rounds):
        for n in ROWS:
            data = logits(n, vocab, turn * 10 + n)
            chain = torch.randint(vocab, (n - 1,)).expand(n, n - 1)
            depth = torch.arange(n)
            for name, request in requests.items():
                position = PROMPT + depth + turn * 100 + 10 * n
                slots = Slots((request,), torch.zeros(n, dtype=torch.int64), position, chain, depth)
                started = time.perf_counter()
                sampler.choose(data, slots)
                times[name, n].append(time.perf_counter() - started)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--json", action="store_true", help="one object instead of the table")
    arguments = parser.parse_args()
    times = measure(arguments.vocab, arguments.rounds)
    cells = {key: [round(float(q) * 1e3, 4) for q in np.quantile(t, [0.5, 0.25, 0.75])] for key, t in times.items()}
    if arguments.json:
        rows = [{"group": g, "rows": n, "median_ms": m, "q1_ms": a, "q3_ms": b} for (g, n), (m, a, b) in cells.items()]
        json.dump({"vocab": arguments.vocab, "rounds": arguments.rounds, "results": rows}, sys.stdout, indent=1)
        return 0
    print(f"choose(), V = {arguments.vocab}, milliseconds: median (quartiles)")
    print(f"{'':36}" + "".join(f"{n:>3} rows{'':16}" for n in ROWS))
    for name in GROUPS:
        line = (f"{m:7.3f} ({a:.3f}-{b:.3f})".ljust(24) for m, a, b in (cells[name, n] for n in ROWS))
        print(f"{name:36}" + "".join(line))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
