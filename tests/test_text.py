"""Text as it grows: the same however tokens arrive, no half characters, no part of a stop string, in constant time per token."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from outrider import registry
from outrider.config import SamplingParams
from outrider.errors import ModelNotFound
from outrider.models import embedded
from outrider.models.gguf_file import read_header
from outrider.models.gguf_tokenizer import build_tokenizer
from outrider.models.tokenizer import TextTokenizer
from outrider.text import REPLACEMENT, TextStream
from outrider.types import NONE, Finish

from . import probes, tiny

SPECIAL = 256
WORDS = ["the", " cat", " sat", "END", "nd of", " E", "N", "D!", "é", "日本", "\n\n", "###"]


class Bytes:
    """Ids below 256 are bytes, 256 is a special token without text, then come words. Counts what it is asked to decode."""

    def __init__(self) -> None:
        self.longest = self.calls = 0

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        ids = list(ids)
        self.longest, self.calls = max(self.longest, len(ids)), self.calls + 1
        special = b"" if skip_special else b"<s>"
        parts = [bytes([i]) if i < 256 else special if i == SPECIAL else WORDS[i - 257].encode() for i in ids]
        return b"".join(parts).decode("utf-8", errors="replace")


def fallback() -> TextTokenizer:
    """A sentencepiece-like tokenizer: words with a leading mark, single bytes for everything else."""
    pieces = ["<unk>", "</s>", "▁a", "▁the", "cat", "▁", "ing"]
    vocab = {p: i for i, p in enumerate(pieces)} | {f"<0x{b:02X}>": len(pieces) + b for b in range(256)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["</s>"])
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>"))


@pytest.fixture(scope="module")
def smol() -> TextTokenizer:
    try:
        return TextTokenizer(build_tokenizer(read_header(embedded.find())))
    except ModelNotFound:
        pytest.skip("the embedded model is not installed")


def blocks(tokens: Sequence[int], cuts: Iterable[int]) -> list[list[int]]:
    edges = sorted({0, len(tokens), *(c % (len(tokens) + 1) for c in cuts)})
    return [list(tokens[a:b]) for a, b in pairwise(edges)]


def feed(stream: TextStream, parts: Sequence[Sequence[int]]) -> tuple[str, int, list[str]]:
    """Text, tokens used and the pieces shown, as the engine does it: block by block, the last one flushed."""
    used, pieces = 0, []
    for i, part in enumerate(parts or [[]]):
        last = i >= len(parts) - 1
        used += stream.push(part, last=last)
        pieces.append(stream.pop(last))
        if stream.stopped is not None:
            break
    return stream.text, used, pieces


def definition(tokenizer: Bytes, tokens: Sequence[int], stops: Sequence[str], include: bool) -> tuple[str, int]:
    """Full decoding after every token: the text ends with the first token that completes a stop string."""
    for used in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:used])
        safe = text.rstrip(REPLACEMENT) if used < len(tokens) else text
        found = [(safe.find(s), -len(s)) for s in stops if s in safe]
        if found:
            at, size = min(found)
            return safe[: at - size if include else at], used
    return tokenizer.decode(tokens), len(tokens)


TOKENS = st.lists(
    st.one_of(st.integers(0, 256 + len(WORDS)), st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9, 0x41, SPECIAL])), max_size=40
)
WORDY = st.lists(st.integers(256, 256 + len(WORDS)), max_size=30)
STOPS = st.lists(st.sampled_from(["END", "nd of", "D! E", "E", "sat", "cat sat", "\n\n###", "éé", "😀", "本the"]), max_size=3)


@settings(max_examples=300, deadline=None)
@given(tokens=TOKENS | WORDY, cuts=st.lists(st.integers(0, 60), max_size=8), stops=STOPS, include=st.booleans())
def test_any_split_gives_the_text_of_the_definition(tokens: list[int], cuts: list[int], stops: list[str], include: bool) -> None:
    plain = Bytes()
    text, used, pieces = feed(TextStream(plain, stops, include), blocks(tokens, cuts))
    assert (text, used) == definition(plain, tokens, stops, include)
    assert "".join(pieces) == text
    ones = feed(TextStream(plain, stops, include), [[t] for t in tokens])
    assert ones[:2] == (text, used) and "".join(ones[2]) == text


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 262) | st.sampled_from([7 + b for b in "é🎉日".encode()]), max_size=40),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    stops=st.lists(st.sampled_from(["the cat", "a a", "cat", "é"]), max_size=2),
)
def test_byte_fallback_does_not_depend_on_the_split(tokens: list[int], cuts: list[int], stops: list[str]) -> None:
    whole, parts = (TextStream(_FALLBACK, stops) for _ in range(2))
    assert feed(whole, [tokens])[:2] == feed(parts, blocks(tokens, cuts))[:2]


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("ab 🎉🎊🥳日éx"), max_size=25), cuts=st.lists(st.integers(0, 90), max_size=6))
def test_byte_fallback_characters_are_whole(text: str, cuts: list[int]) -> None:
    """Runs of characters longer than the window, each of several byte tokens: as in emoji in a Llama 2 vocabulary."""
    tokens = [7 + b for b in text.encode()] + [4]
    got, used, pieces = feed(TextStream(_FALLBACK), blocks(tokens, cuts))
    assert got == _FALLBACK.decode(tokens) == "".join(pieces) and used == len(tokens)
    assert not any(REPLACEMENT in p for p in pieces)


_FALLBACK = fallback()


def test_leading_space_after_many_tokens_without_text() -> None:
    tokens = [2, *[1] * 40, 3, 4, *[1] * 15, 2]
    assert feed(TextStream(_FALLBACK), [[t] for t in tokens])[0] == "a the" + "cat a" == _FALLBACK.decode(tokens)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_emoji_with_a_real_tokenizer(smol: TextTokenizer, size: int) -> None:
    text = "Hi 👩‍👩‍👧‍👦 日本語 🎉🎊 naïve — ok 🥳"
    tokens = smol.encode(text)
    assert len(tokens) > len(text.split()) and any(REPLACEMENT in smol.decode([t]) for t in tokens)
    parts = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    got, _, pieces = feed(TextStream(smol), parts)
    assert got == text == "".join(pieces) and not any(REPLACEMENT in p for p in pieces)
    assert "".join(smol.decode(p) for p in parts) != text or size > 4, "the test would not notice half characters"


def test_random_ids_of_a_real_tokenizer_equal_the_full_text(smol: TextTokenizer) -> None:
    rng = random.Random(0)
    for _ in range(10):
        tokens = [rng.randrange(smol.vocab_size) if rng.random() < 0.6 else rng.randrange(300) for _ in range(80)]
        assert feed(TextStream(smol), [tokens[:33], tokens[33:]])[0] == smol.decode(tokens)


@pytest.mark.parametrize("skip", [True, False])
def test_what_a_token_adds_is_told_only_where_it_depends_on_nothing(smol: TextTokenizer, skip: bool) -> None:
    """Every token's text by itself, against what it adds between others; tokens of half characters tell nothing."""
    a, b = smol.encode("word"), smol.encode(" é")
    alone = [smol.whole(token, skip) for token in range(smol.vocab_size)]
    for token, text in enumerate(alone):
        found = smol.decode([*a, token, *b], skip)
        assert text is None or found == f"word{text} é", token
        assert (text is None) == ("\ufffd" in smol.decode([token], skip)), token
    assert None in alone


@pytest.mark.parametrize("skip", [True, False])
def test_the_next_token_is_told_as_if_pushed(smol: TextTokenizer, skip: bool) -> None:
    """`next` where it can, else `push` and `pop`, against those alone; stop strings and half characters are never its own."""
    rng, told = random.Random(0), 0
    for _ in range(20):
        one, two = (TextStream(smol, skip_special=skip) for _ in range(2))
        for _ in range(80):
            few = rng.choice((1, 1, 3))
            tokens = [rng.randrange(smol.vocab_size) if rng.random() < 0.8 else rng.randrange(300) for _ in range(few)]
            piece = one.next(tokens)
            told += piece is not None
            if piece is None:
                one.push(tokens)
                piece = one.pop()
            two.push(tokens)
            assert piece == two.pop() and one.text == two.text
            assert (one._window, one._context, one._taken) == (two._window, two._context, two._taken)
    assert told > 1000
    assert TextStream(smol, ["END"]).next([5]) is None


def test_tokenizers_of_other_kinds_tell_nothing() -> None:
    assert all(fallback().whole(token) is None for token in range(8))


def test_incomplete_character_waits_and_is_flushed_at_the_end() -> None:
    stream = TextStream(Bytes())
    party = "🎉".encode()
    assert stream.push([65, *party[:3]]) == 4 and stream.pop() == "A"
    stream.push([], last=True)
    assert stream.pop(True) == REPLACEMENT and stream.text == "A" + REPLACEMENT
    again = TextStream(Bytes())
    again.push([65, *party[:3]])
    assert again.pop() == "A"
    again.push([party[3]])
    assert again.pop() == "🎉"
    again.push([], last=True)
    again.push([], last=True)
    assert again.text == "A🎉"


def test_a_replacement_mark_of_the_model_itself_is_kept() -> None:
    mark = list(REPLACEMENT.encode())
    for tokens in ([*mark, 65], [65, *mark * 5], [0xFF, *"é".encode()], [0xFF] * 9 + list("é".encode()) + [0xFF]):
        assert feed(TextStream(Bytes()), [[t] for t in tokens])[0] == Bytes().decode(tokens)


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_inside_a_token(include: bool) -> None:
    stream = TextStream(Bytes(), ("d o",), include)
    end = WORDS.index("nd of") + 257
    assert stream.push([65, end, 66]) == 2
    assert stream.stopped == "d o" and stream.text == ("And o" if include else "An") == stream.pop()
    assert stream.push([67]) == 0 and stream.push([], last=True) == 0 and stream.pop(True) == "" and len(stream.text) < 6


def test_the_earliest_stop_wins_then_the_longest() -> None:
    word = WORDS.index(" sat") + 257
    for stops, expected in ((("t", "a", "at"), "at"), (("at", "sa", "sat"), "sat"), (("s", " sat"), " sat")):
        stream = TextStream(Bytes(), stops)
        stream.push([word])
        assert stream.stopped == expected


def test_nothing_of_a_stop_string_is_shown_before_it_is_known() -> None:
    stops = ("\n\nUser:", "</end>")
    stream, shown = TextStream(Bytes(), stops), ""
    for char in "one\n\nUse </en\n\n\nUser: hidden":
        stream.push(list(char.encode()))
        shown += stream.pop()
        if stream.stopped:
            break
        text = stream.text
        held = max(n for n in range(8) if any(s.startswith(text[len(text) - n :]) for s in stops))
        assert shown == text[: len(text) - held], "all that can be shown is, and no more"
    assert shown == "one\n\nUse </en\n" and stream.stopped == "\n\nUser:"


def test_what_was_held_is_shown_when_the_text_ends() -> None:
    stream = TextStream(Bytes(), ("END",))
    stream.push(list(b"the EN"))
    assert stream.pop() == "the "
    stream.push([], last=True)
    assert stream.pop(True) == "EN" and stream.text == "the EN"


def test_special_tokens_on_request() -> None:
    tokens = [65, SPECIAL, 66]
    assert feed(TextStream(Bytes()), [tokens])[0] == "AB"
    assert feed(TextStream(Bytes(), skip_special=False), [tokens])[0] == "A<s>B"


@pytest.mark.parametrize("kind", ["words", "special", "broken", "emoji"])
def test_push_does_not_look_at_the_whole_text(kind: str) -> None:
    """Neither decoding nor the search for stop strings grows with the text."""
    unit = {"words": [257, 258], "special": [SPECIAL], "broken": [0xFF], "emoji": list("🎉".encode())}[kind]
    counted = Bytes()
    stream = TextStream(counted, ("never there",))
    for token in unit * (2000 // len(unit)):
        stream.push([token])
        stream.pop()
    assert counted.longest <= 16 and counted.calls <= 2.5 * 2000
    assert len(stream._open) <= 16 and len(stream._window) <= 16


# Stop strings through the engine


def run(tokens_of: dict, stop: str, depth: int, include: bool = False, shift: int = 0):
    """A request with a text, drafted for by one who knows the answer (`depth` 0: by nobody)."""
    prompt, answer = tokens_of
    params = SamplingParams(temperature=1.0, max_tokens=28, ignore_eos=True, seed=11)
    request = tiny.request(prompt, params, text=TextStream(Letters(), (stop,), include))
    drafter = probes.Replay({tuple(prompt): answer}, depth=depth) if depth else registry.parse("none")
    world = tiny.World()
    pieces: list[str] = []
    engine = world.engine(drafter)
    engine.sinks.append(lambda event: pieces.extend(c.text for c in event.committed))
    engine.add(request)
    while engine.step() is not None:
        pass
    assert world.cache.free() == world.cache.capacity
    return request, "".join(pieces)


class Letters:
    """Every token is two letters, so that stop strings end inside tokens too."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        return "".join(chr(65 + i // 8) + chr(97 + i % 8) for i in ids)


@pytest.fixture(scope="module")
def answer() -> tuple[list[int], list[int]]:
    prompt = tiny.prompts(1, seed=5)[0]
    params = SamplingParams(temperature=1.0, max_tokens=28, ignore_eos=True, seed=11)
    return prompt, tiny.World().run(registry.parse("none"), [tiny.request(prompt, params)])[0]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("at", range(7, 16))
def test_stop_string_at_every_offset_of_a_block(answer: tuple[list[int], list[int]], at: int, inside: bool) -> None:
    tokens = answer[1]
    text = Letters().decode(tokens)
    stop = text[2 * at - 3 : 2 * at + (1 if inside else 2)]
    first = text.find(stop)
    used = -(-(first + len(stop)) // 2)
    (fast, shown), (slow, plain) = (run(answer, stop, depth) for depth in (5, 0))
    for request, pieces in ((fast, shown), (slow, plain)):
        assert request.output == tokens[:used] and request.finish is Finish.STOP
        assert request.text.text == pieces == text[:first]
        assert len(request.origins) == used == request.stats.tokens
        assert request.stats.accepted == sum(o != NONE for o in request.origins) <= request.stats.drafted
        assert sum(request.stats.offered_at) <= request.stats.drafted
    assert fast.stats.rounds < slow.stats.rounds and fast.stats.accepted == fast.stats.drafted > 0
    assert run(answer, stop, 5, include=True)[1] == text[: first + len(stop)]


def test_a_stop_string_that_never_comes_changes_nothing(answer: tuple[list[int], list[int]]) -> None:
    request, shown = run(answer, "zz", 5)
    assert request.output == answer[1] and request.finish is Finish.LENGTH and shown == Letters().decode(answer[1])
