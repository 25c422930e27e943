"""What clients may send: OpenAI's request bodies, with the sampling options that vLLM adds and our own `speculation`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..config import SamplingParams
from ..errors import BadInput

MOST_CHOICES, MOST_PROMPTS, MOST_STOPS, MOST_IDS, MOST_MESSAGES = 128, 256, 64, 1_000_000, 10_000
DEFAULT_COMPLETION = 16
"""Tokens of a completion whose length nobody named (OpenAI's own default)."""

Text = Annotated[str, Field(max_length=10_000_000)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Whole = Annotated[int, Field(ge=1, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


def _list(most: int, least: int = 0) -> Any:
    """Bounds of a list. The first item that is wrong ends its check: a body can hold a million of them."""
    return Field(min_length=least, max_length=most, fail_fast=True)


Ids = Annotated[list[Token], _list(MOST_IDS, 1)]


class Model(BaseModel):
    """Strict about types, and no NaN; fields we do not know are left alone, since clients send many."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Model):
    include_usage: bool = False


class Speculation(Model):
    """Per request: `draft` `"none"` for plain decoding, `depth` tokens ahead (unset: what pays), `accept` an acceptance rule."""

    draft: Annotated[str, Field(max_length=100)] | None = None
    depth: Annotated[int, Field(ge=0, le=1024)] | None = None
    accept: Annotated[str, Field(max_length=100)] | None = None


class JsonSchema(Model):
    name: Annotated[str, Field(max_length=1000)] | None = None
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]


class ResponseFormat(Model):
    """An answer's form: `json_object` (any), `json_schema`, `regex` (Rust's syntax, the whole answer) or `grammar` (Lark)."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None

    def source(self) -> Any:
        """What the type promises; None for plain text. Raises `BadInput` where it is missing."""
        if self.type in ("text", "json_object"):
            return None if self.type == "text" else {"type": "object"}
        found = getattr(self, self.type)
        if found is None:
            raise BadInput(f"response_format of type {self.type} needs the field {self.type}")
        return found.schema_ if self.type == "json_schema" else found


class Sampling(Model):
    """What both endpoints take. `outrider` asks for tokens' origins in the answer, `return_token_ids` for token ids."""

    model: Annotated[str, Field(max_length=1000)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]], Field(max_length=10_000)] | None = None
    stop: Stop | Annotated[list[Stop], _list(MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[Token], _list(1000)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: Speculation | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    outrider: bool | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=64, description="`label` names the kind of work.")] | None = None

    @property
    def usage_wanted(self) -> bool:
        """Whether the stream ends with a chunk of its own for usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def common(self) -> dict[str, Any]:
        """The fields that `SamplingParams` takes, as far as they were given."""
        values = {name: getattr(self, name) for name in _SAME_NAME}
        values["stop_token_ids"] = tuple(self.stop_token_ids or ())
        values["logit_bias"] = {_token(key): float(bias) for key, bias in (self.logit_bias or {}).items()}
        values["n"] = self.n or 1
        values["label"] = (self.metadata or {}).get("label")
        if self.speculation is not None:
            values |= {"depth": self.speculation.depth, "accept": self.speculation.accept}
            values["draft"] = "none" if self.speculation.draft == "none" else None
        return {name: value for name, value in values.items() if value is not None}


_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "stop",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "min_tokens",
    "seed",
)


class Part(Model):
    """A piece of a message. Only text is understood."""

    type: Literal["text"]
    text: Text


class Function(Model):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: Annotated[str, Field(max_length=100_000)] | None = None
    parameters: dict[str, Any] | None = None


class Tool(Model):
    """A function that the model may ask the client to call."""

    type: Literal["function"]
    function: Function


class Named(Model):
    name: Annotated[str, Field(max_length=200)]


class ToolChoice(Model):
    type: Literal["function"]
    function: Named


class Called(Model):
    name: Annotated[str, Field(max_length=200)]
    arguments: Text = ""


class ToolCall(Model):
    """A call of an earlier turn."""

    id: Annotated[str, Field(max_length=1000)] | None = None
    type: Literal["function"] = "function"
    function: Called


class Message(Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[ToolCall], _list(1000)] | None = None
    tool_call_id: Annotated[str, Field(max_length=1000)] | None = None
    content: Text | Annotated[list[Part], _list(1000)] | None = None
    name: Annotated[str, Field(max_length=1000)] | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates want it: content is text."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or [])
        return {"role": self.role, "content": content}


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], _list(MOST_MESSAGES, 1)]
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    tools: Annotated[list[Tool], _list(1000)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def params(self, room: int) -> SamplingParams:
        """What to ask of the engine, where `room` tokens fit. Raises `BadInput`."""
        most = self.max_completion_tokens or self.max_tokens or room
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return SamplingParams(**self.common(), max_tokens=min(most, room), logprobs=logprobs)


class CompletionRequest(Sampling):
    """`POST /v1/completions`. With `echo`, the answer begins with the prompt; then `max_tokens` may be 0, which scores it."""

    prompt: Text | Ids | Annotated[list[Text], _list(MOST_PROMPTS, 1)] | Annotated[list[Ids], _list(MOST_PROMPTS, 1)]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    echo: bool = False
    suffix: Annotated[str, Field(max_length=0, description="Not supported: an answer goes on from a prompt's end.")] | None = None
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None

    def prompts(self) -> list[str | list[int]]:
        """One or several, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else list(self.prompt)

    def params(self, room: int) -> SamplingParams:
        """What to ask of the engine, where `room` tokens fit. Raises `BadInput`."""
        most = DEFAULT_COMPLETION if self.max_tokens is None else self.max_tokens
        prompt = self.logprobs if self.echo else None
        return SamplingParams(**self.common(), max_tokens=max(1, min(most, room)), logprobs=self.logprobs, prompt_logprobs=prompt)


def _token(key: str) -> int:
    if not key.isascii() or not key.isdecimal() or len(key) > 10:
        raise BadInput(f"logit_bias maps token ids to numbers, {key[:40]!r} is no token id")
    return int(key)
