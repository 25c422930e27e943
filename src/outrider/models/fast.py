"""The target on a GPU: rounds as graph replays where lanes can hold all that matters, the plain pass for everything else.

Both run the same kernels, so a request may go back and forth between them without a bit of its text changing. The plain pass does
prompts, classical rules, log-probabilities, processors that read history; the graph does the rounds in which time is spent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from ..protocols import Sampler
from ..types import Batch, PassRows, Proposal, Request, Scores, Verdict
from .fields import Shape
from .lanes import LaneBook, filters
from .native import Native
from .passes import Passes
from .replay import Stage
from .rounds import Machine, Play, quiet, shape_of, spanned
from .target import ModelTarget


class FastTarget(ModelTarget):
    """`protocols.Target` for CUDA. `lanes` bounds how many requests can run in captured rounds at once."""

    anchored = True

    def __init__(self, decoder: Any, cache: Any, sampler: Sampler, max_len: int, lanes: int = 256) -> None:
        super().__init__(decoder, cache, sampler, max_len)
        from ..kernels.rounds import Lanes

        blocks = -(-(max_len + 128) // cache.block_size)
        tables = Lanes.make(lanes + 1, blocks, self.device)
        usable: int = getattr(sampler, "usable", self.vocab_size)
        self.book = LaneBook(tables, cache)
        self.machine = Machine(decoder, cache, tables, usable, max_len)
        if isinstance(decoder, Native):
            decoder.passes = Passes(decoder, cache, self.machine)
        self.stage: Stage = Stage(self.machine, self.book, self.loans)
        self._found: tuple[Batch, Proposal, Shape | None] | None = None
        self._met: tuple[tuple[Request, ...], bool, bool] = ((), True, False)
        nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._rows = PassRows(nothing, nothing, nothing, nothing)

    def steady(self, batch: Batch) -> bool:
        """Whether a captured round can do this batch: everyone writes, and lanes can hold what decides."""
        if self.needs.logits or not batch.writes:
            return False
        return self._of(batch.requests)[1] and self.book.room(batch.requests)

    def _of(self, requests: tuple[Request, ...]) -> tuple[tuple[Request, ...], bool, bool]:
        """Of a batch's requests, which stay the same for many rounds: whether lanes can hold all, and whether anybody filters."""
        if self._met[0] is not requests:
            self._met = requests, all(map(self.stage.holds, requests)), any(map(filters, requests))
        return self._met

    def admits(self, batch: Batch, proposal: Proposal) -> bool:
        """A captured round does."""
        return self._shape(batch, proposal) is not None

    def captured(self, batch: int, depth: int) -> bool:
        """See `ModelTarget.captured`: whether somebody guesses, or all, in sequences that are not long."""
        return not self.machine.graphs or all(self.machine.plays(s) for s in spanned(batch, depth, self.needs.features))

    def prepare(self, most: int, tried: int) -> None:
        """Capture the rounds of up to so many requests in sequences that are not long, as far as memory goes: else that would
        happen in the midst of somebody's answer."""
        with self.machine.exact(), contextlib.suppress(torch.OutOfMemoryError):
            for shape in quiet(most, tried, self.needs.features):
                if self.needs.logits or not self.machine.graphs:
                    return
                self.machine.round(shape)

    def place(self, batch: Batch, proposal: Proposal) -> Proposal:
        """Guesses where the round wants them: a captured one takes them from the host."""
        if self._shape(batch, proposal) is not None:
            return proposal
        if batch.blind:  # only a captured round can go on from where the device is
            return Proposal.empty(len(batch))
        return super().place(batch, proposal)

    def _shape(self, batch: Batch, proposal: Proposal) -> Shape | None:
        """The captured round that can do this, if one can. Asked twice in a round, by `place` and `score`, found once."""
        if self._found is None or self._found[0] is not batch or self._found[1] is not proposal:
            self._found = (batch, proposal, self._find(batch, proposal))
        return self._found[2]

    def _find(self, batch: Batch, proposal: Proposal) -> Shape | None:
        resumed = proposal.resume is not None and any(proposal.widths)  # without guesses, a captured round is faster
        if not self.steady(batch) or resumed or proposal.q is not None:
            return None
        longest = max([len(r.tokens) + r.flying for r in batch.requests]) + max(proposal.widths, default=0)
        return shape_of(proposal, longest, self._of(batch.requests)[2], self.needs.features)

    def score(self, batch: Batch, proposal: Proposal) -> Scores:
        """See `ModelTarget.score`; a captured round brings its verdict along."""
        shape, self._found = self._shape(batch, proposal), None
        if shape is None:
            return super().score(batch, proposal.to(self.device))
        self.loans.clear()
        lanes = self.book.take(batch.requests)
        played = self.machine.round(shape)
        started = played.play(Play(lanes, None if batch.blind else _numbers(batch.requests), proposal))
        answer = played.answer(proposal, started)
        if not self.watched:  # nobody on the device will look
            result = played.result
            return Scores(result, self._rows, {}, verdict=Verdict(result, result, result, result, result), answer=answer)
        verdict, rows, shown = played.shown(len(batch), len(batch) + sum(proposal.widths))
        return Scores(played.choices(len(batch)), rows or self._rows, shown, verdict=verdict, answer=answer)

    def keep(self, batch: Batch, proposal: Proposal, verdict: Verdict) -> None:
        """A captured round has kept the path already."""
        if verdict.counts.dtype is not torch.int32:
            super().keep(batch, proposal, verdict)

    def release(self, request: Request) -> None:
        super().release(request)
        self._met = (), True, False
        self.book.release(request)
        self.stage.release(request)


def _numbers(requests: Sequence[Request]) -> tuple[list[int], ...]:
    """What the host knows of each request: its last tokens, its length, how much it may still write."""
    return (
        [r.tokens[-1] for r in requests],
        [r.tokens[-2] if len(r.tokens) > 1 else r.tokens[-1] for r in requests],
        [len(r.tokens) for r in requests],
        [min(r.room, 2**30) for r in requests],
    )
