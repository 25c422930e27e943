"""Not a real drafter: it plays back an answer that is known already, with mistakes at a chosen rate.

It measures what a drafter with that rate of right guesses would bring on this machine, as the synthetic rejection sampling of
vLLM does. Every position of a recorded answer is spoiled independently with probability 1 - rate. A round's first guess stands
where no earlier round's guess was judged, so with chains of K guesses tau is (1 - rate**(K + 1)) / (1 - rate), the formula of
Leviathan et al. 2023 (equation 1), up to the end of the text. Guesses after a spoiled one are made, and are in vain.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import SamplingParams
from ..errors import BadInput, DrafterMismatch
from ..protocols import Drafter, Start
from ..registry import register
from ..types import Batch, Budget, Proposal, Request

Key = tuple[tuple[int, ...], float, int, int]
"""Prompt, temperature, seed (0 at temperature 0, where it decides nothing), index of the sample."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What is known of a running request: the recorded `answer`, and the `guesses` made of it, position by position."""

    answer: list[int]
    guesses: list[int]


@register("synthetic")
class Synthetic(Drafter):
    """NOT A REAL DRAFTER (for benchmarks): replays recorded plain answers and spoils each token with probability 1 - rate."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`rate`: share of right guesses, 0 to 1; `depth`: tokens guessed; `seed`: which of them are wrong; `file`: recordings,
        a JSON list of objects with `prompt_token_ids`, `token_ids`, and (0 if absent) `temperature` and `seed`."""

        rate: float = 0.8
        depth: int = 8
        seed: int = 0
        file: str | None = None

    def __init__(self, config: Config) -> None:
        if not 0 <= config.rate <= 1:
            raise BadInput(f"synthetic needs a rate between 0 and 1, got {config.rate}")
        if config.depth < 1:
            raise BadInput(f"synthetic needs depth >= 1, got {config.depth}")
        self.config, self.depth, self.nodes = config, config.depth, config.depth
        self._recorded: dict[Key, list[int]] = {}
        self._running: dict[int, Replay | None] = {}
        for prompt, params, answer in _read(config.file) if config.file is not None else []:
            self.record(prompt, params, answer)

    def start(self, start: Start) -> None:
        """Raises `DrafterMismatch` for recordings of a model with other tokens."""
        self._vocab = start.vocab_size
        worst = max((token for answer in self._recorded.values() for token in answer), default=0)
        if worst >= self._vocab:
            raise DrafterMismatch(
                f"{self.config.file} has token {worst}, but the vocabulary of {start.name} ends at {self._vocab - 1}; "
                "record the answers with this model"
            )

    def record(self, prompt: Sequence[int], params: SamplingParams, answer: Sequence[int]) -> None:
        """Remember a plain answer. `BadInput` for params that sample without a seed: no later request would match."""
        if params.seed is None and not params.greedy:
            raise BadInput("an answer sampled without a seed cannot be replayed; give one")
        self._recorded[_key(prompt, params, params.seed or 0, 0)] = list(answer)

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        guesses = [self._guess(r, depth) for r, depth in zip(batch.requests, budget.depth, strict=True)]
        return Proposal.chains(guesses)

    def release(self, request: Request) -> None:
        self._running.pop(request.id, None)

    def _guess(self, request: Request, depth: int) -> list[int]:
        """What follows, as long as the request went the recorded way. Under a classical rule at T > 0 nothing: its recording may
        stem from the very randomness that the rule will use, and a guess must not look at that."""
        if depth == 0 or request.sampled:
            return []
        if request.id not in self._running:
            self._running[request.id] = self._replay(request)
        replay, written = self._running[request.id], request.output
        if replay is None or replay.answer[: len(written)] != written:
            return []
        return replay.guesses[len(written) : len(written) + depth]

    def _replay(self, request: Request) -> Replay | None:
        prompt = request.tokens[: request.prompt_len]
        answer = self._recorded.get(_key(prompt, request.params, request.seed, request.index))
        if answer is None:
            return None
        chance = random.Random(f"{self.config.seed} {request.key}")
        return Replay(answer, [self._spoil(token, chance) for token in answer])

    def _spoil(self, token: int, chance: random.Random) -> int:
        """The token, or another one that exists. Two numbers are drawn either way, so that a position depends on no other."""
        right, shift = chance.random() < self.config.rate, 1 + chance.randrange(max(1, self._vocab - 1))
        return token if right else (token + shift) % self._vocab


def _key(prompt: Sequence[int], params: SamplingParams, seed: int, index: int) -> Key:
    return (tuple(prompt), params.temperature, 0 if params.greedy else seed, 0 if params.greedy else index)


def _read(file: str) -> list[tuple[list[int], SamplingParams, list[int]]]:
    """Recordings from a file. Raises `BadInput`, naming the entry that cannot be used."""
    try:
        entries = json.loads(Path(file).read_bytes())
    except OSError as error:
        raise BadInput(f"cannot read the recordings in {file}: {error.strerror or error}") from None
    except ValueError as error:
        raise BadInput(f"{file} is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise BadInput(f"{file} must hold a JSON list of recordings, not {type(entries).__name__}")
    return [_entry(file, i, entry) for i, entry in enumerate(entries)]


def _entry(file: str, index: int, entry: Any) -> tuple[list[int], SamplingParams, list[int]]:
    if not isinstance(entry, dict) or not all(_ids(entry.get(name)) for name in ("prompt_token_ids", "token_ids")):
        raise BadInput(f"{file}: entry {index} must have prompt_token_ids and token_ids, lists of token ids")
    try:
        params = SamplingParams(temperature=entry.get("temperature", 0.0), seed=entry.get("seed", 0))
    except BadInput as error:
        raise BadInput(f"{file}: entry {index}: {error}") from None
    return entry["prompt_token_ids"], params, entry["token_ids"]


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)
