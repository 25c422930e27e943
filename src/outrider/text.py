"""From tokens to text, a piece at a time, without ever showing half a character or part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .protocols import Tokenizer

REPLACEMENT = "\ufffd"
_WINDOW = 6
"""Tokens of context, at least, that are decoded with each new one, so that spaces and merges come out as in the whole text."""
_UNFINISHED = 3
"""A UTF-8 character has up to four bytes: so many tokens may go by before it is whole, and so many marks may stand for it."""


class TextStream:
    """The text of one request as it grows, one token at a time, so that it does not depend on how tokens arrived.

    `push` takes tokens in order and says after how many of them a stop string was complete (all if none was): a stop string ends
    the text at the first token that completes it, though not among the first `min_tokens`. `pop` gives the text that may be
    shown by now. Both take a time that does not depend on the length of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._whole: Callable[[int, bool], str | None] = getattr(tokenizer, "whole", _depends)
        self._early = min_tokens  # so many more tokens cannot complete a stop string that counts
        self._longest = max(map(len, self._stops), default=0)
        self._include, self._skip = include_stop, skip_special
        self._window: list[int] = []  # the last tokens, their text, and how much of it has been taken over
        self._context, self._taken = "", 0
        self._waiting = 0  # tokens since the text last ended with a whole character
        self._shown: list[str] = []
        self._open = ""  # not shown yet
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        """All text so far, cut at the stop string."""
        return "".join(self._shown) + self._open

    def push(self, tokens: Sequence[int], last: bool = False) -> int:
        """Append `tokens`; returns how many were used before a stop string ended the text. `last` flushes what was held back
        for want of the rest of a character."""
        if self.stopped is not None:
            return 0
        for used, token in enumerate(tokens, 1):
            if self._append(self._decode(token)):
                return used
            self._early -= 1
        if last:
            self._append(self._context[self._taken :])
            self._taken = len(self._context)
        return len(tokens)

    def pop(self, last: bool = False) -> str:
        """Text not shown yet, short of anything that may turn out to be the beginning of a stop string."""
        whole = last or not self._stops or self.stopped is not None
        end = len(self._open) if whole else len(self._open) - self._held()
        piece, self._open = self._open[:end], self._open[end:]
        if piece:
            self._shown.append(piece)
        return piece

    def next(self, tokens: Sequence[int]) -> str | None:
        """`push` and `pop` of tokens in the middle of a text; None, and nothing done, where it takes more than a look: where stop
        strings count, and where a character is not whole."""
        if self._stops or self._waiting or self._open:
            return None
        whole, skip = self._whole, self._skip
        pieces = [whole(token, skip) for token in tokens] if len(tokens) > 1 else (whole(tokens[0], skip),)
        if None in pieces:
            return None
        if self._window:
            self._window, self._context, self._taken = [], "", 0
        piece = "".join(pieces)  # type: ignore[arg-type]
        if piece:
            self._shown.append(piece)
        return piece

    def piece(self, token: int) -> str:
        """The text of one token by itself, special ones included; marks for parts of a character. Some tokenizers drop a leading
        space at the start of a text, so the token is also looked at where it follows itself."""
        alone, twice = (self._tokenizer.decode([token] * count, False) for count in (1, 2))
        return f" {alone}" if alone and twice == f"{alone} {alone}" else alone

    def _decode(self, token: int) -> str:
        """What `token` adds to the text: nothing while its last character is unfinished."""
        if not self._waiting and (whole := self._whole(token, self._skip)) is not None:
            self._window, self._context, self._taken = [], "", 0
            return whole
        window = [*self._window, token]
        text = self._tokenizer.decode(window, self._skip)
        marks = len(text) - len(text.rstrip(REPLACEMENT))
        if text and text == self._context and not marks:
            return ""  # a token without text (a special one): it must not push the others out of the window
        self._waiting = self._waiting + 1 if marks else 0
        broken = self._waiting > _UNFINISHED  # no character takes that long
        # Byte-fallback decoders turn all bytes of a run into marks until its last character is whole, so all marks must wait.
        end = max(self._taken, len(text) - (min(marks, _UNFINISHED) if broken else marks))
        piece = text[self._taken : end]
        self._window, self._context, self._taken = window, text, end
        if len(window) >= 2 * _WINDOW and (broken or not marks):
            self._shorten()
        return piece

    def _shorten(self) -> None:
        """Forget old tokens of the window, where what is left reads as it did: not in the middle of a character."""
        for start in range(len(self._window) - _WINDOW, 0, -1):
            text = self._tokenizer.decode(self._window[start:], self._skip)
            gone = len(self._context) - len(text)
            if self._context.endswith(text) and gone <= self._taken and bool(text) == bool(self._context):
                self._window, self._context, self._taken = self._window[start:], text, self._taken - gone
                return

    def _append(self, piece: str) -> bool:
        """Add to the text and look for a stop string that ends in `piece`; the earliest in the text wins, the longest of those
        that begin there. None counts before `min_tokens` tokens are written."""
        before = len(self._open)
        self._open += piece
        if self._early > 0 or not self._stops:
            return False
        found = [(at, -len(s), s) for s in self._stops if (at := self._open.find(s, max(0, before - len(s) + 1))) >= 0]
        if not found:
            return False
        at, _, stop = min(found)
        self.stopped = stop
        self._open = self._open[: at + (len(stop) if self._include else 0)]
        return True

    def _held(self) -> int:
        """How many characters at the end may be the beginning of a stop string. A match can thus never begin in shown text."""
        for n in range(min(self._longest - 1, len(self._open)), 0, -1):
            if any(s.startswith(self._open[-n:]) for s in self._stops):
                return n
        return 0


def _depends(token: int, skip_special: bool) -> str | None:
    """Of tokenizers that do not tell what a token adds."""
    return None
