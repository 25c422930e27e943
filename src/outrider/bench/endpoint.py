"""A server that speaks OpenAI's API, as a client sees it: its model, and streamed answers with the moments their pieces came.

Every answer has a connection of its own, so that the time to the first piece includes opening one. Servers on this machine are
asked directly, all others through the proxy that the environment names, if any.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from ..errors import BadInput, OutriderError

LOCAL = ("localhost", "127.0.0.1", "::1")
MOST = 64 * 2**20
"""Bytes that an answer which is not streamed may have."""
FINAL = "data: [DONE]"
LEAST = -9999.0
"""Nats that stand for minus infinity."""
LONGEST = 4 * 2**20
"""Bytes of one line of a stream."""
MADE = (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)
"""What reading an object of a stream or a list of models raises where that is made up of something else."""
GONE = 3
REFUSED = (400, 404, 405, 422, 500, 501)
"""What servers answer to a kind of request that they do not know."""


class _Straight(urllib.request.HTTPRedirectHandler):
    """Follows nobody: the key that goes with a request is for the server that was named."""

    def redirect_request(self, *about: Any) -> None:
        return None


class Unanswered(OutriderError):
    """A server that cannot be reached, refuses, breaks off or answers something else. `status` is HTTP's, None where there was
    no answer; `gone`: nobody was reached, or nothing was heard."""

    def __init__(self, message: str, status: int | None = None, gone: bool = False) -> None:
        super().__init__(message)
        self.status, self.gone = status, gone


class Patience:
    """How long to go on asking: after `GONE` failures in a row that find the server gone, no more."""

    def __init__(self) -> None:
        self._failures = 0

    def heard(self) -> None:
        """The server is there."""
        self._failures = 0

    def failed(self, error: Unanswered) -> None:
        """Raises `error` where there is no use in asking any more."""
        self._failures = self._failures + 1 if error.gone else 0
        if self._failures >= GONE:
            raise error


@dataclass(slots=True)
class Reply:
    """One streamed answer. `moments`: seconds from asking to each piece of text; `seconds`: to the end. `tokens` as the server
    counts them (None: it does not say). `drafted` and `accepted` where `timings` tell them. `places`: the token, its
    log-probability and that of the best other token (or None), of every token for which the server gave them."""

    text: str = ""
    moments: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    finish: str | None = None
    places: list[tuple[str, float, float | None]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Tokens; pieces where the server does not count."""
        return len(self.moments) if self.tokens is None else self.tokens


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`url` without `/v1`; `timeout` is the longest silence, in seconds. `chat`: it takes conversations, not texts alone.
    `native`: it is this package's own server, and takes its extensions. `counts`: it can be asked how many tokens it wrote."""

    url: str
    model: str
    key: str | None = None
    timeout: float = 60.0
    chat: bool = True
    native: bool = False
    counts: bool = True

    @classmethod
    def find(cls, url: str, model: str | None = None, key: str | None = None, timeout: float = 60.0) -> Endpoint:
        """The server at `url` and its model, each tried with one token. Raises `BadInput` for what is no URL or leaves the model
        open, `Unanswered` for a server that does not answer as it should."""
        if timeout <= 0:
            raise BadInput(f"--timeout must be above 0 seconds, got {timeout:g}")
        base = cls(_base(url), model or "", key, timeout)
        cards = base._cards(optional=model is not None)
        chosen = model or _only(cards, base.url)
        card: dict[str, Any] = next((c for c in cards if c.get("id") == chosen), {})
        own = card.get("outrider")
        native = card.get("owned_by") == "outrider" and own is not None
        chat = bool(own.get("chat", True)) if native and isinstance(own, dict) else True
        made = cls(base.url, chosen, key, timeout, chat, native)
        return made._tried()

    def ask(self, messages: Sequence[Mapping[str, str]], **options: Any) -> Reply:
        """The answer to a conversation; texts alone are its messages as paragraphs. Raises `Unanswered`."""
        asked: dict[str, Any] = {"model": self.model, "stream": True, **options}
        asked |= {"stream_options": {"include_usage": True}} if self.counts else {}
        top = asked.pop("top_logprobs", None)
        if self.chat:
            asked["messages"] = [dict(m) for m in messages]
            asked |= {} if top is None else {"logprobs": True, "top_logprobs": top}
        else:
            asked["prompt"] = "\n\n".join(m["content"] for m in messages)
            asked |= {} if top is None else {"logprobs": top}
        reply, started = Reply(), time.perf_counter()
        for event in self._events("chat/completions" if self.chat else "completions", asked):
            try:
                _take(reply, event, time.perf_counter() - started)
            except MADE as error:
                raise Unanswered(f"{self.url}: the stream holds what is no part of an answer ({_message(str(error))})") from None
        reply.seconds = time.perf_counter() - started
        return reply

    def metrics(self) -> str | None:
        """Prometheus' text, or None where there is none to read."""
        try:
            with self._open("/metrics") as response:
                return str(response.read(MOST).decode(errors="replace"))
        except Unanswered:
            return None

    def _tried(self) -> Endpoint:
        """This server, by the way it can be asked: conversations or texts, with tokens counted or not."""
        ways = [replace(self, chat=c, counts=k) for c in ((True, False) if self.chat else (False,)) for k in (True, False)]
        refused: Unanswered | None = None
        for way in ways:
            try:
                way.ask([{"role": "user", "content": "Hello"}], max_tokens=1)
            except Unanswered as error:
                if error.status not in REFUSED:
                    raise
                refused = refused or error
            else:
                return way
        assert refused is not None
        raise refused

    def _cards(self, optional: bool) -> list[Any]:
        try:
            with self._open("/v1/models") as response:
                found = json.loads(response.read(MOST))
            cards = found["data"]
            if not isinstance(cards, list) or not all(isinstance(c, dict) for c in cards):
                raise TypeError("models are objects")
        except MADE:
            raise Unanswered(f"{self.url} is no OpenAI-compatible server: GET /v1/models gives something else") from None
        except Unanswered as error:
            if error.status == 404 and optional:
                return []
            if error.status == 404:
                raise Unanswered(f"{self.url} has no /v1/models: is it an OpenAI-compatible server? ({error})", 404) from None
            raise
        return cards

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The objects of a stream, as they come."""
        with self._open(f"/v1/{path}", body) as response:
            whole = False
            for line in self._lines(response):
                whole = whole or line == FINAL
                if line == FINAL:
                    continue
                try:
                    event = json.loads(line[5:])
                except (ValueError, RecursionError):
                    raise Unanswered(f"{self.url}: the stream holds something other than JSON: {line[:80]!r}") from None
                if not isinstance(event, dict) or "error" in event:
                    raise Unanswered(f"{self.url}: the answer broke off: {_message(line[5:])}")
                yield event
                whole = whole or any(choice.get("finish_reason") for choice in event.get("choices") or ())
        if not whole:
            raise Unanswered(f"{self.url}: the stream was cut short")

    def _lines(self, response: Any) -> Iterator[str]:
        """Lines of a stream that hold data. Raises `Unanswered` for more than an answer can be, and where nothing but signs of
        life comes for too long."""
        size, heard = 0, time.monotonic()
        while raw := response.readline(LONGEST):
            size += len(raw)
            if size > MOST or (len(raw) == LONGEST and not raw.endswith(b"\n")):
                raise Unanswered(f"{self.url}: the stream does not end, or holds more than any answer")
            line = raw.decode(errors="replace").strip()
            if line.startswith("data:"):
                yield line
                heard = time.monotonic()
            elif time.monotonic() - heard > self.timeout:
                raise self._silent()

    @contextmanager
    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """A response that went well. Whatever goes wrong, also while it is read, is an `Unanswered`."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        proxies: dict[str, str] | None = {} if urlsplit(self.url).hostname in LOCAL else None
        opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies), _Straight)
        try:
            with opener.open(request, timeout=self.timeout) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise self._refused(error, path) from None
        except TimeoutError:
            raise self._silent() from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise self._silent() from None
            why = getattr(error.reason, "strerror", None) or error.reason
            message = f"cannot reach {self.url}: {why}; is the server running, and the address right?"
            raise Unanswered(message, gone=True) from None
        except (OSError, http.client.HTTPException) as error:
            message = f"{self.url}{path}: the connection broke off ({type(error).__name__}: {printable(str(error))[:200]})"
            raise Unanswered(message, gone=True) from None

    def _silent(self) -> Unanswered:
        return Unanswered(f"{self.url} was silent for {self.timeout:g} s; raise --timeout if it needs longer", gone=True)

    def _refused(self, error: urllib.error.HTTPError, path: str) -> Unanswered:
        with error:
            try:
                said = _message(error.read(10_000).decode(errors="replace"))
            except OSError:
                said = str(error.reason)
        if error.code in (401, 403):
            how = "refuses the key that was sent" if self.key else "asks for a key"
            hint = "put the right one into an environment variable and name that with --api-key-env"
            return Unanswered(f"{self.url} {how} ({error.code}: {said}); {hint}", error.code)
        if 300 <= error.code < 400:
            where = printable(error.headers.get("Location") or "somewhere else")[:200]
            return Unanswered(f"{self.url}{path} points to {where}; give the address that answers itself", error.code)
        return Unanswered(f"{self.url}{path} answered {error.code}: {said}", error.code)


def _base(url: str) -> str:
    """`http://host:port[/prefix]` without `/v1`. Raises `BadInput`."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or not url.isascii() or any(c.isspace() for c in url):
        raise BadInput(f"{url!r} is no server's address; give one like http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _only(cards: Sequence[Mapping[str, Any]], url: str) -> str:
    names = [str(card.get("id")) for card in cards]
    if len(names) != 1:
        shown = printable(", ".join(names[:8]))[:300] or "none"
        raise BadInput(f"{url} lists {len(names)} models ({shown}); name the one to ask with --model")
    return names[0]


def _message(text: str) -> str:
    """What an error says, in whatever form servers write them."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return printable(text)[:200] or "no reason given"
    for name in ("error", "detail", "message"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return printable(str(found))[:300]


def printable(text: str) -> str:
    """On one line, and nothing that commands a terminal: servers may say anything."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


def _take(reply: Reply, event: Mapping[str, Any], moment: float) -> None:
    """Note what one object of a stream tells."""
    usage, timings = event.get("usage"), event.get("timings")
    if isinstance(usage, dict) and _is_count(usage.get("completion_tokens")):
        reply.tokens = usage["completion_tokens"]
    if isinstance(timings, dict) and _is_count(timings.get("draft_n")):
        kept = timings.get("draft_n_accepted")
        reply.drafted, reply.accepted = timings["draft_n"], kept if _is_count(kept) else 0
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = (delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or "") + (
            choice.get("text") or ""
        )
        if text:
            reply.moments.append(moment)
            reply.text += text
        reply.places += _places(choice.get("logprobs"))
        reply.finish = choice.get("finish_reason") or reply.finish


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**31


def _places(found: Any) -> Iterator[tuple[str, float, float | None]]:
    """Log-probabilities in either of OpenAI's shapes."""
    if not isinstance(found, dict):
        return
    for entry in found.get("content") or ():
        others = [_nats(o["logprob"]) for o in entry.get("top_logprobs") or () if o["token"] != entry["token"]]
        yield str(entry["token"]), _nats(entry["logprob"]), max(others, default=None)
    tokens, values = found.get("tokens") or (), found.get("token_logprobs") or ()
    for i, (token, value) in enumerate(zip(tokens, values, strict=False)):
        top = (found.get("top_logprobs") or [{}] * len(tokens))[i] or {}
        if value is not None:
            yield str(token), _nats(value), max((_nats(v) for k, v in top.items() if k != token), default=None)


def _nats(value: Any) -> float:
    """A log-probability; minus infinity as the number that servers write for it. Raises `ValueError` for no number."""
    found = float(value)
    if math.isnan(found):
        raise ValueError("a log-probability is no number")
    return min(max(found, LEAST), 0.0)
