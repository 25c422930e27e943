"""An OpenAI-compatible server of another make: it answers by rote, and can be told to misbehave."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse

METRICS = """# HELP vllm:spec_decode_num_drafts_total Rounds.
vllm:spec_decode_num_drafts_total{{model_name="m"}} {0}
vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {1}.0
vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {2}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="0"}} {0}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="1"}} {3}
"""


@dataclass
class Stub:
    """What to answer: `words`, one token each, after `silence` seconds. `strict`: no field that it does not know. `changes`:
    words that are others when a request has a temperature. `breaks`: what ends a stream early, `cut`, `error` or
    `garbage`; `alive`: comments without end; anything else is sent as it is. `moved`: where to ask instead."""

    words: list[str] = field(default_factory=lambda: ["The ", "sea ", "is ", "wide ", "and ", "blue."])
    changes: dict[int, str] = field(default_factory=dict)
    logprobs: bool = True
    gap: float = 1.0
    usage: bool = True
    chat: bool = True
    strict: bool = False
    key: str | None = None
    silence: float = 0.0
    breaks: str | None = None
    models: list[str] = field(default_factory=lambda: ["m"])
    metrics: str | None = None
    moved: str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)

    def text(self, body: dict[str, Any]) -> list[str]:
        words = [self.changes.get(i, w) if body.get("temperature") else w for i, w in enumerate(self.words)]
        return words[: body.get("max_tokens", 100)]


def app(stub: Stub) -> FastAPI:
    made = FastAPI()

    def refused(request: Request) -> Response | None:
        if stub.moved is not None:
            return RedirectResponse(stub.moved + request.url.path)
        if stub.key is None or request.headers.get("authorization") == f"Bearer {stub.key}":
            return None
        return JSONResponse({"error": {"message": "wrong key", "code": "invalid_api_key"}}, 401)

    @made.get("/v1/models", response_model=None)
    async def models(request: Request) -> Any:
        return refused(request) or {"object": "list", "data": [{"id": name, "object": "model"} for name in stub.models]}

    @made.get("/metrics", response_model=None)
    async def metrics() -> Any:
        if stub.metrics is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        n = len(stub.asked)
        return PlainTextResponse(stub.metrics.format(2 * n, 4 * n, 3 * n, n))

    async def answer(request: Request, chat: bool) -> Any:
        no = refused(request)
        if no is not None:
            return no
        body = await request.json()
        stub.asked.append(body)
        await asyncio.sleep(stub.silence)
        if stub.strict and "stream_options" in body:
            return JSONResponse({"detail": "Unexpected fields in the request: {'stream_options'}"}, 422)
        if chat and not stub.chat:
            return JSONResponse({"detail": "no chat template"}, 400)
        return StreamingResponse(stream(stub, body, chat), media_type="text/event-stream")

    @made.post("/v1/chat/completions", response_model=None)
    async def conversations(request: Request) -> Any:
        return await answer(request, True)

    @made.post("/v1/completions", response_model=None)
    async def texts(request: Request) -> Any:
        return await answer(request, False)

    return made


async def stream(stub: Stub, body: dict[str, Any], chat: bool) -> AsyncIterator[str]:
    words = stub.text(body)
    wanted = bool(body.get("logprobs")) and stub.logprobs
    for i, word in enumerate(words):
        if i == 2 and stub.breaks is not None:
            async for line in broken(stub.breaks):
                yield line
            return
        yield event({"delta": {"content": word}} if chat else {"text": word}, rows(stub, word, i, chat) if wanted else None)
    yield event({"delta": {}} if chat else {"text": ""}, None, "stop")
    if stub.usage:
        yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': len(words)}})}\n\n"
    yield "data: [DONE]\n\n"


async def broken(how: str) -> AsyncIterator[str]:
    """How a stream ends that does not end well."""
    while how == "alive":
        yield ": still here\n\n"
        await asyncio.sleep(0.05)
    known = {"error": 'data: {"error": {"message": "engine died"}}\n\n', "garbage": "data: {oops\n\n"}
    if how != "cut":
        yield known.get(how) or (how if how.startswith("data:") else f"data: {how}") + "\n\n"


def rows(stub: Stub, word: str, i: int, chat: bool) -> dict[str, Any]:
    own, other = -0.1 - 0.01 * i, -0.1 - 0.01 * i - stub.gap
    if not chat:
        return {"tokens": [word], "token_logprobs": [own], "top_logprobs": [{word: own, "x": other}]}
    top = [{"token": word, "logprob": own}, {"token": "x", "logprob": other}]
    return {"content": [{"token": word, "logprob": own, "top_logprobs": top}]}


def event(content: dict[str, Any], logprobs: Any, finish: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'finish_reason': finish, 'logprobs': logprobs, **content}]})}\n\n"


@contextmanager
def serving(stub: Stub) -> Iterator[str]:
    """The stub at a free port: its address."""
    server = uvicorn.Server(uvicorn.Config(app(stub), port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not server.started and time.monotonic() < end:
        time.sleep(0.01)
    assert server.started, "the stub did not start"
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
