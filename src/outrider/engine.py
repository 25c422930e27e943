"""The loop. A chain is a tree that never branches, plain decoding an empty proposal, prefill a scoring of more pending tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from . import logprobs, metrics
from .accept import lossless
from .guard import Guard
from .logprobs import Measured
from .outcome import Outcome, read
from .protocols import AcceptanceRule, Controller, Sink, Target
from .scheduler import Scheduler
from .types import Batch, Finish, Proposal, Request, StepEvent, Verdict


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


class Engine:
    """Runs rounds until every request is finished."""

    def __init__(
        self, target: Target, drafter: Guard, scheduler: Scheduler, accept: AcceptanceRule, controller: Controller
    ) -> None:
        self.target, self.drafter, self.scheduler = target, drafter, scheduler
        self.accept, self.controller = accept, controller
        self.sinks: list[Sink] = []

    def add(self, request: Request) -> None:
        """Queue a request; `OutOfMemory` if it can never fit."""
        request.lossless = lossless(request.rule)
        if request.finish is not Finish.RUNNING:  # stopped before it began
            return
        self.scheduler.add(request)
        request.started = time.perf_counter()

    def step(self) -> StepEvent | None:
        """One round, or None when there is nothing to do."""
        pending = self.launch()
        return None if pending is None else self.settle(pending)

    def launch(self) -> Pending | None:
        """Everything the device does in a round; no host sync inside."""
        batch = self.scheduler.next()
        if batch is None:
            return None
        started = time.perf_counter()
        budget = self.controller.budget(batch)  # how far to look ahead, per request; 0 = do not
        proposal = self.controller.cut(batch, self.drafter.propose(batch, budget))  # guesses
        drafted = time.perf_counter()
        scores = self.target.score(batch, proposal)  # one pass over pending tokens and guesses
        scored = time.perf_counter()
        verdict = self.accept(proposal, scores, batch)  # longest agreeing path, plus one token
        measured = logprobs.measure(batch, proposal, scores, verdict, self.target.sampler)  # of those who asked
        self.target.keep(batch, proposal, verdict)  # the path's KV stays, the rest is forgotten
        self.drafter.observe(batch, proposal, verdict, scores)
        return Pending(batch, proposal, verdict, started, drafted, scored, measured)

    def settle(self, pending: Pending) -> StepEvent:
        """What the host needs: text, stop strings, statistics, freeing."""
        outcome = read(pending.batch, pending.proposal, pending.verdict, pending.logprobs)
        self.scheduler.advance(pending.batch, outcome.accepted, outcome.counts, outcome.tokens)
        event = self._event(pending, outcome)
        for item in event.committed:
            if item.request.finish is not Finish.RUNNING:
                self.release(item.request)
        self.controller.observe(event)
        for sink in self.sinks:
            sink(event)
        return event

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
        items = tuple(outcome.commit(b) for b in range(len(pending.batch)))
        event = StepEvent(
            items,
            draft_seconds=pending.drafted - pending.started,
            verify_seconds=pending.scored - pending.drafted,
            seconds=time.perf_counter() - pending.started,
            prefill=sum(p for p in pending.batch.pending if p > 1),
            rows=sum(pending.batch.pending) + sum(pending.proposal.widths),
        )
        metrics.charge(event, time.perf_counter())
        return event
