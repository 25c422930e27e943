"""Lanes: where the state of running requests lives on the device, and the host's book of who has which.

A lane holds what a captured round needs to know about a request and what the round changes: its last tokens, its length, how
many tokens it may still write, whether it has ended. So a round can follow another without the host having read anything.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..config import SamplingParams
from ..kernels import STOPS
from ..noise import signed
from ..sampling import filtered
from ..types import NONE, Request

if TYPE_CHECKING:
    from ..kernels.rounds import Lanes


class LaneBook:
    """Gives every request of a captured round a lane, and keeps block tables up to date. `tables` is `[lanes, blocks]`."""

    def __init__(self, lanes: Lanes, cache: Any) -> None:
        self.lanes, self.cache = lanes, cache
        self.padding = lanes.last.shape[0] - 1
        self._free = list(range(self.padding - 1, -1, -1))
        self._of: dict[int, int] = {}
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._last: tuple[Sequence[Request], list[int]] = ((), [])
        self._host = np.zeros(tuple(lanes.table.shape), dtype=np.int32)

    def take(self, requests: Sequence[Request]) -> list[int]:
        """The lanes of `requests`, new ones set up on the device, with block tables as the cache has them now."""
        fresh = [] if requests is self._last[0] else [r for r in requests if r.id not in self._of]
        if fresh:  # noted only once the device has been told, which may fail
            lanes = self._free[-len(fresh) :]
            self._introduce(fresh, lanes)
            del self._free[-len(fresh) :]
            self._of.update(zip((r.id for r in fresh), lanes, strict=True))
        blocks, seen = self.cache.blocks, self._blocks.get
        changed = [r for r in requests if blocks(r) is not seen(r.id)]
        if changed:
            self._map(changed)
        if requests is self._last[0]:
            return self._last[1]
        lanes = [self._of[r.id] for r in requests]
        if isinstance(requests, tuple):
            self._last = requests, lanes
        return lanes

    def room(self, requests: Sequence[Request]) -> bool:
        """Whether there are lanes for all of `requests`."""
        return requests is self._last[0] or sum(r.id not in self._of for r in requests) <= len(self._free)

    def release(self, request: Request) -> None:
        self._last = (), []
        lane = self._of.pop(request.id, None)
        self._blocks.pop(request.id, None)
        if lane is not None:
            self._free.append(lane)

    def _introduce(self, fresh: Sequence[Request], given: list[int]) -> None:
        """Upload what never changes while a request runs."""
        ids = np.array(given, dtype=np.int64)
        rows = np.array([_constants(r) for r in fresh], dtype=np.int64)
        table = _upload(np.concatenate([ids[:, None], rows], 1), self.lanes.last.device)
        lanes, at = self.lanes, table[:, 0]
        lanes.key[at] = table[:, 1]
        floats = table[:, 2:5].contiguous().view(torch.float64)
        lanes.heat[at] = floats[:, 0].float()
        lanes.top_p[at] = floats[:, 1]
        lanes.min_p[at] = floats[:, 2].float()
        lanes.top_k[at] = table[:, 5].int()
        lanes.stops[at] = table[:, 6:].int()
        lanes.done[at] = 0

    def _map(self, changed: Sequence[Request]) -> None:
        """Upload block tables that grew, shrank or moved."""
        at = np.array([self._of[r.id] for r in changed], dtype=np.int64)
        for request, lane in zip(changed, at.tolist(), strict=True):
            blocks, row = self.cache.blocks(request), self._host[lane]
            count = min(len(blocks), len(row))  # no captured round reaches further
            row[:count] = blocks[:count]
            row[count:] = 0
        device = self.lanes.last.device
        self.lanes.table.index_copy_(0, _upload(at, device), _upload(self._host[at], device))
        self._blocks.update((request.id, self.cache.blocks(request)) for request in changed)


def fits(request: Request) -> bool:
    """Whether a lane can hold all that decides this request's tokens: no processor that looks at history, no log-probabilities,
    the coupled rule, few stop tokens."""
    p: SamplingParams = request.params
    plain = not (p.penalised or p.logit_bias or p.allowed_token_ids is not None or p.processors or p.min_tokens)
    quiet = p.logprobs is None and p.prompt_logprobs is None
    return plain and quiet and not request.bad_words and not request.classical and len(request.stop_ids) <= STOPS


def filters(request: Request) -> bool:
    """Whether top-k, top-p or min-p has a say in the request's tokens."""
    return not request.params.greedy and filtered(request.params)


def _constants(request: Request) -> list[int]:
    p = request.params
    stops = sorted(request.stop_ids)
    return [
        signed(request.key),
        _bits(p.temperature),
        _bits(p.top_p),
        _bits(p.min_p),
        max(p.top_k, 0),
        *stops,
        *[NONE - 1] * (STOPS - len(stops)),
    ]


def _bits(x: float) -> int:
    """The bits of a float, as an int64."""
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def _upload(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A copy on the device, without waiting for it."""
    return staged(array, device).to(device, non_blocking=True)


def staged(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A copy on the host from which `device` can read at any time later."""
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host.clone()
