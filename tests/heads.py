"""Tiny trained drafters as directories: random weights, made once, for the tiny target."""

from __future__ import annotations

import tempfile
from functools import cache as memo
from pathlib import Path
from typing import Any

import torch

from outrider.drafters._eagle import EaglePupil, EagleTraining
from outrider.drafters._medusa import MedusaPupil, MedusaTraining
from outrider.drafters.eagle import Eagle
from outrider.drafters.medusa import Medusa
from outrider.protocols import Lesson, Teacher

from . import tiny


def teacher(family: str = "llama", **changes: Any) -> Teacher:
    """The tiny model as a teacher of drafters, in fp32."""
    model = tiny.model(family, dtype=torch.float32)
    rows = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    facts = {"name": "tiny", "config": model.config.to_dict(), "counts": torch.arange(tiny.VOCAB), "fingerprint": "f"}
    return Teacher(**(facts | {"embeddings": rows[0], "head": rows[1]} | changes))


@memo
def lesson(names: tuple[str, ...], rows: int = 4, length: int = 24, family: str = "llama", seed: int = 1) -> Lesson:
    """Texts that the tiny model wrote greedily after random prompts, with its states."""
    model = tiny.model(family, dtype=torch.float32)
    tokens = torch.randint(2, tiny.VOCAB, (rows, 4), generator=torch.Generator().manual_seed(seed))
    while tokens.shape[1] < length:
        tokens = torch.cat([tokens, model(input_ids=tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    out = model.base_model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    states = {str(i): h for i, h in enumerate(out.hidden_states[:-1])} | {"last": out.last_hidden_state}
    features = {n: torch.cat([states[part] for part in n.removeprefix("hidden:").split(",")], -1) for n in names}
    real = torch.ones_like(tokens, dtype=torch.bool)
    taught = real.clone()
    taught[:, :4] = False
    return Lesson(tokens, taught, real, features, lambda x: model.get_output_embeddings()(x).float())


def scrambled(module: torch.nn.Module, seed: int = 0, size: float = 0.2) -> None:
    """Random weights instead of those that change nothing."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data += size * torch.randn(parameter.shape, generator=generator)


@memo
def _rooms() -> list[tempfile.TemporaryDirectory[str]]:
    return []


def room() -> Path:
    """A directory that lives as long as the tests."""
    made = tempfile.TemporaryDirectory(prefix="outrider-tests-")
    _rooms().append(made)
    return Path(made.name)


@memo
def medusa_directory(family: str = "llama", **options: Any) -> Path:
    """Random Medusa heads for a tiny target."""
    pupil = MedusaPupil(teacher(family), MedusaTraining(**({"heads": 3} | options)))
    scrambled(pupil.module)
    path = room()
    pupil.save(path)
    return path


def medusa(nodes: int = 12, depth: int = 0, **options: Any) -> Medusa:
    """A drafter over such heads."""
    return Medusa(Medusa.Config(path=str(medusa_directory(**options)), nodes=nodes, depth=depth))


@memo
def eagle_directory(family: str = "llama", **options: Any) -> Path:
    """A random EAGLE drafter for a tiny target."""
    torch.manual_seed(0)
    pupil = EaglePupil(teacher(family), EagleTraining(**options))
    path = room()
    pupil.save(path)
    return path


def eagle(nodes: int = 9, depth: int = 4, width: int = 3, **options: Any) -> Eagle:
    """A drafter over such a network."""
    return Eagle(Eagle.Config(path=str(eagle_directory(**options)), nodes=nodes, depth=depth, width=width))
