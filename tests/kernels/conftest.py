"""Kernels run on a GPU, or with TRITON_INTERPRET=1 on CPU tensors (slowly, so that shapes there are small)."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    pytest.skip("kernels need a GPU, or TRITON_INTERPRET=1")
