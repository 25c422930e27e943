"""Many clients at once: nothing is lost or mixed up, those who leave give their memory back, the door closes slowly."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import outrider
from outrider import LLM, SamplingParams
from outrider.errors import BadInput
from outrider.serve import server as server_module
from outrider.serve import worker as worker_module
from outrider.serve.server import bind, serve
from outrider.serve.settings import Settings

from .conftest import Running, running

TEXT = "/v1/completions"
PROMPTS = [f"{word} {word} {n}" for n, word in enumerate(["hello", "hell", "he", "llo", "abc"] * 4)]


def ask(n: int, **more: Any) -> dict[str, Any]:
    return {"prompt": PROMPTS[n % len(PROMPTS)], "seed": n, "max_tokens": 60, "temperature": 1.0, "stream": True, **more}


async def read(client: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None = None) -> str:
    """The text of a stream; `leave_after` so many objects the client hangs up."""
    text, count = "", 0
    async with client.stream("POST", TEXT, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            count += 1
            if leave_after is not None and count > leave_after:
                return text
    return text


def together(server: Running, task: Callable[[httpx.AsyncClient], Any]) -> Any:
    async def go() -> Any:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            return await task(client)

    return asyncio.run(go())


def solo(library: LLM, n: int) -> str:
    params = SamplingParams(seed=n, max_tokens=60, temperature=1.0)
    return library.generate(ask(n)["prompt"], params)[0].text


def test_every_stream_is_what_it_is_alone(server: Running, library: LLM) -> None:
    async def all_of_them(client: httpx.AsyncClient) -> list[str]:
        return await asyncio.gather(*(read(client, ask(n)) for n in range(20)))

    texts = together(server, all_of_them)
    assert texts == [solo(library, n) for n in range(20)]


def test_half_of_them_leave(server: Running, library: LLM) -> None:
    rng = random.Random(0)
    leave = {n: rng.randrange(1, 20) for n in range(50) if n % 2}

    async def storm(client: httpx.AsyncClient) -> list[str]:
        return await asyncio.gather(*(read(client, ask(n, ignore_eos=n in leave), leave.get(n)) for n in range(50)))

    texts = together(server, storm)
    server.at_rest()
    for n in (0, 8, 24, 48):
        assert texts[n] == solo(library, n)


def test_a_client_that_leaves_stops_its_answer(load: Callable[..., LLM]) -> None:
    """Streamed or not: the engine stops long before the answer would have ended."""
    with running(load()) as server:
        slow(server)

        async def impatient(client: httpx.AsyncClient) -> None:
            body = ask(1, max_tokens=100, ignore_eos=True, speculation={"draft": "none"})
            await read(client, body, 1)
            with pytest.raises(httpx.ReadTimeout):
                await client.post(TEXT, json=body | {"stream": False}, timeout=0.3)

        together(server, impatient)
        server.at_rest(1)
        rows = [line.split() for line in server.client.get("/metrics").text.splitlines()]
        [written] = [float(row[1]) for row in rows if row[0] == "outrider_generation_tokens_total"]
        assert 2 < written < 80


def test_a_full_house_sends_people_away(load: Callable[..., LLM]) -> None:
    with running(load(), max_running=2, max_queue=2) as server:
        slow(server)

        async def crowd(client: httpx.AsyncClient) -> list[httpx.Response]:
            body = ask(0, stream=False, ignore_eos=True, max_tokens=20)
            return await asyncio.gather(*(client.post(TEXT, json=body) for _ in range(12)))

        found = together(server, crowd)
        status = [r.status_code for r in found]
        assert status.count(200) >= 4 and status.count(429) >= 1 and set(status) == {200, 429}
        refused = next(r for r in found if r.status_code == 429)
        assert 1 <= int(refused.headers["retry-after"]) <= 60 and refused.json()["error"]["code"] == "queue_full"
        assert len({r.json()["choices"][0]["text"] for r in found if r.status_code == 200}) == 1
        server.at_rest()


def test_those_who_are_made_ready_count_as_waiting(load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms that take long to make: no more of them than there are places, and whoever wants none is not held up."""
    go = threading.Event()
    with running(load(), max_running=2, max_queue=1) as server, ThreadPoolExecutor(2) as pool:
        make = server.server.house.grammars.compile
        monkeypatch.setattr(server.server.house.grammars, "compile", lambda *form: go.wait(20) and make(*form))
        body = {"prompt": "x", "max_tokens": 4, "response_format": {"type": "regex", "regex": "ab"}}
        slow = [pool.submit(server.post, "/v1/completions", body) for _ in range(2)]
        end = time.monotonic() + 10
        while server.server.house._coming < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert server.post("/v1/completions", {**body, "n": 2}).status_code == 429
        server.complete("hello", max_tokens=2)
        go.set()
        assert [f.result().json()["choices"][0]["text"] for f in slow] == ["ab", "ab"]
        server.at_rest()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_stops_reading_is_dropped(server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(server_module, "STALLED", 0.2)
    body = ask(0, max_tokens=110, ignore_eos=True, logprobs=20, outrider=True, stream=stream) | {"n": 100}
    asked = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(asked)}\r\n\r\n"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        sock.sendall(head.encode() + asked)
        ours = sock.getsockname()
        end = time.monotonic() + 20
        while not server.server.worker.open and time.monotonic() < end:
            time.sleep(0.01)
        open_ = server.server.server_state.connections
        while any(one.client == ours for one in list(open_)) and time.monotonic() < end:  # type: ignore[union-attr]
            time.sleep(0.02)
        assert time.monotonic() < end


def slow(server: Running, seconds: float = 0.02) -> None:
    """Rounds that take as long as a larger model's."""
    step = server.llm.engine.step

    def slower() -> Any:
        time.sleep(seconds)
        return step()

    server.llm.engine.step = slower  # type: ignore[method-assign]


def test_a_round_that_fails_ends_its_requests_and_no_others(load: Callable[..., LLM]) -> None:
    with running(load()) as server:
        score, broken = server.llm.engine.target.score, threading.Event()

        def failing(*arguments: Any) -> Any:
            if broken.is_set():
                broken.clear()
                raise RuntimeError("planted")
            return score(*arguments)

        server.llm.engine.target.score = failing  # type: ignore[method-assign]
        broken.set()
        response = server.post(TEXT, ask(0, stream=False))
        assert response.status_code == 500 and response.json()["error"]["code"] == "engine_failed"
        assert "planted" not in response.text
        assert server.complete()["choices"]
        server.at_rest()


def test_those_who_wait_outlive_a_round_that_fails(load: Callable[..., LLM], library: LLM) -> None:
    with running(load(), max_running=1) as server:
        engine, failed = server.llm.engine, threading.Event()
        score = engine.target.score

        def failing(*arguments: Any) -> Any:
            if engine.scheduler.waiting and not failed.is_set():
                failed.set()
                raise RuntimeError("planted")
            return score(*arguments)

        engine.target.score = failing  # type: ignore[method-assign]
        slow(server)

        async def both(client: httpx.AsyncClient) -> list[httpx.Response]:
            return await asyncio.gather(*(client.post(TEXT, json=ask(n, stream=False)) for n in range(2)))

        found = together(server, both)
        assert sorted(r.status_code for r in found) == [200, 500] and failed.is_set()
        n, answer = next((n, r) for n, r in enumerate(found) if r.status_code == 200)
        assert answer.json()["choices"][0]["text"] == solo(library, n)
        server.at_rest()


def test_a_thread_that_fails_leaves_nobody_waiting(load: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic of a library's native code is no `Exception`."""

    class Panic(BaseException):
        pass

    def failing(*_: Any) -> Any:
        raise Panic

    with running(load()) as server:
        monkeypatch.setattr(server.server.worker, "_tell", failing)
        assert server.post(TEXT, ask(0, stream=False)).status_code == 503
        assert "Panic" in str(server.server.worker.failed)


def test_an_engine_that_keeps_failing_ends_the_server(load: Callable[..., LLM]) -> None:
    with running(load()) as server:

        def failing(*_: Any) -> Any:
            raise RuntimeError("planted")

        server.llm.engine.target.score = failing  # type: ignore[method-assign]
        for _ in range(worker_module.MOST_CRASHES):
            assert server.post(TEXT, ask(0, stream=False)).status_code == 500
        try:
            assert server.post(TEXT, ask(0)).status_code == 503
        except httpx.TransportError:
            pass  # it has ended already
        end = time.monotonic() + 5
        while not server.server.should_exit and time.monotonic() < end:
            time.sleep(0.02)
        assert server.server.should_exit and "3 rounds in a row" in str(server.server.worker.failed)


def test_a_broken_stream_says_so(load: Callable[..., LLM]) -> None:
    with running(load()) as server:
        step, count = server.llm.engine.step, iter(range(1000))

        def failing() -> Any:
            if next(count) == 5:
                raise RuntimeError("planted")
            return step()

        server.llm.engine.step = failing  # type: ignore[method-assign]
        with server.client.stream("POST", TEXT, json=ask(0, ignore_eos=True)) as response:
            found = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
        assert response.status_code == 200 and "choices" in found[0] and found[-1]["error"]["code"] == "engine_failed"


def test_draining_finishes_what_runs(load: Callable[..., LLM]) -> None:
    with running(load()) as server:
        slow(server)
        with server.client.stream("POST", TEXT, json=ask(0, ignore_eos=True)) as response:
            rows = response.iter_lines()
            next(rows)
            server.server.drain()
            with httpx.Client(base_url=server.url) as other:
                refused = other.post(TEXT, json=ask(1))
                assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
                assert other.get("/health").status_code == 503
            rest = [line for line in rows if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]


def test_answers_that_take_too_long_at_the_end_are_told(load: Callable[..., LLM]) -> None:
    with running(load(), drain_seconds=0.1) as server:
        slow(server, 0.2)
        with server.client.stream("POST", TEXT, json=ask(0, ignore_eos=True)) as response:
            rows = response.iter_lines()
            next(rows)
            server.server.drain()
            last = [line for line in rows if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"


def test_two_servers_want_one_port(load: Callable[..., LLM]) -> None:
    """Both may bind it while neither listens."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            first.listen()
            with pytest.raises(BadInput, match=f"{port}.*another --port"):
                serve(load(), Settings(port=port), print, second)
        with pytest.raises(BadInput, match=f"{port}.*another --port"):
            bind("127.0.0.1", port)


def test_the_load_test(server: Running) -> None:
    """Its short form: 40 clients, a third of whom leave; what it would report."""
    script = Path(__file__).parents[2] / "benchmarks" / "load_test.py"
    spec = importlib.util.spec_from_file_location("load_test", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["load_test"] = module
    spec.loader.exec_module(module)
    plan = module.Plan(40, 60.0, 80, 16, 1.0, 0.3, 10)
    found, seconds = asyncio.run(module.run(server.url, plan, True, os.getpid()))
    figures = module.summary(found, seconds)
    assert figures["errors"] == figures["differences"] == 0 and figures["compared"] == 10
    assert figures["answers"] + figures["left"] == 80 and figures["left"] > 0
    assert module.growth([100.0] * 8) == 0 and module.growth([1.0]) is None
    assert module.growth([50, 90, 100, 100, 100, 100, 110, 110, 110, 110, 110, 110]) == pytest.approx(0.1)


@pytest.mark.slow
def test_sigterm(model: str, tmp_path: Path) -> None:
    """The command: what it prints, a running answer that is finished at SIGTERM, exit status 0."""
    config = tmp_path / "serve.toml"
    config.write_text('max-queue = 3\nserved-name = "from-file"\n')
    source = str(Path(outrider.__file__).parents[1])
    environment = {**os.environ, "OUTRIDER_SERVED_NAME": "from-environment", "OUTRIDER_DTYPE": "float64", "PYTHONPATH": source}
    command = [sys.executable, "-m", "outrider", "serve", "--model", model, "--port", "0", "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        told = dict(process.stdout.readline().split(maxsplit=1) for _ in range(4))
        url = told["ready"].split()[0]
        assert told["model"].strip() == "from-environment" and told["try"].startswith(f"curl {url}/v1/chat/completions")
        body = ask(0, ignore_eos=True, max_tokens=110)
        with httpx.Client(base_url=url, timeout=30) as client, client.stream("POST", TEXT, json=body) as response:
            rows = response.iter_lines()
            next(rows)
            process.send_signal(signal.SIGTERM)
            assert [line for line in rows if line][-1] == "data: [DONE]"
        assert process.wait(20) == 0
        log = [json.loads(line) for line in process.stderr.read().splitlines() if line.startswith("{")]  # type: ignore[union-attr]
        assert any(line["event"] == "request" and line["status"] == 200 and line["tokens"] == 110 for line in log)
        assert "hello" not in json.dumps(log)
    finally:
        process.kill()
