"""The drafter that replays answers: as right as it was told to be, the same every time, silent where it knows nothing."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider import registry
from outrider.bench.audit import runnable
from outrider.config import SamplingParams
from outrider.drafters import AUTO
from outrider.errors import BadInput, DrafterMismatch
from outrider.protocols import Replayer, Start
from outrider.sampling import TextSampler
from outrider.types import Batch, Budget, Request

from .. import tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=500, seed=0)
ANSWER = [2 + i * 7 % 40 for i in range(400)]


def drafter(spec: str = "synthetic", answers: dict[tuple[int, ...], list[int]] | None = None, vocab: int = tiny.VOCAB):
    made = registry.parse(spec)
    made.start(Start("tiny", vocab, 512, torch.device("cpu"), torch.float64, TextSampler(vocab)))
    for prompt, answer in (answers or {}).items():
        made.record(prompt, GREEDY, answer)
    return made


def guess(made, request: Request, depth: int) -> list[int]:
    batch = Batch((request,), (1,), (True,), (depth,))
    return made.propose(batch, Budget((depth,), (depth,))).tokens[0].tolist()


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_the_rate_of_right_guesses(rate: float) -> None:
    answers = {(p,): ANSWER for p in range(2, 12)}
    made = drafter(f"synthetic:rate={rate},depth=400", answers)
    guesses = [guess(made, tiny.request(p, GREEDY), 400) for p in answers]
    right = [g == a for row in guesses for g, a in zip(row, ANSWER, strict=True)]
    assert len(right) == 4000 and all(0 <= g < tiny.VOCAB for row in guesses for g in row)
    assert sum(right) / 4000 == pytest.approx(rate, abs=0 if rate in (0, 1) else 4 * (rate * (1 - rate) / 4000) ** 0.5)
    if rate == 0.8:  # spoiled independently: as often as elsewhere after a spoiled one
        after = [b for a, b in itertools.pairwise(right) if not a]
        assert sum(after) / len(after) == pytest.approx(rate, abs=4 * (0.16 / len(after)) ** 0.5)


def test_the_same_every_time_and_other_for_another_seed_or_request() -> None:
    answers = {(2, 3): ANSWER, (2, 4): ANSWER}
    rows = {}
    for seed in (0, 0, 1):
        made = drafter(f"synthetic:rate=0.5,depth=400,seed={seed}", answers)
        for prompt in answers:
            row = guess(made, tiny.request(prompt, GREEDY), 400)
            assert rows.setdefault((seed, prompt), row) == row
    assert len({tuple(row) for row in rows.values()}) == 4


def test_a_position_is_spoiled_whenever_it_is_reached() -> None:
    made = drafter("synthetic:rate=0.5,depth=4", {(2, 3): ANSWER})
    whole = guess(made, tiny.request((2, 3), GREEDY), 400)
    later = tiny.request((2, 3), GREEDY)
    later.tokens += ANSWER[:10]
    assert guess(made, later, 4) == whole[10:14]
    later.tokens += ANSWER[10:398]
    assert guess(made, later, 4) == whole[398:]


def test_silent_where_nothing_is_recorded() -> None:
    made = drafter("synthetic", {(2, 3): ANSWER})
    hot = replace(GREEDY, temperature=1.0)
    made.record((2, 3), replace(hot, seed=5), ANSWER)
    assert guess(made, tiny.request((2, 4), GREEDY), 4) == []
    assert guess(made, tiny.request((2, 3), hot, seed=6), 4) == []
    assert len(guess(made, tiny.request((2, 3), replace(hot, seed=5)), 4)) == 4
    assert len(guess(made, tiny.request((2, 3), replace(GREEDY, seed=9)), 4)) == 4  # a greedy answer has no seed
    strayed = tiny.request((2, 3), GREEDY)
    strayed.tokens += [ANSWER[0], ANSWER[1] + 1]
    assert guess(made, strayed, 4) == []
    other = tiny.request((2, 3), replace(hot, seed=5))
    other.index = 1
    assert guess(made, other, 4) == []
    classical = tiny.request((2, 3), replace(hot, seed=5), rule="rejection")
    assert guess(made, classical, 4) == []
    assert len(guess(made, tiny.request((2, 3), GREEDY, rule="rejection"), 4)) == 4


def test_release_forgets_the_request_and_keeps_the_recording() -> None:
    made = drafter("synthetic", {(2, 3): ANSWER})
    request = tiny.request((2, 3), GREEDY)
    first = guess(made, request, 4)
    made.release(request)
    made.release(request)
    assert not made._running and guess(made, request, 4) == first


def test_through_the_engine_it_keeps_the_formula() -> None:
    """tau = (1 - rate**(K + 1)) / (1 - rate) for chains of K guesses, over texts that are as long as they may be."""
    params = SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True, seed=1)
    asked = tiny.prompts(8, seed=4)
    plain = tiny.World().run(registry.parse("none"), [tiny.request(p, params) for p in asked])
    made = registry.parse("synthetic:rate=0.8,depth=4")
    for prompt, answer in zip(asked, plain, strict=True):
        made.record(prompt, params, answer)
    requests = [tiny.request(p, params) for p in asked]
    assert tiny.World().run(made, requests) == plain
    tau = sum(r.stats.tokens for r in requests) / sum(r.stats.rounds for r in requests)
    assert tau == pytest.approx((1 - 0.8**5) / 0.2, rel=0.08)


def test_recordings_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "answers.json"
    sampled = {"prompt_token_ids": [2, 4], "token_ids": [9, 8], "temperature": 0.7, "seed": 3}
    file.write_text(json.dumps([{"prompt_token_ids": [2, 3], "token_ids": [5, 6, 7]}, sampled]))
    made = drafter(f"synthetic:rate=1,file={file}")
    assert guess(made, tiny.request((2, 3), GREEDY), 4) == [5, 6, 7]
    assert guess(made, tiny.request((2, 4), replace(GREEDY, temperature=0.7, seed=3)), 4) == [9, 8]
    with pytest.raises(DrafterMismatch, match="token 9"):
        drafter(f"synthetic:file={file}", vocab=9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read"),
        ("{", "not JSON"),
        ("{}", "must hold a JSON list"),
        ("[3]", "entry 0"),
        ('[{"prompt_token_ids": [1], "token_ids": ["a"]}]', "entry 0"),
        ('[{"prompt_token_ids": [1], "token_ids": [1], "seed": -1}]', "entry 0"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "answers.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BadInput, match=words):
        registry.parse(f"synthetic:file={file}")


@pytest.mark.parametrize("spec", ["synthetic:rate=1.1", "synthetic:rate=-0.1", "synthetic:rate=nan", "synthetic:depth=0"])
def test_options_out_of_range(spec: str) -> None:
    with pytest.raises(BadInput, match="synthetic needs"):
        registry.parse(spec)


def test_an_answer_that_no_request_can_match() -> None:
    with pytest.raises(BadInput, match="seed"):
        drafter().record((2,), SamplingParams(temperature=1.0), [3])


def test_it_passes_for_nothing_else() -> None:
    assert AUTO != "synthetic" and "synthetic" not in runnable("any", 3)
    assert isinstance(drafter(), Replayer) and not isinstance(registry.parse("ngram"), Replayer)
    assert "NOT A REAL DRAFTER" in (registry.get("synthetic").__doc__ or "")
