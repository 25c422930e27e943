"""Tests on a card, with the embedded model: `python -m pytest -m gpu tests/gpu`. `OUTRIDER_MODEL` names its file where the
package with the weights is not installed."""

from __future__ import annotations

import os

import pytest
import torch

from outrider.llm import LLM

MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m-instruct")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this directory needs a card."""
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(600))
            if not torch.cuda.is_available():
                item.add_marker(skip)


@pytest.fixture(scope="package")
def llm() -> LLM:
    return LLM(MODEL, draft="none", device="cuda", max_model_len=2048)


@pytest.fixture(scope="package")
def exact() -> LLM:
    """The same with rows that never care who shares the pass."""
    return LLM(MODEL, draft="none", device="cuda", max_model_len=2048, invariant=True)
