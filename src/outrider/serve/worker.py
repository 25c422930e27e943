"""The thread that owns the engine: it takes jobs from an inbox, runs rounds, and tells event loops what came of them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..config import SamplingParams
from ..engine import Engine
from ..llm import LLM
from ..results import Chunk
from ..types import Finish, Request, StepEvent
from . import faults
from .faults import Fault

MOST_CRASHES = 3
"""Rounds that may fail one after the other before the engine is given up."""
PATIENCE = 1000
"""Rounds in a row that may come to nothing while somebody waits."""
NAP = 0.001
log = logging.getLogger("outrider.serve")

Event = tuple[int, Chunk] | Fault
"""News of a job: the number of a choice with its share of a round, or the end of all of it."""


@dataclass(eq=False, slots=True)
class Job:
    """What one HTTP request asks of the engine: `requests`, one per choice in the order of the answer, and where news of them
    goes: to `tap`, if there is one and it takes them, else into the queue. `open` counts choices that have not ended."""

    requests: tuple[Request, ...]
    loop: asyncio.AbstractEventLoop
    news: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    tap: Callable[[Event], bool] | None = None
    open: int = 0
    started: float = field(default_factory=time.perf_counter)

    def first(self, choice: int) -> Request:
        """The first sample of a choice's prompt."""
        return self.requests[choice - self.requests[choice].index]


class Worker:
    """`limit` bounds the choices that may be in the house at once. `submit` and `cancel` may be called from any thread;
    everything else of the engine belongs to the thread."""

    def __init__(self, llm: LLM, limit: int) -> None:
        self.llm, self.limit = llm, limit
        self.draining = False
        self.failed: str | None = None
        self.crashes = 0
        self._lock = threading.Condition()
        self._inbox = deque[tuple[Job, bool]]()
        self._open = 0
        self._seconds = 1.0  # of a choice, from coming to going, as of late
        self._places: dict[int, tuple[Job, int]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    @property
    def engine(self) -> Engine:
        return self.llm.engine

    @property
    def open(self) -> int:
        """Choices in the house: queued, running, or just handed in."""
        return self._open

    def start(self) -> None:
        """Let rounds begin."""
        self._thread.start()

    def drain(self) -> None:
        """Take nothing new; what is in the house is finished."""
        self.draining = True

    def close(self, seconds: float = 10.0) -> None:
        """Stop everything and wait for the thread to end."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def admit(self, count: int, before: int = 0) -> None:
        """Whether so many choices may come in, with `before` others about to. Raises `Fault` 400 for more than ever fit, 429 when
        the house is full, 503 when it closes."""
        if count > self.limit:
            raise Fault(400, f"{count} answers were asked for at once, this server takes at most {self.limit}", param="n")
        if self.failed is not None:
            raise Fault(503, f"the engine has stopped: {self.failed}", "engine_stopped")
        if self.draining or self._closing:
            raise Fault(503, "the server is shutting down and takes no new requests", "shutting_down", retry_after=5)
        if self._open + before + count > self.limit:
            raise Fault(
                429, f"{self._open + before} answers are being written or wait already", "queue_full", retry_after=self._wait()
            )

    def submit(self, requests: Sequence[Request]) -> Job:
        """Queue a job; called on the event loop that wants the news. Raises `Fault` like `admit`."""
        job = Job(tuple(requests), asyncio.get_running_loop(), open=len(requests))
        with self._lock:
            self.admit(job.open)
            self._open += job.open
            self._inbox.append((job, True))
            self._lock.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Stop a job within a round. Nothing happens to one that has ended."""
        with self._lock:
            if job.open:
                self._inbox.append((job, False))
                self._lock.notify()

    def _wait(self) -> int:
        """Seconds until there is likely to be room."""
        return int(min(max(1.0, self._seconds), 60.0))

    def _run(self) -> None:
        try:
            self._rounds()
        except BaseException as error:  # the thread is all that anybody waits for: whatever it is, they must hear of it
            log.error("the engine's thread failed", exc_info=error)
            self.failed = f"its thread failed with {type(error).__name__}"
        self._end_all(Fault(503, "the server is shutting down", "shutting_down"))

    def _rounds(self) -> None:
        """Until it is closed or has failed."""
        idle_rounds = 0
        while not self._closing and self.failed is None:
            self._take()
            try:
                event = self.engine.step()
            except Exception as error:
                self._crashed(error)
                continue
            if event is not None:
                self.crashes = idle_rounds = 0
                self._tell(event)
            elif not self.engine.scheduler.idle:
                idle_rounds += 1
                time.sleep(NAP)
                if idle_rounds > PATIENCE:
                    idle_rounds = 0
                    self._crashed(RuntimeError("rounds come to nothing while requests wait"))

    def _take(self) -> None:
        """What came in since the last round; waits while there is nothing to do."""
        with self._lock:
            while not self._inbox and self.engine.scheduler.idle and not self._closing:
                self._lock.wait()
            items, self._inbox = self._inbox, deque()
        for job, wanted in items:
            if wanted:
                self._begin(job)
            else:
                self._end(job)

    def _begin(self, job: Job) -> None:
        try:
            for choice, request in enumerate(job.requests):
                self.engine.add(request)
                self._places[request.id] = (job, choice)
        except Exception as error:
            self._end(job, faults.of(error))

    def _end(self, job: Job, why: Fault | None = None) -> None:
        """End what is left of a job, and say why if there is somebody to hear it: even if it cannot be released."""
        for request in job.requests:
            self._places.pop(request.id, None)
        self._gone(job.open)
        job.open = 0
        if why is not None:
            self._send([(job, why)])
        self.engine.abort(job.requests)

    def _gone(self, count: int) -> None:
        with self._lock:
            self._open -= count

    def _tell(self, event: StepEvent) -> None:
        """One piece of news per choice of the round; one wake-up per event loop."""
        news: list[tuple[Job, Event]] = []
        ended = 0
        for item in event.committed:
            place = self._places.get(item.request.id)
            if place is None or item.late:
                continue
            job, choice = place
            news.append((job, (choice, self.llm.chunk(item, job.first(choice)))))
            if item.finish is not Finish.RUNNING:
                del self._places[item.request.id]
                job.open -= 1
                ended += 1
                self._seconds += 0.1 * (time.perf_counter() - job.started - self._seconds)
        if ended:
            self._gone(ended)
        self._send(news)

    def _send(self, news: list[tuple[Job, Event]]) -> None:
        loops = {id(job.loop): job.loop for job, _ in news}
        for key, loop in loops.items():
            mine = [(job, event) for job, event in news if id(job.loop) == key]
            try:
                loop.call_soon_threadsafe(_deliver, mine)
            except RuntimeError:  # the loop has ended, and nobody listens
                log.debug("news for an event loop that has ended")

    def _crashed(self, error: Exception) -> None:
        """A round failed for a reason of its own: whoever was in it cannot go on, those who wait may. If nobody was, they are the
        reason."""
        self.crashes += 1
        log.error("a round failed", exc_info=error, extra={"fields": {"crashes": self.crashes}})
        why = Fault(500, "the engine failed while this answer was being written; try again", "engine_failed")
        hit = [self._places[r.id][0] for r in self.engine.scheduler.running if r.id in self._places]
        self._end_each(hit or [job for job, _ in self._places.values()], why)
        if self.crashes >= MOST_CRASHES:
            self.failed = f"{self.crashes} rounds in a row failed, the last with {type(error).__name__}"
            self._end_all(why)

    def _end_all(self, why: Fault) -> None:
        with self._lock:
            items, self._inbox = self._inbox, deque()
        self._end_each([job for job, _ in (*self._places.values(), *items)], why)

    def _end_each(self, jobs: Sequence[Job], why: Fault) -> None:
        for job in {id(job): job for job in jobs}.values():
            try:
                self._end(job, why)
            except Exception as error:
                log.error("a request could not be released", exc_info=error)
                self.failed = self.failed or f"a request could not be released ({type(error).__name__})"


def _deliver(news: list[tuple[Job, Event]]) -> None:
    for job, event in news:
        try:
            taken = job.tap is not None and job.tap(event)
        except Exception as error:  # the others' news must go out all the same
            log.error("an answer failed", exc_info=error)
            taken, event = False, faults.of(error)
        if not taken:
            job.news.put_nowait(event)


def measure_plain(llm: LLM, tokens: int = 12, runs: int = 3) -> float:
    """Tokens per second of plain decoding, one request alone: what speculation is compared with. Before the thread starts.
    The first run warms up; of the others' rounds the lower quartile counts, so that a busy moment cannot flatter speculation."""
    prompt = llm.tokenizer.encode("The")
    most = max(2, min(tokens, llm.max_model_len - len(prompt)))
    params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, draft="none")
    gaps: list[float] = []
    for run in range(runs + 1):
        times = [time.perf_counter() for _ in llm.stream(prompt, params)]
        gaps += [after - before for before, after in pairwise(times)] if run else []
    usual = sorted(gaps)[len(gaps) // 4] if gaps else 0.0
    return 1 / usual if usual > 0 else 0.0
