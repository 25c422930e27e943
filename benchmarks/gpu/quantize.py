"""Quantised weights on a card: bits of rows at every width, time of products and of plain decoding against the dense model's.

    PYTHONPATH=src:. python benchmarks/gpu/quantize.py --shapes 8B --json quantize_gpu.json

Needs torchao. Random weights; the dense baseline runs in the same process. Exit status 1 if a row's bits or a text differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.passes import rounds
from benchmarks.gpu.shapes import World, graphed, milliseconds, model
from benchmarks.gpu.speed import spread, write
from torch import nn

from outrider.drafters.none import NoDrafter
from outrider.drafters.synthetic import Synthetic
from outrider.kernels.quantized import FEW, MANY, linear
from outrider.models.quantize import Quantized, quantize

MATRICES = {
    "8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "1.5B": ((2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960)),
    "SmolLM2-135M": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
}
"""Outputs and inputs of qkv, out, gate and up, down."""
ROWS = (1, 4, 8, 16, 64, 512)
COPIES = 24
"""Weights that a timed graph goes through, so that none is found in the cache."""


def matrix(shape: tuple[int, int], scheme: str) -> tuple[torch.Tensor, Quantized]:
    """A random bf16 weight, and the same rounded."""
    layer = nn.Linear(shape[1], shape[0], bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    holder = nn.Sequential(layer)
    quantize(holder, scheme, "cuda")
    made: Any = holder[0]
    return layer.weight, made.weight


def bits(shape: tuple[int, int], scheme: str) -> dict[str, Any]:
    """Widths from 1 to 48 at which a row differs from itself alone, whether wide tiles agree with narrow ones, and errors."""
    dense, weight = matrix(shape, scheme)
    pair = weight.values, weight.scale
    x = torch.randn(1024, shape[1], device="cuda", dtype=torch.bfloat16)
    alone = torch.cat([linear(x[i : i + 1], pair) for i in range(48)])
    wrong = [w for w in range(1, 49) if not torch.equal(linear(x[:w], pair), alone[:w])]
    wrong += [w for w in range(1, 49) if not torch.equal(linear(x[48 - w : 48], pair), alone[48 - w :])]
    few, many = linear(x, pair, tile=FEW), linear(x, pair, tile=MANY)
    exact, whole = x.double() @ weight.dequantized().double().T, x.double() @ dense.double().T
    scores = linear(x, pair, dtype=torch.float32)
    return {
        "wrong_widths": sorted(set(wrong)) + ([] if torch.equal(few[:48], alone) else [1024]),
        "tiles_agree": torch.equal(few, many),
        "product_error": float((scores.double() - exact).norm() / exact.norm()),
        "rounding_error": float((exact - whole).norm() / whole.norm()),
    }


def times(shape: tuple[int, int], scheme: str) -> dict[str, Any]:
    """Microseconds per product, dense by the vendor's library and quantised, and the share of the quantised bytes' rate."""
    pairs = [matrix(shape, scheme) for _ in range(COPIES)]
    weight = pairs[0][1]
    size = weight.values.nbytes + weight.scale.nbytes
    out: dict[str, Any] = {}
    for rows in ROWS:
        x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
        dense = milliseconds(graphed(lambda x=x: [nn.functional.linear(x, w) for w, _ in pairs]))["median"] * 1000 / COPIES
        small = milliseconds(graphed(lambda x=x: [linear(x, (q.values, q.scale)) for _, q in pairs]))["median"] * 1000 / COPIES
        out[str(rows)] = {"dense_us": dense, "quantised_us": small, "speedup": dense / small, "GB/s": size / small / 1e3}
    return out


def decoding(name: str, scheme: str, repeats: int) -> dict[str, Any]:
    """A captured round of 1 and 8 rows, plain decoding at batch 1 (milliseconds per token), and a drafted text beside."""
    made = model(name)
    quantize(made, scheme, "cuda")
    world = World(made, name)
    out: dict[str, Any] = {f"round/{rows}": rounds(world, 512, rows) for rows in (1, 8)}
    write(world, NoDrafter(), (512, 32))
    runs = [write(world, NoDrafter(), (512, 256)) for _ in range(repeats)]
    out["plain_ms"] = spread([seconds * 1000 for seconds, _ in runs])
    answer = runs[0][1][0]
    drafter = Synthetic(Synthetic.Config(rate=0.8, depth=5))
    drafter.record(answer.tokens[:512], answer.params, answer.output)
    seconds, many = write(world, drafter, (512, 256))
    out["drafted_ms"], out["same_text"] = seconds * 1000, many[0].output == answer.output
    out["tiles"] = {str(shape): agree for shape, agree in world.decoder.products.tiles.items()}
    out["weights_gib"] = sum(t.nbytes for t in [*made.parameters(), *made.buffers()]) / 2**30
    del world, made
    gc.collect()
    torch.cuda.empty_cache()
    return out


def measure(name: str, schemes: list[str], repeats: int) -> dict[str, Any]:
    """All that is asked of one shape."""
    out: dict[str, Any] = {}
    for scheme in schemes:
        for shape in MATRICES[name]:
            key = f"{scheme}/{shape[0]}x{shape[1]}"
            out[key] = found = {**bits(shape, scheme), "times": times(shape, scheme)}
            one, eight = (found["times"][rows] for rows in ("1", "8"))
            print(
                f"{name} {key}: wrong {found['wrong_widths']}, tiles agree {found['tiles_agree']}, 1 row {one['speedup']:.2f}x "
                f"({one['GB/s']:.0f} GB/s), 8 rows {eight['speedup']:.2f}x",
                flush=True,
            )
    for scheme in ["none", *schemes]:
        out[f"decoding/{scheme}"] = found = decoding(name, scheme, repeats)
        base = out["decoding/none"]["plain_ms"]["median"] / found["plain_ms"]["median"]
        print(
            f"{name} {scheme}: {found['plain_ms']['median']:.3f} ms per token, {base:.2f}x, same text {found['same_text']}",
            flush=True,
        )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="8B")
    parser.add_argument("--schemes", default="int8,int4")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", default="quantize_gpu.json")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    out: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": args.commit, "shapes": {}}
    for name in args.shapes.split(","):
        out["shapes"][name] = measure(name, args.schemes.split(","), args.repeats)
        Path(args.json).write_text(json.dumps(out, indent=1) + "\n")
    found = [part for shape in out["shapes"].values() for part in shape.values()]
    return int(any(part.get("wrong_widths") or not part.get("same_text", True) for part in found))


if __name__ == "__main__":
    sys.exit(main())
