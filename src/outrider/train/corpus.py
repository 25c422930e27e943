"""Texts on disk: shards of tokens with a manifest that says where they come from, read back as one corpus.

A shard is a safetensors file: `tokens [N]` (uint16 where that will do), all texts one after another; `lengths [n]`;
`prompts [n]`, how many tokens of a text are its prompt; `held [n]` (1: never trained on). Shards and manifest appear whole, the
manifest last, so that whatever is interrupted leaves a corpus that can be gone on with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ..errors import BadInput, BadWeights, OutOfMemory
from ..trained import sweep, write_bytes, write_json

MANIFEST = "manifest.json"
FORMAT = 1
_GRAM, _KEPT, _NEAR, _FEWEST = 8, 4, 0.6, 8
"""Of the hashes of 8 tokens in a row, one in 4 is kept; a text of 8 or more, of which this share is known already, is a copy."""


@dataclass(frozen=True, slots=True)
class Text:
    """`tokens`, of which the first `prompt` were given and the rest were written by the target."""

    tokens: tuple[int, ...]
    prompt: int


@dataclass(slots=True)
class Seen:
    """Remembers texts, to tell copies: the same answer to the same prompt, or mostly the same runs of tokens. The first `frame`
    tokens of every text (a chat template's) do not count."""

    frame: int = 0
    whole: set[bytes] = field(default_factory=set)
    grams: set[int] = field(default_factory=set)

    def add(self, text: Text) -> bool:
        """Whether the text is new; if so, it is known from now on."""
        key = _digest(text.tokens)[:16]
        if key in self.whole:
            return False
        grams = self._grams(text.tokens[self.frame :])
        if len(grams) >= _FEWEST and len(grams & self.grams) >= _NEAR * len(grams):
            return False
        self.whole.add(key)
        self.grams |= grams
        return True

    def _grams(self, tokens: Sequence[int]) -> set[int]:
        if len(tokens) < _GRAM:
            return set()
        windows = np.lib.stride_tricks.sliding_window_view(np.array(tokens, dtype=np.uint64) + np.uint64(1), _GRAM)
        odd = np.array([pow(0x9E3779B97F4A7C15, i + 1, 2**64) for i in range(_GRAM)], dtype=np.uint64)
        mixed = (windows * odd).sum(1, dtype=np.uint64) * odd[0]
        top = mixed >> np.uint64(20)
        return set(top[top % np.uint64(_KEPT) == 0].tolist())


def is_held(prompt: Sequence[int], share: float) -> bool:
    """Whether texts with this prompt are kept from training: by its hash, so that no two answers to it part ways."""
    return int.from_bytes(_digest(prompt)[:8], "big") < share * 2**64


def _digest(tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(np.array(tokens, dtype="<i4").tobytes()).digest()


def matching(directory: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of texts that were made just so, or None where there are none. `BadInput` for others."""
    manifest = read_manifest(directory)
    if manifest is None:
        return None
    differing = [f"{k} {manifest.get(k)!r}, now {v!r}" for k, v in identity.items() if manifest.get(k) != v]
    if differing:
        raise BadInput(
            f"{directory} holds texts that were made otherwise ({'; '.join(differing):.300}); "
            "give another directory, or remove it"
        )
    return manifest


class Store:
    """Where texts are put. `identity`: what they were made of and how; a directory that was made otherwise raises `BadInput`."""

    def __init__(self, directory: Path, identity: dict[str, Any], held: float, frame: int = 0) -> None:
        self.directory, self.held, self.seen = directory, held, Seen(frame)
        self.manifest = matching(directory, identity)
        sweep(directory)
        if self.manifest is None:
            counts = {"rounds": 0, "texts": 0, "held": 0, "tokens": 0, "taught": 0, "copies": 0}
            self.manifest = {"format": FORMAT, **identity, **counts, "shards": []}
            return
        for text in texts(load(directory)):
            self.seen.add(text)

    def add(self, found: Iterable[Text], rounds: int) -> None:
        """Put one round's texts, copies left out; `rounds` are done then. `OutOfMemory` where the disk has no room."""
        assert self.manifest is not None
        new, copies = [], 0
        for text in found:
            fresh = len(text.tokens) > text.prompt and self.seen.add(text)
            new += [text] if fresh else []
            copies += not fresh
        held = [is_held(t.tokens[: t.prompt], self.held) for t in new]
        manifest = dict(self.manifest)
        counts = {"texts": len(new), "held": sum(held), "tokens": sum(len(t.tokens) for t in new), "copies": copies}
        counts["taught"] = sum(len(t.tokens) - t.prompt for t in new)
        for name, count in counts.items():
            manifest[name] += count
        name = f"shard-{rounds:05}.safetensors"
        manifest |= {"rounds": rounds, "shards": [*manifest["shards"], name] if new else manifest["shards"]}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if new:
                write_bytes(self.directory / name, save(_tensors(new, held)))
            write_json(self.directory / MANIFEST, manifest)
        except OSError as error:
            raise OutOfMemory(
                f"the texts cannot be kept in {self.directory} ({error.strerror or error}); make room there and run the same "
                "command again: what was written before is whole"
            ) from error
        self.manifest = manifest


@dataclass(frozen=True, slots=True)
class Corpus:
    """All texts: `tokens [N]` int32, where each starts and how long it is, how many tokens are its prompt, which are held out."""

    tokens: Tensor
    starts: Tensor
    lengths: Tensor
    prompts: Tensor
    held: Tensor
    manifest: dict[str, Any]

    def text(self, index: int) -> Tensor:
        start = int(self.starts[index])
        return self.tokens[start : start + int(self.lengths[index])]

    def split(self, held: bool) -> list[int]:
        """Indices of the texts that are, or are not, kept from training."""
        found: list[int] = torch.nonzero(self.held == held)[:, 0].tolist()
        return found

    def counts(self, vocabulary: int) -> Tensor:
        """How often each token was written, in the texts to train on; `[V]` int64."""
        place = torch.arange(len(self.tokens)) - self.starts.repeat_interleave(self.lengths)
        written = place >= self.prompts.repeat_interleave(self.lengths)
        learned = written & ~self.held.repeat_interleave(self.lengths)
        return torch.bincount(self.tokens[learned].long(), minlength=vocabulary)


def texts(corpus: Corpus) -> Iterable[Text]:
    for i in range(len(corpus.starts)):
        yield Text(tuple(corpus.text(i).tolist()), int(corpus.prompts[i]))


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest, or None where there is none yet. `BadWeights` for a damaged one."""
    path = directory / MANIFEST
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT or not isinstance(found["shards"], list):
            raise ValueError("another format")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadWeights(f"{path} is damaged ({error}); remove the directory and write the texts again") from error
    return dict(found)


def load(directory: Path) -> Corpus:
    """Read the corpus in `directory`. Raises `BadInput` where there is none, `BadWeights` for damaged shards."""
    manifest = read_manifest(directory)
    if manifest is None:
        raise BadInput(f"{directory} holds no texts to train on (no {MANIFEST})")
    parts: dict[str, list[Tensor]] = {"tokens": [], "lengths": [], "prompts": [], "held": []}
    for name in manifest["shards"]:
        try:
            shard = load_file(directory / name)
            for key, some in parts.items():
                some.append(shard[key].to(torch.int32))
        except (OSError, SafetensorError, KeyError) as error:
            raise BadWeights(f"{directory / name} is damaged ({error}); remove {directory} and write the texts again") from error
    joined = {k: torch.cat(v) if v else torch.zeros(0, dtype=torch.int32) for k, v in parts.items()}
    lengths = joined["lengths"].long()
    starts = lengths.cumsum(0) - lengths
    return Corpus(joined["tokens"], starts, lengths, joined["prompts"].long(), joined["held"].bool(), manifest)


def write_texts(path: Path, found: Sequence[Text]) -> None:
    """Put texts where `read_texts` finds them, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, save(_tensors(found, [False] * len(found))))


def read_texts(path: Path) -> list[Text]:
    """Raises like safetensors for a damaged file."""
    shard = load_file(path)
    parts = torch.split(shard["tokens"].to(torch.int32), shard["lengths"].tolist())
    return [Text(tuple(part.tolist()), int(prompt)) for part, prompt in zip(parts, shard["prompts"], strict=True)]


def _tensors(new: Sequence[Text], held: Sequence[bool]) -> dict[str, Tensor]:
    tokens = torch.tensor([t for text in new for t in text.tokens], dtype=torch.int32)
    return {
        "tokens": tokens.to(torch.uint16) if not (tokens >= 2**16).any() else tokens,
        "lengths": torch.tensor([len(t.tokens) for t in new], dtype=torch.int32),
        "prompts": torch.tensor([t.prompt for t in new], dtype=torch.int32),
        "held": torch.tensor(held, dtype=torch.uint8),
    }
