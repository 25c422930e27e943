"""What the server costs over the library: the same answers through `LLM.stream` and through HTTP, in turns, on one machine.

    python benchmarks/serve_overhead.py [--model NAME] [--draft none] [--device cuda] [--streams 1] [--tokens 256] [--repeat 7]

Both run in this process: the server in a thread of its own with its engine thread, and the client in another process, so that
parsing JSON is not counted against the server. With `--streams N` the library answers N prompts in one batch and the server
serves N clients at once. Reports tokens per second of both, and the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import httpx

from outrider import LLM, SamplingParams
from outrider.serve.server import Server, open_house
from outrider.serve.settings import Settings

PROMPT = "Write a long story about a lighthouse. ({})"


async def client(url: str, streams: int, tokens: int) -> float:
    """Seconds from the first byte asked for to the last answer's end."""
    limits = httpx.Limits(max_connections=None)

    async def one(http: httpx.AsyncClient, n: int) -> None:
        body = {"prompt": PROMPT.format(n), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.aiter_bytes():
                pass

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        await http.get("/health")
        started = time.perf_counter()
        await asyncio.gather(*(one(http, n) for n in range(streams)))
        return time.perf_counter() - started


def library(llm: LLM, streams: int, tokens: int) -> float:
    """Seconds for the same answers without a server."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    llm.generate([PROMPT.format(n) for n in range(streams)], params)
    return time.perf_counter() - started


def through_http(url: str, streams: int, tokens: int) -> float:
    command = [sys.executable, __file__, "--client", url, "--streams", str(streams), "--tokens", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure(a: argparse.Namespace) -> dict[str, Any]:
    llm = LLM(a.model, draft=a.draft, device=a.device)
    pairs = []
    library(llm, a.streams, a.tokens)
    for _ in range(a.repeat):
        alone = library(llm, a.streams, a.tokens)
        house, meters = open_house(llm, Settings(port=0, max_running=max(256, a.streams)))
        told, url = threading.Event(), list[str]()
        server = Server(house, meters, lambda found, url=url, told=told: (url.append(found), told.set()))  # type: ignore[misc]
        thread = threading.Thread(target=server.run)
        thread.start()
        told.wait(60)
        served = through_http(url[0], a.streams, a.tokens)
        server.should_exit = True
        thread.join()
        house.worker.close()
        house.close()
        llm.engine.sinks.remove(meters.observe)
        pairs.append((alone, served))
    count = a.streams * a.tokens
    return {
        "model": llm.name,
        "draft": llm.drafter_name,
        "streams": a.streams,
        "tokens": a.tokens,
        "library_tokens_per_second": count / statistics.median(x for x, _ in pairs),
        "server_tokens_per_second": count / statistics.median(y for _, y in pairs),
        "overhead": statistics.median(y / x for x, y in pairs) - 1,
        "overheads": sorted(y / x - 1 for x, y in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.client:
        print(asyncio.run(client(a.client, a.streams, a.tokens)))
        return
    print(json.dumps(measure(a), indent=1))


if __name__ == "__main__":
    main()
