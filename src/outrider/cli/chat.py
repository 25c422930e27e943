"""`outrider chat`: a conversation, with history, until Ctrl-D."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ..config import SamplingParams
from ..errors import BadInput, OutriderError
from . import options as o
from .answer import check, loaded, stats_line, stream_answer
from .drafters import HELP, describe_drafters
from .guard import say

if TYPE_CHECKING:
    from ..llm import LLM

COMMANDS = """/draft   mark drafted tokens, or stop marking them
/reset   forget the conversation
/seed N  use seed N from now on (/seed alone: a new one per answer)
/help    this list
/exit    leave (so does Ctrl-D); Ctrl-C stops an answer and keeps what there is of it"""


def chat(
    ctx: typer.Context,
    system: Annotated[str | None, typer.Option(help="System message to begin with.")] = None,
    model: o.Model = o.DEFAULT_MODEL,
    draft: o.Draft = "auto",
    control: o.Control = "goodput",
    accept: o.Accept = "coupled",
    device: o.Device = "auto",
    dtype: o.Dtype = "auto",
    quantize: o.Quantize = "none",
    max_model_len: o.MaxModelLen = None,
    threads: o.Threads = None,
    max_tokens: o.MaxTokens = 512,
    temperature: o.Temperature = 0.7,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = None,
    repetition_penalty: o.Repetition = 1.0,
    show_draft: o.ShowDraft = False,
    debug: o.Debug = False,
) -> None:
    """Talk with the model. Reads one message per line when standard input is not a terminal."""
    if draft == HELP:
        typer.echo(describe_drafters())
        return
    params = o.sampling_params(ctx.params)
    with loaded(o.ModelOptions.of(ctx.params), rehearse=1) as llm:
        if not llm.tokenizer.has_chat:
            raise BadInput("this model has no chat template: use `outrider generate --raw`, or an instruct model")
        interactive = sys.stdin.isatty()
        if interactive:
            say("Ctrl-D leaves, /help lists commands.")
        talk = Conversation(llm, params, o.Display(show_draft), system)
        for line in typed_lines() if interactive else piped_lines():
            if not react(talk, line, interactive):
                break


class Conversation:
    """The history, and what the next answer will use."""

    def __init__(self, llm: LLM, params: SamplingParams, display: o.Display, system: str | None = None) -> None:
        self.llm = llm
        self.params = params
        self.display = display
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def reset(self) -> None:
        """Back to the system message."""
        self.messages = list(self._opening)

    def ask(self, text: str) -> bool:
        """Answer `text` and remember both; False if Ctrl-C cut the answer short. After an error nothing is remembered."""
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        self._forget()
        try:
            answer = stream_answer(self.llm, self.llm.stream_chat(self.messages, self.params), self.display)
            check(answer.result)
        except OutriderError:
            self.messages = before
            raise
        self.messages.append({"role": "assistant", "content": answer.result.text})
        say(stats_line(answer.result))
        return not answer.interrupted

    def _forget(self) -> None:
        """Drop the oldest turns until the prompt leaves room for an answer: all of it, or a quarter of the context."""
        limit = self.llm.max_model_len
        room = min(self.params.max_tokens, limit // 4)
        first, dropped = len(self._opening), 0
        while len(self.messages) - first > 1 and len(self.llm.tokenizer.chat(self.messages)) + room > limit:
            del self.messages[first : first + 2]
            dropped += 1
        if dropped:
            turns = "the oldest turn" if dropped == 1 else f"the {dropped} oldest turns"
            say(f"note: the conversation outgrew the context of {limit} tokens; {turns} forgotten")


def react(talk: Conversation, line: str, interactive: bool) -> bool:
    """Do what `line` asks; False to leave. At a terminal an error is shown and the talk goes on; in a pipe it ends it."""
    line = line.strip()
    if not line:
        return True
    if line in ("/exit", "/quit"):
        return False
    try:
        if line.startswith("/"):
            _command(talk, line)
        elif not talk.ask(line) and not interactive:
            raise KeyboardInterrupt
    except OutriderError as error:
        if not interactive:
            raise
        say(f"error: {error}")
    return True


def _command(talk: Conversation, line: str) -> None:
    name, _, argument = line.partition(" ")
    if name == "/help":
        say(COMMANDS)
    elif name == "/reset":
        talk.reset()
        say("forgotten")
    elif name == "/draft":
        talk.display = dataclasses.replace(talk.display, show_draft=not talk.display.show_draft)
        say(f"drafted tokens are {'marked' if talk.display.show_draft else 'not marked'}")
    elif name == "/seed":
        talk.params = dataclasses.replace(talk.params, seed=_seed(argument.strip()))
        say("a new seed per answer" if talk.params.seed is None else f"seed {talk.params.seed}")
    else:
        raise BadInput(f"unknown command {name}; /help lists them (a message cannot begin with a slash)")


def _seed(text: str) -> int | None:
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise BadInput(f"/seed wants a whole number, not {text!r}") from None


def typed_lines() -> Iterator[str]:
    """Lines from a terminal, with editing; Ctrl-C drops the line, Ctrl-D ends."""
    try:
        import readline  # noqa: F401 - gives input() history and editing
    except ImportError:
        pass
    while True:
        try:
            yield input("> ")
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("\n(Ctrl-D or /exit leaves)")


def piped_lines() -> Iterator[str]:
    """Lines from a pipe. Raises `BadInput` for one that is not UTF-8."""
    for number, line in enumerate(typer.get_binary_stream("stdin"), 1):
        try:
            yield line.decode()
        except UnicodeDecodeError:
            raise BadInput(f"line {number} of standard input is not valid UTF-8") from None
