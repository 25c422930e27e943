"""What the host does in a round: many requests, real scheduling, text and control, and a device that a clock plays.

    python benchmarks/host_cost.py                    # 64 requests, plain and beside ngram and suffix, a device of 1.24 ms
    python benchmarks/host_cost.py --requests 16 --round 1.1e-3 --draft ngram
    python benchmarks/host_cost.py --round 0          # no device at all: the host's part alone

A round of the played device begins when it was launched and the one before has ended, and lasts `--round` seconds, half as long
again with guesses. Texts are this package's own source, so that lookups find what they find in code. Drafters that read the
model's states learn nothing from it, since there are none. Prints one line per run, or JSON with `--json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from outrider import LLM
from outrider.cli.answer import frozen
from outrider.config import SamplingParams
from outrider.types import NONE, Batch, Finish, PassRows, Proposal, Request, Scores, StepEvent, Verdict

SOURCE = Path(__file__).parent.parent / "src" / "outrider"
PROMPT, PER_TOKEN, WIDER = 32, 2e-6, 1.5
"""Tokens of a prompt, seconds that the device takes for each, and how much longer a round with guesses takes."""


@dataclass
class Played:
    """A captured round's answer, which arrives when the clock says so."""

    rows: list[list[int]]
    guesses: tuple[torch.Tensor, ...]
    begun: float
    ended: float

    def read(self) -> tuple[list[list[int]], list[Any]]:
        while time.perf_counter() < self.ended:
            pass
        return self.rows, [g.tolist() for g in self.guesses]

    def seconds(self) -> float:
        return self.ended - self.begun


@dataclass
class Device:
    """Stands in for the target's pass. `texts` has what every request will have written, by its first tokens."""

    llm: LLM
    round: float
    texts: dict[tuple[int, ...], list[int]]
    ended: float = 0.0
    places: dict[int, int] = field(default_factory=dict)

    def score(self, batch: Batch, proposal: Proposal) -> Scores:
        """One round: what comes next in every text, and as many guesses as agree with it."""
        wide, prompt = proposal.columns, sum(p for p in batch.pending if p > 1)
        guesses = list(zip(proposal.tokens.tolist(), proposal.sizes.tolist(), strict=True))
        rows = [self._row(r, b, batch.ready[b], guesses[b], wide) for b, r in enumerate(batch.requests)]
        begun = max(time.perf_counter(), self.ended)
        self.ended = begun + self.round * (WIDER if wide else 1.0) + PER_TOKEN * prompt
        table = torch.tensor(rows)
        verdict = Verdict(table[:, 4 + wide :][:, :wide], table[:, 0], table[:, 3 : 4 + wide], table[:, 1], table[:, 2])
        none = torch.zeros(0, dtype=torch.int64)
        features = {
            name: torch.zeros(len(batch), self.llm._target.decoder.hidden_size) for name in self.llm._target.needs.features
        }
        told = (proposal.sizes, proposal.tokens, proposal.parents, proposal.source)
        answer = Played(rows, told, begun, self.ended)
        if prompt:  # such rounds are not captured: whoever reads them waits
            answer.read()
        return Scores(
            verdict.tokens, PassRows(none, none, none, none), features, verdict=verdict, answer=None if prompt else answer
        )

    def _row(self, request: Request, b: int, ready: bool, guess: tuple[list[int], int], wide: int) -> list[int]:
        """Accepted, count, finish, tokens, path."""
        text, at = self.texts[tuple(request.tokens[:PROMPT])], self.places.get(request.id, PROMPT)
        left = PROMPT + request.params.max_tokens - at
        if not ready or left <= 0:
            return [0, 0, 0, *[NONE] * (2 * wide + 2)]
        accepted, (tokens, size) = 0, guess
        while accepted < min(size, left - 1) and tokens[accepted] == text[at + accepted]:
            accepted += 1
        self.places[request.id] = at + accepted + 1
        spare = [NONE] * (wide - accepted)
        finish = Finish.LENGTH if accepted + 1 >= left else Finish.RUNNING
        fresh = text[at : at + accepted + 1]
        return [accepted, accepted + 1, int(finish), *fresh, *spare, *range(accepted), *spare, NONE]


def corpus(llm: LLM, count: int, length: int) -> list[list[int]]:
    """So many texts of so many tokens each, none like another."""
    tokens: list[int] = []
    for path in sorted(SOURCE.rglob("*.py")):
        tokens += llm.tokenizer.encode(path.read_text())
        if len(tokens) >= count * length:
            break
    return [tokens[i * length : (i + 1) * length] for i in range(count)]


def run(llm: LLM, device: Device, draft: str, tokens: int) -> dict[str, Any]:
    """Everybody's answer once, with one drafter."""
    llm.switch(draft)
    device.places.clear()
    told, waited, guessing = list[float](), list[float](), 0

    def hear(event: StepEvent) -> None:
        nonlocal guessing
        told.append(time.perf_counter())
        waited.append(event.waited)
        guessing += any(item.drafted for item in event.committed)

    llm.engine.sinks.append(hear)
    begun = time.perf_counter()
    llm.generate(
        [text[:PROMPT] for text in device.texts.values()], SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    )
    seconds = time.perf_counter() - begun
    llm.engine.sinks.remove(hear)
    gaps = [later - earlier for earlier, later in pairwise(told)]
    return {
        "draft": draft,
        "seconds": seconds,
        "rounds": len(told),
        "guessing": guessing,
        "round": statistics.median(gaps),
        "waited": statistics.median(waited),
    }


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--round", type=float, default=1.24e-3)
    parser.add_argument("--draft", action="append")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    llm = LLM(draft="none", device="cpu", prefix_cache=False)
    texts = corpus(llm, asked.requests, PROMPT + asked.tokens + 1)
    device = Device(llm, asked.round, {tuple(text[:PROMPT]): text for text in texts})
    target: Any = llm._target
    target.score, target.keep = device.score, lambda batch, proposal, verdict: None
    target.cache._zero = lambda blocks: None  # a device's work
    found = []
    with frozen():
        for _ in range(asked.repeats):
            for draft in asked.draft or ["ngram", "suffix"]:
                plain, drafted = run(llm, device, "none", asked.tokens), run(llm, device, draft, asked.tokens)
                found.append(drafted | {"plain": plain, "speedup": plain["seconds"] / drafted["seconds"]})
                if not asked.json:
                    print(line(found[-1]), flush=True)
    if asked.json:
        print(json.dumps(found, indent=1))


def line(found: dict[str, Any]) -> str:
    plain = found["plain"]
    return (
        f"{found['draft']}: {found['speedup']:.3f} of plain decoding; a round {1e3 * plain['round']:.3f} ms plain, "
        f"{1e3 * found['round']:.3f} beside it; the host waits {1e3 * plain['waited']:.3f} and {1e3 * found['waited']:.3f}; "
        f"guesses in {found['guessing']} of {found['rounds']} rounds"
    )


if __name__ == "__main__":
    main()
