"""Lean draft models as directories: the tiny target's first layers, which borrow the target's rows."""

from __future__ import annotations

from functools import cache as memo
from pathlib import Path
from typing import Any

import torch

from outrider.drafters.draft_model import DraftModel
from outrider.models import lean
from outrider.models.hf import truncate

from . import tiny
from .heads import room


@memo
def directory(layers: int, vocab: int) -> Path:
    """Its head answers for the first `vocab` tokens (0: all)."""
    model = tiny.model(dtype=torch.float32)
    rows = (model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach())
    made = lean.Lean(truncate(model, layers), rows, torch.arange(vocab) if vocab else None)
    path = room()
    made.save(path, lean.Origin("tiny", "", rows[0].shape[1], tiny.VOCAB, True))
    return path


def draft(layers: int = 2, vocab: int = 0, **config: Any) -> DraftModel:
    return DraftModel(DraftModel.Config(str(directory(layers, vocab)), **config))  # type: ignore[abstract]
