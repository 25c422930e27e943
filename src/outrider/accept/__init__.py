"""Acceptance rules, by name. One small file each."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from ..errors import BadInput
from ..protocols import AcceptanceRule
from ..types import Batch, Proposal, Scores, Verdict
from .block import Block
from .coupled import Coupled
from .lossy import Threshold, Typical
from .mixed import judge
from .rejection import Rejection
from .traversal import Traversal

RULES: dict[str, type[Any]] = {
    "coupled": Coupled,
    "rejection": Rejection,
    "block": Block,
    "traversal": Traversal,
    "typical": Typical,
    "threshold": Threshold,
}


def rule(spec: str) -> AcceptanceRule:
    """The rule of a spec `NAME[:key=number,...]`, as in `typical:eps=0.05`. `BadInput` lists what is known."""
    name, _, rest = spec.partition(":")
    if name not in RULES:
        raise BadInput(f"unknown acceptance rule {name!r}; known: {', '.join(RULES)} (typical and threshold are lossy)")
    made: AcceptanceRule = RULES[name](**_options(name, rest))
    return made


def lossless(spec: str) -> bool:
    """Whether the rule of a spec leaves the model's law as it is."""
    return rule(spec).lossless


def _options(name: str, rest: str) -> dict[str, float]:
    made = RULES[name]
    known = [f.name for f in fields(made)] if is_dataclass(made) else []
    options: dict[str, float] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key not in known:
            raise BadInput(f"acceptance rule {name} has no option {key!r}; it knows {', '.join(known) or 'none'}")
        try:
            options[key] = float(value)
        except ValueError:
            raise BadInput(f"acceptance rule {name}: {key} must be a number, got {value!r}") from None
        if not 0 <= options[key] <= 1:
            raise BadInput(f"acceptance rule {name}: {key} must be between 0 and 1, got {value}")
    return options


class PerRequest:
    """Every request by the rule that it names (`Request.rule`); `name` is what requests without a wish get."""

    def __init__(self, name: str = "coupled") -> None:
        self.name = name
        self.lossless = lossless(name)

    def __call__(self, proposal: Proposal, scores: Scores, batch: Batch) -> Verdict:
        if scores.verdict is not None:  # the pass was told the rule, and applied it
            return scores.verdict
        made = {spec: rule(spec) for spec in {r.rule for r in batch.requests}}
        return judge([made[r.rule] for r in batch.requests], proposal, scores, batch)
