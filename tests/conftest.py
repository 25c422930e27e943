"""One thread: the tests' models are tiny, and threads waiting for each other cost more than they bring.
The user's own drafters stay out of sight, and those that a file of tests registers are gone after it."""

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

from outrider import registry, trust

torch.set_num_threads(1)
os.environ["OUTRIDER_HOME"] = tempfile.mkdtemp(prefix="outrider-tests-")


@pytest.fixture(scope="session", autouse=True)
def nobody_is_trusted() -> None:
    """The package's own drafters are watched, too."""
    trust.TRUSTING = False


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    registry.names()
    table = registry._table()
    before = dict(table)
    yield
    table.clear()
    table.update(before)
