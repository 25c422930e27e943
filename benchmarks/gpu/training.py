"""Tokens per second of training a drafter, what the time goes to, and peak memory; texts of random tokens.

    PYTHONPATH=src:. python benchmarks/gpu/training.py --method eagle:vocab=16384 --seconds 20 --batch-tokens 16384

First whole steps as `outrider train` takes them, for most of the seconds; then some steps with a halt after each phase, which
makes them slower and tells phases apart: the target's pass, the drafter's forward pass (the target's scores included), backward,
optimiser. `--trace FILE` writes a trace of three whole steps for chrome://tracing. `--model tiny --device cpu` tries it out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.loading import pick_device, pick_dtype
from outrider.models import weights
from outrider.train import tiny
from outrider.train.capture import Capture
from outrider.train.corpus import Corpus
from outrider.train.loop import Recipe, Trainer
from outrider.train.run import method

PHASES = ("target", "forward", "backward", "optimiser")
_PROMPT = 40


@dataclass
class Clock:
    """Seconds by phase; `halt` waits for the device."""

    device: torch.device
    spent: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in PHASES})
    last: float = 0.0

    def halt(self, phase: str | None = None) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if phase is not None:
            self.spent[phase].append(now - self.last)
        self.last = now


def texts(vocabulary: int, tokens: int, length: int) -> Corpus:
    """Random texts of half of `length` to `length` tokens, one in twenty held out. Tokens fall off as in real text (Zipf)."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(length // 2, length + 1, (max(20, tokens * 4 // (3 * length)),), generator=generator)
    chances = 1 / torch.arange(10, vocabulary + 10, dtype=torch.float64)
    drawn = torch.multinomial(chances, int(lengths.sum()), replacement=True, generator=generator).int()
    prompts = torch.full_like(lengths, min(_PROMPT, length // 4))
    held = torch.arange(len(lengths)) % 20 == 0
    return Corpus(drawn, lengths.cumsum(0) - lengths, lengths, prompts, held, {})


def made(args: argparse.Namespace, directory: Path) -> Trainer:
    """A trainer that never checks."""
    device = pick_device(args.device)
    source = weights.resolve(str(tiny.directory()) if args.model == tiny.NAME else args.model)
    capture = Capture(weights.load(source, pick_dtype("auto", device), str(device)))
    corpus = texts(capture.vocabulary, args.texts, args.length)
    _, cls, options = method(args.method)
    build: Any = cls
    pupil = build.pupil(capture.teacher(corpus.counts(capture.vocabulary)), options)
    capture = Capture(capture.loaded, pupil.features, keep=args.keep)
    recipe = Recipe(steps=10**6, check=10**6, batch_tokens=args.batch_tokens, longest=args.length, save_minutes=1e6)
    return Trainer(pupil, capture, corpus, recipe, directory)


def whole(trainer: Trainer, seconds: float) -> dict[str, float]:
    """Steps as they are, the first five not counted."""
    seen: list[tuple[float, int]] = []
    trainer.run(lambda sign: seen.append((time.perf_counter(), trainer.state.tokens)), time.monotonic() + seconds)
    if len(seen) < 4:
        raise SystemExit(f"{len(seen)} steps in {seconds:g} s tell nothing: give more --seconds, or fewer --batch-tokens")
    first = min(5, len(seen) - 3)
    (start, before), (end, after) = seen[first], seen[-1]
    return {
        "steps": len(seen),
        "tokens_per_second": (after - before) / (end - start),
        "step_ms": 1000 * (end - start) / (len(seen) - 1 - first),
    }


def phases(trainer: Trainer, count: int) -> dict[str, float]:
    """Median milliseconds of each phase, with a halt after it."""
    clock, stream, cuda = Clock(trainer.capture.device), trainer._stream(), trainer.capture.device.type == "cuda"
    for _ in range(count + 2):
        trainer.optimiser.zero_grad(set_to_none=True)
        clock.halt()
        lesson = trainer.capture.lesson(trainer.corpus, next(stream), trainer.recipe.longest)
        clock.halt("target")
        with torch.autocast(trainer.capture.device.type, torch.bfloat16, enabled=cuda):
            loss, _ = trainer.pupil.loss(lesson)
        clock.halt("forward")
        loss.backward()
        clock.halt("backward")
        torch.nn.utils.clip_grad_norm_(trainer.parameters, 1.0)
        trainer.optimiser.step()
        clock.halt("optimiser")
    return {phase: 1000 * statistics.median(times[2:]) for phase, times in clock.spent.items()}


def trace(trainer: Trainer, path: str) -> None:
    """Three whole steps for a profiler's eyes."""
    stream, began = trainer._stream(), time.monotonic()
    with torch.profiler.profile() as profile:
        for _ in range(3):
            trainer._step(stream, began).read()
    profile.export_chrome_trace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="eagle", help="as for outrider train, with its options")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=600, help="longest text")
    parser.add_argument("--texts", type=int, default=2_000_000, help="tokens of text to make up")
    parser.add_argument("--steps", type=int, default=8, help="steps with halts")
    parser.add_argument("--keep", action="store_true", help="states stay in memory; --texts must last less than --seconds")
    parser.add_argument("--trace", default="")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    cuda = pick_device(args.device).type == "cuda"
    with tempfile.TemporaryDirectory() as place:
        trainer = made(args, Path(place))
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        out: dict[str, Any] = {k: v for k, v in vars(args).items() if k not in ("json", "trace")}
        out |= {"torch": torch.__version__, "card": torch.cuda.get_device_name() if cuda else "cpu"}
        out["whole"] = whole(trainer, args.seconds)
        out["phases_ms"] = phases(trainer, args.steps)
        out["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        if args.trace:
            trace(trainer, args.trace)
    print(json.dumps(out, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
