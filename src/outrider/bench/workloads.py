"""What the benchmark asks: six workloads of ten prompts each, written for this package, or a file of the user's own.

`code`, `chat`, `summarise`, `question`, `creative` and `repetitive` differ in how much of an answer can be guessed: `repetitive`
(edits, extraction, rewriting with small changes) repeats its prompt, `creative` repeats nothing.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import BadInput
from ..models.tokenizer import TextTokenizer

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation that waits for an answer; a plain prompt is one message of the user."""

    messages: tuple[Message, ...]

    @property
    def sha256(self) -> str:
        """Tells prompts apart, whatever file they came from: the hash of the messages as canonical JSON."""
        text = json.dumps([dict(m) for m in self.messages], ensure_ascii=True, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def encode(self, tokenizer: TextTokenizer) -> list[int]:
        """Token ids, through the model's chat template if it has one, else of the messages as paragraphs. Where a template
        knows no system role, that message opens the user's first one."""
        if not tokenizer.has_chat:
            return tokenizer.encode("\n\n".join(m["content"] for m in self.messages))
        try:
            return tokenizer.chat(self.messages)
        except BadInput:
            if self.messages[0]["role"] != "system" or len(self.messages) < 2:
                raise
            system, first, *rest = self.messages
            opening = {"role": first["role"], "content": f"{system['content']}\n\n{first['content']}"}
            return tokenizer.chat([opening, *rest])


@dataclass(frozen=True, slots=True)
class Workload:
    """A named list of prompts; `source` is `built-in` or the file's path."""

    name: str
    source: str
    prompts: tuple[Prompt, ...]

    @property
    def sha256(self) -> str:
        """Tells lists of prompts apart: the hash of the prompts' hashes, in their order."""
        return hashlib.sha256("".join(p.sha256 for p in self.prompts).encode()).hexdigest()

    def first(self, limit: int | None) -> Workload:
        """The same with at most `limit` prompts."""
        return Workload(self.name, self.source, self.prompts[:limit])


@cache
def built_in() -> Mapping[str, Workload]:
    """The package's own workloads by name, in the order of the file."""
    lines = (resources.files(__package__) / "data" / "workloads.jsonl").read_text(encoding="utf-8").splitlines()
    prompts: dict[str, list[Prompt]] = {}
    for number, line in enumerate(lines, 1):
        entry = json.loads(line)
        prompts.setdefault(entry["workload"], []).append(_prompt(entry, f"line {number}"))
    return {name: Workload(name, "built-in", tuple(found)) for name, found in prompts.items()}


def names() -> tuple[str, ...]:
    """Names of the built-in workloads."""
    return tuple(built_in())


def find(name: str) -> Workload:
    """A built-in workload, or one from a file. Raises `BadInput` for what is neither, with the closest name."""
    if name in built_in():
        return built_in()[name]
    try:
        there = Path(name).is_file()
    except (OSError, ValueError):
        there = False
    if there:
        return read(Path(name))
    close = difflib.get_close_matches(name, names(), 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise BadInput(f"no workload {name!r}; {hint}there are {', '.join(names())}, or give a .jsonl or .txt file")


def read(path: Path) -> Workload:
    """A workload from a file: `.jsonl`, one object per line with `prompt` (text), `messages` (a conversation that ends with the
    user) or `turns` (of which the first is asked); or `.txt`, prompts separated by blank lines. Raises `BadInput`, naming the
    line, for files that cannot be read so, and for files without a prompt."""
    suffix = path.suffix.lower()
    if suffix not in (".jsonl", ".txt"):
        raise BadInput(f"{path}: a workload is a .jsonl file (one object per line) or a .txt file (blocks between blank lines)")
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise BadInput(f"cannot read the workload {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not valid UTF-8 (byte {error.start}); convert it first") from None
    prompts = _lines(path, text) if suffix == ".jsonl" else _blocks(text)
    if not prompts:
        raise BadInput(f"{path} has no prompts")
    return Workload(path.stem, str(path), tuple(prompts))


def _blocks(text: str) -> list[Prompt]:
    return [_said(block.strip("\r\n")) for block in re.split(r"\n(?:[ \t\r]*\n)+", text) if block.strip()]


def _lines(path: Path, text: str) -> list[Prompt]:
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise BadInput(f"{path}, line {number}: not JSON ({error})") from None
        prompts.append(_prompt(entry, f"{path}, line {number}"))
    return prompts


def _prompt(entry: Any, where: str) -> Prompt:
    """A prompt from an object of a `.jsonl` file."""
    if not isinstance(entry, dict):
        raise BadInput(f"{where}: expected an object with prompt, messages or turns, got {type(entry).__name__}")
    if "messages" in entry:
        return _conversation(entry["messages"], where)
    text = entry.get("prompt")
    if text is None and isinstance(entry.get("turns"), list) and entry["turns"]:
        text = entry["turns"][0]
    if not isinstance(text, str) or not text.strip():
        raise BadInput(f"{where}: expected prompt (text), messages (a list) or turns (a list of texts)")
    return _said(text)


def _conversation(messages: Any, where: str) -> Prompt:
    good = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not good or not messages or messages[-1]["role"] == "assistant":
        raise BadInput(f"{where}: messages must be a list of objects with role and content, the last one not the assistant's")
    return Prompt(tuple({"role": m["role"], "content": m["content"]} for m in messages))


def _said(text: str) -> Prompt:
    return Prompt(({"role": "user", "content": text},))
