"""The short way of streamed text says what the long one says, and is left where it cannot be gone."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider.results import Chunk
from outrider.serve.line import Line
from outrider.serve.replies import ChatReply, CompletionReply, framed
from outrider.serve.stream import Answer

from .conftest import Running

TEXTS = ("a", " b", 'q"uo\\te', "é\u2028\n", "\0", "😀", "", "</script>")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def ask(path: str, **options: Any) -> dict[str, Any]:
    given = {"messages": [{"role": "user", "content": "hello"}]} if path == CHAT else {"prompt": "hello hello"}
    return given | {"seed": 3, "temperature": 1, "max_tokens": 60, "ignore_eos": True, "stream": True} | options


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """What the short way was asked, and whether it did it."""
    found: list[bool] = []
    take = Answer._take

    def noted(self: Answer, news: Any) -> bool:
        found.append(take(self, news))
        return found[-1]

    monkeypatch.setattr(Answer, "_take", noted)
    yield found


def events(server: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.post(path, body)
    assert response.status_code == 200 and response.text.endswith("data: [DONE]\n\n")
    return [json.loads(part.removeprefix("data: ")) for part in response.text.split("\n\n")[:-2]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_both_ways_say_the_same(server: Running, path: str, taken: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    short = events(server, path, ask(path))
    assert sum(taken) > 10
    monkeypatch.setattr(Line, "push", lambda self, piece: False)
    long = events(server, path, ask(path))
    for event in (*short, *long):
        for name in ("id", "created", "metrics", "timings"):
            event.pop(name, None)
    assert short == long


@pytest.mark.parametrize("options", [{"n": 2}, {"logprobs": True}, {"return_token_ids": True}, {"outrider": True}])
def test_what_is_more_than_text_goes_the_long_way(server: Running, options: dict[str, Any], taken: list[bool]) -> None:
    assert events(server, CHAT, ask(CHAT, **options)) and not any(taken)


def test_answers_that_are_not_streamed_are_gathered_without_waking_anybody(server: Running, taken: list[bool]) -> None:
    found = server.chat(seed=3, temperature=1, max_tokens=60, ignore_eos=True)
    assert found["usage"]["completion_tokens"] == 60 and sum(taken) > 10
    streamed = events(server, CHAT, ask(CHAT))
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in streamed)
    assert found["choices"][0]["message"]["content"] == text


def test_a_client_of_http_1_0_gets_no_chunks(server: Running) -> None:
    body = json.dumps(ask(TEXT)).encode()
    head = f"POST {TEXT} HTTP/1.0\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as sock:
        sock.sendall(head.encode() + body)
        got = b""
        while part := sock.recv(65536):
            got += part
    parts = got.split(b"\r\n\r\n", 1)[1].decode().split("\n\n")
    assert parts[-2] == "data: [DONE]" and all(part.startswith("data: ") for part in parts[:-1])


@pytest.mark.parametrize("kind", [ChatReply, CompletionReply])
def test_a_piece_is_framed_like_any_event(server: Running, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For texts that JSON writes in its own way."""
    made: list[Any] = []
    start: Callable[..., None] = kind.__init__

    def kept(self: Any, *given: Any) -> None:
        start(self, *given)
        made.append(self)

    monkeypatch.setattr(kind, "__init__", kept)
    events(server, *((CHAT, ask(CHAT)) if kind is ChatReply else (TEXT, ask(TEXT))))
    [reply] = made
    reply.choices[0].finish = None
    for text in TEXTS:
        chunk = Chunk(text, (1,), (-1,), ())
        piece = reply.piece(0, chunk)
        reply.add(0, chunk)
        assert piece == "".join(map(framed, reply.events(0, chunk))).encode()


def test_an_answer_that_fails_on_the_short_way_fails_alone(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = ChatReply.piece

    def failing(self: ChatReply, choice: int, chunk: Chunk) -> bytes | None:
        if self.seed == 13 and self.choices[0].rounds > 3:
            raise RuntimeError("planted")
        return piece(self, choice, chunk)

    monkeypatch.setattr(ChatReply, "piece", failing)
    response = server.post(CHAT, ask(CHAT, seed=13))
    last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["type"] == "server_error" and "planted" not in response.text
    assert events(server, CHAT, ask(CHAT))
