"""Check the Triton kernels at real shapes, and time them; on a GPU.

    PYTHONPATH=src:. python benchmarks/gpu/check_kernels.py --json kernels_gpu.json

Times are medians, in microseconds, of launches within a CUDA graph. Ends with status 1 if a check fails. Attention is timed in
other tunings as long as `--seconds` allow."""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from benchmarks.gpu.kernel_inputs import CARD, Attend, InLanes, chains, ints, microseconds, normal, tree
from torch import Tensor
from torch.nn import functional as F

from outrider.kernels.attention import TUNING, Form, Tuning
from outrider.kernels.choose import Work, choose
from outrider.kernels.layers import add_rms_norm, gate, rope_write
from outrider.kernels.product import linear
from outrider.sampling import TextSampler

HEADS = {"9/3x64": (9, 3, 64), "32/8x128": (32, 8, 128), "12/2x128": (12, 2, 128)}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T=1": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "top_k": {"temperature": 1.0, "top_k": 50},
}
PRODUCTS = {
    "8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    "1.5B": ((2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960), (151936, 1536)),
}
"""(N, K) of qkv, out, gate and up, down, head."""
WIDTHS = {"SmolLM2": (576, (9, 3, 64), 1536), "8B": (4096, (32, 8, 128), 14336)}


class Book:
    """What was found: `checks` by name (true: passed), numbers by section, and how much time is left."""

    def __init__(self, seconds: float) -> None:
        self.started, self.seconds = time.perf_counter(), seconds
        self.checks: dict[str, bool] = {}
        self.sections: dict[str, dict[str, Any]] = {}

    def check(self, name: str, passed: bool) -> None:
        self.checks[name] = bool(passed)
        if not passed:
            print(f"FAILED: {name}", flush=True)

    def note(self, section: str, name: str, value: Any) -> None:
        self.sections.setdefault(section, {})[name] = value

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.started


# ---- attention ----


def attention_bits(book: Book) -> None:
    """A node's bits, whatever stands beside it and however it is computed; and how far they are from fp64."""
    rng = random.Random(0)
    parents = [rng.randrange(-1, node) for node in range(24)]
    line = list(range(-1, 23))
    for (name, heads), known in itertools.product(HEADS.items(), (513, 2048)):
        for form in (Form(tree=True), Form(window=300, softcap=20.0, tree=True)):
            kind = f"attention {name} known {known} {'window, cap' if form.window else 'plain'}"
            w = tree(heads, known, parents, form)
            out = w.run()
            alone, serial = (torch.stack([w.alone(r, s) for r in range(25)]) for s in (False, True))
            book.check(f"{kind}: tree = one row", torch.equal(out, alone))
            book.check(f"{kind}: tree = serial row", torch.equal(out, serial))
            exact = torch.stack([w.exact(r) for r in range(25)])
            error = float((out.double() - exact).norm() / exact.norm())
            book.check(f"{kind}: fp64", error < 5e-3)
            book.note("attention error", f"{name} {known} {'window' if form.window else 'plain'}", error)
            variants(book, kind, w, out)
        chain = tree(heads, known, line, Form(tree=True))
        other = [replace(chain, form=Form(serial=s)).run() for s in (False, True)]
        book.check(
            f"attention {name} known {known}: chain as tree, in parts, serial", all(torch.equal(chain.run(), o) for o in other)
        )


def variants(book: Book, kind: str, w: Attend, out: Tensor) -> None:
    """Larger bounds, other tiles, fewer programs; and, as a control, a wrong path."""
    longest = replace(w, where=replace(w.where, longest=16384)).run()
    book.check(f"{kind}: longest", torch.equal(out, longest))
    single = ints([(0, row, 1) for row in range(len(out))])
    book.check(f"{kind}: tiles of one row", torch.equal(out, replace(w, where=replace(w.where, tiles=single)).run()))
    book.check(f"{kind}: three programs", torch.equal(out, w.run(replace(TUNING, most=3))))
    wrong = replace(w, where=replace(w.where, path=w.where.path.roll(1, 0))).run()
    book.check(f"{kind}: a wrong path is noticed", not torch.equal(out, wrong))


def attention_times(book: Book) -> None:
    """Default tuning, everything."""
    for name, heads in HEADS.items():
        for context in (512, 2048, 8192):
            row = [timed(book, f"{name} {context}x{rows}", heads, context, [rows]) for rows in (1, 4, 16, 48)]
            print(f"attention {name:9} context {context:5}: rows 1, 4, 16, 48: {row} us", flush=True)
        many = timed(book, f"{name} 640x1 of 64 requests", heads, 640, [1] * 64)
        whole = [timed(book, f"{name} serial {context}x512", heads, context, [512], serial=True) for context in (0, 4096)]
        print(f"attention {name:9} 64 requests at 640: {many}; serial 512 rows at 0, 4096: {whole} us", flush=True)


def timed(
    book: Book,
    name: str,
    heads: tuple[int, int, int],
    context: int,
    rows: list[int],
    tuning: Tuning = TUNING,
    serial: bool = False,
) -> float | None:
    """One pass over KV of other layers each time; None where the card has no room for the tuning."""
    try:
        works = chains(heads, context, rows, tuning, serial)
        found = microseconds([lambda w=w: w.run(tuning) for w in works])  # type: ignore[misc]
    except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError) as error:
        book.note("attention us", name, str(error))
        return None
    book.note("attention us", name, found)
    return found


def tunings(book: Book) -> None:
    """Other tunings, while there is time: for every head shape the passes that matter most."""
    for split, warps in itertools.product((64, 128, 256), (4, 8)):
        tuning = Tuning(split=split, warps=warps)
        for name, heads in HEADS.items():
            if book.spent > book.seconds:
                print(f"out of time before {name} {tuning}", flush=True)
                book.note("attention us", "stopped before", f"{name} split {split} warps {warps}")
                return
            label = f"{name} split {split} warps {warps}"
            places = [(512, [1]), (512, [16]), (2048, [4]), (8192, [1]), (8192, [16]), (640, [1] * 64)]
            row = [timed(book, f"{label}: {c}x{n[0]} of {len(n)}", heads, c, n, tuning) for c, n in places]
            whole = timed(book, f"{label}: serial 4096x512", heads, 4096, [512], tuning, serial=True)
            print(f"{label}: 512x1, 512x16, 2048x4, 8192x1, 8192x16, 64 of 640x1: {row}; serial 4096x512 {whole} us", flush=True)


# ---- the choice ----


def combinations() -> list[dict[str, Any]]:
    """All filters on and off, at three temperatures."""
    some = itertools.product((0.0, 0.7, 1.3), (1.0, 0.9, 0.3), (0, 1, 50), (0.0, 0.05))
    return [{"temperature": t, "top_p": p, "top_k": k, "min_p": m} for t, p, k, m in some]


def choice_equals(book: Book, rows: int = 256, batches: int = 9) -> None:
    """The sampler's token in every row: random scores, such with many ties, nearly flat ones, some without a valid choice."""
    world = InLanes(combinations())
    for vocab in (49152, 128256):
        usable = vocab - 100
        sampler, wrong, invalid, seen = TextSampler(vocab, usable), 0, 0, 0
        for batch in range(batches):
            z = normal(rows, vocab, seed=batch, dtype=torch.float32) * (4, 4, 0.05)[batch % 3]
            z = z.bfloat16().float() if batch % 3 else z
            if batch >= batches - 3:
                z[::7, 77], z[1::7, usable - 1], z[2::7], z[3::7, usable + 5] = torch.nan, torch.inf, -torch.inf, torch.nan
                z[4::7, : usable - 2] = -torch.inf
            at = torch.arange(rows, device=CARD) + batch * rows
            which, position = at % len(world.requests), at // 8 + 3
            got = torch.zeros_like(which)
            work = Work.make(len(which), usable, CARD, world.filters)
            choose(z, world.rows(which, position), world.lanes, work, got)
            wanted = sampler.choose(z, world.slots(which, position))
            wrong, invalid, seen = wrong + int((got != wanted).sum()), invalid + int((wanted < 0).sum()), seen + rows
        book.check(f"choose {vocab}: {seen} rows as TextSampler", wrong == 0)
        book.check(f"choose {vocab}: some rows have no valid choice", 0 < invalid < seen)
        book.note("choose", f"{vocab} rows, wrong, invalid", [seen, wrong, invalid])
        print(f"choose {vocab}: {seen} rows, {wrong} wrong, {invalid} without a valid choice", flush=True)


def choice_times(book: Book) -> None:
    for vocab, (name, params) in itertools.product((49152, 128256), CHOICES.items()):
        row = []
        for rows in (1, 8, 16, 64, 256):
            world = InLanes([params] * rows)
            z = normal(rows, vocab, dtype=torch.float32) * 4
            at = torch.arange(rows, device=CARD)
            where, out = world.rows(at, at + 9), torch.zeros_like(at)
            scratch = Work.make(rows, vocab, CARD, world.filters)

            def work(z=z, where=where, world=world, out=out, scratch=scratch) -> None:  # type: ignore[no-untyped-def]
                choose(z, where, world.lanes, scratch, out)

            row.append(microseconds([work], 20 if rows <= 16 else 4))
            book.note("choose us", f"{vocab} {name} {rows}", row[-1])
        print(f"choose {vocab:6} {name:6}: rows 1, 8, 16, 64, 256: {row} us", flush=True)


# ---- products ----


def products(book: Book) -> None:
    """Rows that do not care how many they are, and what that costs against the vendor's product."""
    for name, shapes in PRODUCTS.items():
        for at, (wide, inner) in enumerate(shapes):
            head = at == 4
            dtype = torch.float32 if head else torch.bfloat16
            x, weight = normal(1024, inner), normal(wide, inner, seed=1) * inner**-0.5
            whole = linear(x, weight, dtype=dtype)
            parts = [slice(i, i + rows) for rows in (1, 16, 64, 256) for i in (0, 1024 - rows)]
            same = [torch.equal(linear(x[part], weight, dtype=dtype), whole[part]) for part in parts]
            book.check(f"product {name} {wide}x{inner}: rows do not care", all(same))
            exact = x[:64].double() @ weight[:4096].double().T
            error = float((whole[:64, :4096].double() - exact).norm() / exact.norm())
            book.check(f"product {name} {wide}x{inner}: fp64", error < (1e-5 if head else 5e-3))
            del whole, exact
            product_times(book, f"{name} {wide}x{inner}", x, weight, dtype)


def product_times(book: Book, name: str, x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    copies = [weight] + [weight.clone() for _ in range(min(9, 120_000_000 // (2 * weight.numel())))]
    launches, found = 20 if weight.numel() < 2e8 else 4, {}
    for rows in (1, 16, 64, 256):
        mine = x[:rows]
        ours = microseconds([lambda w=w, r=mine: linear(r, w, dtype=dtype) for w in copies], launches)  # type: ignore[misc]
        theirs = microseconds([lambda w=w, r=mine: vendor(r, w, dtype) for w in copies], launches)  # type: ignore[misc]
        found[rows] = [ours, theirs]
    book.note("product us", name, found)
    print(f"product {name:18} rows: [ours, torch.mm] us: {found}", flush=True)


def vendor(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mm(x, weight.t()) if dtype is x.dtype else torch.mm(x, weight.t(), out_dtype=dtype)


# ---- layers ----


def layers(book: Book) -> None:
    for name, rows in itertools.product(WIDTHS, (1, 16)):
        width, heads, inner = WIDTHS[name]
        works = [norms(book, name, rows, width), ropes(book, name, rows, heads), gates(book, name, rows, inner)]
        row = [microseconds([work]) for work in works]
        for kind, found in zip(("norm", "rope", "gate"), row, strict=True):
            book.note("layers us", f"{name} {kind} {rows}", found)
        print(f"layers {name:8} rows {rows:2}: norm, rope and write, gate: {row} us", flush=True)


def near(book: Book, name: str, got: Tensor, wanted: Tensor) -> None:
    error = float((got.double() - wanted.double()).norm() / wanted.double().norm())
    book.check(f"layers {name}: torch", error < 5e-3)
    book.note("layers error", name, error)


def norms(book: Book, name: str, rows: int, width: int) -> Callable[[], object]:
    x, residual, weight = normal(rows, width), normal(rows, width, seed=1), normal(width, seed=2)
    for gemma in (False, True):
        total = residual + x
        out = add_rms_norm(x, residual.clone(), weight, 1e-5, gemma)
        f = total.float() * torch.rsqrt(total.float().square().mean(1, keepdim=True) + 1e-5)
        wanted = f * (1 + weight.float()) if gemma else weight * f.bfloat16()
        near(book, f"{name} norm {rows}{' gemma' if gemma else ''}", out, wanted)
        ones = torch.cat([add_rms_norm(None, total[r : r + 1].clone(), weight, 1e-5, gemma) for r in range(rows)])
        book.check(f"layers {name} norm {rows}{' gemma' if gemma else ''}: rows alone", torch.equal(out, ones))
    zero = torch.zeros_like(x)
    return lambda: add_rms_norm(zero, residual, weight, 1e-5)


def ropes(book: Book, name: str, rows: int, heads: tuple[int, int, int]) -> Callable[[], object]:
    count, kv, dim = heads
    qkv = normal(rows, (count + 2 * kv) * dim)
    pool = normal(4096, kv, dim, seed=1), normal(4096, kv, dim, seed=2)
    angle = torch.arange(8192, device=CARD)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2, device=CARD) / dim)
    angles = torch.cat([angle.cos()] * 2, 1), torch.cat([angle.sin()] * 2, 1)
    at = torch.arange(rows, device=CARD)
    where = SimpleNamespace(position=(at + 4000).int(), write=at * 3 + 64)
    out = rope_write(qkv, angles, where, pool)
    q, k, v = qkv.view(rows, -1, dim).split([count, kv, kv], 1)
    cos, sin = (a[at + 4000][:, None] for a in angles)
    for kind, got, x in (("query", out, q), ("key", pool[0][where.write], k)):
        half = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1).float()
        near(book, f"{name} rope {kind} {rows}", got, x.float() * cos + half * sin)
    book.check(f"layers {name} rope {rows}: values are written as they are", torch.equal(pool[1][where.write], v))
    return lambda: rope_write(qkv, angles, where, pool)


def gates(book: Book, name: str, rows: int, inner: int) -> Callable[[], object]:
    x = normal(rows, 2 * inner)
    first, second = x.float().chunk(2, 1)
    near(book, f"{name} gate {rows}", gate(x), F.silu(first).bfloat16() * second.bfloat16())
    near(book, f"{name} gate {rows} gelu", gate(x, tanh=True), F.gelu(first, approximate="tanh").bfloat16() * second.bfloat16())
    return lambda: gate(x)


PARTS = (attention_bits, choice_equals, products, layers, attention_times, choice_times, tunings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="kernels_gpu.json")
    parser.add_argument("--seconds", type=float, default=130.0, help="no new tuning is tried after so many")
    parser.add_argument("--only", default="", help="parts to run, by commas: " + ", ".join(p.__name__ for p in PARTS))
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    book = Book(args.seconds)
    chosen = [p for p in PARTS if not args.only or p.__name__ in args.only.split(",")]
    out: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": args.commit,
        "tuning": {
            name: getattr(TUNING, name) for name in ("split", "stretch", "warps", "stages", "most", "ahead", "enough", "pair")
        },
        "checks": book.checks,
        "parts_seconds": {},
        "sections": book.sections,
    }
    for part in chosen:
        before = book.spent
        part(book)
        out["parts_seconds"][part.__name__] = round(book.spent - before, 1)
        Path(args.json).write_text(json.dumps(out, indent=1) + "\n")
        torch.cuda.empty_cache()
    failed = [name for name, passed in book.checks.items() if not passed]
    print(f"{len(book.checks) - len(failed)} of {len(book.checks)} checks passed, {book.spent:.0f} s, {out['parts_seconds']}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
