"""Tool calls: found however the text is cut, nothing of them shown as text, prompts for templates that know tools and others."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from outrider import LLM
from outrider.errors import BadInput
from outrider.models.tokenizer import TextTokenizer
from outrider.serve import calls as calls_module
from outrider.serve.calls import Call, Calls, Form, Part
from outrider.serve.schema import ChatRequest
from outrider.serve.tools import Prompter, required

from ..models.tiny_gguf import Tiny
from .conftest import NAME, Running, running
from .test_input import fails

F, G = Call("f", '{"x": 1}'), Call("g", "{}")
ONE = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TWO = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
QUOTED = Call("f", '{"x": "</tool_call>"}')
CASES: list[tuple[Form, str, list[Part]]] = [
    (Form.HERMES, "Hello there.", ["Hello there."]),
    (Form.HERMES, "a <b> < tool_call> <tool_cal", ["a <b> < tool_call> <tool_cal"]),
    (Form.HERMES, ONE, [F]),
    (Form.HERMES, f"Let me see.\n\n{ONE}\n{TWO}\n", ["Let me see.", F, G]),
    (Form.HERMES, f"{ONE}\nDone.", [F, "Done."]),
    (Form.HERMES, ONE.removesuffix("</tool_call>"), [F]),
    (Form.HERMES, '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>', [QUOTED]),
    (Form.HERMES, "<tool_call>no JSON</tool_call> x", ["<tool_call>no JSON</tool_call> x"]),
    (Form.HERMES, f"<tool_call>bad</tool_call>{TWO}", ["<tool_call>bad</tool_call>", G]),
    (Form.HERMES, '<tool_call>{"arguments": {}}</tool_call>', ['<tool_call>{"arguments": {}}</tool_call>']),
    (Form.HERMES, '{"name": "f", "parameters": {"x": 1}}', ['{"name": "f", "parameters": {"x": 1}}']),
    (Form.MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]', [F, G]),
    (Form.MISTRAL, 'Hm. [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}', ["Hm.", F, G]),
    (Form.MISTRAL, "[TOOL_CALLS]what", ["[TOOL_CALLS]what"]),
    (Form.MISTRAL, "[TOOL] [TOOL_CAL", ["[TOOL] [TOOL_CAL"]),
    (Form.LLAMA, '{"name": "f", "parameters": {"x": 1}}', [F]),
    (Form.LLAMA, ' {"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', [F, G]),
    (Form.LLAMA, '<|python_tag|>{"name": "f", "parameters": {"x": 1}}', [F]),
    (Form.LLAMA, '{"answer": 42}', ['{"answer": 42}']),
    (Form.LLAMA, 'It is {"name": "f", "parameters": {}}', ['It is {"name": "f", "parameters": {}}']),
]


@pytest.mark.parametrize("text", ["<tool_call>" + "</tool_call>" * 300, "<tool_call></tool_call>" * 300])
def test_a_model_that_repeats_end_marks_costs_one_look_at_each(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[str]()
    monkeypatch.setattr(calls_module, "_load", looks.append)
    calls, parts = Calls(Form.HERMES), list[Part]()
    for letter in text:
        parts += calls.feed(letter)
    assert joined(parts + calls.close()) == [text] and len(looks) <= 300


def joined(parts: list[Part]) -> list[Part]:
    """Neighbouring texts as one."""
    out: list[Part] = []
    for part in parts:
        if out and isinstance(part, str) and isinstance(out[-1], str):
            out[-1] += part
        else:
            out.append(part)
    return out


@pytest.mark.parametrize(("form", "text", "want"), CASES)
def test_calls_are_found_however_the_text_is_cut(form: Form, text: str, want: list[Part]) -> None:
    rng = random.Random(text)
    for cuts in ([], list(range(1, len(text))), *(sorted(rng.sample(range(len(text)), rng.randrange(8))) for _ in range(50))):
        calls, parts, shown = Calls(form), list[Part](), 0
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            parts += calls.feed(text[start:end])
            for part in parts[shown:]:
                assert not isinstance(part, str) or part in text, "shown text is the answer's own"
            shown = len(parts)
        assert joined(parts + calls.close()) == want


def test_forms_by_template() -> None:
    assert Form.of("... <tool_call> ...") is Form.HERMES and Form.of("{{ x }}") is Form.HERMES
    assert Form.of("[TOOL_CALLS]") is Form.MISTRAL and Form.of("<|python_tag|>") is Form.LLAMA


class Roomy(Tiny):
    """With room for tools in the prompt."""

    def _metadata(self, out: Any) -> None:
        add = out.add_context_length
        out.add_context_length = lambda _: add(1024)
        super()._metadata(out)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("roomy")
    Roomy().write(folder / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
        llm = LLM(str(folder / "tiny.gguf"), draft="ngram:min=1,depth=4", control="fixed", dtype="float64")
    with running(llm) as server:
        yield server


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "Look.", "parameters": parameters}}


TOOLS = [tool("weather", city={"enum": ["Rome", "Oslo"]}), tool("clock", hour={"type": "integer", "minimum": 0, "maximum": 23})]


def test_required_calls_through_the_client(roomy: Running) -> None:
    client = roomy.openai()
    names = set()
    for seed in range(6):
        ask: Any = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "tools": TOOLS, "tool_choice": "required"}
        ask |= {"seed": seed, "max_tokens": 400, "temperature": 1.0}
        [choice] = client.chat.completions.create(**ask).choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        [call] = choice.message.tool_calls or []
        names.add(call.function.name)
        assert set(json.loads(call.function.arguments)) == {"city" if call.function.name == "weather" else "hour"}
        chunks = [c.choices[0] for c in client.chat.completions.create(**ask, stream=True)]
        deltas = [d for c in chunks for d in c.delta.tool_calls or []]
        assert [(d.index, d.function) for d in deltas] == [(0, deltas[0].function)]
        assert (deltas[0].function.name, deltas[0].function.arguments) == (call.function.name, call.function.arguments)
        assert not "".join(c.delta.content or "" for c in chunks) and chunks[-1].finish_reason == "tool_calls"
    assert names == {"weather", "clock"}


def test_a_named_tool_and_none(roomy: Running) -> None:
    choice = {"type": "function", "function": {"name": "clock"}}
    found = roomy.chat(tools=TOOLS, tool_choice=choice, max_tokens=400, seed=1)["choices"][0]
    assert found["message"]["tool_calls"][0]["function"]["name"] == "clock"
    plain = roomy.chat(seed=1)
    assert roomy.chat(tools=TOOLS, tool_choice="none", seed=1)["choices"] == plain["choices"]


def test_calls_and_results_of_earlier_turns(roomy: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"hour": 3}'}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "late"},
    ]
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 8}
    assert roomy.post("/v1/chat/completions", body).status_code == 200
    call["function"]["arguments"] = "{"
    fails(roomy.post("/v1/chat/completions", body), 400, "arguments")


def test_templates_that_know_tools(library: LLM) -> None:
    backend = copy.deepcopy(library.tokenizer.backend)
    backend.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.hour }}{% endfor %};{% endfor %}"
    )
    prompter = Prompter(TextTokenizer(backend))
    call = {"function": {"name": "clock", "arguments": '{"hour": 3}'}}
    messages = [
        {"role": "assistant", "content": "a", "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "1"},
    ]
    body = ChatRequest.model_validate({"messages": messages, "tools": TOOLS})
    assert backend.decode(prompter.encode(body)) == "weather;clock;assistant:a<tool_call>3;tool:b;"
    assert prompter.form is Form.HERMES


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nothing"}}},
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
    ],
)
def test_choices_that_cannot_be(more: dict[str, Any]) -> None:
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **more})
    with pytest.raises(BadInput, match="tool"):
        required(body)


def test_bad_tools(server: Running) -> None:
    hello = {"messages": [{"role": "user", "content": "hello"}]}
    for tools in ("x", [5], [{"type": "function"}], [{"type": "web"}], [{"type": "function", "function": {"name": ""}}]):
        fails(server.post("/v1/chat/completions", hello | {"tools": tools}), 400, "tools")
    broken = [tool("f", x={"type": "florb"})]
    fails(server.post("/v1/chat/completions", hello | {"tools": broken, "tool_choice": "required"}), 400, "florb")
