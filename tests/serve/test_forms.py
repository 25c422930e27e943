"""Random schemas with speculation on and off, in the short form of `benchmarks/forms.py`; the long one is `make long`."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from outrider import LLM
from outrider.serve.grammar import Grammar, Grammars

from .conftest import Running
from .test_grammar import SMALL, thing


@pytest.fixture(scope="module")
def forms() -> ModuleType:
    script = Path(__file__).parents[2] / "benchmarks" / "forms.py"
    spec = importlib.util.spec_from_file_location("forms", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["forms"] = module
    spec.loader.exec_module(module)
    return module


def test_ten_schemas(server: Running, forms: ModuleType) -> None:
    """The same tokens, valid, and in fewer rounds."""
    rng, sums = random.Random(3), {"on": [0, 0, 0], "off": [0, 0, 0]}
    no_blanks = {str(server.llm.tokenizer.encode(c, special=False)[0]): -4.0 for c in (" ", "\n")}
    for seed in range(10):
        wanted = forms.schema(rng, 1)
        form = {"type": "json_schema", "json_schema": {"schema": wanted}}
        body = {"seed": seed, "response_format": form, "max_tokens": 110, "temperature": float(seed % 2), "logit_bias": no_blanks}
        answers = {
            "on": server.complete("{", **body),
            "off": server.complete("{", **body, speculation={"draft": "none"}),
        }
        assert answers["on"]["choices"] == answers["off"]["choices"], wanted
        [choice] = answers["on"]["choices"]
        assert choice["finish_reason"] == "length" or forms.valid(choice["text"], wanted), (wanted, choice["text"])
        for way, answer in answers.items():
            found = answer["metrics"]["speculative_decoding"]
            sums[way][0] += found["rounds"]
            sums[way][1] += found["num_draft_tokens"]
            sums[way][2] += found["num_accepted_draft_tokens"]
    assert sums["off"][1] == 0 and sums["on"][0] < 0.7 * sums["off"][0] and sums["on"][2] > 0


def test_what_is_forced(library: LLM) -> None:
    """Keys in a text of any kind; punctuation and blanks where the text is written as usual, or as it was before; the end."""
    grammars, encode = Grammars(library.tokenizer), library.tokenizer.encode

    def after(form: Any, text: str, most: int = 50) -> str:
        made = grammars.processor(form, 1)
        found = made.forced([0, *encode(text, special=False)], most)
        return library.tokenizer.decode(found, skip_special=False)

    json_form = grammars.compile("json_schema", thing(long={"const": "word"}, ok={"type": "boolean"}))
    assert after(json_form, "") == '{"long": "word", "ok": '
    assert after(json_form, "", 3) == '{"l'
    assert after(json_form, '{\n  "') == "long" + '"'
    assert after(json_form, '{"long" : "') == "word" + '"'
    assert after(json_form, '{"long": "word", "ok": t') == "rue}</s>"
    assert after(json_form, '{"long": "word", "ok": true}') == "</s>"
    own = grammars.compile("json_schema", thing(a=SMALL, b=SMALL, c={"const": "x"}))
    assert after(own, '{\n"a" : 1\n,\n"b" : 2\n,') == '\n"c"'
    assert after(json_form, "nonsense") == ""
    assert after(grammars.compile("regex", "(yes|no), of course"), "y") == "es, of course</s>"
    assert after(grammars.compile("grammar", 'start: "a" ("b" | "c")'), "") == "a"


@pytest.mark.parametrize(
    ("value", "wanted", "good"),
    [
        ({"a": 1}, thing(a={"type": "integer", "minimum": 0, "maximum": 9}), True),
        ({"a": True}, thing(a={"type": "integer", "minimum": 0, "maximum": 9}), False),
        ({"a": 1, "b": 2}, thing(a={"const": 1}), False),
        ({"a": [1, 1]}, thing(a={"type": "array", "items": {"const": 1}, "minItems": 1, "maxItems": 1}), False),
        ({"a": None}, thing(a={"anyOf": [{"const": 3}, {"type": "null"}]}), True),
        ({"a": "abcd"}, thing(a={"type": "string", "pattern": "^[a-c]{3}$"}), False),
        ({"a": 1}, thing(a={"const": True}), False),
    ],
)
def test_the_validator(forms: ModuleType, value: Any, wanted: dict[str, Any], good: bool) -> None:
    assert forms.conforms(value, wanted) is good and forms.valid(json.dumps(value), wanted) is good
    assert not forms.valid("{", wanted)


def test_the_script(forms: ModuleType, model: str) -> None:
    """Its figures, on three schemas."""
    made, rng = forms.Forms(model, "ngram:min=1,depth=4", 30), random.Random(1)
    figures = forms.run(made, [forms.schema(rng, 1) for _ in range(3)])
    assert figures["same_tokens"] == figures["schemas"] == 3 and figures["valid"] == figures["complete"]
    assert figures["off"]["tokens_per_round"] == 1 and figures["off"]["accepted"] is None


def test_what_goes_wrong_on_the_way_of_a_guess_stays_there(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """An automaton that breaks while it looks ahead: the same answer, and no error."""
    form = {"type": "json_schema", "json_schema": {"schema": thing(a={"const": "word"}, b={"type": "boolean"})}}
    body = {"response_format": form, "max_tokens": 60, "seed": 1}
    want = server.complete("{", **body)["choices"]

    def broken(self: Grammar, *given: Any) -> list[int]:
        self._ahead.follow((1,) * 200)
        raise RuntimeError("too complex")

    monkeypatch.setattr(Grammar, "_next", broken)
    assert server.complete("{", **body)["choices"] == want
