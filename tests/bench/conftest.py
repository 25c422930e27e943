"""A tiny model on disk, and an LLM around it in fp64, where nothing but a fault can change a text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.llm import LLM
from tests.models.tiny_gguf import Tiny


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    Tiny(kind="Q4_1").write(path)
    return path


@pytest.fixture
def llm(model_file: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setenv("OUTRIDER_CACHE", str(model_file.parent / "cache"))
    made = LLM(str(model_file), draft="none", control="fixed", device="cpu", dtype="float64")
    yield made
    made.close()
