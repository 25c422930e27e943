"""Heads on a card, untrained ones for the embedded model: guesses that are mostly wrong must not change a token, and guesses that
are right are the network's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.config import SamplingParams
from outrider.drafters._eagle import EaglePupil, EagleTraining
from outrider.drafters._medusa import MedusaPupil, MedusaTraining
from outrider.llm import LLM
from outrider.protocols import Teacher

from .test_text import drafted, first_difference, prompts, texts


@pytest.fixture(scope="module")
def directories(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model: Any = llm._target.decoder.model
    rows = [end.weight.detach() for end in (model.get_input_embeddings(), model.get_output_embeddings())]
    counts = torch.arange(len(rows[0]), device=rows[0].device).flip(0)
    teacher = Teacher("embedded", model.config.to_dict(), *rows, counts, llm._target.fingerprint)
    torch.manual_seed(0)
    made = {
        "eagle": EaglePupil(teacher, EagleTraining(vocab=8192)),
        "first": EaglePupil(teacher, EagleTraining(version=1)),
        "medusa": MedusaPupil(teacher, MedusaTraining(vocab=8192)),
    }
    root = tmp_path_factory.mktemp("heads")
    for name, pupil in made.items():
        pupil.save(root / name)
    return {name: root / name for name in made}


SPECS = ("eagle:path={eagle}", "eagle:path={eagle},width=1", "eagle:path={first},depth=3", "medusa:path={medusa}")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", SPECS)
def test_heads(llm: LLM, directories: dict[str, Path], spec: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=256, seed=11)
    llm.switch("none")
    plain = texts(llm, prompts(32), params)
    llm.switch(spec.format(**directories), control="fixed")
    results = llm.generate(prompts(32), params)
    wrong = [
        (i, first_difference(r.token_ids, p)) for i, (r, p) in enumerate(zip(results, plain, strict=True)) if r.token_ids != p
    ]
    assert drafted(results) > 0 and wrong == [] and llm.drafter_name != "none"
