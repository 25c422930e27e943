"""Sends what the engine writes: as server-sent events, or whole. A client that leaves ends its job within a round.

Nearly all news are a piece of text for a client that waits for it. Those take a short way: from the event loop's callback to the
socket, with no task woken up and nothing built but the text. All others go through the job's queue.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from . import figures
from .faults import Fault
from .line import NAME, Line
from .replies import Reply
from .worker import Event, Job, Worker

LEFT = 499
"""The status logged for a client that did not wait."""
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class Answer(Response):
    """Waits for the first news before anything is sent, so that errors have their own status."""

    def __init__(self, worker: Worker, job: Job, reply: Reply, stream: bool) -> None:
        super().__init__()
        self._worker, self._job, self._reply, self._stream = worker, job, reply, stream
        self._held: Fault | None = None
        self._line: Line | None = None
        self._waiting = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        noted = scope.setdefault("state", {}).setdefault("noted", {})
        watcher = asyncio.create_task(_watch(receive, self._job))
        self._line, self._job.tap = scope["state"].get(NAME), self._take
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
            self._job.tap = None
            self._worker.cancel(self._job)
            noted.update(figures.noted(self._job.requests))

    async def _next(self) -> list[dict[str, Any]]:
        """What the news that came in gives the stream: one piece, or all that wait if the reader lags. Raises `Fault`."""
        queue, events = self._job.news, list[dict[str, Any]]()
        self._waiting = self._held is None
        news = self._held or await queue.get()
        self._waiting = False
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

    def _take(self, news: Event) -> bool:
        """Deal with news on the spot, which ends no choice; False, and nothing done, where that cannot be."""
        if not self._waiting or isinstance(news, Fault) or news[1].result is not None or not self._job.news.empty():
            return False
        if self._stream:
            piece = self._reply.piece(*news)
            if piece is None or (piece and (self._line is None or not self._line.push(piece))):
                return False
        self._reply.add(*news)
        return True

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
