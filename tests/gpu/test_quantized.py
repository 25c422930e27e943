"""The embedded model with quantised weights on a card: the text is that of plain decoding, one request at a time or many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from outrider.config import SamplingParams
from outrider.llm import LLM
from tests.gpu.conftest import MODEL, ROOM
from tests.gpu.test_text import prompts, texts

pytest.importorskip("torchao")


@pytest.fixture(scope="module", params=["int8", "int4"])
def llm(request: Any) -> Iterator[LLM]:
    with closing(LLM(MODEL, **ROOM, quantize=request.param, invariant=True)) as made:
        yield made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_and_company_change_nothing(llm: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=128, seed=5)
    llm.switch("none", control="fixed")
    alone = [texts(llm, [prompt], params)[0] for prompt in prompts(16)]
    assert texts(llm, prompts(64), params)[:16] == alone
    for draft in ("ngram:min=1,depth=3", "ngram:min=1,depth=15", "ngram:min=1,depth=47"):
        llm.switch(draft, control="fixed")
        assert texts(llm, prompts(16), params) == alone, draft
        assert [texts(llm, [prompt], params)[0] for prompt in prompts(4)] == alone[:4], draft


def test_the_fused_decoder_ran(llm: LLM) -> None:
    products = llm._target.decoder.products  # type: ignore[attr-defined]
    assert len(products.tiles) == 4
