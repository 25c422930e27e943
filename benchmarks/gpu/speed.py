"""Speed on a GPU: one request and many, plain and drafted, against transformers' generate; every figure with its own baseline.

    PYTHONPATH=src:. python benchmarks/gpu/speed.py --parts single,synthetic,crowd --json speed_gpu.json

Random weights of named shapes for 8B and 1.5B (token ids, no text); the embedded model with text for SmolLM2, whose file
`OUTRIDER_MODEL` may name. What a part measures is said in its function.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from benchmarks.gpu.passes import rounds
from benchmarks.gpu.shapes import World, model, prompt, request

from outrider import LLM, SamplingParams
from outrider.bench import workloads
from outrider.bench.prompts import PROMPTS
from outrider.drafters.none import NoDrafter
from outrider.drafters.synthetic import Synthetic
from outrider.models.hf import truncate
from outrider.protocols import Drafter

EMBEDDED = os.environ.get("OUTRIDER_MODEL", "smollm2-135m-instruct")
RATES, DEPTHS = (0.6, 0.8, 0.9), (3, 5, 8)
Answer = tuple[list[int], SamplingParams, list[int]]
"""Prompt, parameters, what was written."""


def spread(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    torch.cuda.synchronize()
    started = time.perf_counter()
    out = function()
    torch.cuda.synchronize()
    return time.perf_counter() - started, out


def write(world: World, drafter: Drafter, lengths: tuple[int, int], count: int = 1) -> tuple[float, list[Any]]:
    """Seconds from the first to the last token of `count` requests (prompt, answer tokens), and the requests."""
    engine = world.engine(drafter)
    many = [request(prompt(lengths[0], seed), lengths[1]) for seed in range(count)]
    for one in many:
        engine.add(one)
    while any(len(one.tokens) == one.prompt_len for one in many):
        engine.step()
    begun = sum(len(one.output) for one in many)
    seconds, _ = timed(lambda: [None for _ in iter(engine.step, None)])
    tokens = sum(len(one.output) for one in many) - begun
    return seconds / tokens, many


def generate(made: Any, ids: Any, tokens: int, **options: Any) -> float:
    """Seconds per token of transformers' own generate on a prompt, its first token excluded."""
    made.set_attn_implementation("sdpa")
    ids = torch.tensor([ids], device="cuda")
    common: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}

    def run(count: int) -> float:
        return timed(lambda: made.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **common))[0]

    run(tokens)
    short, whole = run(2), run(tokens)
    made.set_attn_implementation("outrider")
    return (whole - short) / (tokens - 2)


def single(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One request, context 512, plain: seconds per token against the captured round's time; transformers' eager generate; then
    the replayed answer at several rates and depths against the ideal, tau / (1 + draft / plain), of the same run."""
    made = model(name)
    world = World(made, name)
    passed = rounds(world, 512, 1)["median"] / 1000
    write(world, NoDrafter(), (512, 32))
    plain: list[float] = []
    answer: Answer | None = None
    for _ in range(args.repeats):
        seconds, many = write(world, NoDrafter(), (512, 256))
        plain.append(seconds)
        answer = (many[0].tokens[:512], many[0].params, many[0].output)
    out: dict[str, Any] = {"pass_ms": passed * 1000, "plain_ms": spread([p * 1000 for p in plain])}
    out["plain_x_pass"] = passed / median(plain)
    print(
        f"{name}: pass {passed * 1e3:.3f} ms, plain {median(plain) * 1e3:.3f} ms per token, {out['plain_x_pass']:.3f}", flush=True
    )
    if "hf" in args.parts:
        eager = generate(made, prompt(512, 0), 34)
        out["transformers_ms"], out["against_transformers"] = eager * 1000, eager / median(plain)
        print(f"   transformers eager {eager * 1e3:.2f} ms per token: {eager / median(plain):.2f}x", flush=True)
    if "compiled" in args.parts:
        out |= compiled(made, median(plain))
    for rate, depth in itertools.product(RATES, DEPTHS) if "synthetic" in args.parts and answer else ():
        drafter = Synthetic(Synthetic.Config(rate=rate, depth=depth))
        drafter.record(*answer)
        out[f"replay/{rate}/{depth}"] = replayed(world, drafter, answer[2], args.repeats)
    del world, made
    gc.collect()
    torch.cuda.empty_cache()
    return out


def compiled(made: Any, plain: float) -> dict[str, Any]:
    """transformers' generate with its static cache, compiled."""
    try:
        seconds, per = timed(lambda: generate(made, prompt(512, 0), 66, cache_implementation="static"))
        print(
            f"   transformers compiled {per * 1e3:.2f} ms per token: {per / plain:.2f}x (ready after {seconds:.0f} s)", flush=True
        )
        return {"compiled_ms": per * 1000, "against_compiled": per / plain, "compile_seconds": seconds}
    except Exception as error:
        return {"compiled_error": repr(error)[:300]}


def replayed(world: World, drafter: Synthetic, answer: list[int], repeats: int) -> dict[str, Any]:
    """The recorded answer again, interleaved with plain decoding."""
    ratios = []
    write(world, drafter, (512, 40))
    for _ in range(repeats):
        plain, _ = write(world, NoDrafter(), (512, 256))
        seconds, many = write(world, drafter, (512, 256))
        stats = many[0].stats
        tau = stats.tokens / stats.rounds
        ideal = tau / (1 + stats.draft_seconds / stats.rounds / plain)
        assert many[0].output == answer
        ratios.append((plain / seconds, ideal, tau, stats.draft_seconds / stats.rounds * 1e3))
    speedup, ideal, tau, draft = (median(column) for column in zip(*ratios, strict=True))
    share = spread([a / b for a, b, _, _ in ratios])
    how = f"{drafter.config.rate}, {drafter.depth} deep"
    print(f"   replay {how}: tau {tau:.2f}, {speedup:.2f}x of {ideal:.2f}: {share['median']:.3f}, draft {draft:.3f} ms")
    return {"speedup": speedup, "ideal": ideal, "tau": tau, "draft_ms": draft, "share": share}


def assisted(args: argparse.Namespace) -> dict[str, Any]:
    """The embedded model, one request that quotes its prompt: transformers' assisted generation and ours, with the same n-gram
    lookup (10 tokens) and the same draft model (the first 6 layers, 4 tokens), all greedy, the same 192 tokens."""
    llm = LLM(EMBEDDED, draft="none", control="fixed", device="cuda", max_model_len=2048)
    made: Any = llm._target.decoder.model
    small = truncate(copy.deepcopy(made), 6)
    small.set_attn_implementation("sdpa")
    ids = workloads.built_in()["repetitive"].prompts[0].encode(llm.tokenizer)
    out: dict[str, Any] = {}
    for label, draft, options in (
        ("plain", "none", {}),
        ("ngram", "ngram:max=4,min=2,depth=10", {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 4}),
        ("draft model", f"draft_model:path={EMBEDDED},layers=6,depth=4", {"assistant_model": small, "num_assistant_tokens": 4}),
    ):
        llm.switch(draft, control="fixed")
        params = SamplingParams(temperature=0.0, max_tokens=192, ignore_eos=True, seed=1)
        llm.generate([ids], params)
        ours = [_writing(llm.generate([ids], params)[0].stats) for _ in range(args.repeats)]
        theirs = [generate(made, ids, 192, **options) for _ in range(args.repeats)]
        out[label] = {"ours_ms": spread([1e3 * s for s in ours]), "theirs_ms": spread([1e3 * s for s in theirs])}
        out[label]["times_as_fast"] = median(theirs) / median(ours)
        print(f"assisted, {label}: {out[label]['times_as_fast']:.1f}x ({1e3 * median(ours):.3f} ms per token)", flush=True)
    return out


def _writing(stats: Any) -> float:
    """Seconds per token after the first."""
    return float((stats.seconds - stats.first_token_seconds) / (stats.tokens - 1))


def crowd(args: argparse.Namespace) -> dict[str, Any]:
    """64 requests of the 8B shape, 512 tokens in and 256 out, plain: tokens per second from first token to last."""
    made = model("8B")
    world = World(made, "8B", tokens=64 * 1024)
    write(world, NoDrafter(), (512, 16), 64)
    speeds = [1 / write(world, NoDrafter(), (512, 256), 64)[0] for _ in range(2)]
    print(f"8B, 64 requests: {median(speeds):.0f} tokens/s")
    del world, made
    gc.collect()
    torch.cuda.empty_cache()
    return {"tokens_per_second": spread(speeds)}


def texts(args: argparse.Namespace) -> dict[str, Any]:
    """The embedded model, with text: 60 requests of up to 256 tokens, plain and with ngram; 256 requests of 256."""
    out: dict[str, Any] = {}
    started = time.perf_counter()
    llm = LLM(EMBEDDED, draft="none", device="cuda", max_model_len=2048)
    out["load_seconds"] = time.perf_counter() - started
    some = [f"{p} ({i})" for i in range(11) for p in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=256, seed=1)
    full = SamplingParams(temperature=0.0, max_tokens=256, seed=1, ignore_eos=True)

    def run(many: list[str], how: SamplingParams) -> float:
        seconds, results = timed(lambda: llm.generate(many, how))
        return sum(len(r.token_ids) for r in results) / seconds

    for label, draft, control in (("plain", "none", "fixed"), ("ngram", "ngram", "goodput"), ("ngram fixed", "ngram", "fixed")):
        llm.switch(draft, control=control)
        run(some[:60], params)
        out[f"60/{label}"] = spread([run(some[:60], params) for _ in range(args.repeats)])
        print(f"SmolLM2, 60 requests, {label}: {out[f'60/{label}']['median']:.0f} tokens/s", flush=True)
    llm.switch("none", control="fixed")
    run(some[:256], full)
    out["256/plain"] = spread([run(some[:256], full) for _ in range(args.repeats)])
    print(f"SmolLM2, 256 requests: {out['256/plain']['median']:.0f} tokens/s", flush=True)
    lean = f"draft_model:path={EMBEDDED},layers=6,depth=3"
    for label, draft in (("plain", "none"), ("ngram", "ngram"), ("suffix", "suffix"), ("draft_model of 6 layers", lean)):
        llm.switch(draft, control="fixed")
        run(some[:1], full)
        out[f"1/{label}"] = spread([run(some[:1], full) for _ in range(args.repeats)])
        print(f"SmolLM2, 1 request, {label}: {out[f'1/{label}']['median']:.0f} tokens/s", flush=True)
    return out


def first_token(args: argparse.Namespace) -> dict[str, Any]:
    """8B shape, a prompt of 4,096 tokens: seconds to the first token, with its prefix cached and not."""
    made = model("8B")
    world = World(made, "8B", tokens=64 * 512)

    def once(seed: int) -> float:
        engine = world.engine(NoDrafter())
        one = request(prompt(4096, seed), 1)
        engine.add(one)
        return timed(lambda: [None for _ in iter(engine.step, None)])[0]

    once(1)
    fresh, again = [once(s) for s in (2, 3, 4)], [once(s) for s in (2, 3, 4)]
    print(f"8B, 4,096 tokens: first token after {median(fresh):.3f} s, cached {median(again):.3f} s")
    return {"fresh": spread(fresh), "cached": spread(again)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="single,hf,synthetic,crowd,texts,first,assisted")
    parser.add_argument("--shapes", default="SmolLM2-135M,1.5B,8B")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", default="speed_gpu.json")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    out: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": args.commit,
    }
    out["command"] = " ".join(("python", *sys.argv))
    parts: dict[str, Callable[[], Any]] = {f"single/{n}": lambda n=n: single(n, args) for n in args.shapes.split(",")}
    parts |= {
        "crowd": lambda: crowd(args),
        "texts": lambda: texts(args),
        "first": lambda: first_token(args),
        "assisted": lambda: assisted(args),
    }
    for name, part in parts.items():
        if name.split("/")[0] in args.parts:
            try:
                out[name] = part()
            except Exception as error:
                out[name] = {"error": repr(error)[:500]}
                print(name, "failed:", repr(error)[:500], flush=True)
            Path(args.json).write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
