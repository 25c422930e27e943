"""Bad input gets the right 4xx in OpenAI's shape, and disturbs nobody."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from outrider import LLM
from outrider.serve import server as server_module
from outrider.serve.edge import parse
from outrider.serve.faults import Fault
from outrider.serve.schema import ChatRequest, CompletionRequest
from outrider.serve.settings import Settings
from outrider.types import StepEvent

from .conftest import KEY, Running, running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
TYPE = {"content-type": "application/json"}


def fails(response: httpx.Response, status: int, says: str = "") -> dict[str, Any]:
    """The error object, which must be whole and say `says`."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert says in error["message"]
    return error


BODIES: list[tuple[str, dict[str, Any], int, str]] = [
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hello"}, 400, "messages"),
    (CHAT, {"messages": [{"role": "pirate", "content": "x"}]}, 400, "role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "text"),
    (CHAT, {"messages": HELLO, "model": "gpt-9"}, 404, "gpt-9"),
    (CHAT, {"messages": HELLO, "temperature": -1}, 400, "temperature"),
    (CHAT, {"messages": HELLO, "temperature": "hot"}, 400, "temperature"),
    (CHAT, {"messages": HELLO, "temperature": True}, 400, "temperature"),
    (CHAT, {"messages": HELLO, "top_p": 0}, 400, "top_p"),
    (CHAT, {"messages": HELLO, "top_p": 1.5}, 400, "top_p"),
    (CHAT, {"messages": HELLO, "top_k": -2}, 400, "top_k"),
    (CHAT, {"messages": HELLO, "min_p": 2}, 400, "min_p"),
    (CHAT, {"messages": HELLO, "n": 0}, 400, "n"),
    (CHAT, {"messages": HELLO, "n": 10**9}, 400, "n"),
    (CHAT, {"messages": HELLO, "n": 1.5}, 400, "n"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_tokens": -5}, 400, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_tokens": 10**30}, 400, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_tokens": 4, "min_tokens": 9}, 400, "min_tokens"),
    (CHAT, {"messages": HELLO, "seed": -1}, 400, "seed"),
    (CHAT, {"messages": HELLO, "seed": 2**64}, 400, "seed"),
    (CHAT, {"messages": HELLO, "stop": [""]}, 400, "stop"),
    (CHAT, {"messages": HELLO, "stop": ["x"] * 100}, 400, "stop"),
    (CHAT, {"messages": HELLO, "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HELLO, "logit_bias": {"99999": 1}}, 400, "99999"),
    (CHAT, {"messages": HELLO, "logit_bias": {"5": 1e300}}, 400, "logit_bias"),
    (CHAT, {"messages": HELLO, "top_logprobs": 500, "logprobs": True}, 400, "top_logprobs"),
    (CHAT, {"messages": HELLO, "frequency_penalty": 1e9}, 400, "frequency_penalty"),
    (CHAT, {"messages": HELLO, "stream": "yes"}, 400, "stream"),
    (CHAT, {"messages": HELLO, "speculation": {"draft": "telepathy"}}, 400, "telepathy"),
    (CHAT, {"messages": HELLO, "speculation": {"depth": -1}}, 400, "depth"),
    (CHAT, {"messages": HELLO, "speculation": {"accept": "always"}}, 400, "always"),
    (CHAT, {"messages": [{"role": "user", "content": "hello " * 200}]}, 400, "context"),
    (TEXT, {}, 400, "prompt"),
    (TEXT, {"prompt": ""}, 400, "empty"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": [-1]}, 400, "prompt"),
    (TEXT, {"prompt": [10**6]}, 400, "vocabulary"),
    (TEXT, {"prompt": [1, "x"]}, 400, "prompt"),
    (TEXT, {"prompt": [5] * 128}, 400, "context"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    (TEXT, {"prompt": "x", "best_of": 4}, 400, "best_of"),
    (TEXT, {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    (TEXT, {"prompt": ["x"] * 1000}, 400, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "status", "says"), BODIES)
def test_bodies_that_cannot_be_honoured(server: Running, path: str, body: dict[str, Any], status: int, says: str) -> None:
    assert "Traceback" not in fails(server.post(path, body), status, says)["message"]


RAW: list[tuple[bytes, int, str]] = [
    (b"", 400, ""),
    (b"{", 400, "line 1"),
    (b"[]", 400, ""),
    (b"null", 400, ""),
    (b'{"prompt": "x", "temperature": NaN}', 400, "NaN"),
    (b'{"prompt": "x", "temperature": Infinity}', 400, "Infinity"),
    (b'{"prompt": "x", "temperature": 1e999}', 400, "temperature"),
    (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", 400, ""),
    (b'{"prompt": "x", "prompt": "y"}', 400, "twice"),
    (b'{"prompt": "\xff\xfe"}', 400, "UTF-8"),
    (b'{"prompt": "\\ud800"}', 400, "half a character"),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "nested"),
]


@pytest.mark.parametrize(("raw", "status", "says"), RAW)
def test_bodies_that_are_no_json(server: Running, raw: bytes, status: int, says: str) -> None:
    fails(server.client.post(TEXT, content=raw, headers=TYPE), status, says)


def test_the_wrong_door(server: Running) -> None:
    assert fails(server.client.get("/v1/nothing"), 404)["code"] == "not_found"
    assert fails(server.client.get(CHAT), 405)["code"] == "method_not_allowed"
    fails(server.client.delete("/v1/models"), 405)
    fails(server.client.post(TEXT, content=b"prompt=x", headers={"content-type": "text/plain"}), 415)
    fails(server.client.post(TEXT, content=b"{}"), 415)


def test_the_log_holds_no_words_of_clients(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    form = {"type": "regex", "regex": "(secret"}
    with caplog.at_level("INFO", "outrider.serve"):
        fails(server.post(TEXT, {"prompt": "secret", "response_format": form}), 400, "(secret")
        fails(server.post(TEXT, {"prompt": "secret", "logit_bias": {"secret": 1}}), 400, "secret")
        server.complete("secret")
        deadline = time.monotonic() + 10  # a line is written after its answer was sent
        while not any(getattr(r, "fields", {}).get("status") == 200 for r in caplog.records) and time.monotonic() < deadline:
            time.sleep(0.01)
    found = [getattr(record, "fields", {}) for record in caplog.records]
    ours = found[-3:]  # a line of the test before may come late
    assert [line["status"] for line in ours] == [400, 400, 200] and "secret" not in str(found)


def test_bodies_that_are_too_large(server: Running) -> None:
    large = b'{"prompt": "' + b"x" * (50 * 2**20) + b'"}'
    fails(server.client.post(TEXT, content=large, headers=TYPE), 413, "0.254 MiB")
    pieces = (large[i : i + 2**20] for i in range(0, len(large), 2**20))  # no Content-Length
    fails(server.client.post(TEXT, content=pieces, headers=TYPE), 413, "0.254 MiB")
    assert server.complete()["choices"]


def test_keys(load: Callable[..., LLM]) -> None:
    llm = load(draft="suffix")
    with running(llm, api_keys=(KEY, "other"), cors_origins=("https://a.example",)) as server:
        assert llm.engine.drafter.drafter.config.isolate  # type: ignore[attr-defined]
        body = {"prompt": "x", "max_tokens": 2}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}, {"authorization": "Bearer ü"}):
            raw = {k: v.encode() for k, v in headers.items()}
            assert fails(server.post(TEXT, body, headers=raw), 401)["code"] == "invalid_api_key"
        refused = server.client.get("/v1/models", headers={"origin": "https://a.example"})
        assert fails(refused, 401) and refused.headers["access-control-allow-origin"] == "https://a.example"
        assert server.client.get("/v1/models").status_code == 401 and server.client.get("/health").status_code == 200
        seen = set()
        server.llm.engine.sinks.append(lambda event: seen.update(item.request.group for item in event.committed))
        for key in (KEY, "other"):
            assert server.post(TEXT, body, headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert len(seen) == 2 and None not in seen, "each key has a group of its own, which drafters and KV memory keep apart"


def test_a_key_gets_no_guesses_from_anothers_text(load: Callable[..., LLM]) -> None:
    """Also where the drafter that remembers is a member of another, as `auto` has it."""
    llm = load(draft="hybrid:members=suffix+none", control="fixed")
    guessed = dict[int, int]()

    def count(event: StepEvent) -> None:
        for item in event.committed:
            guessed[item.request.id] = guessed.get(item.request.id, 0) + item.drafted

    with running(llm, api_keys=(KEY, "other")) as server:
        llm.engine.sinks.append(count)
        body = {"prompt": [5 + i * 7 % 90 for i in range(40)], "max_tokens": 24, "seed": 3, "temperature": 1.0}
        for key in (KEY, "other", KEY):
            assert server.post(TEXT, body, headers={"authorization": f"Bearer {key}"}).status_code == 200
        first, another, again = guessed.values()
        assert first == another < again


@pytest.mark.parametrize(("share", "hits"), [(False, 1), (True, 2)])
def test_keys_share_prompts_only_if_told_to(
    load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, share: bool, hits: int
) -> None:
    monkeypatch.setattr("outrider.scheduler.CHUNK", 64)
    monkeypatch.setattr("outrider.loading.CHUNK", 64)
    llm = load(draft="suffix", kv_tokens=1024)
    with running(llm, api_keys=(KEY, "other"), share=share) as server:
        assert llm.engine.drafter.drafter.config.isolate is not share  # type: ignore[attr-defined]
        body = {"prompt": [5 + i % 90 for i in range(100)], "max_tokens": 6, "seed": 1}
        texts = {
            server.post(TEXT, body, headers={"authorization": f"Bearer {key}"}).json()["choices"][0]["text"]
            for key in (KEY, "other", KEY)
        }
        assert len(texts) == 1 and llm.engine.scheduler.hits == hits


def test_the_limit_on_bodies_follows_the_context() -> None:
    assert Settings().fitted(8192).bytes == 2**19 and Settings().fitted(128).bytes == 2**18 + 4096
    assert Settings(max_body=2.0).fitted(8192).bytes == 2**21


def test_limits_and_origins(load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load()
    with running(llm, max_running=1, max_queue=1, max_tokens=5, cors_origins=("https://a.example",), read_seconds=0.5) as server:
        assert server.complete(max_tokens=50, ignore_eos=True)["usage"]["completion_tokens"] == 5
        assert server.chat(max_tokens=50, ignore_eos=True)["usage"]["completion_tokens"] == 5
        with monkeypatch.context() as patch:
            patch.setattr(llm, "prepare", None)  # those whom there is no place for cost no work
            fails(server.post(TEXT, {"prompt": "x", "n": 3}), 400, "at most 2")
            fails(server.post(TEXT, {"prompt": ["x"] * 256, "n": 128}), 400, "at most 2")
        allowed = server.client.get("/health", headers={"origin": "https://a.example"}).headers
        assert allowed["access-control-allow-origin"] == "https://a.example"
        assert "access-control-allow-origin" not in server.client.get("/health", headers={"origin": "https://b.example"}).headers
        assert _slowly(server, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                       b"content-length: 99\r\n\r\n{").startswith(b"HTTP/1.1 408")  # fmt: skip


def test_clients_that_dawdle_are_hung_up_on(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.3)
    for head in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"):
        started = time.monotonic()
        assert _slowly(server, head) == b""
        assert 0.2 < time.monotonic() - started < 5
    assert server.complete()["choices"]


def _slowly(server: Running, head: bytes) -> bytes:
    """Send `head`, then a byte now and then, until the server has had enough; what it said."""
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=0.05) as sock:
        sock.sendall(head)
        said, end = b"", time.monotonic() + 10
        while time.monotonic() < end:
            try:
                part = sock.recv(4096)
                if not part or b"\r\n\r\n" in (said := said + part):
                    return said
            except TimeoutError:
                if head:
                    sock.sendall(b"x")
            except ConnectionError:
                return said
    raise AssertionError("the server waits for ever")


JUNK: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    0.5,
    1e-300,
    2**31,
    2**63,
    "",
    "x",
    "\u0000",
    "none",
    "é" * 50,
    [],
    [0],
    ["x"],
    {},
]
JUNK += [{"x": 1}, [[1]], [None], {"type": "json_object"}, {"type": "regex", "regex": "a*"}, {"draft": "none"}, {"5": 1.5}, 2**70]


def test_fuzz(server: Running) -> None:
    """Bodies with one to three fields replaced by anything: an answer or a 4xx, never a failure of the server."""
    rng = random.Random(0)
    seen = set()
    shapes = {CHAT: (ChatRequest, {"messages": HELLO}), TEXT: (CompletionRequest, {"prompt": "hello"})}
    for _ in range(500):
        path = rng.choice([CHAT, TEXT])
        model, body = shapes[path]
        names = rng.sample(sorted(model.model_fields), rng.randrange(1, 4))
        asked = {"max_tokens": 3, **body, **{name: rng.choice(JUNK) for name in names}}
        response = server.post(path, asked)
        seen.add(response.status_code)
        assert response.status_code in (200, 400, 404), (asked, response.text)
        if response.status_code != 200:
            fails(response, response.status_code)
        assert '{"error"' not in response.text or response.status_code != 200, (asked, response.text)
    assert {200, 400} <= seen


def test_the_first_wrong_item_ends_the_check() -> None:
    """A body of a few MiB holds a million of them: to list what is wrong with each would take minutes."""
    parts = [{"role": "user", "content": [{}] * 1000}] * 1000
    for model, body in [(CompletionRequest, {"prompt": [[]] * 1000}), (ChatRequest, {"messages": parts})]:
        with pytest.raises(ValidationError) as error:
            model(**body)
        assert error.value.error_count() < 10


def test_strict_json() -> None:
    assert parse('{"a": [1, "ü", "\\ud83d\\ude00"]}'.encode()) == {"a": [1, "ü", "😀"]}
    for raw in (b'{"a": {"b": 1, "b": 2}}', b'{"a": -Infinity}', json.dumps({"a": "\ud800"}).encode()):
        with pytest.raises(Fault):
            parse(raw)
