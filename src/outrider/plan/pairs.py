"""Which model should draft for which: the same family, and about a tenth of the size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .costs import Costs
from .predict import break_even, share
from .sizes import Size

TENTH, CLOSE, TOO_CLOSE = 0.1, 0.25, 0.5
"""Parts of the target's size: what to look for, what is worth a word, and what is refused: a guess costs half a plain pass."""
PADDING = 1024
"""Vocabularies that differ by less are one and the same, padded to different sizes."""
DEMANDING = 0.85
"""Share of guesses to be right that drafts of any family seldom reach."""


@dataclass(frozen=True, slots=True)
class Family:
    """Public models that share one tokenizer: configuration's name, vocabulary, and names with sizes in parameters."""

    kind: str
    vocab: int
    members: tuple[tuple[str, float], ...]


FAMILIES = (
    Family(
        "llama", 128256, (("Llama-3.2-1B", 1.24e9), ("Llama-3.2-3B", 3.21e9), ("Llama-3.1-8B", 8.03e9), ("Llama-3.3-70B", 70.6e9))
    ),
    Family("llama", 49152, (("SmolLM2-135M", 0.135e9), ("SmolLM2-360M", 0.362e9), ("SmolLM2-1.7B", 1.71e9))),
    Family(
        "qwen2", 151936, (("Qwen2.5-0.5B", 0.494e9), ("Qwen2.5-1.5B", 1.54e9), ("Qwen2.5-7B", 7.62e9), ("Qwen2.5-32B", 32.8e9))
    ),
    Family("qwen3", 151936, (("Qwen3-0.6B", 0.596e9), ("Qwen3-1.7B", 1.72e9), ("Qwen3-8B", 8.19e9), ("Qwen3-32B", 32.8e9))),
    Family(
        "gemma3_text", 262144, (("gemma-3-270m", 0.268e9), ("gemma-3-1b", 1.0e9), ("gemma-3-4b", 3.88e9), ("gemma-3-12b", 11.8e9))
    ),
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is to be said of a pair. `refused`: it cannot pay, and `reasons` begins with why. `cost`: of a guess, in plain passes;
    `needed`: chance of a guess at which the best depth breaks even (None: no chance is enough)."""

    draft: str
    share: float
    cost: float
    needed: float | None
    refused: bool
    reasons: tuple[str, ...]


def judge(target: Size, draft: Size, costs: Costs, depths: Sequence[int], batch: int = 1) -> Judgement:
    """Whether `draft` should guess for `target`."""
    part, cost, needed = draft.parameters / target.parameters, share(costs, batch, 1), break_even(costs, depths, batch)
    must = "no share of right guesses is enough" if needed is None else f"{needed:.0%} of the guesses must be right to break even"
    reasons = []
    refused = part > TOO_CLOSE or needed is None or needed > DEMANDING
    if part > TOO_CLOSE:
        reasons.append(
            f"too close in size: {draft.name} has {part:.0%} of the parameters of {target.name}, so that guessing takes nearly "
            f"as long as writing; a guess costs {cost:.2f} plain passes, and {must}"
        )
    elif refused:
        reasons.append(f"a guess costs {cost:.2f} plain passes, and {must}, which is seldom reached")
    elif part > CLOSE:
        reasons.append(f"large for a draft ({part:.0%} of the target); a guess costs {cost:.2f} plain passes, and {must}")
    if abs(target.vocab - draft.vocab) > PADDING or target.family != draft.family:
        reasons.append(
            f"another family ({draft.family}, {draft.vocab:,} tokens, against {target.family}, {target.vocab:,}): its guesses "
            "may have to be translated, and agree less often; the same family is the better choice"
        )
    if 0 < draft.context < target.context:
        reasons.append(f"trained for {draft.context:,} tokens: longer texts ({target.context:,} are possible) get no guesses")
    return Judgement(draft.name, part, cost, needed, refused, tuple(reasons))


def wanted(target: Size) -> str:
    """What to look for, and public models that are just that."""
    found = (
        f"a model of the same family ({target.family}, {target.vocab:,} tokens) with about {_short(TENTH * target.parameters)}"
    )
    known = [m for f in FAMILIES if f.kind == target.family and abs(f.vocab - target.vocab) <= PADDING for m in f.members]
    small = [m for m in known if m[1] <= CLOSE * target.parameters]
    if not small:
        return found + " parameters; or a drafter that was trained for it (outrider train)"
    nearest = min(small, key=lambda m: abs(m[1] - TENTH * target.parameters))
    return f"{found} parameters, such as {nearest[0]} ({_short(nearest[1])})"


def _short(count: float) -> str:
    return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.0f} million"
