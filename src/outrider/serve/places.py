"""Log-probabilities in OpenAI's two shapes: a list of tokens (chat), parallel lists (completions)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..types import Logprob

LEAST = -9999.0
"""Stands for minus infinity, which JSON lacks."""
HALF = "\ufffd"

Row = tuple[Logprob, ...]


def chat_place(row: Row, top: int) -> dict[str, Any]:
    """One token with the `top` likeliest at its place."""
    best = sorted((entry for entry in row if entry.rank <= top), key=lambda entry: entry.rank)
    return _entry(row[0]) | {"top_logprobs": [_entry(entry) for entry in best]}


def completion_places(rows: Sequence[Row | None], first: str, offset: int) -> dict[str, Any]:
    """Parallel lists; `first` is the text of a token without a row (the first of a prompt), `offset` where the text begins."""
    tokens = [first if row is None else row[0].text for row in rows]
    offsets, at = [], offset
    for token in tokens:
        offsets.append(at)
        at += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if row is None else _finite(row[0].logprob) for row in rows],
        "top_logprobs": [None if row is None else _table(row) for row in rows],
        "text_offset": offsets,
    }


def _entry(entry: Logprob) -> dict[str, Any]:
    whole = HALF not in entry.text
    return {
        "token": entry.text,
        "logprob": _finite(entry.logprob),
        "bytes": list(entry.text.encode()) if whole else None,
    }


def _table(row: Row) -> dict[str, float]:
    """By text; of two tokens that read alike, the likelier."""
    return {entry.text: _finite(entry.logprob) for entry in sorted(row, key=lambda entry: entry.logprob)}


def _finite(value: float) -> float:
    return max(value, LEAST)
