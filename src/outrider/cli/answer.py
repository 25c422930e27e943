"""One answer from start to end: load the model, stream, survive Ctrl-C, report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import OutriderError
from ..heap import frozen
from .drafters import check_draft
from .guard import say
from .options import Display, ModelOptions

if TYPE_CHECKING:
    from ..llm import LLM
    from ..results import Chunk, Result

RESULT_FIELDS = ("text", "token_ids", "finish_reason", "seed", "lossless")
STATS_FIELDS = (
    "tokens",
    "rounds",
    "drafted",
    "accepted",
    "tokens_per_round",
    "acceptance_rate",
    "acceptance_by_position",
    "draft_seconds",
    "verify_seconds",
    "seconds",
    "tokens_per_second",
    "drafter",
    "accept",
    "lossless",
    "controller",
    "speedup",
    "losing",
)
"""What `--json` prints: scripts depend on these names."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came out, and whether Ctrl-C cut it short."""

    result: Result
    interrupted: bool = False


@contextmanager
def loaded(options: ModelOptions, rehearse: int | None = None) -> Iterator[LLM]:
    """The model, loaded with its progress and notices on stderr, closed at the end; `rehearse`: how many requests it has at most
    (None: any number). Raises `OutriderError`."""
    check_draft(options.draft)
    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)
    from ..llm import LLM
    from ..rehearsal import MOST

    llm = LLM(
        options.model,
        draft=options.draft,
        control=options.control,
        accept=options.accept,
        device=options.device,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        kv_tokens=options.kv_tokens,
        prefix_cache=options.prefix_cache,
        quantize=options.quantize,
        trace=options.trace,
        trace_text=options.trace_text,
        trace_mib=options.trace_mib,
        rehearse=MOST if rehearse is None else rehearse,
        progress=say,
    )
    with closing(llm), frozen():
        for notice in llm.notices:
            say(f"note: {notice}")
        yield llm


def stream_answer(llm: LLM, chunks: Iterator[Chunk], display: Display) -> Answer:
    """Show `chunks` as they come. Ctrl-C ends the answer early, with what there is."""
    from .painter import Painter, paint_legend

    def decode(ids: Sequence[int]) -> str:
        return llm.tokenizer.decode(ids)

    if display.show_draft:
        paint_legend()
    painter = Painter(decode, marks=display.show_draft, silent=display.json)
    ended: dict[int, Result] = {}
    result, interrupted = None, False
    try:
        for chunk in chunks:
            if chunk.index == 0:
                painter.show(chunk)
            if chunk.result is not None:
                ended[chunk.index] = chunk.result
        result = together(ended)
    except KeyboardInterrupt:
        result, interrupted = llm.interrupt(), True
    if result is None:
        if interrupted:
            raise KeyboardInterrupt
        raise RuntimeError("the stream ended without a result")
    painter.finish(result.text)
    for other in () if display.json else result.others:
        say(f"--- answer {other.index + 1} of {display.samples}")
        sys.stdout.write(other.text + "\n")
    return Answer(result, interrupted)


def together(ended: Mapping[int, Result]) -> Result | None:
    """The first sample's result with the others' inside."""
    others = tuple(ended[index] for index in sorted(ended) if index)
    return replace(ended[0], others=others) if 0 in ended else None


def report(answer: Answer, display: Display) -> None:
    """The statistics on stderr, or the JSON object on stdout; then an error or interruption takes its course."""
    if display.json:
        sys.stdout.write(as_json(answer.result, display.samples > 1) + "\n")
        sys.stdout.flush()
    else:
        say(stats_line(answer.result))
    if answer.interrupted:
        raise KeyboardInterrupt
    for result in answer.result.samples:
        check(result)


def check(result: Result) -> None:
    """Raises `OutriderError` if the answer ended in an error of its own."""
    if result.finish_reason == "error":
        raise OutriderError(result.error or "the model gave no valid scores; try another --dtype or --device")


def as_json(result: Result, samples: bool = False) -> str:
    """The object of `--json`, on one line of ASCII: the first answer, and, under `samples`, all of them as a list."""
    more = {"samples": [as_object(sample) for sample in result.samples]} if samples else {}
    return json.dumps(as_object(result) | more)


def as_object(result: Result) -> dict[str, Any]:
    """One answer; `logprobs` only where they were asked for: per token a list of `{token_id, logprob, rank, text}`."""
    stats = {name: getattr(result.stats, name) for name in STATS_FIELDS}
    found = {name: getattr(result, name) for name in RESULT_FIELDS} | {"stats": stats}
    if result.logprobs is not None:
        found["logprobs"] = [[asdict(entry) for entry in place] for place in result.logprobs]
    return found


def stats_line(result: Result) -> str:
    """One line for people: speed, size, speculation, seed, first token, how it ended."""
    s = result.stats
    guesses = f"{s.acceptance_rate:.0%} of {s.drafted} guesses accepted" if s.drafted else "no guesses"
    parts = [
        f"{s.tokens_per_second:.1f} tok/s",
        f"{s.tokens} tokens in {s.seconds:.2f} s",
        f"{s.tokens_per_round:.2f} tokens per round",
        guesses,
        f"drafter {s.drafter}",
        f"seed {result.seed}",
        f"first token {s.first_token_seconds:.2f} s",
        f"ended by {result.finish_reason}",
    ]
    if s.losing:
        parts.append(f"LOSING: {s.speedup or 0:.2f} times the speed of plain decoding, try --draft none")
    if not result.lossless:
        parts.append("LOSSY: this acceptance rule may change the text")
    return "[" + " | ".join(parts) + "]"
