"""What a user may ask of one answer. Names follow vLLM's `SamplingParams`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    Processor = Callable[[tuple[int, ...], Tensor], Tensor]

MAX_SEED = 2**64
LOGPROBS_MODES = ("raw", "processed", "both")
MAX_LABEL = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, and when to stop. Defaults sample from the model's own distribution.

    The order of work is fixed: penalties, bias, masks (bad words, allowed ids, min_tokens), then temperature, top-k,
    top-p, min-p on tempered scores; noise last. `temperature=0` is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are
    off. `seed=None` draws 64 random bits, which the result returns. `depth` says how far speculation looks ahead for
    this request (0: plain decoding), `max_depth` how far at most; None leaves it to the engine's controller. `draft="none"` is
    plain decoding, whatever else is set. `accept` names this request's acceptance rule, as in `LLM`;
    None takes the engine's.

    `logprobs=k` asks for the log-probability of every token written and of the k likeliest at its place, `prompt_logprobs=k` for
    those of the prompt (always of the raw distribution). `logprobs_mode`: `raw`, the model's own distribution (softmax of its
    logits); `processed`, the one the token was drawn from, after every processor, temperature and filter (at `temperature=0`
    softmax of the processed scores); `both`. `n` asks for that many samples of one prompt. `min_tokens` counts for stop
    strings, too: one that is complete within the first `min_tokens` tokens does not end the text.

    `label` names the kind of work, up to 64 visible characters: acceptance is watched for each kind apart.

    `detokenize=False` leaves out the text: results then have token ids alone, which for many short passes is much faster.

    `processors` are functions `(tokens, scores [V]) -> scores [V]` of the whole sequence (prompt, output, and at a drafted
    position its own guesses) and of its untempered scores after penalties, bias and masks, applied in turn before temperature.
    They must be pure: they are called for guesses that come to nothing, more than once, in any order. They may change `scores`
    in place. One that raises, or returns anything but finite (or -inf) scores of the same shape, ends its request with an error.

    Raises `BadInput`, naming the field, for values that cannot be honoured.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int = 256
    min_tokens: int = 0
    seed: int | None = None
    skip_special_tokens: bool = True
    depth: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    processors: tuple[Processor, ...] = ()
    accept: str | None = None
    max_depth: int | None = None
    draft: str | None = None
    detokenize: bool = True
    label: str | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        stops = (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop or ())
        put(self, "stop", stops)
        put(self, "bad_words", _listed("bad_words", self.bad_words))
        put(self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _listed("allowed_token_ids", self.allowed_token_ids))
        for token in (*self.stop_token_ids, *(self.allowed_token_ids or ())):
            _integer("a token id", token)
        if not isinstance(self.logit_bias, Mapping):
            raise BadInput(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        put(self, "processors", tuple(self.processors))
        for name, low, high, hint in _RANGES:
            _number(name, getattr(self, name), low, high, hint)
        for name in ("top_k", "max_tokens", "min_tokens", "n"):
            _integer(name, getattr(self, name))
        self._check_logprobs()
        wrong = next((p for p in self.processors if not callable(p)), None)
        if wrong is not None:
            raise BadInput(f"processors must be functions (tokens, scores) -> scores, got {wrong!r}")
        if self.seed is not None:
            _integer("seed", self.seed)
            if not 0 <= self.seed < MAX_SEED:
                raise BadInput(f"seed must be between 0 and 2**64 - 1, got {self.seed}")
        self._check_look_ahead()
        if self.label is not None:
            check_label(self.label)
        if stops and not self.detokenize:
            raise BadInput("stop strings are looked for in the text; leave detokenize on, or give stop_token_ids instead")
        if self.min_tokens > self.max_tokens:
            raise BadInput(f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise BadInput("allowed_token_ids is empty: no token could ever be chosen; leave it unset to allow all")
        if any(not isinstance(s, str) or not s for s in (*stops, *self.bad_words)):
            raise BadInput("stop strings and bad words must be non-empty strings")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias token id", token)
            _number("logit_bias value", bias, -1e30, 1e30, "use bad_words or allowed_token_ids to forbid tokens")

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value)
                if value < 0:
                    raise BadInput(f"{name} must be 0 (the token alone) or more, got {value}; leave it unset to turn it off")
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise BadInput(f"logprobs_mode must be one of {', '.join(LOGPROBS_MODES)}, got {self.logprobs_mode!r}")

    def _check_look_ahead(self) -> None:
        for name in ("depth", "max_depth"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value)
                if value < 0:
                    raise BadInput(f"{name} must be 0 (plain decoding) or more, got {value}")
        if self.depth is not None and self.max_depth is not None and self.depth > self.max_depth:
            raise BadInput(f"depth ({self.depth}) is larger than max_depth ({self.max_depth}); drop one of them")
        if self.draft not in (None, "none"):
            raise BadInput(f"a request's draft can only be 'none' (or unset), got {self.draft!r}; the drafter is LLM(draft=...)")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whatever form they were given in."""
        return self.stop if isinstance(self.stop, tuple) else ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether scores depend on which tokens came before."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


_RANGES = (
    ("temperature", 0.0, 100.0, "0 is greedy, 1 is the model's own distribution"),
    ("top_k", -1, 2**31, "0 or -1 turns it off"),
    ("top_p", 0.0, 1.0, "1 turns it off"),
    ("min_p", 0.0, 1.0, "0 turns it off"),
    ("repetition_penalty", 0.0, 100.0, "1 turns it off"),
    ("frequency_penalty", -100.0, 100.0, "0 turns it off"),
    ("presence_penalty", -100.0, 100.0, "0 turns it off"),
    ("n", 1, 4096, "the number of samples of one prompt"),
    ("max_tokens", 1, 2**31, "ask for at least one token"),
    ("min_tokens", 0, 2**31, "0 turns it off"),
)


def check_label(label: object) -> None:
    """Raises `BadInput` for what cannot name a kind of work."""
    if not isinstance(label, str) or not 0 < len(label) <= MAX_LABEL or not label.isprintable() or label != label.strip():
        raise BadInput(f"label must be 1 to {MAX_LABEL} visible characters without blanks around them, got {label!r:.200}")


def _number(name: str, value: object, low: float, high: float, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        raise BadInput(f"{name} must be a finite number, got {value!r}")
    exclusive = name in ("top_p", "repetition_penalty")
    if value < low or value > high or (exclusive and value == low):
        left = "(" if exclusive else "["
        raise BadInput(f"{name} must be in {left}{low:g}, {high:g}], got {value!r} ({hint})")


def _integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInput(f"{name} must be a whole number, got {value!r}")


def _listed(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise BadInput(f"{name} must be a list, got {value!r}")
    return tuple(value)
