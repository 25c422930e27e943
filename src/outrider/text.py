"""From tokens to text, a piece at a time, without ever showing half a character or part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from .protocols import Tokenizer

REPLACEMENT = "\ufffd"
_WINDOW = 6
"""Tokens of context decoded with each new piece, so that spaces and merges come out as in the whole text."""


class TextStream:
    """The text of one request as it grows.

    `push` takes tokens in order and says after how many of them a stop string was complete (all of them if none was): a stop string ends
    the text at the first token that completes it, however the tokens arrived. `pop` gives the text that may be shown by now.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), include_stop: bool = False, skip_special: bool = True
    ) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._include, self._skip = include_stop, skip_special
        self._ids: list[int] = []
        self._anchor = self._read = 0
        self._text, self._shown = "", 0
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        """All text so far, cut at the stop string."""
        return self._text

    def push(self, tokens: Sequence[int], last: bool = False) -> int:
        """Append `tokens`; returns how many were used before a stop string ended the text. `last` flushes what was held back
        for want of the rest of a character."""
        groups = [[t] for t in tokens] if self._stops else ([list(tokens)] if tokens else [])
        used = 0
        for group in groups:
            self._ids += group
            used += len(group)
            self._decode(flush=False)
            if self._cut():
                return used
        if last:
            self._decode(flush=True)
            self._cut()
        return used

    def pop(self, last: bool = False) -> str:
        """Text not shown yet, short of anything that may turn out to be the beginning of a stop string."""
        end = len(self._text) if last or self.stopped is not None else len(self._text) - self._held()
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _decode(self, flush: bool) -> None:
        before = self._tokenizer.decode(self._ids[self._anchor : self._read], self._skip)
        now = self._tokenizer.decode(self._ids[self._anchor :], self._skip)
        if now.endswith(REPLACEMENT) and not flush:
            return
        self._text += now[len(before) :]
        self._read = len(self._ids)
        self._anchor = max(0, self._read - _WINDOW)

    def _cut(self) -> bool:
        """Look for a stop string; the earliest in the text wins, the longest of those that begin there."""
        found = [(at, -len(s), s) for s in self._stops if (at := self._text.find(s)) >= 0]
        if not found:
            return False
        at, _, stop = min(found)
        self.stopped = stop
        self._text = self._text[: at + (len(stop) if self._include else 0)]
        return True

    def _held(self) -> int:
        longest = max((len(s) for s in self._stops), default=1) - 1
        for n in range(min(longest, len(self._text)), 0, -1):
            if any(s.startswith(self._text[-n:]) for s in self._stops):
                return n
        return 0
