"""Which requests run, in what order, and what each feeds into the next pass. The only file that knows request order.

First come, first served. Prompts are fed in chunks whose bounds are fixed multiples, so that a prompt's KV does not depend on
load. When KV memory runs out, the youngest running request gives its memory back and is recomputed later: its prompt in the same
chunks, its own tokens as they were decoded; key, positions and tokens already sent stay.

Why this comes to an end: only the youngest gives way, so the oldest running request keeps its memory; it is fed in every pass,
or in one of three where kinds of work alternate; so it ends, and the next oldest follows. Why it does not thrash: a request is
admitted only with memory for everybody's next round, its own included, so it runs at least twice before it can have to give way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum

from . import logprobs
from .errors import OutOfMemory
from .protocols import Cache
from .steady import Steady, longest, reach, soon
from .types import Batch, Finish, Request

CHUNK = 512
"""Prompt tokens fed per pass and request."""
CALM = 128
"""Tokens of free KV per request, beside its guesses, at which nobody can be short of memory two rounds from now."""
GROUP, HELD = 8, 64
"""Once all places were taken, one part in so many of them must be free before anybody is let in, or somebody must have waited
before a free place for so many rounds."""
REPLAY = 16
"""Own tokens fed per pass when a preempted request is recomputed."""


Fed = tuple[Request, int, int]
"""A request, how many pending tokens it feeds, and its room for guesses."""


class Work(IntEnum):
    """What a request's rows in a pass are."""

    PROMPT = 0
    REPLAY = 1
    WRITE = 2


class Scheduler:
    """Admission, chunked prefill, preemption. `lookahead` is how many draft nodes a round may need KV for; `max_rows` bounds the
    prompt rows of one pass (at least one chunk is always fed). `separate`: prompts, recomputed tokens and writing never share a
    pass, and take turns. `grain`: a prompt's beginning may be taken over from earlier requests, in multiples of so many tokens
    (0: never); below `CHUNK` it says that a token has the same bits of KV whoever computes it, and answers are taken over, too.

    `shared` tells how many of a request's first tokens the drafter lets others take over; `sharing`: with KV of its own, which
    differs a little by who computed it, so that requests whose text depends on what is guessed take nothing over. `hits` counts
    requests that took something over and `saved` the tokens; `preempted` counts those that gave way. `most` bounds the requests
    of a pass (see `recovery.py`).

    While more wait than can run, newcomers are let in several at a time: their prompts interrupt everybody else's writing, once
    for all of them, and in between rounds can be launched ahead."""

    def __init__(
        self,
        cache: Cache,
        lookahead: int,
        max_requests: int = 256,
        max_rows: int = 2048,
        separate: bool = False,
        grain: int = 0,
    ) -> None:
        self.cache, self.lookahead = cache, lookahead
        self.max_requests, self.max_rows = max_requests, max_rows
        self.separate, self.grain = separate, grain
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.shared: Callable[[Request], int] = lambda request: len(request.tokens)
        self.sharing = False
        self.preempted = self.hits = self.saved = 0
        self.most = max_requests
        self._last = Work.WRITE
        self._blocked: tuple[int, int] | None = None
        self._steady: Steady | None = None
        self._guessing = False
        self._members: tuple[Request, ...] = ()
        self._full, self._held = False, 0
        self._behind = set[int]()  # requests of which the drafter has not made all KV that is final

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
        self._steady, self._members = None, ()
        self._behind.discard(request.id)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def part(self, batch: Batch, ends: Sequence[int]) -> bool:
        """Those of a round that was read who ended (`ends` is not 0) take part in no other, though they are told so later. False,
        and nothing is changed, where that is to be told first: others wait for their place, or may need their memory."""
        gone = [request.id for request, end in zip(batch.requests, ends, strict=True) if end]
        if gone and (self.waiting or not self._plenty(len(self.running))):
            return False
        if gone:
            self._steady, self._members = None, ()
            self.running = [request for request in self.running if request.id not in gone]
        return True

    def calm(self, batch: Batch) -> bool:
        """Whether the next round's batch is known before `batch`'s round is read: all write, nobody is let in or would have
        to give way."""
        known = (not self.waiting or self.gathering) and all(batch.ready) and all(r.flying for r in self.running)
        return known and self._plenty(len(self.running))

    @property
    def gathering(self) -> bool:
        """Whether those who wait are kept waiting until a group of them can be let in."""
        free = self.max_requests - len(self.running)
        return self._full and free < max(1, self.max_requests // GROUP) and self._held < HELD

    def launched(self, batch: Batch, widths: Sequence[int]) -> None:
        """Note that a round is in flight, which may add its guesses and one more token to every request."""
        self._guessing = any(widths)
        if self._guessing:
            self._steady = None
        for request, width in zip(batch.requests, widths, strict=True):
            request.flying += width + 1

    def next(self, blind: bool = False) -> Batch | None:
        """The next round's batch, with KV reserved for its tokens and `room` draft nodes; None if nothing can run. `blind`: a
        round is in flight, of which everybody gets at least one token."""
        if blind and self._steady is not None and self._steady.further(self.cache):
            return self._steady.batch(bool(self.waiting))
        self._steady = None
        writing = self._writing(blind) if blind or not (self.waiting or self.gathering) else None
        if writing is not None:
            if blind and not self._guessing:
                self._steady = Steady.of(writing, self.cache)
            return writing
        rooms = self._secure()
        if not blind:
            self._admit(rooms)
        able = [(r, self._chunk(r), room) for r, room in zip(self.running, rooms, strict=True) if r.room > bool(r.flying)]
        able = [fed for fed in able if fed[0].flying] if blind else able
        chosen: list[Fed] = []
        rows = 0
        for request, pending, room in self._turn(able) if self.separate else able:
            if pending > REPLAY and rows and rows + pending > self.max_rows:
                continue
            rows += pending if pending > 1 else 0
            chosen.append((request, pending, room))
        chosen = chosen[: self.most]
        if not chosen:
            return None
        ready = tuple(r.computed + pending == len(r.tokens) for r, pending, _ in chosen)
        rooms_out = tuple(room for _, _, room in chosen)
        return Batch(tuple(r for r, _, _ in chosen), tuple(p for _, p, _ in chosen), ready, rooms_out, blind, bool(self.waiting))

    def _writing(self, blind: bool) -> Batch | None:
        """The next round's batch where everybody writes, and there is memory for all they wish: what takes no more than a look at
        each. None where it is not so, which what was reserved does not change."""
        running, wish, cache = self.running, self.lookahead, self.cache
        if not running or len(running) > self.most or not self._plenty(len(running)):
            return None
        rooms, short = list[int](), False
        for request in running:
            length, left, flying = len(request.tokens), request.room, request.flying
            room = wish if left > 1 else 0
            if request.computed != length - 1 or bool(flying) != blind or left < 1 + blind:
                return None
            need = length + flying + room
            if need > cache.room(request):
                short = True
                if not cache.reserve(request, need):
                    return None
            rooms.append(room)
        if short and not self.waiting:
            self._foresee()
        self._last = Work.WRITE
        if not blind:
            self._full, self._held = False, 0
        count, members = len(running), tuple(running)
        if members != self._members:  # whoever knows a batch by its requests finds the same object
            self._members = members
        return Batch(self._members, (1,) * count, (True,) * count, tuple(rooms), blind, bool(self.waiting))

    def _foresee(self) -> None:
        """Somebody needed another block. Whoever will soon has one now, so that block tables change once for all of them, and not
        in every round for a few."""
        for request in self.running:
            self.cache.reserve(request, soon(request) + self.lookahead)

    def _turn(self, able: list[Fed]) -> list[Fed]:
        """One kind of work alone; each kind that there is gets its turn."""
        kinds = [_work(request, pending) for request, pending, _ in able]
        if not able:
            return able
        self._last = min(kinds, key=lambda kind: (kind <= self._last, kind))
        return [fed for fed, kind in zip(able, kinds, strict=True) if kind is self._last]

    def _secure(self) -> list[int]:
        """KV for every running request's known tokens, oldest first, then room for guesses as far as it goes. Whoever cannot be
        served first makes all give back room for guesses, then the youngest give way."""
        reserve, wish = self.cache.reserve, self.lookahead
        if self._plenty(len(self.running)):  # so that nobody's guesses stand in the way of what others know
            rooms = [wish if request.room > 1 else 0 for request in self.running]
            if all(reserve(r, reach(r) + room) for r, room in zip(self.running, rooms, strict=True)):
                return rooms
        i = 0
        while i < len(self.running):
            request = self.running[i]
            if reserve(request, reach(request)):
                i += 1
            elif not self._tighten():
                self._preempt()
        return [self._room(request) for request in self.running]

    def _plenty(self, count: int) -> bool:
        """Whether so many requests can have all they wish for, this round and the next."""
        return self.cache.free() >= count * (self.lookahead + CALM)

    def _tighten(self) -> bool:
        """Take back room for guesses. Returns whether there was any."""
        before = self.cache.free()
        for request in self.running:
            self.cache.trim(request, reach(request))
        return self.cache.free() > before

    def _room(self, request: Request) -> int:
        """Room for draft nodes beside the known tokens, which have theirs."""
        wish = self._wishes(request)[0]
        return wish if wish and self.cache.reserve(request, reach(request) + wish) else 0

    def _wishes(self, request: Request) -> tuple[int, ...]:
        return (self.lookahead, 0) if request.room > 1 and self.lookahead else (0,)

    def _preempt(self) -> None:
        youngest = self.running.pop()
        self.cache.release(youngest)
        youngest.computed = 0
        self.preempted += 1
        self.waiting.appendleft(youngest)

    def _admit(self, rooms: list[int]) -> None:
        if self.gathering:
            self._held += len(self.running) < self.max_requests
            return
        self._held = 0
        owed: int | None = None
        passed = 0  # samples that wait for their prompt to be read; who comes after them need not
        while len(self.waiting) > passed and len(self.running) < self.max_requests:
            request = self.waiting[passed]
            if self._must_wait(request):
                passed += 1
                continue
            free = self.cache.free()
            if self.running and self._blocked is not None and self._blocked[0] == request.id and free <= self._blocked[1]:
                return  # nothing has come back since it was found not to fit
            if owed is None:
                owed = sum(map(self._growth, self.running, rooms))
            room = self._enter(request, owed)
            if room is None and not self.running:
                raise OutOfMemory(
                    f"a request of {len(request.tokens)} tokens does not fit into KV memory even alone; raise kv_tokens "
                    f"(the pool holds {self.cache.capacity}, {self.cache.free()} of them free)"
                )
            self._blocked = (request.id, free) if room is None else None
            if room is None:
                return
            del self.waiting[passed]
            self.running.append(request)
            rooms.append(room)
            owed += self._growth(request, room)
        self._full = len(self.waiting) > passed and len(self.running) >= self.max_requests

    def _enter(self, request: Request, owed: int) -> int | None:
        """Give a waiting request its KV memory, begun with blocks of others where they hold its tokens. Returns its room for
        guesses; None, and nothing changed, if not everybody could go on beside it for one more round, for which those who run may
        need `owed`."""
        twin = self._copied(request)
        blocks = self._earlier(request) if twin is None else self.cache.head(twin, request.prompt_len - 1)
        for room in self._wishes(request):
            length = len(request.tokens) + room
            later = min(length + 1, longest(request)) if self.running else length
            if self.cache.price(request, max(length, later), blocks) + owed > self.cache.free():
                continue
            self.cache.adopt(request, blocks)
            if self.cache.reserve(request, length):
                self._begin(request, twin, len(blocks) * self.cache.block_size)
                return room
            self.cache.release(request)
        return None

    def _growth(self, request: Request, room: int) -> int:
        """Free KV memory that a running request may need for its next round."""
        return self.cache.price(request, min(reach(request) + room + 1, longest(request)))

    def _earlier(self, request: Request) -> tuple[int, ...]:
        """Blocks that hold the request's beginning, by earlier requests. Its last known token is always fed, for its scores, and
        so are all whose scores were asked for."""
        if not self.grain or (self.sharing and request.sampled):
            return ()
        known = len(request.tokens) if self.grain < CHUNK else request.prompt_len
        if logprobs.asks_prompt(request):
            known = min(known, len(request.prompt_logprobs) + 1)
        return self.cache.find(request.tokens, known - 1, self.grain, request.group)

    def _begin(self, request: Request, twin: Request | None, shared: int) -> None:
        """The first `shared` tokens of a new request have their KV. From a twin the rest of the prompt is copied, up to its last
        token."""
        request.computed = request.taken = shared
        if twin is None:
            self.hits += shared > 0
            self.saved += shared
            return
        end = request.prompt_len - 1
        self.cache.copy(self.cache.slots(twin, shared, end), self.cache.slots(request, shared, end))
        request.computed = request.taken = end

    def _must_wait(self, request: Request) -> bool:
        twin = request.twin
        return twin is not None and twin in self.running and twin.computed < twin.prompt_len

    def _copied(self, request: Request) -> Request | None:
        """The sample whose prompt KV is there to be used again."""
        twin = request.twin
        return twin if twin is not None and twin in self.running and request.prompt_len > 1 else None

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

    def advance(
        self, batch: Batch, accepted: list[int], counts: list[int], tokens: list[list[int]], guessed: bool = True
    ) -> None:
        """Book what a round committed: tokens, and how much KV is computed (all that was fed, and the accepted path). Unless it
        `guessed`, a drafter has made none of its own."""
        size, grain, running = self.cache.block_size, self.grain, Finish.RUNNING
        shares = zip(batch.requests, batch.pending, accepted, counts, tokens, strict=True)
        for request, fed, took, count, fresh in shares:
            if request.finish is not running:
                continue
            before = request.computed
            request.computed = after = before + fed + took
            request.tokens += fresh if len(fresh) == count else fresh[:count]
            if not grain or not count:  # its scores may not be sound
                continue
            behind = guessed and request.id in self._behind
            if before // size < after // size or before < request.prompt_len or behind:
                self._publish(request)

    def _publish(self, request: Request) -> None:
        """Others may begin with what is final of a request."""
        whole, size = request.computed if self.grain < CHUNK else request.prompt_len // CHUNK * CHUNK, self.cache.block_size
        ready = min(whole, self.shared(request))
        self.cache.publish(request, ready)
        if ready // size < whole // size:
            self._behind.add(request.id)
        else:
            self._behind.discard(request.id)


def _work(request: Request, pending: int) -> Work:
    if pending == 1:
        return Work.WRITE
    return Work.PROMPT if request.computed < request.prompt_len else Work.REPLAY
