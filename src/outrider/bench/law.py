"""Does the text follow the model's law? Sampling through the real engine, against an enumeration that shares nothing with it.

The law of the first few tokens is enumerated on a tiny vocabulary: transformers' own forward pass for every prefix,
`oracle.process` for the options. Many seeds then run through the real pipeline, and the likelihood-ratio chi-squared statistic
G / 2 = n * KL(observed || law) judges the counts. Its false-alarm rate is bounded for every n, not only in the limit:
P(n * KL >= x) <= exp(-x) * (e * x / d)**d for x > d = cells - 1 (Agrawal 2020, "Finite-sample concentration of the multinomial in
relative entropy"). A token that the law rules out makes the statistic infinite.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache as memo
from typing import Any

import torch

from .. import oracle
from ..config import SamplingParams
from ..models.hf import Decoder, truncate
from ..protocols import Drafter
from . import tiny

VOCAB = 6
PROMPT = (2, 5, 3, 4)
ALARM = 1e-12
"""Bound on the probability that one law test of a right engine fails."""
_BATCH = 256

Word = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LawTest:
    """What came of a test: `samples` texts of `length` tokens, `information` = n * KL(observed || law) in nats, and `alarm`, a
    bound on the probability of so large a value under the law."""

    samples: int
    length: int
    information: float
    alarm: float

    @property
    def fails(self) -> bool:
        return self.alarm < ALARM


def run(params: SamplingParams, rule: str = "coupled", samples: int = 1024, length: int = 2, seed: int = 0) -> LawTest:
    """Sample `samples` texts of `length` tokens with a drafter and `rule`, and compare with the enumerated law. `params` gives
    temperature and filters; lengths, ends and seeds are set here."""
    params = replace(params, max_tokens=length, min_tokens=0, ignore_eos=True)
    law = enumerate_law(params, length)
    counts = sample(params, rule, samples, seed)
    information = divergence(counts, law)
    return LawTest(samples, length, information, alarm(information, sum(p > 0 for p in law.values()) - 1))


def enumerate_law(params: SamplingParams, length: int) -> dict[Word, float]:
    """Probability of every text of `length` tokens after `PROMPT`; sums to 1."""
    law: dict[Word, float] = {(): 1.0}
    for _ in range(length):
        law = {(*word, v): mass * p for word, mass in law.items() for v, p in enumerate(_following(params, word))}
    return law


def _following(params: SamplingParams, word: Word) -> list[float]:
    request = tiny.request([*PROMPT, *word], params)
    request.prompt_len = len(PROMPT)
    with torch.inference_mode():
        logits = _reference()(input_ids=torch.tensor([request.tokens])).logits[0, -1]
    scores = [s / params.temperature for s in oracle.process(logits.tolist(), request)]
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    total = math.fsum(weights)
    return [w / total for w in weights]


def sample(params: SamplingParams, rule: str, samples: int, seed: int) -> Counter[Word]:
    """Texts written by the real engine, counted: one request per seed, in batches."""
    counts: Counter[Word] = Counter()
    for start in range(0, samples, _BATCH):
        seeds = range(seed + start, seed + min(start + _BATCH, samples))
        requests = [tiny.request(PROMPT, replace(params, seed=s + 1), rule=rule) for s in seeds]
        world = tiny.World(tokens=16 * _BATCH, own=_decoder(3))
        counts.update(tuple(text) for text in world.run(_drafter(), requests, rule))
    return counts


def divergence(counts: Mapping[Word, int], law: Mapping[Word, float]) -> float:
    """n * KL(observed || law), infinite where something impossible was seen."""
    n = sum(counts.values())
    if any(law.get(word, 0.0) == 0 for word in counts):
        return math.inf
    return max(0.0, math.fsum(c * math.log(c / n / law[word]) for word, c in counts.items()))


def alarm(information: float, degrees: int) -> float:
    """Agrawal's bound on the probability of at least this much information; 1 where it says nothing."""
    if information <= degrees:
        return 1.0
    if math.isinf(information):
        return 0.0
    return math.exp(-information + degrees * (1 + math.log(information / degrees)))


def _model() -> Any:
    return tiny.model(vocab_size=VOCAB, seed=5, initializer_range=0.2)


@memo
def _reference() -> Any:
    """The model as transformers runs it."""
    return _model()


@memo
def _decoder(layers: int) -> Decoder:
    return Decoder(truncate(_model(), layers), f"law-{layers}")


def _drafter() -> Drafter:
    """The target's first layers, so that some guesses are right and some wrong."""
    made = tiny.draft_model(2, depth=2)
    made.start = lambda start: made.bind(_decoder(2), start)  # type: ignore[method-assign]
    return made
