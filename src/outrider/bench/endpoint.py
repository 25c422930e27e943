"""A server that speaks OpenAI's API, as a client sees it: its model, and streamed answers with the moments their pieces came.

Every answer has a connection of its own, so that the time to the first piece includes opening one. Servers on this machine are
asked directly, all others through the proxy that the environment names, if any.
"""

from __future__ import annotations

import http.client
import json
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
REFUSED = (400, 404, 405, 422, 500, 501)
"""What servers answer to a kind of request that they do not know."""


class Unanswered(OutriderError):
    """A server that cannot be reached, refuses, breaks off or answers something else. `status` is HTTP's, None where there was
    no answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


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
        native = card.get("owned_by") == "outrider"
        chat = bool(card.get("outrider", {}).get("chat", True)) if native else True
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
            _take(reply, event, time.perf_counter() - started)
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
            assert isinstance(cards, list) and all(isinstance(c, dict) for c in cards)
        except (ValueError, TypeError, KeyError, AssertionError):
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
            for raw in response:
                line = raw.decode(errors="replace").strip()
                whole = whole or line == FINAL
                if not line.startswith("data:") or line == FINAL:
                    continue
                try:
                    event = json.loads(line[5:])
                except ValueError:
                    raise Unanswered(f"{self.url}: the stream holds something other than JSON: {line[:80]!r}") from None
                if not isinstance(event, dict) or "error" in event:
                    raise Unanswered(f"{self.url}: the answer broke off: {_message(line[5:])}")
                whole = whole or any(choice.get("finish_reason") for choice in event.get("choices") or ())
                yield event
        if not whole:
            raise Unanswered(f"{self.url}: the stream was cut short")

    @contextmanager
    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """A response that went well. Whatever goes wrong, also while it is read, is an `Unanswered`."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        proxies: dict[str, str] | None = {} if urlsplit(self.url).hostname in LOCAL else None
        opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
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
            raise Unanswered(f"cannot reach {self.url}: {why}; is the server running, and the address right?") from None
        except (OSError, http.client.HTTPException) as error:
            raise Unanswered(f"{self.url}{path}: the connection broke off ({type(error).__name__}: {error})") from None

    def _silent(self) -> Unanswered:
        return Unanswered(f"{self.url} was silent for {self.timeout:g} s; raise --timeout if it needs longer")

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
        shown = ", ".join(names[:8]) or "none"
        raise BadInput(f"{url} lists {len(names)} models ({shown}); name the one to ask with --model")
    return names[0]


def _message(text: str) -> str:
    """What an error says, in whatever form servers write them."""
    try:
        found = json.loads(text)
    except ValueError:
        return " ".join(text.split())[:200] or "no reason given"
    for name in ("error", "detail", "message"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return str(found)[:300]


def _take(reply: Reply, event: Mapping[str, Any], moment: float) -> None:
    """Note what one object of a stream tells."""
    usage, timings = event.get("usage"), event.get("timings")
    if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
        reply.tokens = usage["completion_tokens"]
    if isinstance(timings, dict) and isinstance(timings.get("draft_n"), int):
        reply.drafted, reply.accepted = timings["draft_n"], int(timings.get("draft_n_accepted") or 0)
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


def _places(found: Any) -> Iterator[tuple[str, float, float | None]]:
    """Log-probabilities in either of OpenAI's shapes."""
    if not isinstance(found, dict):
        return
    for entry in found.get("content") or ():
        others = [float(o["logprob"]) for o in entry.get("top_logprobs") or () if o["token"] != entry["token"]]
        yield str(entry["token"]), float(entry["logprob"]), max(others, default=None)
    tokens, values = found.get("tokens") or (), found.get("token_logprobs") or ()
    for i, (token, value) in enumerate(zip(tokens, values, strict=False)):
        top = (found.get("top_logprobs") or [{}] * len(tokens))[i] or {}
        if value is not None:
            yield str(token), float(value), max((float(v) for k, v in top.items() if k != token), default=None)
