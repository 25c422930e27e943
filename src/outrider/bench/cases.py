"""What the audit asks for: prompts that take turns with groups of options, so that every group meets every temperature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..config import SamplingParams
from ..llm import LLM
from .prompts import PROMPTS

TEMPERATURES = (0.0, 0.7, 1.0)
DEPTH = 3
"""How far most requests of a batch let a drafter look ahead, so that passes stay small; every fourth sets no limit."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One request: token ids and text of the prompt, the parameters and the name of their group."""

    prompt: tuple[int, ...]
    text: str
    group: str
    params: SamplingParams


def _plain(base: SamplingParams, llm: LLM) -> SamplingParams:
    return base


def _top_k(base: SamplingParams, llm: LLM) -> SamplingParams:
    return replace(base, top_k=20)


def _nucleus(base: SamplingParams, llm: LLM) -> SamplingParams:
    return replace(base, top_p=0.9, min_p=0.02)


def _penalties(base: SamplingParams, llm: LLM) -> SamplingParams:
    return replace(base, repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=0.2)


def _masks(base: SamplingParams, llm: LLM) -> SamplingParams:
    """Bias on a common token, a forbidden word, and only the lower half of the vocabulary (ends included)."""
    usable = llm.tokenizer.vocab_size
    allowed = (*range(usable // 2), *(e for e in sorted(llm.tokenizer.eos_ids) if e >= usable // 2))
    common = _ids(llm, " the")[:1]
    return replace(base, logit_bias=dict.fromkeys(common, 1.5), bad_words=("and",), allowed_token_ids=allowed)


def _at_least(base: SamplingParams, llm: LLM) -> SamplingParams:
    """The text wants to end at once, and must not before half its length."""
    return replace(base, min_tokens=base.max_tokens // 2, logit_bias=dict.fromkeys(sorted(llm.tokenizer.eos_ids), 12.0))


def _stops(base: SamplingParams, llm: LLM) -> SamplingParams:
    """Common stop tokens and strings, so that texts end in the middle of a block."""
    return replace(base, stop_token_ids=tuple(_ids(llm, ".")[:1]), stop=("\n\n", " the "))


def _together(base: SamplingParams, llm: LLM) -> SamplingParams:
    mixed = replace(_penalties(base, llm), top_k=50, top_p=0.95, min_tokens=3, bad_words=("of the",), ignore_eos=True)
    return replace(mixed, logit_bias=dict.fromkeys(_ids(llm, ",")[:1], -1.0))


GROUPS: tuple[tuple[str, Callable[[SamplingParams, LLM], SamplingParams]], ...] = (
    ("plain", _plain),
    ("top-k", _top_k),
    ("top-p, min-p", _nucleus),
    ("penalties", _penalties),
    ("bias and masks", _masks),
    ("min_tokens", _at_least),
    ("stops", _stops),
    ("together", _together),
)


def cases(llm: LLM, temperature: float, prompts: int, max_tokens: int, seed: int) -> list[Case]:
    """One request per prompt, at least one per group of options. The seed decides each request's noise; which group a prompt
    meets shifts with the temperature."""
    shift = TEMPERATURES.index(temperature) * 3
    made = []
    for i in range(max(prompts, len(GROUPS))):
        text = PROMPTS[i % min(prompts, len(PROMPTS))]
        name, change = GROUPS[(i + i // len(GROUPS) + shift) % len(GROUPS)]
        noise = seed + 1000 * (shift + 1) + i
        base = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=noise, depth=DEPTH if i % 4 else None)
        made.append(Case(tuple(llm.tokenizer.encode(text)), text, name, change(base, llm)))
    return made


def _ids(llm: LLM, text: str) -> list[int]:
    return llm.tokenizer.encode(text, special=False)
