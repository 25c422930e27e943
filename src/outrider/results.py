"""What callers of the library get back: streamed pieces, finished answers, and their statistics."""

from __future__ import annotations

from dataclasses import dataclass

from .types import COUPLED, Logprob


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer: the `text` that became printable, the tokens of the round, where each came from
    (drafter index, or NONE for the target's own token) and the guesses that were rejected. The last one of a sample carries its
    result. `index` tells which sample it belongs to (`n > 1`); log-probabilities as in `Result`, for the tokens of the round."""

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[int, ...]
    rejected: tuple[int, ...]
    result: Result | None = None
    index: int = 0
    logprobs: tuple[tuple[Logprob, ...], ...] | None = None
    processed_logprobs: tuple[tuple[Logprob, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One finished answer. `lossless` is False only under a rule that says so.

    `logprobs` (None unless asked for) has one tuple per token: the token itself, then those of the k likeliest that it
    is not, best first; under `logprobs_mode="both"` they are of the raw distribution and `processed_logprobs` of the other.
    `prompt_logprobs` has one entry per prompt token, None for the first. With `n > 1` this is sample 0 and `others` the rest."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[int, ...]
    finish_reason: str
    seed: int
    stats: Summary
    lossless: bool = True
    logprobs: tuple[tuple[Logprob, ...], ...] | None = None
    error: str | None = None
    processed_logprobs: tuple[tuple[Logprob, ...], ...] | None = None
    prompt_logprobs: tuple[tuple[Logprob, ...] | None, ...] | None = None
    index: int = 0
    others: tuple[Result, ...] = ()

    @property
    def samples(self) -> tuple[Result, ...]:
        """All samples of the prompt, in order of `index`: this one and, on the first, the others."""
        return (self, *self.others)


@dataclass(frozen=True, slots=True)
class Summary:
    """`Stats` as scripts read them; seconds; `acceptance_by_position[i]` is the share kept of guesses at depth i + 1;
    `controller` tells in one line how far the engine looked ahead, over all its requests, and why it last changed that; `speedup`
    is the engine's of late over plain decoding, as measured (None: nothing to compare with yet); `losing`: it is below 1."""

    tokens: int
    rounds: int
    drafted: int
    accepted: int
    tokens_per_round: float
    acceptance_rate: float
    acceptance_by_position: tuple[float, ...]
    draft_seconds: float
    verify_seconds: float
    seconds: float
    tokens_per_second: float
    first_token_seconds: float
    drafter: str
    accept: str = COUPLED
    lossless: bool = True
    controller: str = ""
    speedup: float | None = None
    losing: bool = False
