"""`outrider generate`: one prompt, one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import BadInput
from . import options as o
from .answer import loaded, report, stream_answer
from .drafters import HELP, describe_drafters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..config import SamplingParams
    from ..llm import LLM
    from ..results import Chunk


def generate(
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="What to answer or to continue.")] = None,
    file: o.PromptFile = None,
    chat: o.AsChat = None,
    model: o.Model = o.DEFAULT_MODEL,
    draft: o.Draft = "auto",
    control: o.Control = "goodput",
    accept: o.Accept = "coupled",
    device: o.Device = "auto",
    dtype: o.Dtype = "auto",
    quantize: o.Quantize = "none",
    max_model_len: o.MaxModelLen = None,
    threads: o.Threads = None,
    max_tokens: o.MaxTokens = 256,
    min_tokens: o.MinTokens = 0,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = None,
    stop: o.Stop = [],  # noqa: B006 - typer copies the default
    repetition_penalty: o.Repetition = 1.0,
    frequency_penalty: o.Frequency = 0.0,
    presence_penalty: o.Presence = 0.0,
    logit_bias: o.LogitBias = [],  # noqa: B006
    bad_word: o.BadWord = [],  # noqa: B006
    ignore_eos: o.IgnoreEos = False,
    n: o.Samples = 1,
    logprobs: o.Logprobs = None,
    show_draft: o.ShowDraft = False,
    trace: o.TraceFile = None,
    trace_text: o.TraceText = False,
    trace_mib: o.TraceMib = o.TRACE_MIB,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Answer one prompt. The text goes to stdout as it comes, everything else to stderr."""
    if draft == HELP:
        typer.echo(describe_drafters())
        return
    display = o.Display(show_draft, json, n, logprobs)
    text = o.read_prompt(prompt, file)
    params = o.sampling_params(ctx.params)
    with loaded(o.ModelOptions.of(ctx.params), rehearse=n) as llm:
        report(stream_answer(llm, _start(llm, text, chat, params), display), display)


def _start(llm: LLM, text: str, chat: bool | None, params: SamplingParams) -> Iterator[Chunk]:
    templated = llm.tokenizer.has_chat if chat is None else chat
    if templated and not llm.tokenizer.has_chat:
        raise BadInput("this model has no chat template, so --chat cannot be honoured: use --raw")
    if templated:
        return llm.stream_chat([{"role": "user", "content": text}], params)
    return llm.stream(text, params)
