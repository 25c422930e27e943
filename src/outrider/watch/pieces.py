"""Which characters of a streamed text came from which token.

The engine streams text that is safe to print: it holds back half a character, or what may become a stop string. So the text of
a round is not the text of the round's tokens. Here the tokens are decoded one by one into labelled pieces, and every printed
text takes as many pieces as it covers. What is printed is always exactly the engine's text; only the labels come from here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

from ..results import Chunk
from ..types import NONE

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4
"""Bytes of UTF-8; after so many tokens without a whole character, the bytes are simply no text."""


class Mark(Enum):
    """What a piece of text is."""

    OWN = "own"
    ACCEPTED = "accepted"
    REJECTED = "rejected"


Piece = tuple[str, Mark]


class Pieces:
    """A queue of labelled pieces, filled by `add` and emptied by the text that gets printed."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._before: list[int] = []
        self._open: list[int] = []
        self._queue: deque[Piece] = deque()

    def take(self, chunk: Chunk) -> list[Piece]:
        """The pieces of `chunk.text`, in order, with rejected guesses in between where they stood."""
        bonus = len(chunk.token_ids) - 1 if chunk.origins and chunk.origins[-1] == NONE else len(chunk.token_ids)
        for i, (token, origin) in enumerate(zip(chunk.token_ids, chunk.origins, strict=True)):
            if i == bonus:
                self._reject(chunk.rejected)
            self._add(token, Mark.OWN if origin == NONE else Mark.ACCEPTED)
        if bonus == len(chunk.token_ids):
            self._reject(chunk.rejected)
        return self.split(chunk.text)

    def split(self, text: str) -> list[Piece]:
        """`text` cut into pieces that are still queued; their texts, without the rejected ones, add up to `text`."""
        out: list[Piece] = []
        while text and self._queue:
            piece, mark = self._queue.popleft()
            if mark is Mark.REJECTED:
                out.append((piece, mark))
                continue
            # A tokenizer may drop the space of a piece that it sees first: one character of slack keeps step.
            slack = 1 if text[1:].startswith(piece) and not text.startswith(piece) else 0
            size = min(len(piece) + slack, len(text))
            out.append((text[:size], mark))
            if size < len(piece):
                self._queue.appendleft((piece[size:], mark))
            text = text[size:]
        if text:
            out.append((text, Mark.OWN))
        return out

    def _reject(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._queue.append((self._decode(tokens), Mark.REJECTED))

    def _add(self, token: int, mark: Mark) -> None:
        self._open.append(token)
        before = self._decode(self._before)
        text = self._decode(self._before + self._open)[len(before) :]
        if text.endswith(REPLACEMENT) and len(self._open) < LONGEST_CHARACTER:
            return
        if text:
            self._queue.append((text, mark))
        self._before, self._open = self._open, []
