"""Command-line options that several commands share, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import SamplingParams
from ..errors import BadInput

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The embedded model, by name: help texts must not import the engine. A test holds it equal to the engine's own."""

TRACE_MIB = 64.0
"""MiB of a trace's file; likewise."""

_MODEL = "Model"
_SAMPLING = "Sampling"
_OUTPUT = "Output"

Model = Annotated[
    str,
    typer.Option(help="Directory, GGUF file, hub id or the embedded default's name.", rich_help_panel=_MODEL),
]
Draft = Annotated[
    str,
    typer.Option(
        metavar="NAME[:key=value,...]",
        help="Who guesses: none, auto, or a drafter with its options; 'help' lists them all.",
        rich_help_panel=_MODEL,
    ),
]
Accept = Annotated[
    str,
    typer.Option(
        help="The acceptance rule: coupled (same text as without guesses), rejection, block, traversal (same law); "
        "LOSSY, they change what the model writes: typical, threshold.",
        rich_help_panel=_MODEL,
    ),
]
Control = Annotated[
    str,
    typer.Option(
        help="How far to look ahead: goodput (as far as it pays), adaptive (by acceptance alone), fixed (as the drafter likes).",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=_MODEL)]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.", rich_help_panel=_MODEL)]
Quantize = Annotated[
    str,
    typer.Option(
        help="Round the layers' weights to fewer bits (another model then, exact all the same): none, int8, int4.",
        rich_help_panel=_MODEL,
    ),
]
MaxModelLen = Annotated[int | None, typer.Option(min=1, help="Longest sequence, prompt included.", rich_help_panel=_MODEL)]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads for the model.", rich_help_panel=_MODEL)]

MaxTokens = Annotated[int, typer.Option(help="Most tokens to write.", rich_help_panel=_SAMPLING)]
MinTokens = Annotated[int, typer.Option(help="Fewest tokens before the end.", rich_help_panel=_SAMPLING)]
Temperature = Annotated[float, typer.Option(help="0 is greedy; 1 the model's own law.", rich_help_panel=_SAMPLING)]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 is off.", rich_help_panel=_SAMPLING)]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the best.", rich_help_panel=_SAMPLING)]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.", rich_help_panel=_SAMPLING)]
Stop = Annotated[list[str], typer.Option(help="Stop before this text (repeatable).", rich_help_panel=_SAMPLING)]
Repetition = Annotated[float, typer.Option(help="Above 1: repeat less.", rich_help_panel=_SAMPLING)]
Frequency = Annotated[float, typer.Option(help="Penalty per earlier use of a token.", rich_help_panel=_SAMPLING)]
Presence = Annotated[float, typer.Option(help="Penalty once a token was used.", rich_help_panel=_SAMPLING)]
LogitBias = Annotated[
    list[str],
    typer.Option(metavar="ID=VALUE", help="Add VALUE to a token's logit (repeatable).", rich_help_panel=_SAMPLING),
]
BadWord = Annotated[list[str], typer.Option(help="Never write this (repeatable).", rich_help_panel=_SAMPLING)]
Samples = Annotated[int, typer.Option("--n", min=1, help="How many answers to write.", rich_help_panel=_SAMPLING)]
Logprobs = Annotated[
    int | None,
    typer.Option(
        min=0, metavar="K", help="With --json: log-probabilities, of K more tokens at each place.", rich_help_panel=_OUTPUT
    ),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Write on past the end.", rich_help_panel=_SAMPLING)]

TraceFile = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="PATH",
        help="Write a line for every round, for `outrider replay` (.jsonl; .parquet with pyarrow); no text.",
        rich_help_panel=_OUTPUT,
    ),
]
TraceText = Annotated[bool, typer.Option("--trace-text", help="With --trace: prompts and answers, too.", rich_help_panel=_OUTPUT)]
TraceMib = Annotated[
    float,
    typer.Option(metavar="MIB", help="With --trace: put a file aside when it is larger than this.", rich_help_panel=_OUTPUT),
]

ShowDraft = Annotated[bool, typer.Option("--show-draft", help="Mark accepted and rejected guesses.", rich_help_panel=_OUTPUT)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.", rich_help_panel=_OUTPUT)]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and all warnings.", rich_help_panel=_OUTPUT)]
AsChat = Annotated[
    bool | None,
    typer.Option("--chat/--raw", help="Use the model's chat template, or not (default: if it has one).", rich_help_panel=_MODEL),
]
PromptFile = Annotated[
    str | None,
    typer.Option("--file", "-f", metavar="PATH", help='Read the prompt from a file, unchanged; "-" is stdin.'),
]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What to load, and how."""

    model: str = DEFAULT_MODEL
    draft: str = "auto"
    accept: str = "coupled"
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    threads: int | None = None
    control: str = "goodput"
    prefix_cache: bool = True
    kv_tokens: int | None = None
    quantize: str = "none"
    trace: str | None = None
    trace_text: bool = False
    trace_mib: float = TRACE_MIB

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ModelOptions:
        """From a command's parameters, by name."""
        return cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given})


@dataclass(frozen=True, slots=True)
class Display:
    """How to show an answer."""

    show_draft: bool = False
    json: bool = False
    samples: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.show_draft and self.json:
            raise BadInput("--show-draft and --json exclude each other: the JSON object carries no colours; drop one")
        if self.show_draft and self.samples > 1:
            raise BadInput("--show-draft shows one answer as it comes: drop it or --n")
        if self.logprobs is not None and not self.json:
            raise BadInput("--logprobs are part of the JSON object: add --json")


SAME_NAME = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    "n",
    "logprobs",
)
"""Options whose name and value `SamplingParams` takes as they are."""


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """From a command's parameters, by name; options the command lacks keep their defaults. Raises `BadInput`."""
    values = {name: given[name] for name in SAME_NAME if name in given}
    return SamplingParams(
        **values,
        stop=tuple(given.get("stop") or ()),
        bad_words=tuple(given.get("bad_word") or ()),
        logit_bias=parse_bias(given.get("logit_bias") or []),
    )


def parse_bias(items: list[str]) -> dict[int, float]:
    """`["5=1.5", "7=-2"]` -> `{5: 1.5, 7: -2.0}`. Raises `BadInput` for anything else, and for a token given twice."""
    biases: dict[int, float] = {}
    for item in items:
        left, equals, right = item.partition("=")
        try:
            token, value = int(left), float(right)
        except ValueError:
            equals = ""
        if not equals:
            raise BadInput(f"--logit-bias {item!r} is not ID=VALUE, like 198=-5 (a token id and a number)")
        if token in biases:
            raise BadInput(f"--logit-bias gives token {token} twice")
        biases[token] = value
    return biases


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt from the argument or from a file ("-" is stdin), unchanged. Raises `BadInput` if there is none, both,
    it is blank, or it is not UTF-8."""
    if (prompt is None) == (file is None):
        both = prompt is not None
        raise BadInput(
            "a prompt and --file were both given: drop one" if both else 'no prompt: give one, or --file PATH ("-" is stdin)'
        )
    text = _checked(prompt) if prompt is not None else _from_file(file or "-")
    if not text.strip():
        raise BadInput("the prompt is empty: give the model at least one word to go on")
    return text


def _checked(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError:  # the shell's bytes were no UTF-8, python keeps them as lone surrogates
        raise BadInput("the prompt is not valid UTF-8: check the terminal's encoding, or use --file") from None
    return prompt


def _from_file(file: str) -> str:
    name = "standard input" if file == "-" else file
    try:
        data = typer.get_binary_stream("stdin").read() if file == "-" else Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"cannot read the prompt from {name}: {reason}") from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{name} is not valid UTF-8 (byte {error.start}): convert it first, say with iconv") from None
