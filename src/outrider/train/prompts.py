"""Where texts begin: openings of user turns for a target that invents its own, and what a user's files hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadInput
from ..models.tokenizer import TextTokenizer

SUFFIXES = (".jsonl", ".parquet", ".txt", ".md")
_COLUMNS = ("messages", "prompt", "text")
OPENINGS = (
    "Write a Python function that",
    "Write a Python program which reads",
    "Write a Python class for",
    "Implement in JavaScript",
    "Here is my code:\n\n```python\ndef",
    "Fix the bug in this function:\n\n```python\n",
    "Write a SQL query that",
    "Write unit tests for",
    "Explain what this code does:\n\n```",
    "Write a shell script to",
    "How do I sort",
    "Refactor the following",
    "Write HTML and CSS for",
    "Write a recursive function",
    "Hi! I",
    "Hello, can you help me",
    "I feel",
    "What should I do when",
    "My friend",
    "Can you recommend",
    "I'm planning",
    "Tell me about",
    "Give me advice on",
    "Let's talk about",
    "Thanks! Now",
    "Summarise the following text:\n\n",
    "Summarize this article in three sentences:\n\n",
    "Give me the key points of this passage:\n\n",
    "Write a one-paragraph summary of",
    "Shorten this email:\n\nDear",
    "What is the main idea of this text?\n\n",
    "Rewrite this paragraph so that it is easier to read:\n\n",
    "What is",
    "What are the differences between",
    "Why does",
    "Who was",
    "When did",
    "How does",
    "How many",
    "Where can",
    "Explain",
    "Is it true that",
    "Which",
    "Describe the causes of",
    "List five",
    "Write a story about",
    "Write a poem about",
    "Write a short story in which",
    "Write a dialogue between",
    "Write a letter to",
    "Imagine that",
    "Describe a place where",
    "Write the opening paragraph of",
    "Come up with a name for",
    "Write a song about",
    "Write a product description for",
    "Solve step by step:",
    "Solve for x:",
    "A train leaves",
    "If a shop sells",
    "Calculate",
    "What is the probability that",
    "Find the area of",
    "John has",
    "A farmer has",
    "What is the sum of",
    "Prove that",
    "Convert",
    "Translate into",
    "Make a table of",
    "Create a plan for",
    "Classify the following",
    "Edit the following text",
    "Compare",
    "Suggest",
    "Pretend you are",
    "Extract all names from this text:\n\n",
    "Write an essay on",
    "Write a news report about",
    "Give step-by-step instructions for",
    "",
    "",
    "",
    "",
    "",
    "",
    "",
    "",
    "",
    "",
    "",
    "",
)
"""First words of user turns, of the kinds that people ask for; the empty ones leave the whole turn to the target."""
_PIECE = 2000
"""Characters of a text file that make one prompt."""


@dataclass(frozen=True, slots=True)
class Given:
    """A prompt from a user's file: a conversation, or a text to continue."""

    messages: tuple[Mapping[str, str], ...] = ()
    text: str = ""

    def ids(self, tokenizer: TextTokenizer, most: int) -> list[int]:
        """Its tokens: a conversation through the chat template, a text cut to its last `most`."""
        return tokenizer.chat(self.messages) if self.messages else tokenizer.encode(self.text)[-most:]


def read(paths: list[str]) -> list[Given]:
    """All prompts of the files: JSON lines or rows of parquet with `messages`, `prompt` or `text`, or plain text, a page or so at
    a time. Raises `BadInput`, naming file and line, for what cannot be understood, and for files that hold nothing."""
    found: list[Given] = []
    for name in paths:
        path = Path(name).expanduser()
        if path.suffix not in SUFFIXES:
            raise BadInput(f"{path}: training data are {', '.join(SUFFIXES)} files; convert it, say to one JSON object per line")
        some = list(_rows(path) if path.suffix == ".parquet" else _lines(path) if path.suffix == ".jsonl" else _pieces(path))
        if not some:
            raise BadInput(f"{path} is empty: leave it out, or put prompts there")
        found += some
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as UTF-8 text: {error}") from error


def _rows(path: Path) -> Iterator[Given]:
    for number, row in enumerate(_records(path), 1):
        try:
            yield _given(row)
        except (ValueError, TypeError, KeyError) as error:
            raise BadInput(f"{path}, row {number}: {error}; each row has messages, prompt or text") from error


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a parquet file, of the columns that are known, without empty cells."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise BadInput(f"{path}: parquet files need pyarrow: pip install 'outrider[parquet]', or convert it to .jsonl") from error
    try:
        with parquet.ParquetFile(path) as file:
            columns = [name for name in _COLUMNS if name in file.schema_arrow.names]
            batches = file.iter_batches(columns=columns) if columns else ()
            for batch in batches:
                yield from ({k: v for k, v in row.items() if v is not None} for row in batch.to_pylist())
    except (OSError, pyarrow.ArrowException) as error:
        raise BadInput(f"{path} cannot be read as parquet: {str(error) or type(error).__name__:.200}") from error
    if not columns:
        raise BadInput(f"{path} has none of the columns {', '.join(_COLUMNS)}: rename one, or convert it to .jsonl")


def _lines(path: Path) -> Iterator[Given]:
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield _given(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            what = f"no JSON ({error})" if isinstance(error, json.JSONDecodeError) else str(error)
            raise BadInput(f"{path}, line {number}: {what}; each line is one object with messages, prompt or text") from error


def _given(item: Any) -> Given:
    """A conversation ends with the user's turn: what somebody else answered is left to the target to write."""
    if not isinstance(item, dict):
        raise ValueError("not a JSON object")
    if "messages" not in item:
        text = item.get("prompt", item.get("text"))
        if not isinstance(text, str) or not text.strip():
            raise ValueError("neither messages nor a prompt or text that is not empty")
        return Given(text=text)
    messages = item["messages"]
    if not isinstance(messages, list) or not all(_is_message(m) for m in messages):
        raise ValueError("messages must be a list of objects with role and content, both text")
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError("messages without a turn to answer")
    return Given(messages=tuple(messages))


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


def _pieces(path: Path) -> Iterator[Given]:
    """Paragraphs, joined until they are long enough to go on from."""
    piece = ""
    for paragraph in _text(path).split("\n\n"):
        piece = f"{piece}\n\n{paragraph}" if piece else paragraph
        while len(piece) >= _PIECE:
            yield Given(text=piece[:_PIECE])
            piece = piece[_PIECE:]
    if piece.strip():
        yield Given(text=piece)
