"""Drafters with a pass of their own on a GPU: captured guesses beside plain ones, and what a step, a proposal and a round take.

    PYTHONPATH=src:. python benchmarks/gpu/heads.py --json heads_gpu.json

Random EAGLE and Medusa heads for the embedded model, whose file `OUTRIDER_MODEL` may name: times do not depend on what is
guessed, but rounds of heads that are mostly wrong bring about one token each. `same`: share of the requests and rounds in which
the replayed guesses are the plain ones (in bf16 both round, in different order), of drafters that wait for the host.
`step_us`: what one more level adds to a graph, and `kernels_per_step` how many launches. `host_us`: how long `propose` keeps
the host; `propose_us`: until the device is done.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from outrider import LLM, SamplingParams
from outrider.bench.prompts import PROMPTS
from outrider.drafters._eagle import EaglePupil, EagleTraining
from outrider.drafters._medusa import MedusaPupil, MedusaTraining
from outrider.protocols import Drafter, Teacher

MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m-instruct")
SPECS = {
    "eagle chain": "eagle:path={few},width=1,depth=5",
    "eagle chain, whole vocabulary": "eagle:path={whole},width=1,depth=5",
    "eagle tree": "eagle:path={few}",
    "eagle 1 chain": "eagle:path={first},width=1,depth=5",
    "medusa": "medusa:path={medusa}",
    "layer_skip": "layer_skip:attention=4+8+12+16+20+24,mlp=none,floor=0,depth=4",
    "early_exit": "early_exit:exit=24,floor=0,depth=4",
}


def directories(llm: LLM, root: Path) -> dict[str, str]:
    """Random heads for the model."""
    model: Any = llm._target.decoder.model
    rows = [end.weight.detach() for end in (model.get_input_embeddings(), model.get_output_embeddings())]
    counts = torch.arange(len(rows[0]), device=rows[0].device).flip(0)
    teacher = Teacher("embedded", model.config.to_dict(), *rows, counts, llm._target.fingerprint)
    torch.manual_seed(0)
    made = {
        "few": EaglePupil(teacher, EagleTraining(vocab=8192)),
        "whole": EaglePupil(teacher, EagleTraining()),
        "first": EaglePupil(teacher, EagleTraining(version=1)),
        "medusa": MedusaPupil(teacher, MedusaTraining(vocab=8192)),
    }
    for name, pupil in made.items():
        pupil.save(root / name)
    return {name: str(root / name) for name in made}


def captured(drafter: Any) -> Any:
    """The drafter's captured form."""
    found = getattr(drafter, "climbs", None) or getattr(drafter, "replays", None)
    return found if found is not None else drafter._writer.chains


@contextmanager
def plain(drafter: Any) -> Iterator[None]:
    """The drafter without its captured form."""
    name = next((n for n in ("climbs", "replays") if hasattr(drafter, n)), "_writer")
    before = getattr(drafter, name)
    setattr(drafter, name, replace(before, chains=None) if name == "_writer" else None)
    try:
        yield
    finally:
        setattr(drafter, name, before)


class Watch:
    """Stands in for a drafter's `propose`: compares it with its plain form, or times it."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.propose = drafter, drafter.propose
        self.same: list[bool] = []
        self.turn = False
        self.host: list[float] = []
        self.whole: list[float] = []

    def compare(self, batch: Any, budget: Any) -> Any:
        """Both forms, each first in turn: whoever is first reads what is new."""
        made: dict[bool, Any] = {}
        self.turn = not self.turn
        for form in (self.turn, not self.turn):
            with plain(self.drafter) if form else nullcontext():
                out = self.propose(batch, budget)
                made[form] = (out, out.tokens.tolist(), out.parents.tolist(), out.sizes.tolist())
        (one, *theirs), (_, *mine) = made[True], made[False]
        for b, size in enumerate(theirs[2]):
            if one.widths[b]:
                agree = all(x[b][:size] == y[b][:size] for x, y in zip(theirs[:2], mine[:2], strict=True))
                self.same.append(agree and size == mine[2][b])
        return one

    def clock(self, batch: Any, budget: Any) -> Any:
        torch.cuda.synchronize()
        started = time.perf_counter()
        out = self.propose(batch, budget)
        told = time.perf_counter()
        torch.cuda.synchronize()
        if any(out.widths):
            self.host.append(1e6 * (told - started))
            self.whole.append(1e6 * (time.perf_counter() - started))
        return out


def write(llm: LLM, count: int, temperature: float, tokens: int = 96) -> float:
    """Microseconds per round of `count` requests."""
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=11, ignore_eos=True)
    torch.cuda.synchronize()
    started = time.perf_counter()
    results = llm.generate(list(PROMPTS[:count]), params)
    seconds = time.perf_counter() - started
    return 1e6 * seconds / max(r.stats.rounds for r in results)


def replayed(work: Callable[[], object], times: int = 50) -> float:
    """Microseconds of one replay."""
    for _ in range(5):
        work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end) / times


def launches(work: Callable[[], object]) -> int:
    """Kernels of one replay."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return sum(1 for e in seen.events() if e.device_type == device and "emcpy" not in e.name and "emset" not in e.name)


def steps(form: Any, context: int = 512) -> dict[str, float]:
    """What a level costs in the graph, for one request of `context` tokens, all of whose memory is the scratch page."""
    made = max(form.replays._made.values(), key=lambda m: getattr(m.shape, "depth", 0))
    if not hasattr(made.shape, "depth"):
        return {"replay_us": replayed(made.replay), "kernels": launches(made.replay)}
    found = {}
    for depth in (2, made.shape.depth):
        one = type(made)(made.shape._replace(requests=1, depth=depth), form)
        one.given.zero_()
        one.given[:, 0], one.given[:, 1], one.given[:, 2], one.given[:, 4], one.given[:, 5] = (
            one.host[0, 0],
            context,
            1,
            depth,
            16,
        )
        states = getattr(one, "states", one.given)
        one.given[:, 3] = states.data_ptr()
        found[depth] = (replayed(one.replay), launches(one.replay), one)
    more = made.shape.depth - 2
    (short, few, _), (long, many, _) = found[2], found[made.shape.depth]
    return {"replay_us": long, "step_us": (long - short) / more, "kernels_per_step": (many - few) / more, "kernels": many}


def without(llm: LLM, drafter: Any, count: int) -> tuple[float, float]:
    """Microseconds until guesses are made without the captured form, and of a round."""
    propose, slow = drafter.propose, Watch(drafter)
    with plain(drafter):
        write(llm, count, 0.0)
        round_ = write(llm, count, 0.0)
        drafter.propose = slow.clock
        write(llm, count, 0.0)
        drafter.propose = propose
    return median(slow.whole), round_


def measure(llm: LLM, spec: str) -> dict[str, Any]:
    """One drafter: agreement, then times with its captured form and without."""
    llm.switch(spec, control="fixed")
    drafter: Any = llm.engine.drafter.drafter
    out: dict[str, Any] = {"spec": spec.split(":")[0], "same": {}, "round_us": {}}
    waits = type(drafter).follows is Drafter.follows  # the others' plain forms know nothing of captured rounds
    if not waits:
        write(llm, 8, 0.0)
    for temperature in (0.0, 1.0) if waits else ():
        watch = Watch(drafter)
        drafter.propose = watch.compare
        write(llm, 8, temperature)
        out["same"][str(temperature)] = sum(watch.same) / max(1, len(watch.same))
        drafter.propose = watch.propose
    out |= steps(captured(drafter))
    for count in (1, 8):
        watch = Watch(drafter)
        drafter.propose = watch.propose
        write(llm, count, 0.0)
        told = {"replayed": write(llm, count, 0.0)}
        drafter.propose = watch.clock
        write(llm, count, 0.0)
        out[f"host_us_{count}"], out[f"propose_us_{count}"] = median(watch.host), median(watch.whole)
        drafter.propose = watch.propose
        if waits:
            out[f"plain_propose_us_{count}"], told["plain"] = without(llm, drafter, count)
        out["round_us"][str(count)] = told
    out["working"] = llm.engine.drafter.reason is None and not captured(drafter).replays.off
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="names of SPECS, separated by semicolons (all)")
    options = parser.parse_args()
    llm = LLM(MODEL, draft="none", device="cuda", max_model_len=2048)
    report: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "model": llm.name if hasattr(llm, "name") else MODEL,
        "plain_decoding_us": {str(n): min(write(llm, n, 0.0) for _ in range(3)) for n in (1, 8)},
    }
    with tempfile.TemporaryDirectory() as root:
        made = directories(llm, Path(root))
        for name, spec in SPECS.items():
            if not options.only or name in options.only.split(";"):
                report[name] = measure(llm, spec.format(**made))
                print(json.dumps({name: report[name]}), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
