"""What every HTTP request meets first: an id, the key check, limits on its body, strict JSON, a line in the log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import faults
from .faults import Fault
from .settings import MIB, Settings
from .traces import Traces

log = logging.getLogger("outrider.serve")
ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
GUARDED = "/v1"
"""Where keys are asked for; health, metrics and the page have nothing to hide."""


class Edge:
    """The outermost layer. Nothing escapes from it: what was not foreseen is a 500 in OpenAI's shape, and in the log."""

    def __init__(self, app: ASGIApp, settings: Settings, traces: Traces | None = None) -> None:
        self._app, self._traces = app, traces
        self._share = settings.share
        self._keys = tuple(_digest(key) for key in settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if ID.fullmatch(given) else uuid.uuid4().hex
        noted: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=name, noted=noted)
        started, status = time.perf_counter(), 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", name.encode())]
            await send(message)

        try:
            scope["state"]["group"] = self._check(scope, headers)
            await self._app(scope, receive, tagged)
        except Exception as error:
            fault = faults.of(error)
            if not isinstance(error, Fault):
                log.error("a request failed", exc_info=error, extra={"fields": {"request": name}})
            if not status:
                await JSONResponse(fault.body, fault.status, fault.headers)(scope, receive, tagged)
        finally:
            seconds = time.perf_counter() - started
            fields = _note(scope, name, noted.pop("status", status), seconds, noted)
            if self._traces is not None and scope["path"].startswith(GUARDED):
                self._traces.note(headers, fields, seconds)

    def _check(self, scope: Scope, headers: Headers) -> str | None:
        """Whose request it is, where there are keys, unless they share. All are compared, each in the same time, so that the time
        tells nothing."""
        if not self._keys or not scope["path"].startswith(GUARDED) or scope["method"] == "OPTIONS":
            return None
        kind, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip())
        known = [hmac.compare_digest(digest, other) for other in self._keys]
        if kind.lower() != "bearer" or not any(known):
            raise Fault(401, "a valid API key is needed: send it as `Authorization: Bearer KEY`", "invalid_api_key")
        return None if self._share else digest.hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _note(scope: Scope, name: str, status: int, seconds: float, noted: dict[str, Any]) -> dict[str, Any]:
    """A line in the log; its fields."""
    client = scope.get("client")
    fields = {"request": name, "method": scope["method"], "path": scope["path"], "status": status}
    fields |= {"client": client[0] if client else None, "ms": round(1e3 * seconds, 1)}
    quiet = scope["path"] in ("/health", "/metrics")
    log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields | noted})
    return fields | noted


class StrictRoute(APIRoute):
    """A route whose JSON body is read within limits and parsed strictly before anything else sees it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            if self.body_field is not None:
                settings: Settings = request.app.state.settings
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind != "application/json":
                    raise Fault(415, "send JSON, with the header `Content-Type: application/json`", "unsupported_media_type")
                request = Parsed(request.scope, request.receive)
                await request.read(settings)
            return await handle(request)

        return strict


class Parsed(Request):
    """A request whose body was read and parsed by `read`."""

    value: Any = None

    async def read(self, settings: Settings) -> None:
        """Raises `Fault` 413 beyond the limit, 408 for a client that takes too long, 400 for anything but JSON."""
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > settings.bytes:
            raise _too_large(settings)
        parts, size = [], 0
        try:
            async with asyncio.timeout(settings.read_seconds):
                async for part in self.stream():
                    size += len(part)
                    if size > settings.bytes:
                        raise _too_large(settings)
                    parts.append(part)
        except TimeoutError:
            raise Fault(408, f"the request did not arrive within {settings.read_seconds:g} s", "request_timeout") from None
        except ClientDisconnect:
            raise Fault(499, "the client has left") from None
        self._body = b"".join(parts)
        self.value = parse(self._body)

    async def json(self) -> Any:
        return self.value


def parse(body: bytes) -> Any:
    """Strict JSON: UTF-8, no duplicate keys, no NaN, no half characters. Raises `Fault` 400."""
    try:
        value = json.loads(body.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        if SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise Fault(400, f"the body is not valid UTF-8 (byte {error.start})", "invalid_utf8") from None
    except UnicodeEncodeError:
        raise Fault(400, "the body holds half a character (a lone surrogate)", "invalid_utf8") from None
    except RecursionError:
        raise Fault(400, "the body is nested too deeply", "invalid_json") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise Fault(400, f"the body is not valid JSON: {error.msg} ({where})", "invalid_json") from None
    except ValueError as error:
        raise Fault(400, f"the body is not valid JSON: {str(error)[:200]}", "invalid_json") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Fault(400, f"the body gives {twice[:100]!r} twice", "duplicate_key")
    return made


def _no_constant(name: str) -> Any:
    raise Fault(400, f"the body holds {name}, which is no JSON number", "invalid_json")


def _too_large(settings: Settings) -> Fault:
    return Fault(413, f"the body is larger than {settings.bytes / MIB:.3g} MiB, this server's limit", "body_too_large")
