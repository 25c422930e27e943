"""A transformers tokenizer behind `protocols.Tokenizer`, with chat templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..errors import BadInput
from ..text import REPLACEMENT

ROLES = ("system", "developer", "user", "assistant", "tool")


class TextTokenizer:
    """Text to token ids and back.

    `eos_ids` are all tokens that end a text, as the tokenizer and the model's generation configuration name them;
    `vocab_size` counts the tokens that have a text (the model's vocabulary may be padded beyond it)."""

    def __init__(self, backend: PreTrainedTokenizerBase, generation: GenerationConfig | None = None) -> None:
        self._backend = backend
        self.vocab_size = len(backend)
        self.eos_ids = frozenset(_ids(backend.eos_token_id)) | frozenset(_ids(getattr(generation, "eos_token_id", None)))
        self._fast: Any = getattr(backend, "_tokenizer", None)  # what `decode` ends in, without its checks of every id
        self._bytes = type(getattr(self._fast, "decoder", None)).__name__ == "ByteLevel"
        self._whole = dict[tuple[int, bool], str | None]()
        self.has_chat = bool(backend.chat_template)

    @property
    def backend(self) -> PreTrainedTokenizerBase:
        """transformers' own, for libraries that want to read it."""
        return self._backend

    @property
    def vocab(self) -> dict[str, int]:
        """Token strings and their ids, as the tokenizer spells them."""
        return dict(self._backend.get_vocab())

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`. `special` adds what the model frames a text with (BOS); special tokens written out in the
        text are recognised either way. `BadInput` for text that is no Unicode (lone surrogates)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadInput(f"the text holds half a character at index {error.start}; remove it") from error
        return list(self._backend.encode(text, add_special_tokens=special))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`, without touching its spaces. Ids past the vocabulary have no text."""
        if self._fast is not None:
            return str(self._fast.decode(list(ids), skip_special_tokens=skip_special))
        text = self._backend.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return str(text)

    def whole(self, token: int, skip_special: bool = True) -> str | None:
        """What `token` adds to any text that ends with a whole character; None where that depends on its neighbours. Tokens that
        stand for bytes and nothing else add the same ones wherever they are."""
        if not self._bytes:
            return None
        key = token, skip_special
        if key not in self._whole:
            text = self.decode([token], skip_special)
            self._whole[key] = None if REPLACEMENT in text else text
        return self._whole[key]

    @property
    def template(self) -> str:
        """The chat template's source, the one for tools where there are several; empty without one."""
        found: Any = self._backend.chat_template or ""
        return str(found.get("tool_use") or found.get("default") or "") if isinstance(found, Mapping) else str(found)

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn. A message is `{"role": ..., "content": ...}`, tools are
        described as OpenAI's API does.

        Raises `BadInput` for malformed messages, and for models without a chat template."""
        if not self.has_chat:
            raise BadInput("this model has no chat template; use a chat (instruct) model, or give a plain prompt (--raw)")
        _check(messages)
        try:
            ids: Any = self._backend.apply_chat_template(
                [dict(m) for m in messages],
                tools=None if tools is None else [dict(t) for t in tools],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            raise BadInput(f"the model's chat template rejects these messages: {error}") from error
        return list(ids)

    def frame(self) -> tuple[str, str]:
        """What the chat template writes before and after the words of a conversation's first user turn."""
        mark = "user-words-go-here"
        try:
            text = self._backend.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
        except Exception as error:
            raise BadInput(f"the model's chat template rejects a plain user turn: {error}") from error
        before, _, after = str(text).partition(mark)
        return before, after


def _check(messages: object) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise BadInput("messages must be a non-empty list of {'role': ..., 'content': ...}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise BadInput(f"message {i} must be a mapping with 'role' and 'content', got {type(message).__name__}")
        if message.get("role") not in ROLES:
            raise BadInput(f"message {i}: role must be one of {', '.join(ROLES)}, got {message.get('role')!r}")
        if not isinstance(message.get("content"), str):
            raise BadInput(f"message {i}: content must be text, got {type(message.get('content')).__name__}")


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
