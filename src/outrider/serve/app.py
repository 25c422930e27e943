"""The routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response

from .. import noise
from ..config import SamplingParams
from ..errors import BadInput, OutriderError
from ..llm import LLM
from ..types import Request as Sample
from ..version import VERSION
from ..watch.gain import Gain
from . import faults
from .calls import Form
from .edge import Edge, StrictRoute
from .faults import Fault
from .grammar import Form as Grammatical
from .grammar import Grammars
from .meters import Meters
from .page import page
from .replies import ChatReply, CompletionReply, Context
from .schema import ChatRequest, CompletionRequest, Sampling
from .settings import Settings
from .stream import Answer
from .tools import Prompter, offered, required
from .traces import Traces
from .worker import Worker

EXACT = 11
"""Bits that a drawn seed gives up: below 2**53, every JSON reader keeps it whole."""
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in {
        400: "The request cannot be honoured.",
        401: "The key is missing or wrong.",
        404: "No such model.",
        408: "The request took too long to arrive.",
        413: "The body is too large.",
        415: "The body is no JSON.",
        429: "The queue is full.",
        500: "The engine failed.",
        503: "The server is shutting down.",
    }.items()
}


class House:
    """What the routes share: the model, the thread that runs it, one for templates and tokens, and one for grammars, which may
    take seconds."""

    def __init__(self, llm: LLM, settings: Settings, worker: Worker, gain: Gain) -> None:
        self.llm, self.settings, self.worker, self.gain = llm, settings, worker, gain
        self.name = settings.served_name or llm.name
        self.created = int(time.time())
        self.context = Context(self.name, f"outrider-{VERSION}", llm.tokenizer, lambda: llm.drafter_name, gain)
        self.prompter = Prompter(llm.tokenizer)
        self.grammars = Grammars(llm.tokenizer)
        self.traces = Traces(self.name) if settings.otel else None
        self._coming = 0
        self._clerk = ThreadPoolExecutor(1, thread_name_prefix="outrider-clerk")
        self._smith = ThreadPoolExecutor(1, thread_name_prefix="outrider-smith")

    async def aside(self, task: Callable[[], Any]) -> Any:
        """Run what takes long off the event loop, one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._clerk, task)

    def check(self, body: Sampling, prompts: int = 1) -> None:
        """Raises `Fault` for another model than the one served, another drafter, and answers that there is no place for, before
        any work is done for them."""
        if body.model is not None and body.model != self.name:
            raise Fault(404, f"model {body.model[:200]!r} is not served here; use {self.name!r}", "model_not_found", "model")
        asked = body.speculation.draft if body.speculation is not None else None
        loaded = self.worker.engine.drafter.name
        if asked not in (None, "none", "auto", loaded):
            message = f"speculation.draft is {asked!r}, but this server runs with {loaded!r}; use that, 'none', or leave it out"
            raise Fault(400, message, param="speculation.draft")
        self.worker.admit(prompts * (body.n or 1), self._coming)

    @contextmanager
    def door(self, body: Sampling, prompts: int = 1) -> Iterator[None]:
        """Checks a request, and counts it as waiting while it is made ready: many at once that take long must not pile up."""
        self.check(body, prompts)
        count = prompts * (body.n or 1)
        self._coming += count
        try:
            yield
        finally:
            self._coming -= count

    def room(self, tokens: int) -> int:
        """Tokens that an answer to a prompt may have. Raises `Fault` where there is no room."""
        context = min(self.llm.max_model_len, self.worker.engine.target.cache.capacity)
        if tokens >= context:
            raise faults.too_long(tokens, context)
        return min(context - tokens, self.settings.max_tokens or context)

    async def grammar(self, body: Sampling) -> Grammatical | None:
        """The compiled form of the answer, if one was asked for. Raises `BadInput`."""
        call = required(body) if isinstance(body, ChatRequest) else None
        if call is not None:
            return await self._forged("grammar", call)
        source = None if body.response_format is None else body.response_format.source()
        if source is None or body.response_format is None:
            return None
        if body.min_tokens:
            raise BadInput("min_tokens and response_format exclude each other: an answer ends where its form does")
        return await self._forged(body.response_format.type, source)

    async def _forged(self, kind: str, source: Any) -> Grammatical:
        return await asyncio.get_running_loop().run_in_executor(self._smith, self.grammars.compile, kind, source)

    def samples(self, ids: list[int], params: Callable[[int], SamplingParams], grammar: Grammatical | None) -> list[Sample]:
        """The requests of one prompt."""
        chosen = params(self.room(len(ids)))
        if grammar is not None:
            chosen = replace(chosen, processors=(self.grammars.processor(grammar, len(ids)),))
        return self.llm.prepare(ids, chosen)

    def close(self) -> None:
        for executor in (self._clerk, self._smith):
            executor.shutdown(wait=False, cancel_futures=True)
        if self.traces is not None:
            self.traces.close()


def seeded(body: Sampling) -> int:
    """The request's seed, drawn if it has none."""
    if body.seed is None:
        body.seed = noise.fresh_seed() >> EXACT
    return body.seed


def labelled(body: Sampling, request: Request) -> None:
    """The kind of work may be named in a header, too; the body's own word wins."""
    header = request.headers.get("x-outrider-label")
    if header is not None:
        body.metadata = {"label": header} | (body.metadata or {})


def grouped(requests: list[Sample], group: str | None) -> list[Sample]:
    """Requests that say whose they are."""
    for request in requests:
        request.group = group
    return requests


def make_app(house: House, meters: Meters) -> FastAPI:
    """The application, without the thread that runs the engine: `worker.start` is the caller's."""
    app = FastAPI(title="Outrider", version=VERSION, docs_url="/docs", redoc_url=None)
    app.state.settings, app.state.house = house.settings, house
    app.include_router(_models(house))
    app.include_router(_api(house))
    app.include_router(_health(house, meters))
    if house.settings.page:
        app.include_router(page())
    app.add_exception_handler(Fault, _fault)
    app.add_exception_handler(OutriderError, _fault)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_middleware(Edge, settings=house.settings, traces=house.traces)
    if house.settings.cors_origins:  # around all, so that pages may read errors, too
        shared: dict[str, Any] = {"allow_headers": ["*"], "expose_headers": ["x-request-id", "retry-after"]}
        origins = list(house.settings.cors_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], **shared)
    return app


def _models(house: House) -> APIRouter:
    api = APIRouter(prefix="/v1", responses=ERRORS)

    @api.get("/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [_card(house)]}

    @api.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The same, by name."""
        if name != house.name:
            raise Fault(404, f"model {name[:200]!r} is not served here; use {house.name!r}", "model_not_found", "model")
        return _card(house)

    return api


def _api(house: House) -> APIRouter:
    api = APIRouter(route_class=StrictRoute, prefix="/v1", responses=ERRORS)

    @api.post("/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        with house.door(body):
            labelled(body, request)
            if house.settings.log_prompts:
                request.state.noted["prompt"] = [m.plain() for m in body.messages]
            seed, form = seeded(body), house.prompter.form if offered(body) else None
            if form not in (None, Form.HERMES):
                body.skip_special_tokens = False  # the marks of a call are special tokens
            grammar = await house.grammar(body)

            def prepare() -> list[Sample]:
                return house.samples(house.prompter.encode(body), body.params, grammar)

            requests = grouped(await house.aside(prepare), request.state.group)
        job = house.worker.submit(requests)
        return Answer(house.worker, job, ChatReply(house.context, body, job, seed, form), bool(body.stream))

    @api.post("/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Go on with a text."""
        with house.door(body, len(body.prompts())):
            labelled(body, request)
            if house.settings.log_prompts:
                request.state.noted["prompt"] = body.prompt
            _check_completion(body)
            seed, texts = seeded(body), list[str]()
            grammar = await house.grammar(body)

            def prepare() -> list[Sample]:
                made = list[Sample]()
                for prompt in body.prompts():
                    ids = house.llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                    made += house.samples(ids, body.params, grammar)
                    texts.append(prompt if isinstance(prompt, str) else house.llm.tokenizer.decode(prompt, False))
                return made

            requests = grouped(await house.aside(prepare), request.state.group)
        job = house.worker.submit(requests)
        return Answer(house.worker, job, CompletionReply(house.context, body, job, seed, texts), bool(body.stream))

    return api


def _check_completion(body: CompletionRequest) -> None:
    if body.best_of not in (None, body.n or 1):
        raise Fault(400, "best_of other than n is not supported", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise Fault(400, "max_tokens 0 makes sense with echo only: ask for at least one token", param="max_tokens")


def _card(house: House) -> dict[str, Any]:
    drafter = house.worker.engine.drafter
    own = {
        "drafter": house.llm.drafter_name,
        "drafter_off_because": drafter.reason,
        "accept": house.llm.accept.name,
        "plain_tokens_per_second": house.gain.plain_rate,
        "chat": house.llm.tokenizer.has_chat,
    }
    card = {"id": house.name, "object": "model", "created": house.created, "owned_by": "outrider"}
    return card | {"max_model_len": house.llm.max_model_len, "outrider": own}


def _health(house: House, meters: Meters) -> APIRouter:
    about = APIRouter()

    @about.get("/health")
    async def health() -> Response:
        """200 while requests are taken, 503 once they are not."""
        worker = house.worker
        status = "failed" if worker.failed else "draining" if worker.draining else "ok"
        found = {"status": status, "model": house.name, "drafter": house.llm.drafter_name, "open": worker.open}
        return JSONResponse(found | ({"reason": worker.failed} if worker.failed else {}), 200 if status == "ok" else 503)

    @about.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(meters.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return about


async def _fault(request: Request, error: Exception) -> Response:
    fault = faults.of(error)
    request.state.noted["error"] = fault.code or fault.message
    return JSONResponse(fault.body, fault.status, fault.headers)


async def _invalid(request: Request, error: Exception) -> Response:
    """The first field that is wrong with a body, and what, without repeating the body. Where several forms are possible, the
    one that was got furthest with; names of forms are no part of the place."""
    found = list(error.errors()) if isinstance(error, RequestValidationError) else [{"loc": (), "msg": str(error)}]
    first = max((e for e in found if e["loc"][:2] == found[0]["loc"][:2]), key=lambda e: len(e["loc"]))
    where = ".".join(str(part) for part in first["loc"] if part != "body" and (isinstance(part, int) or part.isidentifier()))
    message = f"{where[:200]}: {first['msg']}" if where else str(first["msg"])
    return await _fault(request, Fault(400, message[:1000], "invalid_value", where[:200] or None))


async def _http(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, a method it does not know."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    said = {
        404: f"there is no {request.url.path[:200]} here",
        405: f"{request.method} is not possible at {request.url.path[:200]}",
    }
    message = said.get(status, str(getattr(error, "detail", "")) or "the request failed")
    response = await _fault(request, Fault(status, message, {404: "not_found", 405: "method_not_allowed"}.get(status)))
    response.headers.update(getattr(error, "headers", None) or {})
    return response
