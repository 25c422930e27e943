"""From news of the engine to what OpenAI's clients expect: one reply per HTTP request, streamed or whole."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from ..results import Chunk
from ..text import TextStream
from ..types import NONE, Logprob
from ..watch.gain import Gain
from ..watch.pieces import Mark, Pieces
from . import figures
from .calls import Call, Calls, Form, Part
from .faults import Fault
from .places import chat_place, completion_places
from .schema import ChatRequest, CompletionRequest, Sampling
from .worker import Job

Json = dict[str, Any]
MARK = "\0"
"""Stands for the text of an event whose rest is known."""


def framed(event: Json) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(event, separators=(',', ':'))}\n\n"


class Context:
    """What replies need of the server: its model's name and fingerprint, how tokens read, and whether guessing pays."""

    def __init__(self, model: str, fingerprint: str, tokenizer: Any, drafter: Callable[[], str], gain: Gain) -> None:
        self.model, self.fingerprint, self.tokenizer, self.drafter, self.gain = model, fingerprint, tokenizer, drafter, gain

    def spell(self, token: int) -> str:
        return TextStream(self.tokenizer).piece(token)


class Choice:
    """What is known of one choice so far. `formed`: a grammar of the client's takes part, and is to blame if no token is left."""

    def __init__(self, decode: Callable[[Sequence[int]], str], formed: bool) -> None:
        self.formed = formed
        self.pieces = Pieces(decode)
        self.text: list[str] = []
        self.parser: Calls | None = None
        self.calls: list[Call] = []
        self.news: list[Part] = []
        self.token_ids: list[int] = []
        self.rows: list[tuple[Logprob, ...]] = []
        self.marks: list[Json] = []
        self.rounds = self.length = 0
        self.opened = False
        self.frame: tuple[str, str] | None = None
        self.finish: str | None = None

    def add(self, chunk: Chunk) -> None:
        """Note a share of a round; `news` is what it adds, with calls told apart from text."""
        self.news = [chunk.text] if self.parser is None else self.parser.feed(chunk.text)
        if self.parser is not None and chunk.result is not None:
            self.news += self.parser.close()
        self.text += [part for part in self.news if isinstance(part, str)]
        self.calls += [part for part in self.news if isinstance(part, Call)]
        self.token_ids += chunk.token_ids
        self.rows += chunk.logprobs or ()
        if chunk.token_ids:
            self.rounds += 1
        if chunk.result is not None:
            ended = chunk.result.finish_reason
            self.finish = "tool_calls" if self.calls and ended == "stop" else ended
            if self.finish == "error":
                message = chunk.result.error or "the model gave no valid scores"
                raise Fault(400 if self.formed else 500, message, "generation_failed")

    def mark(self, chunk: Chunk) -> Json:
        """Where the text of a round comes from: `[text, origin]` pairs, origin one of draft, target, bonus, rejected. The counts
        are of tokens; `rejected` along the first branch only."""
        shown, before = [], None
        for text, mark in self.pieces.take(chunk):
            name = "draft" if mark is Mark.ACCEPTED else "rejected" if mark is Mark.REJECTED else "target"
            if name == "target" and before == "draft":
                name = "bonus"
            shown.append([text, name])
            before = name
        accepted = sum(origin != NONE for origin in chunk.origins)
        counts = {"tokens": len(chunk.token_ids), "accepted": accepted, "rejected": len(chunk.rejected)}
        return {"round": self.rounds, **counts, "pieces": shown}


class Reply:
    """Shared by both endpoints. `events` gives the stream's objects for one piece of news, `ending` the last one, `whole` the
    answer that is not streamed."""

    prefix, noun, stream_noun = "", "", ""
    silent = False

    def __init__(self, context: Context, body: Sampling, job: Job, seed: int) -> None:
        self.context, self.body, self.job, self.seed = context, body, job, seed
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        skip = body.skip_special_tokens
        self.choices = [
            Choice(lambda ids: str(context.tokenizer.decode(ids, skip)), bool(r.params.processors)) for r in job.requests
        ]

    def add(self, choice: int, chunk: Chunk) -> None:
        """Note a share of a round. Raises `Fault` where the choice ended with an error."""
        known = self.choices[choice]
        known.add(chunk)
        if self.body.outrider and not self.body.stream:
            known.marks.append(known.mark(chunk))

    def events(self, choice: int, chunk: Chunk) -> list[Json]:
        """The stream's objects for a share of a round that was `add`ed."""
        raise NotImplementedError

    def piece(self, choice: int, chunk: Chunk) -> bytes | None:
        """The stream's bytes for a share of a round, not `add`ed yet, that brings text and nothing else; none if it brings no
        text. None where it is another, the choice's first, or one of several choices, which share a write: `events` is for those,
        and says the same."""
        known, body = self.choices[choice], self.body
        if not known.rounds or known.parser is not None or chunk.logprobs is not None or chunk.result is not None:
            return None
        if body.return_token_ids or body.outrider or self.silent or len(self.choices) > 1:
            return None
        if not chunk.text:
            return b""
        if known.frame is None:
            event = self._envelope(self.stream_noun) | {"choices": [{"index": choice, **self._bare(MARK)}]}
            head, _, tail = framed(event).rpartition(json.dumps(MARK))
            known.frame = head, tail
        head, tail = known.frame
        return f"{head}{json.dumps(chunk.text)}{tail}".encode()

    def _bare(self, text: str) -> Json:
        """A choice in the stream that has text and nothing else."""
        raise NotImplementedError

    def ending(self) -> Json | None:
        """The stream's own object for usage, where it was asked for."""
        if not self.body.usage_wanted:
            return None
        return self._envelope(self.stream_noun) | {"choices": [], "usage": self._usage()} | self._extensions()

    def whole(self) -> Json:
        made = self._envelope(self.noun) | {"choices": [self._choice(i) for i in range(len(self.choices))]}
        return made | {"usage": self._usage(), "seed": self.seed} | self._extensions()

    def _choice(self, index: int) -> Json:
        raise NotImplementedError

    def _envelope(self, noun: str) -> Json:
        made = {"id": self.id, "object": noun, "created": self.created, "model": self.context.model}
        return made | {"system_fingerprint": self.context.fingerprint}

    def _usage(self) -> Json:
        return figures.usage(self.job.requests)

    def _extensions(self) -> Json:
        return figures.extensions(self.job.requests, self.context.drafter(), self.context.gain)

    def _event(self, index: int, content: Json) -> Json:
        """One choice's object in the stream; the last of all carries the figures, unless a later one will."""
        known = self.choices[index]
        last = content["finish_reason"] is not None and all(c.finish for c in self.choices)
        more = self._extensions() if last and not self.body.usage_wanted else {}
        seed = {"seed": self.seed} if known.rounds <= 1 or last else {}
        return self._envelope(self.stream_noun) | {"choices": [{"index": index, **content}]} | seed | more

    def _extras(self, index: int, chunk: Chunk) -> Json:
        """Of one round: token ids and origins, where asked for."""
        extras: Json = {}
        if self.body.return_token_ids:
            extras["token_ids"] = list(chunk.token_ids)
        if self.body.outrider:
            extras["outrider"] = self.choices[index].mark(chunk)
        return extras

    def _whole_extras(self, index: int) -> Json:
        known = self.choices[index]
        extras: Json = {}
        if self.body.return_token_ids:
            extras["token_ids"] = known.token_ids
        if self.body.outrider:
            extras["outrider"] = {"rounds": known.marks}
        return extras

    def prompt_ids(self, index: int) -> list[int]:
        request = self.job.requests[index]
        return request.tokens[: request.prompt_len]


class ChatReply(Reply):
    """`chat.completion` and `chat.completion.chunk`. `form`: how tool calls are written, where there may be any."""

    prefix, noun, stream_noun = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body: ChatRequest

    def __init__(self, context: Context, body: ChatRequest, job: Job, seed: int, form: Form | None = None) -> None:
        super().__init__(context, body, job, seed)
        if form is not None:
            for choice in self.choices:
                choice.parser = Calls(form)

    def events(self, choice: int, chunk: Chunk) -> list[Json]:
        known, made = self.choices[choice], []
        if not known.opened:
            opening: Json = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            if self.body.return_token_ids:
                opening["prompt_token_ids"] = self.prompt_ids(choice)
            made.append(self._event(choice, opening))
        known.opened = True
        extras = self._extras(choice, chunk)
        text = "".join(part for part in known.news if isinstance(part, str))
        if text or chunk.logprobs or any(extras.values()):
            content = self._bare(text) | {"logprobs": self._logprobs(chunk.logprobs)}
            made.append(self._event(choice, content | extras))
        before = len(known.calls) - sum(isinstance(part, Call) for part in known.news)
        for index, call in enumerate(known.calls[before:], before):
            delta = {"tool_calls": [{"index": index, **call.as_json()}]}
            made.append(self._event(choice, {"delta": delta, "logprobs": None, "finish_reason": None}))
        if chunk.result is not None:
            made.append(self._event(choice, {"delta": {}, "logprobs": None, "finish_reason": known.finish}))
        return made

    def _bare(self, text: str) -> Json:
        return {"delta": {"content": text}, "logprobs": None, "finish_reason": None}

    def _choice(self, index: int) -> Json:
        known = self.choices[index]
        text = "".join(known.text)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if known.calls:
            message |= {"content": text or None, "tool_calls": [call.as_json() for call in known.calls]}
        rows = known.rows if self.body.logprobs else None
        made = {"index": index, "message": message, "logprobs": self._logprobs(rows), "finish_reason": known.finish}
        prompt = {"prompt_token_ids": self.prompt_ids(index)} if self.body.return_token_ids else {}
        return made | prompt | self._whole_extras(index)

    def _logprobs(self, rows: Sequence[tuple[Logprob, ...]] | None) -> Json | None:
        if rows is None:
            return None
        return {"content": [chat_place(row, self.body.top_logprobs or 0) for row in rows], "refusal": None}


class CompletionReply(Reply):
    """`text_completion`. `texts` are the prompts as they are to be echoed."""

    prefix, noun, stream_noun = "cmpl", "text_completion", "text_completion"
    body: CompletionRequest

    def __init__(self, context: Context, body: CompletionRequest, job: Job, seed: int, texts: Sequence[str] = ()) -> None:
        super().__init__(context, body, job, seed)
        self.samples = body.n or 1
        self.texts = texts
        self.silent = body.max_tokens == 0

    def events(self, choice: int, chunk: Chunk) -> list[Json]:
        known = self.choices[choice]
        opening, known.opened = not known.opened, True
        rows = list(chunk.logprobs or ()) if not self.silent else []
        text = "" if self.silent else chunk.text
        extras = self._extras(choice, chunk)
        if opening:
            text = self._echo(choice) + text
            if self.body.return_token_ids:
                extras["prompt_token_ids"] = self.prompt_ids(choice)
        logprobs = self._logprobs(choice, rows, opening, known.length)
        known.length += sum(map(len, logprobs["tokens"])) if logprobs else 0
        if not (text or chunk.logprobs or chunk.result or any(extras.values())):
            return []
        return [self._event(choice, self._bare(text) | {"logprobs": logprobs, "finish_reason": known.finish} | extras)]

    def _bare(self, text: str) -> Json:
        return {"text": text, "logprobs": None, "finish_reason": None}

    def _choice(self, index: int) -> Json:
        known = self.choices[index]
        text = self._echo(index) + ("" if self.silent else "".join(known.text))
        logprobs = self._logprobs(index, [] if self.silent else known.rows, True, 0)
        made = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": known.finish}
        prompt = {"prompt_token_ids": self.prompt_ids(index)} if self.body.return_token_ids else {}
        return made | prompt | self._whole_extras(index)

    def _usage(self) -> Json:
        return figures.usage(self.job.requests, self.silent)

    def _echo(self, index: int) -> str:
        return self.texts[index // self.samples] if self.body.echo else ""

    def _logprobs(self, index: int, rows: list[tuple[Logprob, ...]], opening: bool, offset: int) -> Json | None:
        """Of the prompt, too, where it is echoed and this is the answer's beginning."""
        if self.body.logprobs is None:
            return None
        if not (opening and self.body.echo):
            return completion_places(rows, "", offset)
        prompt = self.job.first(index).prompt_logprobs
        return completion_places([None, *prompt, *rows], self.context.spell(self.prompt_ids(index)[0]), 0)
