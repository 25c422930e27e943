"""A real server on a tiny model: uvicorn in a thread, spoken to over TCP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from outrider import LLM
from outrider.serve.server import Server, open_house
from outrider.serve.settings import Settings

from ..small import load, model

__all__ = ["load", "model"]

NAME = "tiny"
KEY = "sk-test-0"


class Running:
    """A server that answers at `url`."""

    def __init__(self, server: Server, url: str) -> None:
        self.server, self.url = server, url
        self.client = httpx.Client(base_url=url, timeout=30)

    @property
    def llm(self) -> LLM:
        return self.server.house.llm

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def chat(self, text: str = "hello", **options: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 16, **options}
        response = self.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, prompt: Any = "hello hello", **options: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", {"prompt": prompt, "max_tokens": 16, **options})
        assert response.status_code == 200, response.text
        return response.json()

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, **options)

    def at_rest(self, seconds: float = 10.0) -> None:
        """Wait until nothing runs; all memory must be back."""
        end = time.monotonic() + seconds
        engine, cache = self.llm.engine, self.llm.engine.target.cache
        while time.monotonic() < end:
            if engine.scheduler.idle and not self.server.worker.open and cache.free() == cache.capacity:
                return
            time.sleep(0.01)
        raise AssertionError(f"open {self.server.worker.open}, free {cache.free()} of {cache.capacity}")


@pytest.fixture(scope="session")
def library(load: Callable[..., LLM]) -> LLM:
    """The same model without a server: what the server's answers are compared with."""
    return load()


@contextmanager
def running(llm: LLM, **options: Any) -> Iterator[Running]:
    """Serve `llm` at a port of the system's choice."""
    house, meters = open_house(llm, Settings(port=0, served_name=NAME, **options))
    found: list[str] = []
    told = threading.Event()

    def ready(url: str) -> None:
        found.append(url)
        told.set()

    server = Server(house, meters, ready)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        assert told.wait(20), "the server did not start"
        one = Running(server, found[0])
        with one.client:
            yield one
    finally:
        server.should_exit = True
        thread.join(20)
        house.worker.close()
        house.close()


@pytest.fixture(scope="session")
def shared(load: Callable[..., LLM]) -> Iterator[Running]:
    with running(load()) as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    """One server for all tests; whatever a test does, it must come to rest."""
    yield shared
    shared.at_rest()
