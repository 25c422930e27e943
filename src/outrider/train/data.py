"""Training text that the target writes itself: it invents user turns behind its own chat template and answers them, or answers
and continues what it is given. What a drafter learns from is then what it will have to guess.

Round r is a function of the seed, r and the settings alone, so that a run that was killed goes on as if it had not been.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config import SamplingParams
from ..errors import BadInput, OutriderError
from ..llm import LLM
from .corpus import Store, Text
from .prompts import OPENINGS, Given, read
from .tasks import task

Tell = Callable[[str, float], None]
"""Hears what is being done, and which share of it is done."""
Source = Callable[[int], list[Text] | None]
"""Gives the texts of a round by its number; None where there was no time for them."""
_RAW_TURN = 16
_BARREN = 20
"""Rounds in a row without a new text, after which the target has nothing more to say."""


@dataclass(frozen=True, slots=True)
class Writing:
    """What to write: texts until `tokens` were written, `batch` at a time, answers of at most `answer` tokens to prompts of at
    most `prompt`, user turns of at most `turn`. Answers take the `temperatures` in turn. The share `held` is never trained on.
    `files` are answered first; then come prompts of the target's own, and as the share `code` of them programming tasks."""

    tokens: int = 1_000_000
    batch: int = 64
    answer: int = 512
    prompt: int = 1024
    turn: int = 96
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    held: float = 0.03
    seed: int = 0
    files: tuple[str, ...] = ()
    code: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "answer", "prompt", "turn"):
            if getattr(self, name) < 1:
                raise BadInput(f"training data: {name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.held < 0.5:
            raise BadInput(f"the share of texts that are held out must be above 0 and below 0.5, got {self.held}")
        if not 0 <= self.code <= 1:
            raise BadInput(f"the share of programming tasks must be from 0 to 1, got {self.code}")
        if not self.temperatures:
            raise BadInput("training data need at least one temperature")

    def identity(self, name: str, fingerprint: str) -> dict[str, Any]:
        """What decides which texts are written, and by whom."""
        settings = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if k != "tokens"}
        settings["files"] = [_digest(f) for f in self.files]
        return {"model": name, "fingerprint": fingerprint, "settings": settings}


class Writer:
    """Writes texts with `llm` into `directory`."""

    def __init__(self, llm: LLM, writing: Writing, directory: Path, fingerprint: str) -> None:
        self.llm, self.writing, self.tokenizer = llm, writing, llm.tokenizer
        self.given: list[Given] = read(list(writing.files))
        self.answer = min(writing.answer, llm.max_model_len // 2)
        self.most = min(writing.prompt, llm.max_model_len - self.answer - 1)
        self.before, after = self.tokenizer.frame() if self.tokenizer.has_chat else ("", "")
        self.ends = self._special(after)
        frame = len(self.tokenizer.encode(self.before, special=False)) if self.before else 0
        self.identity = writing.identity(llm.name, fingerprint)
        self.store = Store(directory, self.identity, writing.held, frame)

    @property
    def manifest(self) -> dict[str, Any]:
        assert self.store.manifest is not None
        return self.store.manifest

    @property
    def finished(self) -> bool:
        return bool(self.manifest["taught"] >= self.writing.tokens)

    def write(self, tell: Tell, until: float = float("inf"), source: Source | None = None) -> bool:
        """Write rounds until there are enough tokens (True), or until the time `until` (of `time.monotonic`). `source`: who has
        the texts of a round, if not this writer, and minds the time."""
        barren = 0
        while not self.finished:
            done = self.manifest["taught"]
            tell(f"writing texts: {done:,} of {self.writing.tokens:,} tokens", done / self.writing.tokens)
            number = int(self.manifest["rounds"])
            late = source is None and time.monotonic() > until
            found = None if late else (source or self.round)(number)
            if found is None:
                return False
            self.store.add(found, number + 1)
            barren = barren + 1 if self.manifest["taught"] == done else 0
            if barren == _BARREN:
                raise OutriderError(
                    f"{self.llm.name} wrote nothing new in {_BARREN} rounds: ask for fewer tokens than {self.writing.tokens:,} "
                    f"({done:,} are there), or give it prompts"
                )
        return True

    def round(self, number: int) -> list[Text]:
        """The texts of one round."""
        rng = random.Random(f"{self.writing.seed} {number}")
        batch, heats = self.writing.batch, self.writing.temperatures
        given = self.given[number * batch : (number + 1) * batch]
        prompts = [g.ids(self.tokenizer, self.most) for g in given] if given else self._invent(rng)
        prompts = [p for p in prompts if 0 < len(p) <= self.most]
        if not prompts:
            return []
        params = [
            SamplingParams(temperature=heats[i % len(heats)], max_tokens=self.answer, seed=rng.getrandbits(63), detokenize=False)
            for i in range(len(prompts))
        ]
        results = self.llm.generate(prompts, params)
        return [Text((*r.prompt_token_ids, *r.token_ids), len(r.prompt_token_ids)) for r in results if r.error is None]

    def _invent(self, rng: random.Random) -> list[list[int]]:
        """Programming tasks, and prompts that the target makes up: user turns where it knows such things, else the beginnings of
        texts."""
        chat = self.tokenizer.has_chat
        tasks = [self._turn(task(rng)) for _ in range(round(self.writing.code * self.writing.batch))]
        openings = [rng.choice(OPENINGS) for _ in range(self.writing.batch - len(tasks))]
        starts = [self._start(opening, rng) for opening in openings]
        length = self.writing.turn if chat else min(_RAW_TURN, self.writing.turn)
        params = [
            SamplingParams(max_tokens=length, top_p=0.95, stop_token_ids=self.ends, seed=rng.getrandbits(63), detokenize=chat)
            for _ in starts
        ]
        results = self.llm.generate(starts, params)
        if not chat:
            return [*tasks, *([*r.prompt_token_ids, *r.token_ids] for r in results if r.finish_reason == "length")]
        turns = [(opening + r.text).strip() for opening, r in zip(openings, results, strict=True)]
        return [*tasks, *(self._turn(turn) for turn in turns if len(turn.split()) > 1)]

    def _turn(self, text: str) -> list[int]:
        """Tokens of what a user says; for a target without a chat template, of the text."""
        return (
            self.tokenizer.chat([{"role": "user", "content": text}]) if self.tokenizer.has_chat else self.tokenizer.encode(text)
        )

    def _start(self, opening: str, rng: random.Random) -> list[int]:
        """Tokens to begin from; a model whose texts have no start token begins with any token."""
        if self.before:
            return self.tokenizer.encode(self.before + opening, special=False)
        return self.tokenizer.encode(opening) or [rng.randrange(self.tokenizer.vocab_size)]

    def _special(self, after: str) -> tuple[int, ...]:
        """The special token that ends a user turn, if one does."""
        ids = self.tokenizer.encode(after.strip(), special=False)[:1]
        return tuple(ids) if ids and not self.tokenizer.decode(ids) else ()


def _digest(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror or error}") from error


def write(llm: LLM, writing: Writing, directory: Path, fingerprint: str, tell: Sequence[Tell] = ()) -> dict[str, Any]:
    """Write all that was asked for; the manifest."""
    writer = Writer(llm, writing, directory, fingerprint)
    writer.write(tell[0] if tell else lambda what, share: None)
    return writer.manifest
