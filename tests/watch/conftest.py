"""A tiny model that repeats itself, and traces of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams

from ..small import load, model

__all__ = ["load", "model"]

PARAMS = SamplingParams(temperature=1.0, max_tokens=20, seed=7, ignore_eos=True, allowed_token_ids=(*range(100, 106), 263))


@pytest.fixture(scope="session")
def traced(load: Callable[..., LLM], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with text, of two requests of different labels."""
    path = tmp_path_factory.mktemp("traces") / "text.jsonl"
    llm = load(trace=path, trace_text=True)
    for label, prompt in (("code", "hello hello"), ("prose", "abcabcabc")):
        llm.generate(prompt, SamplingParams(**{**_values(), "label": label}))
    llm.close()
    return path


def _values() -> dict[str, Any]:
    return {name: getattr(PARAMS, name) for name in ("temperature", "max_tokens", "seed", "ignore_eos", "allowed_token_ids")}
