"""Each cause of few right guesses is planted, and must be named; and none where there is none."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.plan import diagnose
from outrider.plan.acceptance import Answer, Chances, Record
from outrider.plan.diagnose import Pair, Symptom
from outrider.plan.read import Measured, Report

GOOD = Pair(False, ("{{ a }}", "{{ a }}"), ("float32", "float32"), "float32", "none", (2048, 2048))


def record(*chances: float, depth: int = 8, tokens: int = 400, prompt: int = 10) -> Record:
    """A text whose guesses are right with these chances, one after the other along the text."""
    luck = random.Random(1)
    hits = [luck.random() < chances[min(len(chances) - 1, i * len(chances) // tokens)] for i in range(tokens + depth)]
    runs = [next((j for j in range(depth) if not hits[t + j]), depth) for t in range(tokens - 1)]
    return Record((Answer(tuple(runs), (depth,) * (tokens - 1), depth, tokens, tokens, prompt),))


def wrong(symptoms: object) -> dict[str, str]:
    return {s.name: s.remedy for s in symptoms if s.remedy is not None}  # type: ignore[attr-defined]


def test_nothing_is_wrong() -> None:
    assert wrong(diagnose.of_records({"code": record(0.7), "chat": record(0.6)}, {"code": record(0.72)})) == {}
    assert wrong(diagnose.of_pair(GOOD)) == {}


def test_a_domain_that_the_drafter_does_not_know() -> None:
    found = wrong(diagnose.of_records({"code": record(0.8), "creative": record(0.2)}))
    assert list(found) == ["domain: creative"] and "train" in found["domain: creative"]


def test_few_right_guesses_everywhere() -> None:
    assert set(wrong(diagnose.of_records({"code": record(0.2), "chat": record(0.25)}))) == {"domain: code", "domain: chat"}


def test_a_drafter_trained_on_short_texts() -> None:
    found = wrong(diagnose.of_records({"code": record(0.8, 0.8, 0.3)}))
    assert list(found) == ["context length"] and "shorter texts" in found["context length"]


def test_good_guesses_that_the_depth_cuts_off() -> None:
    found = wrong(diagnose.of_records({"code": record(0.9, depth=3)}))
    assert list(found) == ["depth, texts"] and "depth=6" in found["depth, texts"]


def test_the_price_of_a_temperature() -> None:
    found = wrong(diagnose.of_records({"code": record(0.45)}, {"code": record(0.8)}))
    assert list(found) == ["temperature"] and "top_p" in found["temperature"]


def test_a_drafter_that_loses_the_thread() -> None:
    row = Measured("code", "some", Chances((0.8, 0.7, 0.4)), None, 1, None, 0.0, 1.1, 2.0, 0.5, 0.22, 500)
    [found] = wrong(diagnose.of_report(Report((row,), "m", "cpu", "float32", "r"))).items()
    assert found[0] == "look-ahead, some on code" and "from guess 3 on" in found[1]


def test_a_result_that_says_what_is_wrong() -> None:
    good = Measured("code", "some", Chances((0.9, 0.9)), None, 1, 2, 0.0, 1.4, 2.5, 0.85, 0.81, 500)
    bad = replace(good, workload="chat", chances=Chances((0.2, 0.2)), accepted_share_at_end=0.04, temperature=1.0)
    off = replace(good, draft="other", note="it was switched off")
    found = wrong(diagnose.of_report(Report((good, bad, off), "m", "cpu", "float32", "r")))
    assert set(found) == {"depth, some on code", "some on chat", "temperature, some on chat", "other on code"}
    assert "switched off" in found["other on code"]
    assert set(wrong(diagnose.of_report(Report((good, bad, off), "m", "cpu", "float32", "r"), "other"))) == {"other on code"}


def test_a_handful_of_guesses_is_no_finding() -> None:
    row = Measured("code", "some", Chances((0.9,)), None, 1, None, 0.0, 1.1, 2.0, 0.9, 0.9, 500)
    few = replace(row, workload="chat", chances=Chances((0.0,), (0.2,)), rounds=60)
    lucky = replace(few, workload="edit", chances=Chances((1.0,), (0.02,)), rounds=60)
    found = {s.name: s for s in diagnose.of_report(Report((row, few, lucky), "m", "cpu", "float32", "r"))}
    assert wrong(found.values()) == {} and "12 guesses are too few" in (found["some on chat"].note or "")
    texts = {s.name: s for s in diagnose.of_records({"code": record(0.7), "chat": record(0.0, tokens=20)})}
    assert wrong(texts.values()) == {} and "19 guesses" in (texts["domain: chat"].note or "")


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        ({"translated": True}, "tokenizer", "own tokenizer"),
        ({"templates": ("{{ a }}", "")}, "chat template", "instruct"),
        ({"templates": ("", "{{ a }}")}, "chat template", "plain"),
        ({"templates": ("{{ a }}", "{{ b }}")}, "chat template", "different formats"),
        ({"dtypes": ("float32", "bfloat16")}, "numbers", "near-ties"),
    ],
)
def test_pairs_that_do_not_suit(change: dict, name: str, said: str) -> None:
    found = wrong(diagnose.of_pair(replace(GOOD, **change)))
    assert list(found) == [name] and said in found[name]


def test_what_is_worth_knowing_of_a_pair() -> None:
    def notes(pair: Pair) -> dict[str, Symptom]:
        return {s.name: s for s in diagnose.of_pair(pair)}

    assert "2,048" in (notes(replace(GOOD, contexts=(8192, 2048)))["context"].note or "")
    assert "unrounded" in (notes(replace(GOOD, quantize="int4"))["numbers"].note or "")
    lower = replace(GOOD, dtypes=("bfloat16", "bfloat16"))
    assert "--dtype float32" in (notes(lower)["numbers"].note or "")
    assert notes(replace(GOOD, templates=("{{ a }}", None)))["chat template"].value == "not compared"


def test_what_files_tell(tmp_path: Path) -> None:
    assert diagnose.template_of(str(tmp_path / "none")) is None and diagnose.dtype_of(str(tmp_path)) == ""
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    assert diagnose.template_of(str(tmp_path)) is None
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert diagnose.template_of(str(tmp_path)) == "d" and diagnose.dtype_of(str(tmp_path)) == "bfloat16"
    (tmp_path / "chat_template.jinja").write_text("own")
    assert diagnose.template_of(str(tmp_path)) == "own"
