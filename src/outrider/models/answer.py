"""What a captured round decided, on its way to the host: one small copy that nobody waits for until it is read."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

Mark = torch.cuda.Event | float


@dataclass(frozen=True, slots=True)
class Answer:
    """`result [B, 3 + 2 (N + 1)]` (accepted, count, finish, N + 1 tokens, N + 1 columns of the path) and the guesses it judged,
    in pinned memory; `read` waits for them."""

    result: Tensor
    guesses: tuple[Tensor, ...]
    started: Mark
    ended: Mark
    arrived: Mark

    @classmethod
    def of(cls, result: Tensor, started: Mark, guesses: tuple[Tensor, ...] = ()) -> Answer:
        """Send it. Guesses that are on the host already stay as they are."""
        ended = mark(result.device)
        sent = _sent(result)
        parts = tuple(p if p.device.type == "cpu" else _sent(p) for p in guesses)
        return cls(sent, parts, started, ended, mark(result.device))

    def read(self) -> tuple[list[list[int]], list[list[int]]]:
        """Wait, then: rows of the result, and `[sizes, tokens, parents, source]`."""
        if isinstance(self.arrived, torch.cuda.Event):
            self.arrived.synchronize()
        return self.result.tolist(), [g.tolist() for g in self.guesses]

    def seconds(self) -> float:
        """How long the device worked on the round; call after `read`."""
        return between(self.started, self.ended)


def mark(device: torch.device) -> Mark:
    """This moment in the device's work; on a CPU, which works at once, the time."""
    if device.type != "cuda":
        return time.perf_counter()
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device.index))  # by number it is found in a third of the time
    return event


def between(started: Mark, ended: Mark) -> float:
    """Seconds from one moment to another, which has come."""
    if isinstance(started, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        return float(started.elapsed_time(ended)) / 1000
    return float(ended - started)  # type: ignore[operator]


def _sent(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
