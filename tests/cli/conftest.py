"""A stand-in for the engine: tokens are characters, answers are scripted, so that the command line can be tested alone."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from outrider import results
from outrider import types as nouns
from outrider.cli.app import app
from outrider.config import SamplingParams

OWN = nouns.NONE


@dataclass(frozen=True)
class Round:
    """What one round commits: `guessed` characters were accepted, then comes the target's `own`; `text` is what may be shown."""

    guessed: str = ""
    own: str = ""
    rejected: str = ""
    text: str | None = None

    def chunk(self) -> results.Chunk:
        tokens = self.guessed + self.own
        origins = (0,) * len(self.guessed) + (OWN,) * len(self.own)
        text = tokens if self.text is None else self.text
        return results.Chunk(text, ids(tokens), origins, ids(self.rejected))


@dataclass
class Script:
    """What the stand-in does, and what it was asked."""

    rounds: Sequence[Round] = (Round("", "H"), Round("el", "l", "x"), Round("o", "!"))
    fail_load: BaseException | None = None
    fail_start: BaseException | None = None
    fail_after: tuple[int, BaseException] | None = None
    before_round: Callable[[], None] = lambda: None
    template: bool = True
    context: int = 1000
    result: dict[str, Any] = field(default_factory=dict)
    by_depth: dict[int | None, tuple[str, float]] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    closed: bool = False


def ids(text: str) -> tuple[int, ...]:
    return tuple(ord(c) for c in text)


def summary(tokens: int, rounds: int, speed: float = 20.0, drafted: int = 4, accepted: int = 3) -> results.Summary:
    rate = accepted / drafted if drafted else 0.0
    tau = tokens / rounds if rounds else 0.0
    return results.Summary(tokens, rounds, drafted, accepted, tau, rate, (rate,), 0.1, 0.2, tokens / speed, speed, 0.25, "ngram")


class FakeTokenizer:
    def __init__(self, has_chat: bool) -> None:
        self.has_chat = has_chat

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(t) for t in tokens)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [0] * sum(len(m["content"]) for m in messages)


def fake_llm(script: Script) -> type:
    class FakeLLM:
        def __init__(self, model: str, **options: Any) -> None:
            if script.fail_load is not None:
                raise script.fail_load
            options.pop("progress")("loading")
            script.loaded = {"model": model, **options}
            self.tokenizer = FakeTokenizer(script.template)
            self.notices = ["picked something"]
            self.drafter_name = "ngram"
            self.max_model_len = script.context
            self._done: list[results.Chunk] = []

        def stream(self, prompt: Any, params: SamplingParams) -> Iterator[results.Chunk]:
            if script.fail_start is not None:
                raise script.fail_start
            script.asked.append((prompt, params))
            self._done = []
            return self._rounds(params)

        stream_chat = stream

        def _rounds(self, params: SamplingParams) -> Iterator[results.Chunk]:
            text, _ = script.by_depth.get(params.depth, ("", 0.0))
            chunks = [Round("", text).chunk()] if text else [r.chunk() for r in script.rounds]
            for i, chunk in enumerate(chunks):
                if script.fail_after is not None and script.fail_after[0] == i:
                    raise script.fail_after[1]
                script.before_round()
                self._done.append(chunk)
                last = self._result("stop", params) if i == len(chunks) - 1 else None
                yield results.Chunk(chunk.text, chunk.token_ids, chunk.origins, chunk.rejected, last)

        def interrupt(self) -> results.Result | None:
            return self._result("abort", script.asked[-1][1]) if script.asked else None

        def _result(self, finish: str, params: SamplingParams) -> results.Result:
            tokens = tuple(t for c in self._done for t in c.token_ids)
            origins = tuple(o for c in self._done for o in c.origins)
            _, speed = script.by_depth.get(params.depth, ("", 20.0))
            guesses = {"drafted": 0, "accepted": 0} if params.depth == 0 else {}
            values = {
                "prompt": None,
                "prompt_token_ids": (1,),
                "text": "".join(chr(t) for t in tokens),
                "token_ids": tokens,
                "origins": origins,
                "finish_reason": finish,
                "seed": 7 if params.seed is None else params.seed,
                "stats": summary(len(tokens), len(self._done), speed, **guesses),
            }
            return results.Result(**(values | script.result))

        def close(self) -> None:
            script.closed = True

    return FakeLLM


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """The engine is replaced by whatever this script says."""
    script = Script()
    module = types.ModuleType("outrider.llm")
    module.LLM = fake_llm(script)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "outrider.llm", module)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return script


@pytest.fixture
def run() -> Callable[..., Result]:
    """Run a command: `run("generate", "hi", input=...)`."""

    def go(*args: str, **kwargs: Any) -> Result:
        return CliRunner().invoke(app, list(args), **kwargs)

    return go
