"""Acceptance rules, by name. One small file each."""

from __future__ import annotations

from ..errors import BadInput
from ..protocols import AcceptanceRule
from .coupled import Coupled

RULES: dict[str, type[AcceptanceRule]] = {"coupled": Coupled}


def rule(name: str) -> AcceptanceRule:
    """The rule called `name`; `BadInput` lists the known ones."""
    if name not in RULES:
        raise BadInput(f"unknown acceptance rule {name!r}; known: {', '.join(RULES)}")
    return RULES[name]()
