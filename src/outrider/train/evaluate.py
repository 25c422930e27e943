"""What a drafter is worth: tokens per round and acceptance by position on held-out prompts, through the engine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..config import SamplingParams
from ..errors import OutriderError
from ..llm import LLM
from ..metrics import add
from ..types import Stats, StepEvent
from .corpus import Corpus
from .data import Tell

PLAIN = "none"


@dataclass(frozen=True, slots=True)
class Exam:
    """How to examine: on so many `prompts`, answers of at most `answer` tokens, at these `temperatures`, `batch` at a time."""

    prompts: int = 48
    answer: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    batch: int = 16
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """What came out at one temperature. `tau`: tokens per round over all prompts, `spread` its standard error over prompts;
    `equal`: answers that were token for token the plain ones, of `prompts`."""

    temperature: float
    tau: float
    spread: float
    acceptance_rate: float
    acceptance_by_position: tuple[float, ...]
    tokens: int
    prompts: int
    equal: int


@dataclass(slots=True)
class Answers:
    """Answers to several prompts: their tokens, tokens per round of each, and the counters of all rounds."""

    tokens: list[tuple[int, ...]] = field(default_factory=list)
    taus: list[float] = field(default_factory=list)
    total: Stats = field(default_factory=Stats)


def held_prompts(corpus: Corpus, count: int) -> list[list[int]]:
    """Prompts of held-out texts, each once."""
    found = dict.fromkeys(tuple(corpus.text(i)[: int(corpus.prompts[i])].tolist()) for i in corpus.split(True))
    return [list(p) for p in list(found)[:count]]


def examine(llm: LLM, draft: str, prompts: Sequence[list[int]], exam: Exam, tell: Tell) -> list[Score]:
    """A score per temperature. The controller is off: the drafter looks ahead as far as it likes."""
    scores = []
    for done, temperature in enumerate(exam.temperatures):
        tell(f"held-out prompts at T = {temperature:g}", done / len(exam.temperatures))
        llm.switch(PLAIN)
        plain = answer(llm, prompts, exam, temperature).tokens
        llm.switch(draft, control="fixed")
        found = answer(llm, prompts, exam, temperature)
        if not llm.engine.drafter.working:
            raise OutriderError(f"{draft} cannot draft for {llm.name}: {llm.engine.drafter.reason}")
        scores.append(score(found, temperature, plain))
    llm.switch(PLAIN)
    return scores


def answer(llm: LLM, prompts: Sequence[list[int]], exam: Exam, temperature: float) -> Answers:
    """All prompts answered with the drafter in use."""
    found = Answers()

    def hear(event: StepEvent) -> None:
        for item in event.committed:
            if not item.late:
                add(found.total, item)

    llm.engine.sinks.append(hear)
    try:
        for start in range(0, len(prompts), exam.batch):
            some = prompts[start : start + exam.batch]
            params = SamplingParams(temperature=temperature, max_tokens=exam.answer, seed=exam.seed)
            for result in llm.generate(some, params):
                found.tokens.append(result.token_ids)
                found.taus.append(result.stats.tokens_per_round)
    finally:
        llm.engine.sinks.remove(hear)
    return found


def score(found: Answers, temperature: float, plain: Sequence[tuple[int, ...]]) -> Score:
    """Answers at one temperature, judged by the plain ones."""
    total, taus = found.total, found.taus
    by_position = tuple(round(a / max(o, 1), 4) for a, o in zip(total.accepted_at, total.offered_at, strict=True))
    spread = statistics.stdev(taus) / math.sqrt(len(taus)) if len(taus) > 1 else 0.0
    rate, tau = total.accepted / max(1, total.drafted), total.tokens / max(1, total.rounds)
    equal = sum(a == b for a, b in zip(plain, found.tokens, strict=True))
    return Score(temperature, round(tau, 4), round(spread, 4), round(rate, 4), by_position, total.tokens, len(taus), equal)
