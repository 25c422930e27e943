"""Requests that arrive by themselves: a Poisson process, the same one for every run."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence

from ..config import SamplingParams
from ..llm import LLM
from ..results import Result
from ..types import Finish
from .latency import Times


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the first arrival at which each of `count` requests comes: exponential gaps of mean 1 / rate."""
    draw = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + draw.expovariate(rate))
    return times[:count]


def play(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, at: Sequence[float], times: Times) -> list[Result]:
    """Answer prompts that come `at` these seconds, however busy the engine is. `times` learns when each came, not when it was
    taken. Results in the order of the prompts."""
    requests = [request for prompt in prompts for request in llm.prepare(prompt, params)]
    begin = time.perf_counter()
    times.arrived |= {request.id: begin + offset for request, offset in zip(requests, at, strict=True)}
    waiting, results = deque(requests), dict[int, Result]()
    try:
        while waiting or any(r.finish is Finish.RUNNING for r in requests):
            while waiting and times.arrived[waiting[0].id] <= time.perf_counter():
                llm.engine.add(waiting.popleft())
            event = llm.engine.step()
            for item in event.committed if event is not None else ():
                result = llm.chunk(item, item.request).result
                if result is not None and not item.late:
                    results[item.request.id] = result
            if event is None and waiting:
                time.sleep(max(0.0, times.arrived[waiting[0].id] - time.perf_counter()))
    finally:
        llm.engine.abort([r for r in requests if r not in waiting])
    return [results[request.id] for request in requests]
