"""What the shipped drafters reach: tokens per pass, the same on equal contexts at T = 0 and T = 1, and speed.

    python benchmarks/trained.py --json benchmarks/results/trained_cpu.json

On a GPU, in commands of at most 80 seconds:

    python benchmarks/trained.py --device cuda --seconds 60 --part tau --json benchmarks/results/gpu/trained_tau.json
    python benchmarks/trained.py --device cuda --seconds 60 --part contexts --draft eagle --json FILE
    python benchmarks/trained.py --device cuda --seconds 60 --part speed --draft eagle --control goodput --prompts 2 \\
        --max-tokens 96 --pairs 3 --json FILE

The prompts are those of six built-in workloads, none of which was trained on. `tau` and `contexts` look ahead as far as the
drafter likes (control `fixed`), so that speed has no influence; `contexts` leaves hybrids out, whose lookups would find one
context's answer in another. `speed` runs the pairs of `outrider bench`, one prompt at a time. The file is written anew after
every drafter: what was measured before an end that nobody wanted is in it, with `complete` false. Exit status 1 if a text
differs from plain decoding.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider import LLM, SamplingParams, registry, trained
from outrider.bench.numbers import Speedup
from outrider.bench.numbers import together as added
from outrider.bench.plan import PLAIN, Plan
from outrider.bench.provenance import provenance, weights_file
from outrider.bench.report import Row, finite
from outrider.bench.runner import Runner
from outrider.bench.workloads import gather
from outrider.drafters.hybrid import members
from outrider.models import weights
from outrider.train.card import reduced
from outrider.train.evaluate import Answers, Exam, answer, score

WORKLOADS = ("code", "chat", "summarise", "question", "creative", "math")
ALL = "all"
CHAIN = "eagle:width=1"
DRAFTS = ("eagle", CHAIN, "medusa", "draft_model", "hybrid:members=suffix+eagle")
PARTS = ("tau", "contexts", "speed")
CONTROLS = ("fixed", "goodput")
TEMPERATURES = (0.0, 1.0)
BATCH, SPARE = 16, 8
PLACES = 6
"""Contexts from each answer."""
DRAWS = 2000
"""Of the bootstrap."""
KEPT = (
    *("workload", "prompts", "runs", "tokens_per_second", "plain_tokens_per_second", "speedup", "verdict", "tau", "alpha"),
    *("draft_seconds", "verify_seconds", "other_seconds", "equal", "compared", "note"),
)


class Late(Exception):
    """There is no time left."""


@dataclass
class Study:
    """A model with what is asked of it. `plain` keeps plain answers by temperature and workload."""

    llm: LLM
    model: str
    options: argparse.Namespace
    prompts: Mapping[str, list[list[int]]]
    until: float
    plain: dict[tuple[float, str], Answers] = field(default_factory=dict)

    def tell(self, what: str, share: float) -> None:
        """Hears of every run of the speed part."""
        if self.late:
            raise Late
        print(f"{share:4.0%} {what}", file=sys.stderr, flush=True)

    @property
    def late(self) -> bool:
        return time.monotonic() > self.until

    @property
    def exam(self) -> Exam:
        return Exam(answer=self.options.max_tokens, batch=BATCH)

    def members(self, draft: str) -> list[str]:
        """The drafters that a hybrid is made of; of any other drafter, itself."""
        name, values = registry.split(draft)
        return members(values["members"]) if name == "hybrid" and "members" in values else [draft]

    def path(self, name: str) -> Path:
        """Where the drafter is that was trained for the model."""
        found = trained.find(weights.fingerprint(weights.resolve(self.model)), name)
        if not found:
            sys.exit(f"no {name} that was trained for {self.model} is at hand; to train one: outrider train {name}")
        return found[0].path

    def plainly(self) -> None:
        """All plain answers, where they are not known yet."""
        if not self.plain:
            self.llm.switch(PLAIN)
            for temperature in TEMPERATURES:
                for name, prompts in self.prompts.items():
                    self.plain[temperature, name] = answer(self.llm, prompts, self.exam, temperature)


def taus(study: Study, draft: str) -> list[dict[str, Any]]:
    """Tokens per round by temperature and workload, and over all of them."""
    study.plainly()
    rows = []
    for temperature in TEMPERATURES:
        study.llm.switch(draft, control="fixed")  # anew, since some learn from what was written
        found = {name: answer(study.llm, prompts, study.exam, temperature) for name, prompts in study.prompts.items()}
        plain = {name: study.plain[temperature, name] for name in found}
        found[ALL], plain[ALL] = joined(found.values()), joined(plain.values())
        rows += [{"workload": n, "draft": draft} | asdict(score(a, temperature, plain[n].tokens)) for n, a in found.items()]
    return rows


def joined(parts: Iterable[Answers]) -> Answers:
    """Answers of several workloads as if of one."""
    many = list(parts)
    return Answers([t for a in many for t in a.tokens], [t for a in many for t in a.taus], added([a.total for a in many]))


class Begin:
    """A processor that gives the first token, and leaves those after it alone."""

    def __init__(self, length: int, token: int) -> None:
        self.length, self.token = length, token

    def __call__(self, tokens: tuple[int, ...], scores: Tensor) -> Tensor:
        if len(tokens) != self.length:
            return scores
        return torch.full_like(scores, -torch.inf).index_fill_(0, torch.tensor(self.token, device=scores.device), 0.0)


@dataclass(frozen=True)
class Context:
    """Where one round begins: behind `tokens`, of the answer to prompt `prompt` of a workload."""

    workload: str
    prompt: int
    tokens: tuple[int, ...]


def places(study: Study) -> Iterator[Context]:
    """Prompts with the beginnings of the model's own answers at T = 1, cut at evenly spread places."""
    for name, prompts in study.prompts.items():
        for i, (prompt, text) in enumerate(zip(prompts, study.plain[1.0, name].tokens, strict=True)):
            for cut in sorted({1 + k * len(text) // PLACES for k in range(PLACES)}):
                if cut < len(text):
                    yield Context(name, i, (*prompt, *text[:cut]))


def rounds(study: Study, where: Sequence[Context], temperature: float) -> list[tuple[int, int]]:
    """Of the first round behind each context, guesses offered and tokens committed. The context's last token is what the reading
    of those before it gives, so that a drafter has seen the model's states; the round after that is the one that counts."""
    engine, found = study.llm.engine, list[tuple[int, int]]()
    most = engine.drafter.drafter.depth + SPARE
    for start in range(0, len(where), BATCH):
        some = [c.tokens for c in where[start : start + BATCH]]
        asked = [
            SamplingParams(temperature=temperature, max_tokens=most, seed=0, processors=(Begin(len(t) - 1, t[-1]),)) for t in some
        ]
        requests = [study.llm.prepare(t[:-1], params)[0] for t, params in zip(some, asked, strict=True)]
        heard: dict[int, list[tuple[int, int]]] = {r.id: [] for r in requests}
        for request in requests:
            engine.add(request)
        while any(len(h) < 2 for h in heard.values()):
            event = engine.step()
            for item in event.committed if event is not None else ():
                if item.tokens and not item.late and item.request.id in heard:
                    heard[item.request.id].append((item.drafted, len(item.tokens)))
        engine.abort(requests)
        assert all(first == (0, 1) for first, *_ in heard.values()), "first comes the context's last token, alone"
        found += [second for _, second, *_ in heard.values()]
    return found


def contexts(study: Study, draft: str) -> list[dict[str, Any]]:
    """Tokens of one round at T = 1 against those at T = 0, from the same contexts."""
    study.plainly()
    where = list(places(study))
    study.llm.switch(draft, control="fixed")
    cold, warm = (rounds(study, where, t) for t in TEMPERATURES)
    rows = []
    for name in (*study.prompts, ALL):
        groups: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        offered = 0
        for c, (a, zero), (b, one) in zip(where, cold, warm, strict=True):
            if name in (c.workload, ALL):
                groups[c.workload, c.prompt].append((zero, one))
                offered += (a > 0) + (b > 0)
        pairs = [p for g in groups.values() for p in g]
        if pairs:
            about = {"workload": name, "draft": draft, "contexts": len(pairs), "prompts": len(groups)}
            rows.append(about | {"guessed": offered / (2 * len(pairs))} | ratio(list(groups.values())))
    return rows


def ratio(groups: Sequence[Sequence[tuple[int, int]]]) -> dict[str, Any]:
    """Means and their ratio, with the 95 % interval of a bootstrap over prompts, since contexts of one prompt are alike."""
    sums = [(sum(a for a, _ in g), sum(b for _, b in g)) for g in groups]
    rng, count = random.Random(0), sum(map(len, groups))
    drawn = []
    for _ in range(DRAWS):
        some = rng.choices(sums, k=len(sums))
        drawn.append(sum(b for _, b in some) / sum(a for a, _ in some))
    cuts = statistics.quantiles(drawn, n=40)
    zero, one = (sum(s[i] for s in sums) for i in (0, 1))
    low, high = (cuts[0], cuts[-1]) if len(sums) > 1 else (None, None)
    return {"tau_0": zero / count, "tau_1": one / count, "ratio": one / zero, "low": low, "high": high}


def speed(study: Study, draft: str, control: str) -> list[dict[str, Any]]:
    """Pairs of plain and drafted runs, one prompt at a time, by workload and over all; as many as there is time for."""
    options = study.options
    asked = gather(WORKLOADS, options.prompts)
    plan = Plan((draft,), asked, options.max_tokens, repeats=options.pairs, control=control)
    runner = Runner(study.llm, plan, study.tell)
    try:
        found = runner.run()
    except Late:
        found = runner.report(interrupted=True)
    rows = [r for r in found.rows if r.draft != PLAIN]
    each = [{name: value for name, value in asdict(r).items() if name in KEPT} for r in rows]
    whole = [together(rows)] if [r.runs for r in rows] == [options.pairs] * len(asked) else []
    return [row | {"draft": draft, "control": control} for row in (*each, *whole)]


def together(rows: Sequence[Row]) -> dict[str, Any]:
    """All workloads as one: of every pair the seconds of plain decoding over those with the drafter."""
    tokens, runs = sum(r.tokens / r.runs for r in rows), range(rows[0].runs)
    ours = [sum(r.tokens / r.runs / r.paces[i] for r in rows) for i in runs]
    plain = [sum(r.tokens / r.runs / r.paces[i] * r.speedup.pairs[i] for r in rows if r.speedup) for i in runs]
    gain = Speedup.of([p / o for p, o in zip(plain, ours, strict=True)])
    return {
        "workload": ALL,
        "runs": len(runs),
        "tokens_per_second": statistics.median(tokens / s for s in ours),
        "plain_tokens_per_second": statistics.median(tokens / s for s in plain),
        "speedup": asdict(gain),
        "verdict": gain.verdict,
        "tau": sum(r.tokens for r in rows) / sum(r.rounds for r in rows),
        **{name: sum(getattr(r, name) for r in rows) for name in ("prompts", "equal", "compared")},
    }


def files(study: Study, drafts: Sequence[str]) -> dict[str, Any]:
    """Which weights were measured, by the drafter's name."""
    found = {}
    for spec in dict.fromkeys(member for d in drafts for member in study.members(d)):
        name, values = registry.split(spec)
        if registry.lacks(name, "path"):
            found[name] = weights_file(str(values.get("path") or study.path(name)))
    return found


def show(part: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A line per row."""
    for r in rows:
        if part == "tau":
            said = f"T = {r['temperature']:g}: {r['tau']:.2f} ± {r['spread']:.2f}, {r['equal']} of {r['prompts']} equal"
        elif part == "contexts":
            said = f"{r['tau_1']:.2f} / {r['tau_0']:.2f} = {r['ratio']:.3f} {_interval(r)}, {r['contexts']} contexts"
        else:
            said = (
                f"{r['control']}: {r['speedup']['median']:.2f} {_interval(r['speedup'])}, {r['equal']} of {r['compared']} equal"
            )
        print(f"{part:8} {r['draft']:28} {r['workload']:10} {said}", flush=True)


def _interval(found: Mapping[str, Any]) -> str:
    return "" if found["low"] is None else f"[{found['low']:.2f}, {found['high']:.2f}]"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=weights.DEFAULT_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=10, help="of each workload")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=5, help="of a plain and a drafted run")
    parser.add_argument("--draft", action="append", help="a drafter (repeatable)")
    parser.add_argument("--part", action="append", choices=PARTS, help="what to measure (repeatable)")
    parser.add_argument("--control", action="append", choices=CONTROLS, help="of the speed part (repeatable; both)")
    parser.add_argument("--seconds", type=float, help="begin nothing after so long")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def work(options: argparse.Namespace) -> list[tuple[str, str, Callable[[Study, str], list[dict[str, Any]]]]]:
    """What is to be done: part, drafter and how."""
    drafts, parts = options.draft or DRAFTS, options.part or PARTS
    fast = [d for d in drafts if options.draft or d != CHAIN]
    some = {
        "tau": [("tau", d, taus) for d in drafts],
        "contexts": [("contexts", d, contexts) for d in drafts if not d.startswith("hybrid")],
        "speed": [("speed", d, partial(speed, control=c)) for d in fast for c in options.control or CONTROLS],
    }
    return [one for part in parts for one in some[part]]


def main() -> None:
    options = arguments()
    until = time.monotonic() + (options.seconds or float("inf"))
    todo, drafts = work(options), options.draft or DRAFTS
    llm = LLM(options.model, draft=PLAIN, device=options.device, prefix_cache=False)
    asked = gather(WORKLOADS, options.prompts)
    study = Study(llm, options.model, options, {w.name: [p.encode(llm.tokenizer) for p in w.prompts] for w in asked}, until)
    settings = {"prompts": options.prompts, "max_tokens": options.max_tokens, "pairs": options.pairs, "batch": BATCH}
    report: dict[str, Any] = {"complete": False, "settings": settings, **{part: [] for part, _, _ in todo}}
    command = ["trained.py", *reduced(sys.argv[1:])]
    report["provenance"] = provenance(llm, options.model, command) | {"drafters": files(study, drafts)}
    report["prompts"] = {w.name: w.sha256 for w in asked}
    for done, (part, draft, measure) in enumerate(todo, 1):
        if study.late:
            break
        rows = measure(study, draft)
        show(part, rows)
        report[part] += rows
        report["complete"] = done == len(todo) and not study.late
        if options.json is not None:
            options.json.write_text(json.dumps(finite(report), indent=1) + "\n")
    wrong = [r for part in ("tau", "speed") for r in report.get(part, ()) if r["equal"] != r.get("compared", r["prompts"])]
    sys.exit("texts differ from plain decoding" if wrong else 0)


if __name__ == "__main__":
    main()
