"""Labels on streamed text: whatever is held back, the text is the engine's and every character keeps its label."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cli.painter import Painter
from outrider.results import Chunk
from outrider.types import NONE
from outrider.watch.pieces import Mark, Pieces


def chars(tokens: Sequence[int]) -> str:
    return "".join(chr(t) for t in tokens)


def utf8(tokens: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(tokens).decode(errors="replace")


def chunk(text: str, tokens: Sequence[int], guessed: int, rejected: Sequence[int] = ()) -> Chunk:
    origins = (0,) * guessed + (NONE,) * (len(tokens) - guessed)
    return Chunk(text, tuple(tokens), origins, tuple(rejected))


def test_a_round_is_accepted_then_rejected_then_own():
    found = Pieces(chars).take(chunk("abc", [97, 98, 99], 2, [120]))
    assert found == [("a", Mark.ACCEPTED), ("b", Mark.ACCEPTED), ("x", Mark.REJECTED), ("c", Mark.OWN)]


def test_half_a_character_waits_for_its_other_half():
    pieces = Pieces(utf8)
    first, second = "ü".encode()
    assert pieces.take(chunk("", [first], 1)) == []
    assert pieces.take(chunk("üa", [second, 97], 0)) == [("ü", Mark.OWN), ("a", Mark.OWN)]


def test_bytes_that_are_no_text_do_not_hold_up_the_rest():
    pieces = Pieces(utf8)
    pieces.take(chunk("", [255] * 4, 0))
    assert pieces.take(chunk("\ufffd" * 4 + "a", [97], 1))[-1] == ("a", Mark.ACCEPTED)


def test_text_cut_by_a_stop_string_is_not_shown():
    assert Pieces(chars).take(chunk("a", [97, 98, 99], 3)) == [("a", Mark.ACCEPTED)]


def test_a_space_the_tokenizer_drops_does_not_shift_the_labels():
    found = Pieces(chars).take(chunk(" ab", [97, 98], 1))
    assert found == [(" a", Mark.ACCEPTED), ("b", Mark.OWN)]


@given(st.lists(st.tuples(st.text("abü€", max_size=3), st.booleans(), st.text("xy", max_size=2)), max_size=8), st.data())
def test_pieces_add_up_to_the_text_whatever_is_held_back(rounds, data):
    pieces, written, shown, marks, found = Pieces(chars), "", 0, [], []
    for text, guessed, rejected in rounds:
        written += text
        marks += [Mark.ACCEPTED if guessed else Mark.OWN] * len(text)
        end = data.draw(st.integers(shown, len(written)))
        tokens = [ord(c) for c in text]
        found += pieces.take(chunk(written[shown:end], tokens, len(tokens) if guessed else 0, [ord(c) for c in rejected]))
        shown = end
    found += pieces.split(written[shown:])
    kept = [(c, mark) for text, mark in found if mark is not Mark.REJECTED for c in text]
    assert kept == list(zip(written, marks, strict=True))


def test_a_reader_that_went_away_is_left_to_the_command(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        Painter(chars).show(chunk("a", [97], 0))
