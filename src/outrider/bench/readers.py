"""Prompts from other people's files, told apart by what stands in them: prompts and conversations, logs of OpenAI requests,
ShareGPT conversations, Spec-Bench's questions; as JSON Lines or as one JSON array; or plain text, a prompt per paragraph."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadInput
from .conversation import Message, Prompt, Workload

LARGEST = 2**30
"""Bytes; a file is read as a whole."""
HUMAN, MODEL = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard", "model")
SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file: the keys that tell its entries, and what makes prompts of one (none of those that ask nothing)."""

    name: str
    keys: frozenset[str]
    prompts: Callable[[dict[str, Any], str], list[Prompt]]


def read(path: Path) -> Workload:
    """A workload from a file; `.txt` is text, everything else must be JSON. Raises `BadInput`, naming the line, for files that
    cannot be read so, and for files without a prompt."""
    text = _text(path)
    if path.suffix.lower() == ".txt":
        prompts, reader = _blocks(text), "text, a prompt per paragraph"
    elif path.suffix.lower() in (".jsonl", ".json") or text.lstrip()[:1] in ("{", "["):
        prompts, reader = _prompts(path, text)
    else:
        raise BadInput(f"{path}: a workload is a .jsonl or .json file (objects) or a .txt file (blocks between blank lines)")
    if not prompts:
        raise BadInput(f"{path} has no prompts")
    return Workload(path.stem, str(path), tuple(prompts), reader)


def entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSON file, each with the words that say where it stands."""
    return _objects(path, _text(path))


def prompts_of(entry: dict[str, Any], where: str) -> list[Prompt]:
    """Prompts of one object in this package's own format: `prompt` (text), `messages` (a conversation that ends with the user) or
    `turns` (what the user says, one after the other)."""
    if "messages" in entry:
        return [Prompt(_messages(entry["messages"], where))]
    turns = entry.get("turns", [entry.get("prompt")])
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise BadInput(f"{where}: expected prompt (text), messages (a list) or turns (a list of texts)")
    return [_said(*turns)]


def _text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise BadInput(f"{path} has {size / 2**30:.1f} GiB; {LARGEST / 2**30:.0f} GiB is the most: take a part of it")
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read the workload {path}: {error.strerror or error}") from None
    if b"\0" in data:
        raise BadInput(f"{path} is no text (it has zero bytes); give prompts as .jsonl, .json or .txt in UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not valid UTF-8 (byte {error.start}); convert it first") from None


def _blocks(text: str) -> list[Prompt]:
    return [_said(block.strip("\r\n")) for block in re.split(r"\n(?:[ \t\r]*\n)+", text) if block.strip()]


def _prompts(path: Path, text: str) -> tuple[list[Prompt], str]:
    """All prompts, and how they were read; what the first object is, all must be."""
    prompts: list[Prompt] = []
    kind, silent = None, 0
    for where, entry in _objects(path, text):
        if kind is None:
            kind = next(f for f in FORMATS if f.keys <= entry.keys())
        elif not kind.keys <= entry.keys():
            raise BadInput(f"{where}: expected {' and '.join(sorted(kind.keys))}, as in the objects before it ({kind.name})")
        found = _whole(kind.prompts(entry, where), where)
        silent += not found
        prompts += found
    left = f"; {silent} without a question left out" if silent else ""
    return prompts, (kind.name if kind else "") + left


def _whole(prompts: list[Prompt], where: str) -> list[Prompt]:
    """The same prompts; `BadInput` for halves of characters, which JSON can write and no text can hold."""
    try:
        for prompt in prompts:
            for text in (*(m["content"] for m in prompt.messages), *prompt.later):
                text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"{where}: half of a character ({error.object[error.start]!r}) in a text; take it out") from None
    return prompts


def _objects(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    array = text.lstrip().startswith("[")
    for number, value in _array(path, text) if array else _lines(path, text):
        where = f"{path}, line {number}"
        if not isinstance(value, dict):
            raise BadInput(f"{where}: expected an object with prompt, messages or turns, got {type(value).__name__}")
        yield where, value


def _lines(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise BadInput(f"{path}, line {number}: not JSON ({_reason(error)})") from None


def _array(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """The elements of a JSON array, with the line where each begins."""
    decoder, line, counted = json.JSONDecoder(), 1, 0
    at = _skip(text, text.index("[") + 1)
    if text[at : at + 1] == "]":
        return
    while True:
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            at_line = line + text.count("\n", at, getattr(error, "pos", at))
            raise BadInput(f"{path}, line {at_line}: not JSON ({_reason(error)})") from None
        yield line, value
        end = _skip(text, end)
        if text[end : end + 1] == "]" and not text[end + 1 :].strip():
            return
        if text[end : end + 1] != ",":
            raise BadInput(f"{path}, line {line + text.count(chr(10), at, end)}: not JSON (expected a comma or the array's end)")
        at = _skip(text, end + 1)


def _skip(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    return found.end() if found else at


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else "nested too deeply"


def _messages(messages: Any, where: str) -> tuple[Message, ...]:
    good = isinstance(messages, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
    if not good or not messages or messages[-1]["role"] == "assistant":
        raise BadInput(f"{where}: messages must be a list of objects with role and content, the last one not the assistant's")
    return tuple({"role": m["role"], "content": _content(m, where)} for m in messages)


def _content(message: dict[str, Any], where: str) -> str:
    """A message's text; a list of parts is joined if all are text."""
    content = message.get("content")
    if message.get("tool_calls") or message["role"] in ("tool", "function"):
        raise BadInput(f"{where}: messages with tool calls are not asked again; take it out")
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(p["text"] for p in content)
    if not isinstance(content, str):
        raise BadInput(f"{where}: messages must have a content that is text (pictures and sound are not read)")
    return content


def _request(entry: dict[str, Any], where: str) -> list[Prompt]:
    """A request to `/v1/chat/completions` or `/v1/completions`, or a line of a batch file of such."""
    body = entry["body"]
    if isinstance(body, dict) and "messages" in body:
        told = _messages(body["messages"], where)
        return [Prompt(tuple({**m, "role": "system" if m["role"] == "developer" else m["role"]} for m in told))]
    if not isinstance(body, dict) or "prompt" not in body:
        raise BadInput(f"{where}: expected a body with messages or prompt, as of /v1/chat/completions or /v1/completions")
    texts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    if not texts or not all(isinstance(t, str) and t.strip() for t in texts):
        raise BadInput(f"{where}: the body's prompt must be text or a list of texts (token ids belong to one model)")
    return [Prompt(({"role": "user", "content": text},), raw=True) for text in texts]


def _share(entry: dict[str, Any], where: str) -> list[Prompt]:
    """What the human says, turn by turn, after the system's words; recorded answers give way to the model's own. Nothing for a
    conversation without a human turn, of which such files have many."""
    said = entry["conversations"]
    good = isinstance(said, list) and all(
        isinstance(s, dict) and isinstance(s.get("from"), str) and isinstance(s.get("value"), str) for s in said
    )
    if not good:
        raise BadInput(f"{where}: conversations must be a list of objects with from and value, both text")
    strange = next((s["from"] for s in said if s["from"] not in (*HUMAN, *MODEL, "system")), None)
    if strange is not None:
        raise BadInput(f"{where}: conversations with a speaker {strange!r} are not read (only human, gpt, system); take it out")
    system = tuple({"role": "system", "content": s["value"]} for s in said[:1] if s["from"] == "system")
    first, *later = [s["value"] for s in said if s["from"] in HUMAN and s["value"].strip()] or [""]
    return [Prompt((*system, {"role": "user", "content": first}), tuple(later))] if first else []


def _said(first: str, *later: str) -> Prompt:
    return Prompt(({"role": "user", "content": first},), later)


FORMATS = (
    Format("ShareGPT conversations", frozenset({"conversations"}), _share),
    Format("OpenAI requests", frozenset({"body"}), _request),
    Format("Spec-Bench questions", frozenset({"question_id", "category", "turns"}), prompts_of),
    Format("prompts, messages or turns", frozenset(), prompts_of),
)
