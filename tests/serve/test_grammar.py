"""Structured output: always valid, the same tokens with speculation on and off, at every drafted position."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.serve.grammar import Grammar, Grammars, _shared

from .conftest import NAME, Running
from .test_input import fails


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


WORD, SMALL = {"type": "string", "maxLength": 4}, {"type": "integer", "minimum": 0, "maximum": 99}
LEAVES: list[Any] = [WORD, SMALL, {"type": "boolean"}, {"enum": ["red", "green"]}, {"const": 7}]
SCHEMAS: list[dict[str, Any]] = [
    *(thing(a=one, b=two) for one, two in itertools.combinations(LEAVES, 2)),
    *({"type": "array", "items": leaf, "minItems": 2, "maxItems": 3} for leaf in LEAVES[1:]),
    thing(a=thing(b=thing(c=SMALL))),
    thing(a={"anyOf": [SMALL, {"type": "null"}]}),
    thing(a={"type": "array", "items": thing(x=SMALL), "minItems": 1, "maxItems": 2}),
    thing(date={"type": "string", "format": "date"}),
    thing(a={"type": "string", "pattern": "^[a-c]{3}$"}),
    {"$ref": "#/$defs/t", "$defs": {"t": thing(k={"type": "boolean"})}},
]


def conforms(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """As much of JSON Schema as these need."""
    if "$ref" in schema:
        return conforms(value, root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
    if "anyOf" in schema:
        return any(conforms(value, s, root) for s in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kind = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return False
    if kind is dict:
        return set(value) == set(schema["properties"]) and all(
            conforms(value[k], s, root) for k, s in schema["properties"].items()
        )
    if kind is list:
        return schema["minItems"] <= len(value) <= schema["maxItems"] and all(conforms(v, schema["items"], root) for v in value)
    if kind is str:
        return len(value) <= schema.get("maxLength", 99) and re.search(schema.get("pattern", ""), value) is not None
    return kind is not int or schema["minimum"] <= value <= schema["maximum"]


def test_schemas_with_speculation_on_and_off(server: Running) -> None:
    assert len(SCHEMAS) == 20
    accepted = 0
    no_blanks = {str(server.llm.tokenizer.encode(c, special=False)[0]): -100.0 for c in (" ", "\n")}
    for seed, schema in enumerate(SCHEMAS):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"seed": seed, "response_format": form, "max_tokens": 100, "temperature": 1.0, "logit_bias": no_blanks}
        on = server.complete("{} a", **body)
        off = server.complete("{} a", **body, speculation={"draft": "none"})
        assert on["choices"] == off["choices"], schema
        [choice] = on["choices"]
        assert choice["finish_reason"] == "stop", (schema, choice["text"])
        assert conforms(json.loads(choice["text"]), schema, schema), choice["text"]
        accepted += on["timings"]["draft_n_accepted"]
    assert accepted > 0


def test_regex_grammar_and_any_object(server: Running) -> None:
    words = server.complete(response_format={"type": "regex", "regex": "(yes|no)( really){0,2}"}, seed=1)["choices"][0]
    assert re.fullmatch("(yes|no)( really){0,2}", words["text"]) and words["finish_reason"] == "stop"
    lark = 'start: "a" ("b" | "c")~2 "d"'
    for seed in range(3):
        text = server.complete(response_format={"type": "grammar", "grammar": lark}, seed=seed, n=2)["choices"]
        assert all(re.fullmatch("a[bc][bc]d", c["text"]) for c in text)
    chat = server.chat(response_format={"type": "json_object"}, max_tokens=100, temperature=0)["choices"][0]
    assert chat["message"]["content"].startswith("{")
    if chat["finish_reason"] == "stop":
        json.loads(chat["message"]["content"])
    assert server.chat(response_format={"type": "text"})["choices"]


def test_through_the_client(server: Running) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": thing(ok={"type": "boolean"}), "strict": True},
    }
    client = server.openai()
    ask: Any = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "response_format": form, "max_tokens": 90}
    text = client.chat.completions.create(**ask, seed=1, temperature=0).choices[0].message.content
    assert isinstance(json.loads(text or "")["ok"], bool)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "florb"}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}},
        {"type": "regex", "regex": "(["},
        {"type": "regex"},
        {"type": "grammar", "grammar": "start: nothing"},
        {"type": "grammar", "grammar": "%%%"},
        {"type": "grammar", "grammar": "start: start"},
        {"type": "json_schema", "json_schema": {"schema": False}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
        {"type": "json_schema", "json_schema": {"schema": {"allOf": [{"type": "string"}, {"type": "null"}]}}},
    ],
)
def test_bad_forms(server: Running, form: dict[str, Any]) -> None:
    fails(server.post("/v1/completions", {"prompt": "x", "response_format": form}), 400, "response_format")


def test_the_mask_is_a_function_of_the_path(library: LLM) -> None:
    """In any order, forwards and backwards, on paths that the grammar rules out, and past the end."""
    grammars = Grammars(library.tokenizer)
    source = grammars.compile("regex", "a(b|c)+d")
    a, b, c, d, x = (library.tokenizer.encode(t, special=False)[0] for t in "abcdx")
    end = min(library.tokenizer.eos_ids)
    prompt = (x, x)

    def allowed(made: Grammar, *path: int) -> set[int]:
        row = made((*prompt, *path), torch.zeros(266))
        return set((row == 0).nonzero()[:, 0].tolist())

    want = {(): {a}, (a,): {b, c}, (a, b): {b, c, d}, (a, b, d): {end}, (a, b, d, end): {end}, (a, c, b): {b, c, d}}
    one = grammars.processor(source, 2)
    for path in [*want, *reversed(want), *want]:
        assert allowed(one, *path) == want[path] == allowed(grammars.processor(source, 2), *path)
        assert len(allowed(one, *path, x)) == 266, "a path that is ruled out is left alone"
    far = (a, *[b] * 60)
    assert allowed(one, *far) == allowed(one, a, c) == {b, c, d} and len(one._form._tracks) == 2


def test_paths_that_begin_alike() -> None:
    for one, other, n in [((), (1,), 0), ((1, 2, 3), (1, 2, 3), 3), ((1, 2, 3, 4), (1, 2, 9, 4, 5), 2), ((5,) * 9, (5,) * 4, 4)]:
        assert _shared(one, other) == _shared(other, one) == n


def test_a_guess_that_is_too_complex_does_not_harm_the_text(library: LLM) -> None:
    """An automaton that failed on one path knows the others as before; failing is no end of the text."""
    many = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(700)}, "additionalProperties": False}
    grammars, scores = Grammars(library.tokenizer), torch.zeros(266)
    made = grammars.processor(grammars.compile("json_schema", {"anyOf": [{"const": 5}, many]}), 0)
    brace, five = (tuple(library.tokenizer.encode(t, special=False)) for t in ("{", "5"))
    want = [(made(path, scores.clone()) == 0).tolist() for path in ((), five)]
    assert sum(want[0]) == 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match="grammar failed"):
            made(brace, scores.clone())
        assert [(made(path, scores.clone()) == 0).tolist() for path in ((), five)] == want


def test_schemas_of_awkward_kinds(server: Running) -> None:
    node = {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}, "additionalProperties": False}
    odd = {"enum": ["\u65e5\u672c\u8a9e", "e\u0301", '"\\/', "\U0001f642"]}
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    for schema in (True, node, odd, empty, {"enum": [f"value {i}" for i in range(3000)]}):
        body = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}, "max_tokens": 40, "seed": 3}
        plain, fast = (server.complete("{", **body, speculation=how) for how in ({"draft": "none"}, {}))
        assert plain["choices"] == fast["choices"]
        if plain["choices"][0]["finish_reason"] == "stop":
            value = json.loads(plain["choices"][0]["text"])
            assert schema is True or value in schema.get("enum", [value])


def test_library(library: LLM) -> None:
    """The processor serves the library as well."""
    ids = library.tokenizer.encode("hello")
    grammars = Grammars(library.tokenizer)
    form = grammars.processor(grammars.compile("regex", "[a-c]{5}"), len(ids))
    [result] = library.generate([ids], SamplingParams(seed=1, max_tokens=20, processors=(form,)))
    assert re.fullmatch("[a-c]{5}", result.text) and result.finish_reason == "stop"


def test_a_form_that_proves_too_complex_is_the_clients_fault(server: Running) -> None:
    form = {"type": "regex", "regex": "a"}
    ask = {"prompt": "x", "response_format": form, "max_tokens": 4}
    assert server.complete("x", response_format=form)["choices"][0]["text"] == "a"

    def failing(self: Grammar, tokens: Any, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("too complex")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Grammar, "__call__", failing)
        assert fails(server.post("/v1/completions", ask), 400, "too complex")["code"] == "generation_failed"
