"""Which requests run, in what order, and what each feeds into the next pass. The only file that knows request order.

First come, first served. Prompts are fed in chunks whose bounds are fixed multiples, so that a prompt's KV does not depend on
load. When KV memory runs out, the youngest running request gives its memory back and is recomputed later: its prompt in the same
chunks, its own tokens as they were decoded; key, positions and tokens already sent stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .errors import OutOfMemory
from .protocols import Cache
from .types import Batch, Finish, Request

CHUNK = 512
"""Prompt tokens fed per pass and request."""
CALM = 128
"""Tokens of free KV per request, beside its guesses, at which nobody can be short of memory two rounds from now."""
REPLAY = 16
"""Own tokens fed per pass when a preempted request is recomputed."""


class Scheduler:
    """Admission, chunked prefill, preemption. `lookahead` is how many draft nodes a round may need KV for; `max_rows` bounds the
    prompt rows of one pass (at least one chunk is always fed)."""

    def __init__(self, cache: Cache, lookahead: int, max_requests: int = 256, max_rows: int = 2048) -> None:
        self.cache, self.lookahead = cache, lookahead
        self.max_requests, self.max_rows = max_requests, max_rows
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted = 0

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        """Queue a request. Raises `OutOfMemory` for one that could not finish even if it had the pool to itself."""
        need = request.prompt_len + min(request.params.max_tokens, request.limit)
        if need > self.cache.capacity:
            raise OutOfMemory(
                f"a prompt of {request.prompt_len} tokens and up to {need - request.prompt_len} new ones need KV memory for "
                f"{need} tokens, but the pool holds {self.cache.capacity}; raise kv_tokens or lower max_tokens"
            )
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take a finished or aborted request out; its memory is the target's to release."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def calm(self, batch: Batch) -> bool:
        """Whether the next round's batch is known before `batch`'s round is read: everybody writes, nobody waits or would have to
        give way."""
        return not self.waiting and all(batch.ready) and self.cache.free() >= len(self.running) * (self.lookahead + CALM)

    def launched(self, batch: Batch, widths: Sequence[int]) -> None:
        """Note that a round is in flight, which may add its guesses and one more token to every request."""
        for request, width in zip(batch.requests, widths, strict=True):
            request.flying += width + 1

    def next(self, blind: bool = False) -> Batch | None:
        """The next round's batch, with KV reserved for its tokens and `room` draft nodes; None if nothing can run. `blind`: a
        round is in flight, of which everybody gets at least one token."""
        rooms = self._secure()
        if not blind:
            self._admit(rooms)
        chosen: list[tuple[Request, int, int]] = []
        rows = 0
        for request, room in zip(self.running, rooms, strict=True):
            pending = self._chunk(request)
            if request.room <= bool(request.flying):
                continue
            if pending > REPLAY and rows and rows + pending > self.max_rows:
                continue
            rows += pending if pending > 1 else 0
            chosen.append((request, pending, room))
        if not chosen:
            return None
        ready = tuple(r.computed + pending == len(r.tokens) for r, pending, _ in chosen)
        rooms_out = tuple(room for _, _, room in chosen)
        return Batch(tuple(r for r, _, _ in chosen), tuple(p for _, p, _ in chosen), ready, rooms_out, blind)

    def _secure(self) -> list[int]:
        """KV for every running request, oldest first; whoever cannot be served makes the youngest give way."""
        rooms: list[int] = []
        i = 0
        while i < len(self.running):
            room = self._reserve(self.running[i])
            if room is not None:
                rooms.append(room)
                i += 1
            else:
                self._preempt()
        return rooms

    def _reserve(self, request: Request) -> int | None:
        """Room for draft nodes that could be had beside the known tokens; None if not even those fit."""
        known = len(request.tokens) + request.flying
        for room in (self.lookahead, 0) if request.room > 1 and self.lookahead else (0,):
            if self.cache.reserve(request, known + room):
                return room
        return None

    def _preempt(self) -> None:
        youngest = self.running.pop()
        self.cache.release(youngest)
        youngest.computed = 0
        self.preempted += 1
        self.waiting.appendleft(youngest)

    def _admit(self, rooms: list[int]) -> None:
        passed = 0  # samples that wait for their prompt to be read; who comes after them need not
        while len(self.waiting) > passed and len(self.running) < self.max_requests:
            request = self.waiting[passed]
            if self._must_wait(request):
                passed += 1
                continue
            room = self._reserve(request)
            if room is None and not self.running:
                raise OutOfMemory(
                    f"a request of {len(request.tokens)} tokens does not fit into KV memory even alone; raise kv_tokens "
                    f"(the pool holds {self.cache.capacity}, {self.cache.free()} of them free)"
                )
            if room is None:
                return
            del self.waiting[passed]
            self._share(request)
            self.running.append(request)
            rooms.append(room)

    def _must_wait(self, request: Request) -> bool:
        twin = request.twin
        return twin is not None and twin in self.running and twin.computed < twin.prompt_len

    def _share(self, request: Request) -> None:
        """Copy the prompt's KV from the first sample, while it has any; the last prompt token is read again, for its scores."""
        twin, shared = request.twin, request.prompt_len - 1
        if twin is not None and twin in self.running and shared:
            self.cache.copy(self.cache.slots(twin, 0, shared), self.cache.slots(request, 0, shared))
            request.computed = shared

    def _chunk(self, request: Request) -> int:
        """How many pending tokens to feed: up to the next fixed multiple within the prompt, a few at a time after it."""
        if request.computed < request.prompt_len:
            end = min((request.computed // CHUNK + 1) * CHUNK, request.prompt_len)
            return end - request.computed
        return min(request.pending, REPLAY)

    def landed(self, batch: Batch, widths: Sequence[int]) -> None:
        """Note that a round was read."""
        for request, width in zip(batch.requests, widths, strict=True):
            request.flying -= width + 1

    def advance(self, batch: Batch, accepted: list[int], counts: list[int], tokens: list[list[int]]) -> None:
        """Book what a round committed: tokens, and how much KV is computed (all that was fed, and the accepted path)."""
        for b, request in enumerate(batch.requests):
            if request.finish is not Finish.RUNNING:
                continue
            request.computed += batch.pending[b] + accepted[b]
            request.tokens += tokens[b][: counts[b]]
