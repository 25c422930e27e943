"""Outrider: large language models that answer faster, without changing a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .version import VERSION

__version__ = VERSION
__all__ = ["LLM", "Drafter", "Proposal", "SamplingParams", "Verdict", "register"]

if TYPE_CHECKING:
    from .config import SamplingParams
    from .llm import LLM
    from .protocols import Drafter
    from .registry import register
    from .types import Proposal, Verdict

_HOMES = {
    "LLM": "llm",
    "Drafter": "protocols",
    "Proposal": "types",
    "SamplingParams": "config",
    "Verdict": "types",
    "register": "registry",
}


def __getattr__(name: str) -> object:
    """Import the public names when they are first used: torch takes seconds, `outrider --help` should not."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
