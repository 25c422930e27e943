"""The tiny model on disk, and texts that it wrote."""

from __future__ import annotations

import pytest
import torch

from outrider import LLM
from outrider.models import weights
from outrider.train import tiny
from outrider.train.corpus import Corpus, load
from outrider.train.data import Writing, write

WRITING = Writing(tokens=3000, batch=16, answer=40, turn=8, held=0.2)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    tiny.make(path)
    return str(path)


@pytest.fixture(scope="session")
def loaded(model) -> weights.Loaded:
    return weights.load(weights.resolve(model), dtype=torch.float32)


@pytest.fixture
def llm(model) -> LLM:
    return LLM(model, draft="none", device="cpu")


@pytest.fixture(scope="session")
def corpus(model, loaded, tmp_path_factory) -> Corpus:
    path = tmp_path_factory.mktemp("corpus")
    write(LLM(model, draft="none", device="cpu"), WRITING, path, loaded.fingerprint)
    return load(path)
