"""Tools that a client offers: shown to the model through its chat template, or in words where the template knows none; and, where
a call is required, as a grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jinja2
import jinja2.meta

from ..errors import BadInput
from ..models.tokenizer import TextTokenizer
from .calls import CLOSE, OPEN, Form
from .grammar import BLANKS
from .schema import ChatRequest, Message, Tool

Json = dict[str, Any]


class Prompter:
    """From a chat request to token ids."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.template
        self._knows = _reads_tools(self._template)
        self.form = Form.of(self._template)

    def encode(self, body: ChatRequest) -> list[int]:
        """The conversation, with its tools, ready for the assistant's turn. Raises `BadInput`."""
        tools = offered(body)
        if self._knows:
            messages = [_with_calls(message) for message in body.messages]
            return self._tokenizer.chat(messages, [tool.model_dump(exclude_none=True) for tool in tools] or None)
        messages = [_in_words(message) for message in body.messages]
        if tools:
            head = messages.pop(0)["content"] + "\n\n" if messages[0]["role"] == "system" else ""
            messages.insert(0, {"role": "system", "content": head + _explain(tools)})
        return self._tokenizer.chat(messages)


def _reads_tools(template: str) -> bool:
    """Whether a template has a variable of this name."""
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateError:  # tags of transformers' own
        return "tools" in template
    return "tools" in jinja2.meta.find_undeclared_variables(tree)


def offered(body: ChatRequest) -> Sequence[Tool]:
    """The tools that may be called."""
    return [] if body.tool_choice == "none" else body.tools or []


def required(body: ChatRequest) -> str | None:
    """A Lark grammar of the calls that must be made; None where none must. Raises `BadInput` for a tool that is not offered."""
    if body.tool_choice in (None, "none", "auto"):
        return None
    tools = list(offered(body))
    if not isinstance(body.tool_choice, str) and body.tool_choice is not None:
        name = body.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
        if not tools:
            raise BadInput(f"tool_choice names {name[:100]!r}, which is not among the tools")
    if not tools:
        raise BadInput("tool_choice asks for a call, but there are no tools")
    if body.response_format is not None and body.response_format.type != "text":
        raise BadInput("tool_choice that asks for a call and response_format exclude each other")
    shape = {"anyOf": [_shape(tool) for tool in tools], "x-guidance": {"whitespace_pattern": BLANKS}}
    return f'start: "{OPEN}\\n" call "\\n{CLOSE}"\ncall: %json {json.dumps(shape)}\n'


def _shape(tool: Tool) -> Json:
    """A call's schema. Arguments that the tool does not describe are allowed only where it says so."""
    arguments = {"type": "object", "additionalProperties": tool.function.parameters is None, **(tool.function.parameters or {})}
    properties = {"name": {"const": tool.function.name}, "arguments": arguments}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _with_calls(message: Message) -> Json:
    """With earlier calls as templates want them: arguments as an object."""
    made = message.plain()
    if message.tool_calls:
        calls = [{"name": c.function.name, "arguments": _arguments(c.function.arguments)} for c in message.tool_calls]
        made["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    return made | ({"name": message.name} if message.name is not None else {})


def _in_words(message: Message) -> Json:
    """For templates without tools: calls and results are text."""
    made = message.plain()
    for call in message.tool_calls or []:
        written = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
        made["content"] = f"{made['content']}\n{OPEN}{json.dumps(written)}{CLOSE}".lstrip()
    if message.role == "tool":
        made = {"role": "user", "content": f"<tool_response>{made['content']}</tool_response>"}
    return made


def _arguments(text: str) -> Any:
    try:
        return json.loads(text) if text else {}
    except (ValueError, RecursionError):
        raise BadInput("the arguments of an earlier tool call are no JSON") from None


def _explain(tools: Sequence[Tool]) -> str:
    listed = "\n".join(json.dumps(tool.function.model_dump(exclude_none=True), ensure_ascii=False) for tool in tools)
    return (
        f"These functions can be called, one JSON object each:\n{listed}\n"
        f'To call one, answer with {OPEN}{{"name": NAME, "arguments": OBJECT}}{CLOSE} and nothing else. '
        "Call one only where it helps."
    )
