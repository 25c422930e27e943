"""Finds tool calls in an answer as it is written, however its text is cut into pieces.

Three ways of writing them are known: `<tool_call>{"name", "arguments"}</tool_call>` (Hermes, Qwen and most others),
`[TOOL_CALLS][{...}, ...]` or `[TOOL_CALLS]name[ARGS]{...}` (Mistral), and an answer that is nothing but `{"name", "parameters"}`
(Llama). Text that may be the beginning of a call is held back until it is clear; what proves to be no call is shown as it is.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
LIST, ARGS, TAG = "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"


class Form(Enum):
    """How a model writes its calls; the tags that open one."""

    HERMES = (OPEN,)
    MISTRAL = (LIST, OPEN)
    LLAMA = (TAG, OPEN)

    @classmethod
    def of(cls, template: str) -> Form:
        """What a chat template asks of its model."""
        if OPEN in template:
            return cls.HERMES
        if LIST in template:
            return cls.MISTRAL
        return cls.LLAMA if TAG in template or '"parameters"' in template else cls.HERMES


@dataclass(frozen=True, slots=True)
class Call:
    """One call; `arguments` is JSON text."""

    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """OpenAI's shape."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


Part = str | Call


class Calls:
    """`feed` takes text and gives what is clear by now: text to show, and calls. `close` gives the rest."""

    def __init__(self, form: Form) -> None:
        self._form, self._tags = form, form.value
        self._open = ""
        self._tag: str | None = None
        self._tried = 0  # where the search for an end mark goes on; -1: no mark can end a call
        self._fresh, self._after = True, False

    def feed(self, text: str) -> list[Part]:
        self._open += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def close(self) -> list[Part]:
        parts: list[Part] = []
        while self._tag is not None:
            self._finish(parts)
            while self._step(parts):
                pass
        self._show(parts, self._open)
        self._open = ""
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """One step through the open text; False when more is needed."""
        if self._tag is not None:
            return self._tag == OPEN and self._closed(parts)
        if self._form is Form.LLAMA and self._fresh and self._open.lstrip().startswith("{"):
            self._tag = ""
            return True
        found = min((at, tag) for tag in self._tags if (at := self._open.find(tag)) >= 0) if self._has_tag() else None
        if found is not None:
            at, tag = found
            self._show(parts, self._open[:at].rstrip())
            self._open, self._tag, self._tried = self._open[at + len(tag) :], tag, 0
            return True
        end = self._clear()
        self._show(parts, self._open[:end])
        self._open = self._open[end:]
        return False

    def _has_tag(self) -> bool:
        return any(tag in self._open for tag in self._tags)

    def _clear(self) -> int:
        """Where the end of the open text begins that may turn out to be blanks before a call, or the beginning of a tag."""
        end = len(self._open)
        for size in range(min(max(map(len, self._tags)) - 1, end), 0, -1):
            if any(tag.startswith(self._open[-size:]) for tag in self._tags):
                end -= size
                break
        return len(self._open[:end].rstrip())

    def _closed(self, parts: list[Part]) -> bool:
        """A Hermes call whose end is there. An end mark may stand inside of a string, so the JSON must be whole before it; where
        it is broken otherwise, no later mark can help. Each mark is tried once."""
        while self._tried >= 0 and (at := self._open.find(CLOSE, self._tried)) >= 0:
            text = self._open[:at]
            call = _call(_load(text))
            if call is not None:
                self._take(parts, [call], at + len(CLOSE))
                return True
            self._tried = at + 1 if _in_string(text) else -1
        if self._tried >= 0:
            self._tried = max(self._tried, len(self._open) - len(CLOSE) + 1)
        return False

    def _finish(self, parts: list[Part]) -> None:
        """The text ends in the middle of a call: it may lack no more than its end mark."""
        tag, text = self._tag, self._open
        calls = _listed(text) if tag == LIST else _rowed(text)
        if calls:
            self._take(parts, calls, len(text))
            return
        end = text.find(CLOSE) + len(CLOSE) if CLOSE in text else len(text)
        self._show(parts, (tag or "") + text[:end])
        self._open, self._tag = text[end:], None

    def _take(self, parts: list[Part], calls: Sequence[Call], end: int) -> None:
        parts += calls
        self._open, self._tag, self._after, self._fresh = self._open[end:], None, True, False

    def _show(self, parts: list[Part], text: str) -> None:
        text = text.lstrip() if self._after else text
        if text:
            parts.append(text)
            self._after = False
            self._fresh = self._fresh and not text.strip()


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _in_string(text: str) -> bool:
    """Whether JSON breaks off in the middle of a string."""
    try:
        json.loads(text)
    except ValueError as error:
        return str(error).startswith("Unterminated string")
    except RecursionError:
        pass
    return False


def _call(found: Any) -> Call | None:
    """A call from what it was written as; None if it is none."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    return Call(found["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _rowed(text: str) -> list[Call]:
    """JSON objects in a row, with blanks, semicolons or commas between them; nothing unless all of them are calls."""
    decoder, calls, at = json.JSONDecoder(), list[Call](), 0
    text = text.rstrip().removesuffix(CLOSE)
    while at < len(text):
        if text[at] in " \n\t\r;,":
            at += 1
            continue
        try:
            found, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        call = _call(found)
        if call is None:
            return []
        calls.append(call)
    return calls


def _listed(text: str) -> list[Call]:
    """Mistral's two forms."""
    if text.lstrip().startswith("["):
        found = _load(text)
        calls = [_call(item) for item in found] if isinstance(found, list) else []
        return [call for call in calls if call is not None] if all(calls) else []
    calls = []
    for piece in text.split(LIST):
        name, _, arguments = piece.partition(ARGS)
        if not name.strip() or not isinstance(_load(arguments), dict):
            return []
        calls.append(Call(name.strip(), arguments.strip()))
    return [call for call in calls if call is not None]
