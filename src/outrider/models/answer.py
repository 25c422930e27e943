"""What a captured round decided, on its way to the host: one small copy that nobody waits for until it is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import Proposal


@dataclass(frozen=True, slots=True)
class Answer:
    """`result [B, 3 + 2 (N + 1)]` (accepted, count, finish, N + 1 tokens, N + 1 columns of the path) and the guesses it judged,
    in pinned memory; `read` waits for them. `marks` bracket the round on the device."""

    result: Tensor
    guesses: tuple[Tensor, ...]
    arrived: torch.cuda.Event
    marks: tuple[torch.cuda.Event, torch.cuda.Event]

    @classmethod
    def of(cls, result: Tensor, proposal: Proposal, marks: tuple[torch.cuda.Event, torch.cuda.Event]) -> Answer:
        """Send it. Guesses that are on the host already stay as they are."""
        parts = (proposal.sizes, proposal.tokens, proposal.parents, proposal.source)
        sent = _sent(result)
        guesses = tuple(p if p.device.type == "cpu" else _sent(p) for p in parts)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(sent, guesses, arrived, marks)

    def read(self) -> tuple[list[list[int]], list[list[int]]]:
        """Wait, then: rows of the result, and `[sizes, tokens, parents, source]`."""
        self.arrived.synchronize()
        return self.result.tolist(), [g.tolist() for g in self.guesses]

    def seconds(self) -> float:
        """How long the device worked on the round; call after `read`."""
        return self.marks[0].elapsed_time(self.marks[1]) / 1000


def _sent(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
