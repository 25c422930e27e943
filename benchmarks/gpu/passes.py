"""Time of a captured round by rows, against a graph of its matrix products alone; both in one run.

    PYTHONPATH=src:. python benchmarks/gpu/passes.py --shapes 8B,1.5B,SmolLM2-135M --json passes_gpu.json

What a round holds: rows from lanes, the pass, scores in fp32, the choice, the rule. Random weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.gpu.shapes import World, graphed, milliseconds, model, prompt, request

from outrider.models.products import TRIED, Trust
from outrider.models.rounds import Play, shape_of
from outrider.types import Batch, Proposal

ROWS = (1, 2, 4, 8, 16)


def products(world: World, rows: int) -> dict[str, float]:
    """The pass's matrix products and the head, alone, as a graph."""
    decoder: Any = world.decoder
    stack, product = decoder.stack, decoder.products
    x = torch.randn(rows, decoder.hidden_size, device="cuda").to(decoder.dtype)
    mixed = torch.randn(rows, stack[0].out.shape[1], device="cuda").to(decoder.dtype)
    inner = torch.randn(rows, stack[0].down.shape[1], device="cuda").to(decoder.dtype)

    def work() -> None:
        for block in stack:
            product(x, block.qkv, block.qkv_bias)
            product(mixed, block.out)
            product(x, block.gate_up)
            product(inner, block.down)
        product(x, decoder.head, None, torch.float32)

    return milliseconds(graphed(work))


def at_context(world: World, context: int) -> Any:
    """A request whose KV holds `context - 1` tokens, ready to write."""
    one = request(prompt(context, context), 4096)
    world.cache.reserve(one, context + 64)
    one.computed = context - 1
    return one


def rounds(world: World, context: int, rows: int, temperature: float = 0.0) -> dict[str, float]:
    """A captured round of `rows` rows of one request."""
    one = at_context(world, context)
    object.__setattr__(one.params, "temperature", temperature)
    guesses = Proposal.chains([prompt(rows - 1, 7)] if rows > 1 else [[]])
    target = world.target
    shape = shape_of(guesses, context + rows)
    assert shape is not None
    played = target.machine.round(shape)
    lanes = target.book.take([one])
    numbers = ([one.tokens[-1]], [one.tokens[-2]], [len(one.tokens)], [4000])
    batch = Batch((one,), (1,), (True,), (16,))
    assert target.steady(batch)
    found = milliseconds(lambda: played.play(Play(lanes, numbers, guesses)))
    played.play(Play(lanes, numbers, guesses))
    alone = milliseconds(lambda: played.graph.replay())
    target.release(one)
    return {**alone, "with_upload": found["median"]}


def measure(name: str, contexts: tuple[int, ...]) -> dict[str, Any]:
    """All rows and contexts of one shape."""
    started = time.perf_counter()
    made = model(name)
    loaded = time.perf_counter()
    world = World(made, name)
    ready = time.perf_counter()
    first = rounds(world, 512, 1)
    captured = time.perf_counter()
    out: dict[str, Any] = {
        "decoder": type(world.decoder).__name__,
        "weights_seconds": loaded - started,
        "check_seconds": ready - loaded,
        "first_capture_seconds": captured - ready,
        "untrusted": {str(k): untrusted(t) for k, t in world.decoder.products.trust.items()},
        "first": first,
    }
    for rows in ROWS:
        alone = products(world, rows)
        out[f"products/{rows}"] = alone
        for context in contexts:
            got = rounds(world, context, rows)
            out[f"round/{context}/{rows}"] = got
            print(
                f"{name:14} ctx {context:5} rows {rows:2}: {got['median']:.3f} ms, products {alone['median']:.3f} ms, "
                f"ratio {got['median'] / alone['median']:.3f}, with upload {got['with_upload']:.3f}",
                flush=True,
            )
    for temperature in (1.0,):
        got = rounds(world, 512, 8, temperature)
        out[f"round/512/8/T{temperature}"] = got
        print(f"{name} T={temperature} 8 rows: {got['median']:.3f} ms")
    del world, made
    gc.collect()
    torch.cuda.empty_cache()
    return out


def untrusted(trust: Trust) -> dict[str, Any]:
    """Row counts at which the library's rows have other bits, and whether the package's own product has the library's."""
    return {"rows": sorted(set(TRIED) - trust.rows), "kernel_agrees": trust.kernel}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="SmolLM2-135M,1.5B,8B")
    parser.add_argument("--json", default="passes_gpu.json")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    out: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": args.commit,
        "shapes": {},
    }
    for name in args.shapes.split(","):
        out["shapes"][name] = measure(name, (512, 8192) if name == "8B" else (512,))
        Path(args.json).write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
