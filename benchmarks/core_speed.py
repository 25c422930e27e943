"""What the core reaches on CPU with the embedded model, each figure against its baseline in the same run.

    python benchmarks/core_speed.py --json benchmarks/results/core_cpu.json

Rounds of the compared things are interleaved and medians taken, so that a machine that slows down slows both. Five parts: a
pass by width; plain decoding against transformers' `generate`; the share of a round outside model passes; repetitive work with
prompt lookup against plain; the time from process start to the first token.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from outrider import LLM, SamplingParams
from outrider.models import weights
from outrider.models.layout import Layout
from outrider.types import Batch, Proposal

CODE = """def load_users(path):
    users = []
    with open(path) as file:
        for line in file:
            name, age, city = line.strip().split(",")
            users.append({"name": name, "age": int(age), "city": city})
    return users


def oldest(users):
    best = users[0]
    for user in users:
        if user["age"] > best["age"]:
            best = user
    return best


def by_city(users):
    cities = {}
    for user in users:
        cities.setdefault(user["city"], []).append(user)
    return cities
"""
REPORT = """Order 1042 was placed by Maria Lindholm on 3 March 2025 and shipped to Gothenburg on 5 March 2025.
Order 1043 was placed by Peter Novak on 4 March 2025 and shipped to Brno on 7 March 2025.
Order 1044 was placed by Aisha Rahman on 4 March 2025 and shipped to Leeds on 6 March 2025.
Order 1045 was placed by Jonas Weber on 5 March 2025 and shipped to Leipzig on 8 March 2025."""
REPETITIVE = {
    "edit": f"Rename the function oldest to find_oldest in this file and return the whole file:\n\n```python\n{CODE}```",
    "extract": f"Copy every line that mentions an order, exactly as it is written:\n\n{REPORT}",
    "document": f"Return this Python file unchanged, but with a comment above each function:\n\n```python\n{CODE}```",
}
PROSE = [
    "Write a short story about a lighthouse keeper.",
    "Explain why the sky is blue to a child.",
    "What should I pack for a week in Norway in autumn?",
]


def median(values: list[float]) -> float:
    return statistics.median(values)


def spread(values: list[float]) -> list[float]:
    """Quartiles."""
    return [round(q, 4) for q in statistics.quantiles(values, n=4)]


def clock(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class Passes:
    """Counts the seconds spent inside model passes."""

    def __init__(self, llm: LLM) -> None:
        self.seconds = 0.0
        self._decoder, self._forward = llm._target.decoder, llm._target.decoder.forward

    def __enter__(self) -> Passes:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            out = self._forward(*args, **kwargs)
            self.seconds += time.perf_counter() - begin
            return out

        self._decoder.forward = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *stop: object) -> None:
        del self._decoder.forward


def widths(llm: LLM, repeats: int, context: int = 300) -> dict[str, Any]:
    """Milliseconds of a pass by rows, at one context length, interleaved."""
    target = llm._target
    ids = (llm.tokenizer.encode(CODE) * 5)[:context]
    request = llm._request(ids, SamplingParams(temperature=0.0))
    target.cache.reserve(request, context + 32)
    prefill = Batch((request,), (context - 1,), (False,), (0,))
    target.decoder.forward(Layout.build(prefill, Proposal.empty(1), target.cache), target.cache)
    request.computed = context - 1
    batch = Batch((request,), (1,), (True,), (32,))
    rows = (1, 2, 4, 8, 16)
    layouts = {n: Layout.build(batch, Proposal.chains([ids[5 : 4 + n]]), target.cache) for n in rows}
    times: dict[int, list[float]] = {n: [] for n in rows}
    for i in range(repeats + 2):
        for n in rows:
            seconds = clock(lambda n=n: target.decoder.forward(layouts[n], target.cache))
            if i >= 2:
                times[n].append(seconds * 1e3)
    target.release(request)
    out: dict[str, Any] = {f"ms_{n}_rows": round(median(t), 3) for n, t in times.items()}
    out["ratio_8_to_1"] = round(out["ms_8_rows"] / out["ms_1_rows"], 3)
    return out | {"context": context, "quartiles_1_row": spread(times[1])}


def against_transformers(llm: LLM, repeats: int, tokens: int = 64) -> dict[str, Any]:
    """Plain decoding against `generate`, both fp32 and greedy, same prompts, same number of tokens."""
    reference = weights.load(weights.resolve(weights.DEFAULT_MODEL), attn_implementation="sdpa").model
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, depth=0)
    ours: list[float] = []
    theirs: list[float] = []
    equal = 0
    prompts = [llm.tokenizer.chat([{"role": "user", "content": p}]) for p in PROSE]
    for i in range(repeats + 1):
        for ids in prompts:
            given = torch.tensor([ids])
            kept: dict[str, Any] = {}

            def generate(given: Any = given, kept: Any = kept) -> None:
                kept["out"] = reference.generate(
                    given, attention_mask=torch.ones_like(given), do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens
                )

            with torch.inference_mode():
                seconds = clock(generate)
            mine = clock(lambda ids=ids, kept=kept: kept.update(ours=llm.generate([ids], params)))
            if i:
                theirs.append(tokens / seconds)
                ours.append(tokens / mine)
                equal += tuple(kept["out"][0, len(ids) :].tolist()) == kept["ours"][0].token_ids
    ratio = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "tokens_per_second": round(median(ours), 2),
        "transformers_tokens_per_second": round(median(theirs), 2),
        "ratio": round(median(ratio), 3),
        "quartiles_ratio": spread(ratio),
        "equal_texts": f"{equal} of {len(ratio)}",
    }


def outside(llm: LLM, repeats: int) -> dict[str, Any]:
    """Share of a round spent outside model passes, prompt lookup on, batch 1, by temperature."""
    out = {}
    for name, params in {
        "greedy": SamplingParams(temperature=0.0, max_tokens=96, seed=1),
        "sampled": SamplingParams(temperature=0.7, top_p=0.95, max_tokens=96, seed=1),
    }.items():
        shares = []
        for i in range(repeats + 1):
            for prompt in (REPETITIVE["edit"], PROSE[0]):
                with Passes(llm) as passes:
                    messages = [{"role": "user", "content": prompt}]
                    seconds = clock(lambda messages=messages, params=params: llm.chat(messages, params))
                if i:
                    shares.append(1 - passes.seconds / seconds)
        out[name] = {"share": round(median(shares), 4), "quartiles": spread(shares)}
    return out


def repetitive(llm: LLM, repeats: int) -> dict[str, Any]:
    """Speed with prompt lookup over our own plain decoding, greedy and at T = 0.7; and on prose, where it should not pay."""
    out: dict[str, Any] = {}
    tasks = REPETITIVE | {f"prose {i + 1}": p for i, p in enumerate(PROSE)}
    for temperature in (0.0, 0.7):
        for name, prompt in tasks.items():
            pairs, last = [], None
            for i in range(repeats + 1):
                speeds = []
                for depth in (0, None):
                    params = SamplingParams(temperature=temperature, max_tokens=128, seed=7, depth=depth)
                    result = llm.chat([{"role": "user", "content": prompt}], params)
                    speeds.append(result.stats.tokens_per_second)
                    assert last is None or result.token_ids == last, "speculation changed the text"
                    last = result.token_ids
                if i:
                    pairs.append((speeds[0], speeds[1], result.stats))
            stats = pairs[-1][2]
            ratios = [b / a for a, b, _ in pairs]
            out[f"{name}, T={temperature}"] = {
                "speedup": round(median(ratios), 3),
                "range": [round(min(ratios), 3), round(max(ratios), 3)],
                "plain_tokens_per_second": round(median([a for a, _, _ in pairs]), 1),
                "tokens_per_second": round(median([b for _, b, _ in pairs]), 1),
                "tokens": stats.tokens,
                "tokens_per_round": round(stats.tokens_per_round, 2),
                "acceptance_rate": round(stats.acceptance_rate, 3),
            }
    work = [v["speedup"] for k, v in out.items() if not k.startswith("prose") and k.endswith("T=0.0")]
    return {"by_task": out, "repetitive_greedy_median": round(median(work), 3)}


def first_token(repeats: int) -> dict[str, Any]:
    """Seconds from process start to the first piece of text of `outrider generate`, with a warm cache."""
    command = [sys.executable, "-m", "outrider", "generate", "Say hello.", "--max-tokens", "8", "--raw"]
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            times.append(time.perf_counter() - begin)
    return {"seconds": round(median(times[1:]), 2), "all": [round(t, 2) for t in times[1:]]}


def provenance() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in info if "model name" in line), "")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "command": "python benchmarks/core_speed.py",
        "cpu": f"{cpu}, {os.cpu_count()} cores",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": weights.DEFAULT_MODEL,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=["widths", "transformers", "outside", "repetitive", "first_token"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    llm = LLM(draft="ngram")
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "widths": lambda: widths(llm, 10 * given.repeats),
        "transformers": lambda: against_transformers(llm, given.repeats),
        "outside": lambda: outside(llm, given.repeats),
        "repetitive": lambda: repetitive(llm, given.repeats),
        "first_token": lambda: first_token(given.repeats),
    }
    report: dict[str, Any] = {"provenance": provenance()}
    for name in given.only:
        report[name] = parts[name]()
        print(name, json.dumps(report[name], indent=1), flush=True)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
