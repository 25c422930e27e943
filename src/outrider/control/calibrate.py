"""What passes cost on this machine, found out before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

import torch

from ..config import SamplingParams
from ..protocols import Controller, Target
from ..types import Batch, Proposal, Request
from .goodput import Goodput

GRID = (
    *((1, n) for n in (0, 1, 3, 7, 15, 16)),
    *((size, n) for size in (4, 16, 2, 8, 32, 64) for n in (0, 1, 3, 7)),
)
"""Requests and guesses each, the most telling first."""
TIMES = 3
"""Passes of each; the first one, which warms up, does not count."""
COMPILING = 60.0
"""Seconds from which on no more is begun. What has to be compiled is compiled now, rather than in the middle of an answer."""


def calibrate(
    target: Target, controller: Controller, seconds: float = 1.0, clock: Callable[[], float] = time.perf_counter
) -> int:
    """Run passes of made-up requests through `target` and enter their times into the controller's tables, for about `seconds` at
    most (a pass that has begun is finished), beside the first passes of each kind, which may have to be compiled. Only `goodput`
    has such tables; what is in them already is not measured again. The target is left as it was. How many were measured."""
    if not isinstance(controller, Goodput):
        return 0
    controller.overlaps = controller.costs.steady = target.device.type == "cuda"
    if controller.costs.measured:
        return 0
    chain = controller.known.trees is not None and controller.known.trees.chain(1.0)  # that is what is passed here
    begin, spent, measured, ids = clock(), 0.0, 0, count(-1, -1)
    for size, guesses in GRID:
        requests = [_dummy(next(ids)) for _ in range(size)]
        try:
            if not all(target.cache.reserve(r, 1 + guesses) for r in requests):
                break
            for turn in range(TIMES):
                now = clock()
                if spent > seconds or now - begin > COMPILING:
                    return measured
                took = _pass(target, requests, guesses, clock)
                if turn:
                    controller.costs.add_verify(size, size * (1 + guesses), took, chain)
                    spent, measured = spent + clock() - now, measured + 1
        except torch.OutOfMemoryError:  # so large a batch will not be met
            break
        finally:
            for request in requests:
                target.release(request)
    return measured


def _dummy(number: int) -> Request:
    """A greedy request of one token. Its id is below zero, where no user's are."""
    return Request(number, [0], 1, SamplingParams(temperature=0.0, max_tokens=64), key=0, seed=0)


def _pass(target: Target, requests: list[Request], guesses: int, clock: Callable[[], float]) -> float:
    """Seconds of one pass over the requests with so many guesses each."""
    size = len(requests)
    batch = Batch(tuple(requests), (1,) * size, (True,) * size, (guesses,) * size)
    proposal = Proposal.chains([[0] * guesses for _ in requests], target.device)
    _wait(target.device)
    begin = clock()
    scores = target.score(batch, proposal)
    _wait(target.device)
    took = clock() - begin
    if scores.answer is None:
        return took
    scores.answer.read()
    return min(took, scores.answer.seconds())  # the device's time alone, as rounds report it


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
