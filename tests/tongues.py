"""Toy tokenizers for the tiny models, and draft models that speak another one."""

from __future__ import annotations

import random
import string
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from outrider.drafters.draft_model import DraftModel
from outrider.models.hf import Decoder, truncate

from . import tiny

LETTERS = (string.ascii_letters + string.digits)[: tiny.VOCAB - 2]


class Toy:
    """Longest match first over a list of words; the first two are special. `frame`: texts begin with the first word."""

    def __init__(self, words: list[str], frame: bool = False) -> None:
        self.words, self.vocab, self.frame = words, {w: i for i, w in enumerate(words)}, frame
        self.special = {i for i, w in enumerate(words) if w.startswith("<")}

    def encode(self, text: str, special: bool = True) -> list[int]:
        ids = [self.vocab["<s>"]] if special and self.frame else []
        while text:
            found = max((w for w in self.words if text.startswith(w)), key=len, default="")
            ids += [self.vocab[found]] if found else []
            text = text[len(found) or 1 :]
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        return "".join(self.words[i] for i in ids if not (skip_special and i in self.special))


def target() -> Toy:
    """One letter per token."""
    return Toy(["<s>", "</s>", *LETTERS])


def shuffled(seed: int = 1, frame: bool = False) -> tuple[Toy, list[int]]:
    """The same words under other ids, and the new id of each old one."""
    order = list(range(tiny.VOCAB))
    random.Random(seed).shuffle(order)
    words = [""] * tiny.VOCAB
    for old, new in enumerate(order):
        words[new] = target().words[old]
    return Toy(words, frame), order


def pairs(common: int) -> Toy:
    """The first `common` letters, and pairs of letters for the rest of the ids: longer tokens, few shared ones."""
    rest = tiny.VOCAB - 2 - common
    return Toy(["</s>", "<s>", *LETTERS[:common], *(LETTERS[i] + LETTERS[(7 * i + 1) % len(LETTERS)] for i in range(rest))])


def permuted(layers: int, order: list[int]) -> Decoder:
    """The target's first layers, with every token under its new id: the same model in other words."""
    whole: Any = tiny.model()
    for weight in (whole.get_input_embeddings().weight, whole.get_output_embeddings().weight):
        old = weight.data.clone()
        weight.data[order] = old
    return Decoder(truncate(whole, layers), f"permuted-{layers}")


def draft(decoder: Decoder, tokenizer: Toy, ours: Toy | None = None, **config: Any) -> DraftModel:
    """A draft model that speaks `tokenizer` to a target that speaks `ours`."""
    made = DraftModel(DraftModel.Config(path="tiny", **config))  # type: ignore[abstract]
    own: Any = ours or target()
    made.start = lambda start: made.bind(decoder, replace(start, vocab=own.vocab, tokenizer=own), tokenizer)  # type: ignore[method-assign]
    return made


def foreign(layers: int = 2, frame: bool = False, **config: Any) -> DraftModel:
    """The target's first layers under other ids."""
    tokenizer, order = shuffled(frame=frame)
    return draft(permuted(layers, order), tokenizer, **config)
