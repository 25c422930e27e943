"""Heads on a card, untrained ones for the embedded model: guesses that are mostly wrong must not change a token, and guesses that
are right are the network's own."""

from __future__ import annotations

import pytest
from benchmarks.gpu import heads

from outrider.config import SamplingParams
from outrider.llm import LLM

from .test_text import drafted, first_difference, prompts, texts


@pytest.fixture(scope="module")
def directories(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return heads.directories(llm, tmp_path_factory.mktemp("heads"))


SPECS = ("eagle:path={few}", "eagle:path={few},width=1", "eagle:path={first},depth=3", "medusa:path={medusa}")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", SPECS)
def test_heads(llm: LLM, directories: dict[str, str], spec: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=256, seed=11)
    llm.switch("none")
    plain = texts(llm, prompts(32), params)
    llm.switch(spec.format(**directories), control="fixed")
    results = llm.generate(prompts(32), params)
    wrong = [
        (i, first_difference(r.token_ids, p)) for i, (r, p) in enumerate(zip(results, plain, strict=True)) if r.token_ids != p
    ]
    assert drafted(results) > 0 and wrong == [] and llm.drafter_name != "none"
