"""A tiny model that repeats itself, and traces of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams

from ..models.tiny_gguf import Tiny

PARAMS = SamplingParams(temperature=1.0, max_tokens=20, seed=7, ignore_eos=True, allowed_token_ids=(*range(100, 106), 263))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("watched")
    Tiny().write(folder / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
        yield str(folder / "tiny.gguf")


@pytest.fixture(scope="session")
def load(model: str) -> Callable[..., LLM]:
    def make(**options: Any) -> LLM:
        return LLM(model, **{"draft": "ngram:min=1,depth=4", "control": "fixed", "dtype": "float64", **options})

    return make


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
