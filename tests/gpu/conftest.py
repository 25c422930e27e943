"""Tests on a card, with the embedded model: `python -m pytest -m gpu tests/gpu`. `OUTRIDER_MODEL` names its file where the
package with the weights is not installed."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from outrider.llm import LLM

MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m-instruct")
ROOM: dict[str, Any] = {"draft": "none", "device": "cuda", "max_model_len": 2048, "kv_tokens": 98_304}
"""Memory for 64 requests of the tests, and no more, so that several processes can share a card (`-n 4`)."""


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
    return LLM(MODEL, **ROOM)


@pytest.fixture(scope="package")
def exact() -> LLM:
    """The same with rows that never care who shares the pass."""
    return LLM(MODEL, **ROOM, invariant=True)
