"""Sends what the engine writes: as server-sent events, or whole. A client that leaves ends its job within a round."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from . import figures
from .faults import Fault
from .replies import Reply
from .worker import Job, Worker

LEFT = 499
"""The status logged for a client that did not wait."""
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class Answer(Response):
    """Waits for the first news before anything is sent, so that errors have their own status."""

    def __init__(self, worker: Worker, job: Job, reply: Reply, stream: bool) -> None:
        super().__init__()
        self._worker, self._job, self._reply, self._stream = worker, job, reply, stream
        self._held: Fault | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        noted = scope.setdefault("state", {}).setdefault("noted", {})
        watcher = asyncio.create_task(_watch(receive, self._job))
        try:
            await (self._send_events(scope, receive, send) if self._stream else self._send_whole(scope, receive, send))
        except Fault as fault:
            noted["error"] = fault.code or fault.message
            if fault.status != LEFT:
                await JSONResponse(fault.body, fault.status, fault.headers)(scope, receive, send)
            else:
                noted["status"] = LEFT
        finally:
            watcher.cancel()
            self._worker.cancel(self._job)
            noted.update(figures.noted(self._job.requests))

    async def _next(self) -> list[dict[str, Any]]:
        """What the news that came in gives the stream: one piece, or all that wait if the reader lags. Raises `Fault`."""
        queue, events = self._job.news, list[dict[str, Any]]()
        news = await queue.get() if self._held is None else self._held
        while not isinstance(news, Fault):
            choice, chunk = news
            try:
                self._reply.add(choice, chunk)
            except Fault as fault:
                news = fault
                break
            events += self._reply.events(choice, chunk) if self._stream else []
            if queue.empty():
                return events
            news = queue.get_nowait()
        if not events:
            raise news
        self._held = news
        return events

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        while not self._ended:
            await self._next()
        await JSONResponse(self._reply.whole())(scope, receive, send)

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = await self._next()
        head = [(key.encode(), value.encode()) for key, value in HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        try:
            while True:
                if events:
                    await _push(send, (json.dumps(event, separators=(",", ":")) for event in events))
                if self._ended:
                    break
                events = await self._next()
            ending = self._reply.ending()
            await _push(send, ([] if ending is None else [json.dumps(ending)]) + ["[DONE]"], last=True)
        except Fault as fault:
            if fault.status != LEFT:
                await _push(send, [json.dumps(fault.body)], last=True)
            scope["state"]["noted"].update(status=fault.status, error=fault.code or fault.message)

    @property
    def _ended(self) -> bool:
        return all(choice.finish is not None for choice in self._reply.choices)


async def _push(send: Send, events: Iterable[str], last: bool = False) -> None:
    """One write, however many events."""
    body = "".join(f"data: {event}\n\n" for event in events).encode()
    await send({"type": "http.response.body", "body": body, "more_body": not last})


async def _watch(receive: Receive, job: Job) -> None:
    """Tell the job's reader when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    job.news.put_nowait(Fault(LEFT, "the client has left"))
