"""The loop. A chain is a tree that never branches, plain decoding an empty proposal, prefill a scoring of more pending tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from . import logprobs, metrics
from .accept import lossless
from .control import Foresight
from .guard import Guard
from .logprobs import Measured
from .outcome import Outcome, read
from .protocols import AcceptanceRule, Controller, Sink, Target
from .recovery import Recovery
from .scheduler import Scheduler
from .types import Answer, Batch, Budget, Finish, Proposal, Request, StepEvent, Verdict
from .watch import Watch


@dataclass(frozen=True, slots=True)
class Pending:
    """A round in flight: everything the device was told to do, nothing the host has read."""

    batch: Batch
    proposal: Proposal
    verdict: Verdict
    started: float
    drafted: float
    scored: float
    logprobs: Measured | None = None
    answer: Answer | None = None
    depths: tuple[int, ...] = ()


class Engine:
    """Runs rounds until every request is finished."""

    def __init__(
        self, target: Target, drafter: Guard, scheduler: Scheduler, accept: AcceptanceRule, controller: Controller
    ) -> None:
        target.watched, drafter.admits = drafter.observes, target.admits
        self.target, self.drafter, self.scheduler = target, drafter, scheduler
        self.accept, self.controller = accept, controller
        if isinstance(controller, Foresight):
            controller.preview = drafter.preview
        scheduler.shared, scheduler.sharing = drafter.shared, drafter.sharing
        self.watch = Watch()
        self.sinks: list[Sink] = []
        self.ahead: Pending | None = None
        self._owed: StepEvent | None = None
        self.recovery = Recovery(scheduler, self.release)

    def add(self, request: Request) -> None:
        """Queue a request; `OutOfMemory` if it can never fit."""
        request.lossless = lossless(request.rule)
        if request.finish is not Finish.RUNNING:  # stopped before it began
            return
        self.scheduler.add(request)
        request.started = time.perf_counter()

    def step(self) -> StepEvent | None:
        """One round, or None when there is nothing to do. Where nothing has to be known for it, the next one is launched before
        this one is read; else before its text is told, unless somebody's end matters to others."""
        owed, self._owed = self._owed, None
        if owed is not None:
            return owed
        pending, self.ahead = self.ahead or self.launch(), None
        if pending is None:
            return self.recovery.report()
        try:
            if self._blind(pending):
                self.ahead = self.launch(blind=True)
            outcome = self.book(pending)
        except BaseException:
            self._ground(pending)
            raise
        if pending.answer is not None and self.ahead is None and self.scheduler.part(pending.batch, outcome.finish):
            try:
                self.ahead = self.launch(early=True)
            except BaseException:
                self._owed = self.tell(pending, outcome)  # for whoever asks next
                self._ground(pending)
                raise
        return self.tell(pending, outcome)

    def launch(self, blind: bool = False, early: bool = False) -> Pending | None:
        """The next round, or as much of it as memory allows. `blind`: the round before has not been read; `early`: it has not
        been told, so that nobody may be ended for want of memory."""
        batch = self.scheduler.next(blind)
        return None if batch is None else self.recovery.run(self._round, batch, optional=blind or early)

    def _round(self, batch: Batch, guess: bool) -> Pending:
        """Everything the device does in a round; no host sync inside."""
        started = time.perf_counter()
        budget = self._budget(batch, guess)  # how far to look ahead, per request; 0 = do not
        guesses = self.controller.cut(batch, self.drafter.propose(batch, budget))
        proposal = self.target.place(batch, guesses)
        drafted = time.perf_counter()
        scores = self.target.score(batch, proposal)  # one pass over pending tokens and guesses
        scored = time.perf_counter()
        verdict = self.accept(proposal, scores, batch)  # longest agreeing path, plus one token
        measured = logprobs.measure(batch, proposal, scores, verdict, self.target.sampler)  # of those who asked
        self.target.keep(batch, proposal, verdict)  # the path's KV stays, the rest is forgotten
        self.drafter.observe(batch, proposal, verdict, scores)
        self.scheduler.launched(batch, proposal.widths)
        return Pending(batch, proposal, verdict, started, drafted, scored, measured, scores.answer, budget.depth)

    def _budget(self, batch: Batch, guess: bool) -> Budget:
        if not guess:
            return Budget.none(len(batch))
        rests = batch.blind and (self.controller.resting or not self.drafter.follows(batch.requests))
        return self.controller.rest(batch) if rests else self.controller.budget(batch)

    def settle(self, pending: Pending) -> StepEvent:
        """What the host needs of a round: tokens, then all that follows from them."""
        return self.tell(pending, self.book(pending))

    def book(self, pending: Pending) -> Outcome:
        """Wait for a round and note what it committed: all that the next one depends on."""
        outcome = read(pending)
        self.scheduler.advance(pending.batch, outcome.accepted, outcome.counts, outcome.tokens, any(pending.depths))
        self.scheduler.landed(pending.batch, pending.proposal.widths)
        return outcome

    def tell(self, pending: Pending, outcome: Outcome) -> StepEvent:
        """Text, stop strings, statistics, freeing."""
        event = self._event(pending, outcome)
        for item in event.committed:
            if item.request.finish is not Finish.RUNNING and not item.late:
                self.release(item.request)
        self.controller.observe(event)
        self.watch.observe(event)
        for sink in self.sinks:
            sink(event)
        if self.scheduler.idle:
            self.ground()  # nobody is left to hear of it
        return event

    def _ground(self, pending: Pending) -> None:
        """A round that nobody will read: what the host knows counts, and it is done again."""
        for request in (*pending.batch.requests, *self.scheduler.running):
            request.flying = 0
        self.ahead = None

    def ground(self) -> None:
        """Forget a round that was launched ahead."""
        if self.ahead is not None:
            self._ground(self.ahead)

    def _blind(self, pending: Pending) -> bool:
        """Whether a round may be launched before `pending` has been read: nobody on the host takes part in it."""
        if pending.answer is None or not self.scheduler.calm(pending.batch):
            return False
        requests = pending.batch.requests
        if any(r.finish is not Finish.RUNNING for r in requests):
            requests = tuple(r for r in requests if r.finish is Finish.RUNNING)
        return self.drafter.follows(requests, guessing=not self.controller.resting)

    def release(self, request: Request) -> None:
        """Forget a request everywhere: KV, drafter, sampler, queue. Safe to call at any moment between rounds."""
        self.scheduler.remove(request)
        self.drafter.release(request)
        self.target.release(request)

    def abort(self, requests: Sequence[Request]) -> None:
        """Stop requests where they are; what they wrote stays theirs."""
        for request in requests:
            if request.finish is Finish.RUNNING:
                request.finish = Finish.ABORT
                self.release(request)

    def _event(self, pending: Pending, outcome: Outcome) -> StepEvent:
        items = outcome.committed() + self.recovery.ended()
        event = StepEvent(
            items,
            draft_seconds=pending.drafted - pending.started if any(pending.depths) else 0.0,
            verify_seconds=pending.scored - pending.drafted if pending.answer is None else pending.answer.seconds(),
            seconds=time.perf_counter() - pending.started,
            prefill=sum(p for p in pending.batch.pending if p > 1),
            rows=sum(pending.batch.pending) + sum(pending.proposal.widths),
            depths=pending.depths,
            waited=outcome.waited,
        )
        metrics.charge(event, time.perf_counter())
        return event
