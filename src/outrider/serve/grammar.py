"""Structured output: a request's grammar as a logits processor, at drafted positions as well as at written ones.

llguidance turns a JSON schema, regular expression or Lark grammar into an automaton over tokens. A processor must be a pure
function of its path, so the automaton is moved: back to where a path leaves the last one, then along what is new.

Where the automaton says what must come next, that is a guess that costs nothing (`Grammar.forced`). JSON leaves open how many
blanks stand between its parts, so hardly anything is forced; for guesses there is a second automaton of the same form with blanks
as models usually write them, which counts as long as the text follows it. Beyond that, the text's own habits are followed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any

import llguidance
import numpy as np
import torch
from llguidance.hf import from_tokenizer
from torch import Tensor

from ..errors import BadInput
from ..models.tokenizer import TextTokenizer

BLANKS = r"[\x20\x0A]{0,16}"
"""What may stand between JSON's tokens: enough for pretty-printing, and no endless run of blanks."""
USUAL: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Blanks as models write them if nobody asks for lines of their own."""
MARKS, FEW = b' \n\t{}[]",:', 4
"""What stands between JSON's words, and how many ways of it are tried."""
MOST, FAR = 8, 32
"""Automata kept for the samples of one prompt, and how many tokens one goes back before another is made."""


@dataclass(slots=True)
class _Track:
    """An automaton, and the tokens that it has read."""

    matcher: Any
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Form:
    """A grammar's automaton, at its beginning and never moved: making one can take seconds, a copy does not. `usual`: the same
    with blanks as they are usually written, where that is narrower."""

    strict: Any
    usual: Any = None


class Follower:
    """An automaton that is where a path asks for it. One that failed on some path is used no more: others must not suffer."""

    def __init__(self, fresh: Any) -> None:
        self._fresh = fresh
        self._tracks = [_Track(fresh.deep_copy())]

    def follow(self, written: tuple[int, ...]) -> tuple[Any, int]:
        """The matcher after as much of `written` as its grammar allows, and how many tokens that is. Raises `RuntimeError` where
        the grammar proves too complex."""
        track, shared = self._nearest(written)
        if shared < len(track.tokens) and not track.matcher.rollback(len(track.tokens) - shared):
            raise RuntimeError(f"the grammar cannot go back: {track.matcher.get_error()}")
        read = shared + int(track.matcher.try_consume_tokens(list(written[shared:])))
        track.tokens = written[:read]
        if track.matcher.is_error():
            raise RuntimeError(f"the grammar failed: {track.matcher.get_error()}")
        return track.matcher, read

    def _nearest(self, written: tuple[int, ...]) -> tuple[_Track, int]:
        """The automaton that has to move least, and how many tokens it keeps."""
        self._tracks = [t for t in self._tracks if not t.matcher.is_error()] or [_Track(self._fresh.deep_copy())]
        found = [(_shared(track.tokens, written), track) for track in self._tracks]
        shared, track = max(found, key=lambda pair: pair[0])
        if len(track.tokens) - shared > FAR and len(self._tracks) < MOST:
            track = _Track(track.matcher.deep_copy(), track.tokens)
            self._tracks.append(track)
        return track, shared


class Grammar:
    """The processor of one prompt's requests; what they write begins at `start`. Tokens that no text of the grammar can go on
    with are forbidden; where the text is whole, nothing but its end is allowed."""

    def __init__(self, tokens: Any, form: Form, start: int, ends: Iterable[int]) -> None:
        self._tokens, self._start, self._ends = tokens, start, sorted(ends)
        self._marks: dict[int, bytes] = {}
        self._form, self._source = Follower(form.strict), form

    def __call__(self, tokens: Sequence[int], scores: Tensor) -> Tensor:
        """`scores [V]` with -inf where the grammar forbids a token. Paths that the grammar rules out are left alone: nothing
        on them can be accepted. Raises `RuntimeError` where the grammar proves too complex."""
        written = tuple(tokens[self._start :])
        matcher, read = self._form.follow(written)
        if read == len(written):
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            if matcher.is_error():  # the mask then allows an end, wherever the text is
                raise RuntimeError(f"the grammar failed: {matcher.get_error()}")
        elif all(token in self._ends for token in written[read:]):
            allowed = np.zeros(max(self._ends) + 1, dtype=np.uint8)
            allowed[self._ends] = 1
        else:
            return scores
        return _masked(scores, allowed)

    def forced(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `protocols.Forcing`."""
        path, found = tuple(tokens[self._start :]), list[int]()
        while len(found) < most:
            more = [] if self._usual is None else self._next(self._usual, path)
            more = more or self._next(self._ahead, path) or self._punctuation(path)
            if not more:
                break
            found += more
            path += tuple(more)
        return found[:most]

    @cached_property
    def _ahead(self) -> Follower:
        """For guesses: what goes wrong on their way must not touch the automaton that decides."""
        return Follower(self._source.strict)

    @cached_property
    def _usual(self) -> Follower | None:
        return None if self._source.usual is None else Follower(self._source.usual)

    def _next(self, follower: Follower, written: tuple[int, ...]) -> list[int]:
        matcher, read = follower.follow(written)
        if read < len(written):
            return []
        return self._ends[:1] if matcher.is_stopped() else list(matcher.compute_ff_tokens())

    def _punctuation(self, path: tuple[int, ...]) -> list[int]:
        """What JSON puts between its parts, as the text itself did before: after the same mark, or where a word must end."""
        if self._usual is None or not path:
            return []
        if self._mark(path[-1]):
            after = (path[i + 1] for i in range(len(path) - 2, -1, -1) if path[i] == path[-1])
            options = list(dict.fromkeys(takewhile(self._mark, after)))
        else:
            matcher, read = self._ahead.follow(path)
            lead = bytes(matcher.compute_ff_bytes()) if read == len(path) else b""
            ends = (t for before, t in pairwise(path) if lead and not self._mark(before))
            options = list(dict.fromkeys(reversed([t for t in ends if self._mark(t).startswith(lead)])))
        return next(([t] for t in options[:FEW] if self._ahead.follow((*path, t))[1] > len(path)), [])

    def _mark(self, token: int) -> bytes:
        """A token's text if it is nothing but punctuation and blanks, else nothing."""
        if token not in self._marks:
            text = bytes(self._tokens.decode_bytes([token]))
            self._marks[token] = b"" if text.strip(MARKS) else text
        return self._marks[token]


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens two paths begin with alike. They tend to differ near their ends, so that is where it looks first."""
    size, step = min(len(one), len(other)), 1
    while one[:size] != other[:size]:
        size, step = max(size - step, 0), 2 * step
    while size < min(len(one), len(other)) and one[size] == other[size]:
        size += 1
    return size


def _masked(scores: Tensor, allowed: np.ndarray[Any, Any]) -> Tensor:
    width = len(scores)
    kept = np.zeros(width, dtype=np.bool_)
    size = min(width, len(allowed))
    kept[:size] = allowed[:size].astype(np.bool_)
    return scores.masked_fill_(torch.from_numpy(~kept).to(scores.device), float("-inf"))


class Grammars:
    """Compiles what requests ask for. The table of all tokens takes a second to make and is made once."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: Any = None

    def compile(self, kind: str, source: Any) -> Form:
        """What requests may ask for. `kind`: json_object, json_schema, regex or grammar (Lark). Raises `BadInput`."""
        matcher = llguidance.LLMatcher
        if source is False:
            raise BadInput("response_format: the schema is false, which nothing satisfies; use true or {} for any JSON")
        usual: str | None = None
        if kind in ("json_object", "json_schema"):
            options: Any = ({"whitespace_pattern": BLANKS}, USUAL)
            text = json.dumps({} if source is True else source)
            try:
                made, usual = (matcher.grammar_from_json_schema(text, overrides=blanks) for blanks in options)
            except ValueError as error:
                raise BadInput(f"response_format: the schema cannot be used: {str(error)[:500]}") from None
        else:
            made = matcher.grammar_from_regex(source) if kind == "regex" else matcher.grammar_from_lark(source)
        strict = self._automaton(made)
        if strict.is_error():
            raise BadInput(f"response_format: the {kind} cannot be used: {str(strict.get_error())[:500]}")
        loose = None if usual is None else self._automaton(usual)
        return Form(strict, None if loose is None or loose.is_error() else loose)

    def _automaton(self, grammar: str) -> Any:
        """With an error if it is none, or if nothing can be written by it."""
        made = llguidance.LLMatcher(self.tokens, grammar, log_level=0)
        if made.is_error():
            return made
        tried = made.deep_copy()
        tried.compute_bitmask()
        return tried if tried.is_error() else made

    def processor(self, grammar: Form, start: int) -> Grammar:
        """For a prompt of `start` tokens."""
        return Grammar(self.tokens, grammar, start, self._tokenizer.eos_ids)

    @property
    def tokens(self) -> Any:
        if self._tokens is None:
            backend: Any = self._tokenizer.backend
            try:
                self._tokens = from_tokenizer(backend, eos_token=sorted(self._tokenizer.eos_ids))
            except Exception as error:  # tokenizers that the library cannot read raise all sorts of things
                raise BadInput(f"response_format: this model's tokenizer does not allow grammars ({error})") from error
        return self._tokens
