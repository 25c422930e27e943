"""Attention's forms on a GPU: bits across forms; time per layer by rows and context, beside an earlier kernel's in the same run.

    git show main:src/outrider/kernels/attention.py > build/attention_before.py
    PYTHONPATH=src:. python benchmarks/gpu/attention.py --before build/attention_before.py --json attention_gpu.json

Ends with status 1 if bits differ. Times are medians, in microseconds, of launches within a CUDA graph, each on the KV of another
layer."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import triton
from benchmarks.gpu.kernel_inputs import Attend, chains, ints, microseconds, tile, tree

from outrider.kernels.attention import TUNING, Form, Tuning

HEADS = {"32/8x128": (32, 8, 128), "12/2x128": (12, 2, 128), "9/3x64": (9, 3, 64)}
ROWS = (1, 4, 8, 16)
CONTEXTS = (512, 2048, 8192, 32768)
NEVER = 1 << 30
FORMS = {
    "per split": replace(TUNING, enough=NEVER),
    "per stretch": replace(TUNING, enough=1),
    "three programs": replace(TUNING, most=3, enough=1),
    "one tile at a time": replace(TUNING, pair=1, enough=1),
    "three stages": replace(TUNING, stages=3, enough=1),
}
"""What must not change a bit."""
TUNINGS = {
    "per split": FORMS["per split"],
    "per stretch": FORMS["per stretch"],
    "one tile at a time": replace(TUNING, pair=1),
    **{f"{n} stages": replace(TUNING, stages=n) for n in (3, 5)},
    "stretch 8": replace(TUNING, stretch=8),
    "stretch 8, per stretch": replace(TUNING, stretch=8, enough=1),
    "stretch 2": replace(TUNING, stretch=2),
}
"""What may change the time. Another stretch is another arithmetic, to be chosen once."""


def earlier(path: str) -> Any:
    """Another version of the kernel's file, as a module of the same package."""
    spec = importlib.util.spec_from_file_location("outrider.kernels.attention_before", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def bits(checks: dict[str, bool]) -> None:
    """Chains: every form and the serial one. Trees: every form, and each row alone."""
    for (name, heads), context in itertools.product(HEADS.items(), (3, 509, 512, 2047, 8190)):
        for form in (Form(), Form(window=700, softcap=20.0))[: 2 if heads == HEADS["32/8x128"] else 1]:
            kind = f"{name} at {context}{', window and cap' if form.window else ''}"
            rows = 16
            chain = replace(chains(heads, context, [rows])[0], form=form)
            checks[f"{kind}: chain"] = agree(chain, [chain.run(), replace(chain, form=replace(form, serial=True)).run()])
            checks[f"{kind}: fewer rows"] = all(torch.equal(fewer(chain, n, heads), chain.run()[:n]) for n in (1, 3, 5, 8, 13))
            grown = tree(heads, context, [-1, 0, 0, 1, 1, 2, -1, 6, 7, 7, 8, 4, 4], replace(form, tree=True))
            alone = torch.stack([grown.alone(row, serial=row % 2 == 1) for row in range(14)])
            checks[f"{kind}: tree"] = agree(grown, [grown.run(), alone])
            exact = torch.stack([grown.exact(row) for row in range(14)])
            checks[f"{kind}: fp64"] = float((grown.run().double() - exact).norm() / exact.norm()) < 5e-3
    first = chains(HEADS["32/8x128"], 8190, [4])[0]
    whole = replace(first, q=first.q.float(), pool=(first.pool[0].float(), first.pool[1].float()))
    checks["another stretch is noticed"] = not torch.equal(whole.run(), whole.run(replace(TUNING, stretch=8)))


def agree(one: Attend, others: list[torch.Tensor]) -> bool:
    """Whether all forms of a pass, and what else is given, have the same bits."""
    outs = [one.run(tuning) for tuning in FORMS.values()] + others
    return all(torch.equal(outs[0], out) for out in outs[1:])


def fewer(one: Attend, rows: int, heads: tuple[int, int, int]) -> torch.Tensor:
    """The first rows of a chain as a pass of their own."""
    from outrider.kernels.attention import rows_per_tile

    where = one.where
    part = replace(
        where,
        position=where.position[:rows],
        path=where.path[:rows],
        tiles=ints(tile([rows], rows_per_tile(heads[0] // heads[1]))),
    )
    return replace(one, q=one.q[:rows], where=part).run()


def before(module: Any, works: list[Attend], rows: list[int], heads: tuple[int, int, int]) -> float:
    """The earlier kernel on the same KV, in the tiles it wants."""
    tiles = ints(tile(rows, module.rows_per_tile(heads[0] // heads[1])))

    def call(w: Attend) -> Any:
        x = w.where
        where = module.Where(x.position, x.known, x.path, x.table, tiles, x.longest)
        return lambda: module.attention(w.q, w.pool, where, w.q.shape[2] ** -0.5, module.Form(serial=w.form.serial))

    return microseconds([call(w) for w in works])


def timed(works: list[Attend], tuning: Tuning) -> float | str:
    """One tuning; or why the card has no room for it."""
    try:
        return microseconds([lambda w=w: w.run(tuning) for w in works])  # type: ignore[misc]
    except triton.runtime.errors.OutOfResources as error:
        return str(error)


def times(name: str, old: Any, seconds: float) -> dict[str, Any]:
    """Default tuning against the earlier kernel everywhere; other tunings of the 8B shape while there is time."""
    heads, started, out = HEADS[name], time.perf_counter(), {}
    places: list[tuple[int, list[int], bool]] = [(c, [n], False) for c, n in itertools.product(CONTEXTS, ROWS)]
    places += [(640, [1] * 64, False), (640, [5] * 16, False), (0, [512], True), (4096, [512], True)]
    for context, rows, serial in places:
        works = chains(heads, context, rows, serial=serial)
        found: dict[str, Any] = {"new": timed(works, TUNING)}
        if old is not None:
            found["before"] = before(old, works, rows, heads)
        if name == "32/8x128" and len(rows) == 1 and time.perf_counter() - started < seconds:
            found |= {label: timed(works, tuning) for label, tuning in TUNINGS.items()}
        label = f"{context}/{rows[0]}x{len(rows)}{' serial' if serial else ''}"
        out[label] = found
        print(f"{name} {label}: {found}", flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", help="an earlier version of kernels/attention.py")
    parser.add_argument("--json", default="attention_gpu.json")
    parser.add_argument("--seconds", type=float, default=150, help="for other tunings")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    checks: dict[str, bool] = {}
    out: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": args.commit,
        "tuning": asdict(TUNING),
        "checks": checks,
    }
    bits(checks)
    print(f"bits: {sum(checks.values())} of {len(checks)} hold; failed: {[k for k, v in checks.items() if not v]}", flush=True)
    old = earlier(args.before) if args.before else None
    for name in HEADS:
        out[name] = times(name, old, args.seconds)
        Path(args.json).write_text(json.dumps(out, indent=1) + "\n")
    sys.exit(not all(checks.values()))


if __name__ == "__main__":
    main()
