"""Tokenizers out of GGUF metadata, and the wrapper around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import BadInput, BadWeights, OutriderWarning, UnsupportedModel
from outrider.models import embedded
from outrider.models.gguf_file import GGUF, read_header
from outrider.models.gguf_tokenizer import build_tokenizer, eos_ids
from outrider.models.tokenizer import TextTokenizer
from tests.models.tiny_gguf import TEMPLATE, Tiny, byte_alphabet


def tiny(**changes: Any) -> TextTokenizer:
    tokens, types, merges = Tiny().vocabulary()
    meta = {
        "model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": types, "merges": merges,
        "bos_token_id": 1, "eos_token_id": 2, **changes,
    }  # fmt: skip
    full = {f"tokenizer.ggml.{k}": v for k, v in meta.items() if v is not None}
    return TextTokenizer(build_tokenizer(GGUF(Path("tiny.gguf"), {**full, "tokenizer.chat_template": TEMPLATE}, {})))


@pytest.fixture(scope="module")
def smol() -> TextTokenizer:
    return TextTokenizer(build_tokenizer(read_header(embedded.find())))


def test_merges_specials_and_unused_tokens() -> None:
    got = tiny()
    hello = got.encode("hello")
    assert [got.decode([i]) for i in hello] == ["hello"]
    assert got.vocab_size == 4 + 256 + 5  # the unused token at the end has no text
    assert got.encode("<s><tool>") == [1, 3]
    assert got.decode([1, *hello, 2]) == "hello"
    assert got.decode([1, *hello, 2], skip_special=False) == "<s>hello</s>"
    assert got.decode([*hello, 999]) == "hello"
    assert got.eos_ids == {2}


def test_bos_and_eos_framing() -> None:
    plain = tiny().encode("hello")
    assert tiny(add_bos_token=True).encode("hello") == [1, *plain]
    assert tiny(add_bos_token=True, add_eos_token=True).encode("hello") == [1, *plain, 2]
    assert tiny(add_bos_token=True).encode("hello", special=False) == plain
    assert tiny(pre="llama-bpe").encode("hello") == [1, *plain], "Llama 3 starts with BOS although files do not say so"
    assert tiny(pre="llama-bpe", add_bos_token=False).encode("hello") == plain


def test_how_families_cut_text() -> None:
    def pieces(pre: str, text: str) -> list[str]:
        core = build_tokenizer(read_meta(pre)).backend_tokenizer
        return [core.decoder.decode([piece]) for piece, _ in core.pre_tokenizer.pre_tokenize_str(text)]

    def read_meta(pre: str) -> GGUF:
        tokens, types, merges = Tiny().vocabulary()
        names = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}
        return GGUF(Path("x"), {f"tokenizer.ggml.{k}": v for k, v in names.items()}, {})

    text = "I'LL a  1234"
    assert pieces("gpt-2", text) == ["I", "'", "LL", " a", " ", " 1234"]
    assert pieces("smollm", text) == ["I", "'", "LL", " a", "  ", "1", "2", "3", "4"]
    assert pieces("qwen2", text) == ["I", "'LL", " a", " ", " ", "1", "2", "3", "4"]
    assert pieces("llama-bpe", text) == ["I", "'LL", " a", " ", " ", "123", "4"]
    assert pieces("tekken", "helloWorld 12") == ["hello", "World", " ", "1", "2"]


def test_unknown_cut_warns_and_unknown_kind_is_refused() -> None:
    with pytest.warns(OutriderWarning, match="chatglm-bpe"):
        tiny(pre="chatglm-bpe")
    with pytest.warns(OutriderWarning, match="not named"):
        tiny(pre=None)
    with pytest.raises(UnsupportedModel, match="'bert'"):
        tiny(model="bert")


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": []}, {"tokens": ["a", "a"]}, {"token_type": [1]}, {"merges": ["q zzz"]}, {"merges": None}, {"tokens": None},
        {"tokens": "no list"}, {"model": 3}, {"merges": ["nospace"]},
    ],
)  # fmt: skip
def test_inconsistent_vocabularies_are_bad_weights(changes: dict[str, Any]) -> None:
    with pytest.raises(BadWeights, match=r"tiny.gguf"):
        tiny(**changes)


def sentencepiece(**changes: Any) -> TextTokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "bab", "ab"]
    types = [2, 3, 3, *[6] * 256, *[1] * 6]
    scores = [0.0] * 259 + [-10.0, -11.0, -12.0, -2.0, -3.0, -1.0]
    return tiny(model="llama", tokens=tokens, token_type=types, scores=scores, merges=None, unknown_token_id=0, **changes)


def test_sentencepiece_merges_by_score() -> None:
    space, a, _, space_a, _, ab = range(259, 265)
    got = sentencepiece()
    # "ab" scores best, so "▁abab" becomes ▁ ab ab; "▁a" wins only where no "ab" is possible.
    assert got.encode("abab") == [1, space, ab, ab]
    assert got.encode("a") == [1, space_a]
    assert got.encode("a é") == [1, space_a, space, 3 + 0xC3, 3 + 0xA9]
    assert sentencepiece(add_space_prefix=False).encode("a") == [1, a]
    for text in ("abab", "a é", " a  b", "日本"):
        assert got.decode(got.encode(text)) == text


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30).filter(lambda s: "<" not in s))
def test_round_trip(text: str) -> None:
    for got in _ROUND:
        assert got.decode(got.encode(text)) == text


_ROUND = (tiny(), tiny(pre="llama-bpe"), tiny(pre="tekken"))


def test_smollm2(smol: TextTokenizer) -> None:
    assert smol.vocab_size == 49152
    assert smol.eos_ids == {2}
    assert eos_ids(read_header(embedded.find())) == [2]
    assert smol.encode("Hello world") == [19556, 905], "no BOS"
    assert smol.encode("a  2") == [81, 256, 34], "digits stand alone before spaces are cut"
    ids = smol.chat([{"role": "user", "content": "Hi  there .\n\n1234 ü"}])
    text = smol.decode(ids, skip_special=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi  there .\n\n1234 ü<|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(1) == 3
    assert ids.count(2) == 2


def test_chat_template_of_the_file() -> None:
    got = tiny()
    ids = got.chat([{"role": "user", "content": "hello"}])
    assert got.decode(ids, skip_special=False) == "<s>user hello</s><s>assistant "
    assert ids[0] == 1
    assert len(byte_alphabet()) == len(set(byte_alphabet())) == 256


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        (["hello"], "message 0 must be a mapping"),
        ([{"role": "user", "content": "a"}, {"role": "king", "content": "a"}], "message 1: role must be one of.*'king'"),
        ([{"content": "a"}], "role must be one of"),
        ([{"role": "user"}], "content must be text, got NoneType"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content must be text, got list"),
        ([{"role": "tool", "content": "a"}], "template rejects.*no tools here"),
    ],
)
def test_malformed_messages(messages: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        tiny().chat(messages)


def test_without_a_template(smol: TextTokenizer) -> None:
    backend = build_tokenizer(GGUF(Path("x"), dict(_without_template()), {}))
    plain = TextTokenizer(backend)
    assert smol.has_chat
    assert not plain.has_chat
    with pytest.raises(BadInput, match=r"no chat template.*--raw"):
        plain.chat([{"role": "user", "content": "a"}])


def _without_template() -> dict[str, Any]:
    tokens, types, merges = Tiny().vocabulary()
    names = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": merges}
    return {f"tokenizer.ggml.{key}": value for key, value in names.items()}
