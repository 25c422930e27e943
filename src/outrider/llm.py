"""The facade: load a model and a drafter, ask for answers, stream them."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from . import control as controllers
from . import noise
from .accept import PerRequest, lossless
from .choice import Choice
from .config import SamplingParams
from .errors import BadInput, OutOfMemory
from .loading import Parts, Setup, assemble
from .metrics import summarise
from .models.weights import DEFAULT_MODEL
from .protocols import Drafter
from .rehearsal import MOST
from .results import Chunk, Result
from .seat import Seat
from .text import TextStream
from .types import FINISH_NAMES, Committed, Finish, Request, Stats
from .watch import Watch
from .watch.trace import SIZE, Trace

Prompt = str | Sequence[int]


class LLM:
    """A language model that answers faster, without changing a word.

    `model`: directory, GGUF file, hub id, or the embedded default's name. `draft`: `NAME[:key=value,...]`, or `auto`.
    `control`: how far to look ahead: `goodput` (as far as it pays, measured while it runs), `adaptive` (by acceptance alone) or
    `fixed` (as far as the drafter likes). `accept`: the acceptance rule of requests that name none (`typical` and `threshold`
    are lossy: results then say `lossless=False`). `device` and `dtype`: `auto` means a GPU in bfloat16 if there is one, else
    CPU in float32. `max_model_len` limits the context, `kv_tokens` the KV memory (in tokens over all running requests). `cache`:
    `paged`, or `slots`, the contiguous reference. `invariant=True` makes every token's scores independent, to the last bit, of
    what shares its pass, at some cost. `prefix_cache`: prompts that begin alike share the work. `quantize`: `none`, `int8` or
    `int4`: the layers' weights are rounded to 8 or 4 bits (another model then, exact all the same). `trace`: a file that gets
    a line for every round (no text unless `trace_text`; put aside when larger than `trace_mib`; `close` ends it). `rehearse`: on
    a GPU, guesses are captured and timed beforehand for batches of up to so many requests (0: none, which starts quicker).
    `progress` hears one line per slow step of loading.

    Raises `OutriderError`s that say what to do; nothing is downloaded except for a hub id.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        draft: str = "auto",
        control: str = controllers.DEFAULT,
        accept: str = "coupled",
        device: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        kv_tokens: int | None = None,
        cache: str = "paged",
        invariant: bool = False,
        prefix_cache: bool = True,
        quantize: str = "none",
        trace: str | Path | None = None,
        trace_text: bool = False,
        trace_mib: float = SIZE,
        rehearse: int = MOST,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.notices: list[str] = []
        self._trace = None if trace is None else Trace(trace, trace_text, trace_mib)
        self._choice = Choice(model, self.notices, device)
        self.accept = PerRequest(accept)
        controllers.check(control)
        self.control = control
        setup = Setup(model, device, dtype, max_model_len, kv_tokens, cache, invariant, prefix_cache, quantize)
        say = progress or (lambda line: None)
        parts, drafter = self._assemble(setup, draft, say)
        self._target, self.tokenizer, self.name = parts.target, parts.tokenizer, parts.name
        self._seat = Seat(parts, self._choice, prefix_cache, rehearse, say)
        self.engine = self._seat.take(draft, drafter, self.accept, control)
        self._count = 0
        self._current: list[Request] = []
        self._inboxes: dict[int, deque[Committed]] = {}
        if self._trace is not None:
            self._begin(self._trace)

    def _begin(self, trace: Trace) -> None:
        """From now on all rounds are written down."""
        about = {"model": self.name, "drafter": self.drafter_name, "controller": self.control, "rule": self.accept.name}

        def state() -> tuple[str, str]:
            return self.drafter_name, getattr(self.engine.controller, "reason", "")

        trace.begin(about | {"device": str(self._target.device)}, state, lambda ids: self.tokenizer.decode(ids, False))
        self.engine.sinks.append(trace)

    def _assemble(self, setup: Setup, draft: str, progress: Callable[[str], None]) -> tuple[Parts, Drafter]:
        """The model with room for its drafter; one that `auto` picked gives way to the next best where memory is short."""
        while True:
            drafter = self._choice.drafter(draft)
            try:
                return assemble(setup, drafter, progress), drafter
            except OutOfMemory as error:
                if not self._choice.pass_over(draft, error):
                    raise

    def switch(self, draft: str, accept: str = "coupled", control: str | None = None) -> None:
        """Another drafter and rule on the model that is loaded, for requests to come; `control` None: the same kind of
        controller, which begins with what was learned of this drafter before. Raises `BadInput` while any is running, or where
        a name or options are wrong, `DrafterMismatch` where the drafter does not fit."""
        if not self.engine.scheduler.idle:
            raise BadInput("cannot switch the drafter while requests are running; finish or close them first")
        accept_rule, drafter, control = PerRequest(accept), self._choice.drafter(draft), control or self.control
        controllers.check(control)
        engine = self._seat.take(draft, drafter, accept_rule, control)
        engine.sinks = self.engine.sinks
        self.engine, self.accept, self.control = engine, accept_rule, control

    @property
    def drafter_name(self) -> str:
        """The drafter in use, or `none` once it was switched off."""
        guard = self.engine.drafter
        return guard.name if guard.working else "none"

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and answer together, in tokens."""
        return self._target.max_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """Complete one prompt or several (text or token ids), all in one batch; results in the order of the prompts.

        `params` is one for all, or one each. With `n > 1`, `Result.samples` has all samples of a prompt. Raises
        `BadInput` for prompts that are empty or longer than the context.
        """
        many = _prompts(prompts)
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise BadInput(f"{len(many)} prompts but {len(each)} params; give one for all, or one each")
        groups = [self._requests(p, q or SamplingParams()) for p, q in zip(many, each, strict=True)]
        requests = [request for group in groups for request in group]
        try:
            for request in requests:
                self.engine.add(request)
            for request in requests:
                while request.finish is Finish.RUNNING:
                    self._step()
        finally:
            self.engine.abort(requests)
        return [self._results(group, p) for group, p in zip(groups, many, strict=True)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one prompt, yielding each round as it comes; the last chunk carries the `Result`. With `n > 1` the samples'
        chunks come mixed, told apart by `Chunk.index`, and the last one of each sample carries its result. Closing the iterator,
        or Ctrl-C, stops the request within a round (`interrupt` then tells how far it got)."""
        requests = self._requests(prompt, params or SamplingParams())
        self._current = requests
        return self._rounds(requests, prompt)

    def _rounds(self, requests: list[Request], prompt: Prompt) -> Iterator[Chunk]:
        inbox = deque[Committed]()
        try:
            for request in requests:
                self.engine.add(request)
                self._inboxes[request.id] = inbox
            while inbox or any(r.finish is Finish.RUNNING for r in requests):
                if not inbox:
                    self._step()
                while inbox:
                    item = inbox.popleft()
                    ended = item.finish is not Finish.RUNNING
                    yield _chunk(item, self._result(item.request, prompt, requests[0]) if ended else None)
        finally:
            self.engine.abort(requests)
            for request in requests:
                self._inboxes.pop(request.id, None)

    def _step(self) -> None:
        """One round; what it committed goes to the streams that are open, whoever asked for the round."""
        event = self.engine.step()
        for item in event.committed if event is not None else ():
            if item.request.id in self._inboxes and not item.late:
                self._inboxes[item.request.id].append(item)

    def prepare(self, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """One request per sample of a prompt, checked and not yet queued: for those who run the engine's rounds themselves."""
        return self._requests(prompt, params)

    def chunk(self, item: Committed, first: Request) -> Chunk:
        """A request's share of a round as streams give it, with its result if it ended; `first`: the prompt's first sample."""
        return _chunk(item, None if item.finish is Finish.RUNNING else self._result(item.request, None, first))

    def chat(self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None) -> Result:
        """Answer a conversation (`[{"role": ..., "content": ...}, ...]`) through the model's chat template."""
        return self.generate([self.tokenizer.chat(messages)], params)[0]

    def stream_chat(self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None) -> Iterator[Chunk]:
        """`stream` for a conversation."""
        return self.stream(self.tokenizer.chat(messages), params)

    @property
    def watch(self) -> Watch:
        """What the engine knows about its speculation: acceptance by label, and whether it pays."""
        return self.engine.watch

    def interrupt(self) -> Result | None:
        """Stop the streamed request, if one is running, and return what it has so far."""
        requests = self._current
        if not requests:
            return None
        self.engine.abort(requests)
        for request in requests:
            if request.text is not None:
                request.text.push([], last=True)
        return self._results(requests, None)

    def close(self) -> None:
        """Stop everything and drop the queue. The object must not be used afterwards."""
        scheduler = self.engine.scheduler
        self.engine.abort([*scheduler.running, *scheduler.waiting])
        if self._trace is not None:
            self._trace.close()

    def _requests(self, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """One request per sample. The others copy the first one's prompt KV, unless the drafter wants to see every prompt row."""
        first = self._request(prompt, params)
        others = [self._sample(first, index) for index in range(1, params.n)]
        return [first, *others]

    def _sample(self, first: Request, index: int) -> Request:
        self._count += 1
        return replace(
            first,
            id=self._count,
            index=index,
            tokens=list(first.tokens),
            key=noise.request_key(first.seed, first.tokens, index),
            twin=None if self.engine.drafter.drafter.needs.every else first,
            text=self._text(first.params),
            stats=Stats(),
            origins=[],
            logprobs=[],
            processed_logprobs=[],
            prompt_logprobs=[],
            failures={},
        )

    def _text(self, params: SamplingParams) -> TextStream | None:
        if not params.detokenize:
            return None
        include, skip = params.include_stop_str_in_output, params.skip_special_tokens
        return TextStream(self.tokenizer, params.stops, include, skip, params.min_tokens)

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if not isinstance(params, SamplingParams):
            raise BadInput(f"params must be SamplingParams, got {type(params).__name__}")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _ids(prompt)
        bad_words = self._bad_words(params.bad_words)
        self._check(ids, params, bad_words)
        seed = noise.fresh_seed() if params.seed is None else params.seed
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.tokenizer.eos_ids))
        self._count += 1
        return Request(
            id=self._count,
            tokens=ids,
            prompt_len=len(ids),
            params=params,
            key=noise.request_key(seed, ids),
            seed=seed,
            stop_ids=frozenset(stops),
            bad_words=bad_words,
            limit=self.max_model_len - len(ids),
            rule=params.accept or self.accept.name,
            text=self._text(params),
        )

    def _check(self, ids: list[int], params: SamplingParams, bad_words: tuple[tuple[int, ...], ...]) -> None:
        if params.accept is not None:
            lossless(params.accept)  # raises for a rule that does not exist
        if not ids:
            raise BadInput("the prompt is empty; give at least one token")
        vocab = self._target.vocab_size
        wrong = next((i for i in ids if not 0 <= i < vocab), None)
        if wrong is not None:
            raise BadInput(f"prompt token {wrong!r} is not in the vocabulary of {self.name} (0 to {vocab - 1})")
        if len(ids) >= self.max_model_len:
            raise BadInput(
                f"the prompt has {len(ids)} tokens, but the context of {self.name} holds {self.max_model_len}, answer included; "
                "shorten the prompt or raise max_model_len"
            )
        self._target.sampler.check(params, bad_words)

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences to avoid: each word at the start of a text and after a space."""
        forms = {tuple(self.tokenizer.encode(f, special=False)) for w in words for f in (w, " " + w.lstrip())}
        return tuple(sorted(f for f in forms if f))

    def _results(self, requests: list[Request], prompt: Prompt | None) -> Result:
        first, *others = [self._result(r, prompt, requests[0]) for r in requests]
        return replace(first, others=tuple(others))

    def _result(self, request: Request, prompt: Prompt | None, first: Request) -> Result:
        """One sample's result; the log-probabilities of the prompt are those of the `first` sample."""
        text = request.text.text if request.text is not None else ""
        params, engine = request.params, self.engine
        told = (self.drafter_name, request.rule, request.lossless, engine.controller.explain(), engine.watch.gain)
        return Result(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=tuple(request.tokens[: request.prompt_len]),
            text=text,
            token_ids=tuple(request.output),
            origins=tuple(request.origins),
            finish_reason=FINISH_NAMES.get(request.finish, "abort"),
            seed=request.seed,
            stats=summarise(request.stats, *told),
            lossless=request.lossless,
            error=request.error,
            logprobs=tuple(request.logprobs) if params.logprobs is not None else None,
            processed_logprobs=tuple(request.processed_logprobs)
            if params.logprobs is not None and params.logprobs_mode == "both"
            else None,
            prompt_logprobs=(None, *first.prompt_logprobs) if params.prompt_logprobs is not None else None,
            index=request.index,
        )


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise BadInput(f"a prompt is text or a list of token ids, got {prompts!r}")
    many = list(prompts)
    if not many:
        raise BadInput("no prompts; give at least one")
    return [many] if all(isinstance(p, int) for p in many) else many  # type: ignore[list-item, return-value]


def _ids(prompt: Sequence[int]) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise BadInput(f"a prompt is text or a list of token ids, got {str(prompt)[:80]}") from error


def _chunk(item: Committed, result: Result | None) -> Chunk:
    index, first, second = item.request.index, item.logprobs, item.processed_logprobs
    return Chunk(item.text, item.tokens, item.origins, item.rejected, result, index, first, second)
