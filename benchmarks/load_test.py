"""Many streaming clients against one server: is anything lost or mixed up, how long do they wait, does memory stay flat?

    outrider serve --max-queue 256 &
    python benchmarks/load_test.py --url http://127.0.0.1:8000 --clients 200 --seconds 600 --check --pid $!
    python benchmarks/load_test.py --clients 500 --leave 0.5 --requests 1000        # a storm of clients that hang up

Works with any OpenAI-compatible server. Every client asks one prompt with a seed of its own, reads the stream, and asks again.
`--check` asks everything alone first and compares; texts of a server in fp32 may differ in near-ties unless it was started with
batch-invariant arithmetic, so differences are counted and the first is shown. `--leave` is the share of streams that are
hung up on after a random number of pieces. A client that gets 429 waits as long as it is told. Memory is watched from the second
quarter of the time on: `--flat` bounds how much larger the last quarter's median may be than the second one's. Exit status 1 if a
stream ended in an error, was cut short, or (with `--check`) differs, or if memory grew by more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

SUBJECTS = ("a river", "the moon", "bread", "a lighthouse", "winter", "a clock", "an old map", "the sea", "a garden", "rain")
LEAVE = 8
"""Clients that hang up do so before so many pieces: most answers have more."""
VERBS = ("Describe", "Explain", "Write two sentences about", "List three facts about", "Tell a child about")


@dataclass
class Plan:
    """What is asked of the server."""

    clients: int
    seconds: float
    requests: int | None
    max_tokens: int
    temperature: float
    leave: float
    distinct: int

    def body(self, n: int) -> dict[str, Any]:
        """Request `n`; the same for the same number."""
        n %= self.distinct
        text = f"{VERBS[n % len(VERBS)]} {SUBJECTS[n // len(VERBS) % len(SUBJECTS)]}. ({n})"
        messages = [{"role": "user", "content": text}]
        return {"messages": messages, "seed": n, "max_tokens": self.max_tokens, "temperature": self.temperature, "stream": True}


@dataclass
class Found:
    """What came of it. `solo` holds texts that were asked alone."""

    solo: dict[int, str] = field(default_factory=dict)
    done: int = 0
    left: int = 0
    refused: int = 0
    pieces: int = 0
    errors: list[str] = field(default_factory=list)
    differ: list[tuple[int, str, str]] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


async def ask(client: httpx.AsyncClient, body: dict[str, Any], found: Found, leave_after: int | None = None) -> str | None:
    """One stream: its text, None if it was hung up on. Raises `RuntimeError` where it breaks."""
    while True:
        started, last, text, count, ended = time.perf_counter(), 0.0, "", 0, False
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code == 429:
                found.refused += 1
                await response.aread()
                await asyncio.sleep(float(response.headers.get("retry-after", 1)) * random.uniform(0.5, 1.5))
                continue
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
                if not piece:
                    continue
                now = time.perf_counter()
                (found.gaps if last else found.first).append(now - (last or started))
                last, text, count = now, text + piece, count + 1
                if leave_after is not None and count >= leave_after:
                    return None
        if not ended:
            raise RuntimeError("a stream was cut short")
        found.pieces += count
        return text


async def work(client: httpx.AsyncClient, plan: Plan, found: Found, numbers: Any, deadline: float) -> None:
    """One client: ask, read, compare, again."""
    rng = random.Random()
    for n in numbers:
        if time.monotonic() > deadline:
            return
        leave = rng.randrange(1, LEAVE) if rng.random() < plan.leave else None
        try:
            text = await ask(client, plan.body(n), found, leave)
        except (RuntimeError, httpx.HTTPError) as error:
            found.errors.append(f"{type(error).__name__}: {error}")
            continue
        found.left += text is None
        found.done += text is not None
        want = found.solo.get(n % plan.distinct)
        if text is not None and want is not None and text != want:
            found.differ.append((n % plan.distinct, want, text))


async def watch_memory(pid: int, found: Found) -> None:
    """Resident MiB, once a second."""
    while True:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found.memory.append(next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024)
        await asyncio.sleep(1)


async def run(url: str, plan: Plan, check: bool, pid: int | None = None) -> tuple[Found, float]:
    """All clients at once; what came of it, and the seconds it took."""
    found = Found()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        for n in range(plan.distinct if check else 0):
            found.solo[n] = await ask(client, plan.body(n), Found()) or ""
        watcher = asyncio.create_task(watch_memory(pid, found)) if pid is not None else None
        numbers = iter(range(plan.requests if plan.requests is not None else 10**12))
        started, deadline = time.perf_counter(), time.monotonic() + plan.seconds
        await asyncio.gather(*(work(client, plan, found, numbers, deadline) for _ in range(plan.clients)))
        seconds = time.perf_counter() - started
        if watcher is not None:
            watcher.cancel()
    return found, seconds


def percentiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100)
    return {"p50_ms": 1e3 * cuts[49], "p95_ms": 1e3 * cuts[94], "p99_ms": 1e3 * cuts[98]}


def growth(memory: list[float]) -> float | None:
    """The last quarter's median over that of the second quarter, less 1; None for too few figures."""
    quarter = len(memory) // 4
    if not quarter:
        return None
    return statistics.median(memory[-quarter:]) / statistics.median(memory[quarter : 2 * quarter]) - 1


def summary(found: Found, seconds: float) -> dict[str, Any]:
    """The figures, as `--json` prints them."""
    return {
        "seconds": seconds,
        "answers": found.done,
        "left": found.left,
        "refused": found.refused,
        "answers_per_second": found.done / seconds,
        "pieces_per_second": found.pieces / seconds,
        "first_piece": percentiles(found.first),
        "between_pieces": percentiles(found.gaps),
        "memory_mib": {"most": max(found.memory), "growth": growth(found.memory)} if found.memory else None,
        "compared": len(found.solo),
        "differences": len(found.differ),
        "errors": len(found.errors),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--requests", type=int, help="stop after so many")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--leave", type=float, default=0.0, help="share of streams that are hung up on")
    parser.add_argument("--distinct", type=int, default=50, help="different prompts and seeds")
    parser.add_argument("--check", action="store_true", help="ask everything alone first, and compare")
    parser.add_argument("--pid", type=int, help="the server's process, to watch its memory")
    parser.add_argument("--flat", type=float, metavar="SHARE", help="most growth of memory, as 0.02 (needs --pid)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path, help="write the figures to a file as well")
    a = parser.parse_args()
    plan = Plan(a.clients, a.seconds, a.requests, a.max_tokens, a.temperature, a.leave, a.distinct)
    found, seconds = asyncio.run(run(a.url, plan, a.check, a.pid))
    figures = {"date": time.strftime("%Y-%m-%d"), "clients": a.clients, **summary(found, seconds)}
    if a.output is not None:
        a.output.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures) if a.json else "\n".join(f"{name:20} {value}" for name, value in figures.items()))
    for complaint in found.errors[:3]:
        print(f"error: {complaint}", file=sys.stderr)
    for n, want, got in found.differ[:1]:
        print(f"request {n} alone: {want!r}\nunder load:  {got!r}", file=sys.stderr)
    grown = growth(found.memory)
    fat = a.flat is not None and (grown is None or grown > a.flat)
    if fat:
        print("memory was not watched for long enough" if grown is None else f"memory grew by {grown:.1%}", file=sys.stderr)
    sys.exit(bool(found.errors or found.differ or fat))


if __name__ == "__main__":
    main()
