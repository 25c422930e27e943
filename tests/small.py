"""Fixtures of a tiny model in a file, for tests that need whole `LLM`s; a directory's conftest takes them over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider import LLM

from .models.tiny_gguf import Tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("small")
    Tiny().write(folder / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
        yield str(folder / "tiny.gguf")


@pytest.fixture(scope="session")
def load(model: str) -> Callable[..., LLM]:
    def make(**options: Any) -> LLM:
        return LLM(model, **{"draft": "ngram:min=1,depth=4", "control": "fixed", "dtype": "float64", **options})

    return make
