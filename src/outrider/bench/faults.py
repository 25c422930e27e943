"""Bugs of the kind engines ship, one context manager each, planted by replacing one piece of the engine with a broken twin.

They are the negative controls of the audit and of the contract tests: a comparison that stays silent under one of them is
worthless. `selftest.py` pairs each with the comparison that must notice it. Faults of the coupled rule's pieces live in the
vectorised form, so judge with that (`selftest.vectorised`). Several at once are not meant to work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from .. import sampling
from ..accept import coupled
from ..cache.paged import PagedCache
from ..control import Fixed
from ..drafters.draft_model import DraftModel
from ..models.layout import Layout
from ..models.target import ModelTarget
from ..processors import Ids, Processors, Row
from ..scheduler import Scheduler
from ..text import TextStream
from ..types import NONE, ROOT, Batch, Budget, Finish, Proposal, Request, Scores, Slots, Verdict

Fault = Callable[[], AbstractContextManager[object]]


def faults() -> dict[str, Fault]:
    """Every fault by name, ready to be planted with `with faults()[name]():`."""
    listed: tuple[Fault, ...] = (
        stale_kv,
        draft_cache_hole,
        position_too_far,
        position_too_near,
        noise_keyed_by_slot,
        noise_keyed_by_row,
        noise_reused_by_neighbours,
        penalties_of_the_wrong_slot,
        penalties_of_a_sibling,
        min_tokens_counts_rounds,
        bad_word_across_a_block,
        top_k_after_the_fact,
        top_p_from_another_row,
        eos_overrun,
        length_overrun,
        stop_string_at_a_block_end,
        redraw_after_mismatch,
        last_guess_unchecked,
        padding_that_leaks,
        siblings_see_each_other,
        wrong_block_shared,
        retry_with_a_new_seed,
        index_restarts_on_resume,
    )
    return {str(fault.__name__).replace("_", " "): fault for fault in listed}


# KV and positions


def stale_kv() -> AbstractContextManager[object]:
    """The accepted branch's KV is left where it was drafted."""
    return mock.patch.object(ModelTarget, "keep", lambda self, batch, proposal, verdict: None)


@contextmanager
def draft_cache_hole() -> Iterator[None]:
    """After full acceptance the draft takes its last guess to have KV. The text stays right; self-draft must notice."""
    right = DraftModel._ready

    def wrong(self: DraftModel, request: Request, nodes: int) -> bool:
        memory = self._memory.get(request.id)
        full = memory is not None and len(memory.ran) == self.depth - 1
        ok = right(self, request, nodes)
        if memory is not None and full and ok:
            memory.computed = len(request.tokens) - 1
        return ok

    with mock.patch.object(DraftModel, "_ready", wrong):
        yield


def position_too_far() -> AbstractContextManager[object]:
    """Draft nodes sit one position too far."""
    return _moved(1)


def position_too_near() -> AbstractContextManager[object]:
    """Draft nodes sit one position too near."""
    return _moved(-1)


def _moved(shift: int) -> AbstractContextManager[object]:
    def wrong(made: Layout) -> Layout:
        position = made.rows.position + shift * (made.rows.slot > 0)
        return replace(made, rows=replace(made.rows, position=position))

    return _layout(wrong)


def siblings_see_each_other() -> AbstractContextManager[object]:
    """A tree is verified under a causal mask over slots instead of an ancestor mask."""
    return _layout(lambda made: replace(made, ancestors=None))


def _layout(change: Callable[[Layout], Layout]) -> AbstractContextManager[object]:
    right = Layout.build.__func__  # type: ignore[attr-defined]
    return mock.patch.object(Layout, "build", classmethod(lambda cls, *a, **k: change(right(cls, *a, **k))))


def wrong_block_shared() -> AbstractContextManager[object]:
    """The allocator hands out a block that is still in use."""
    right = PagedCache.slots
    return mock.patch.object(PagedCache, "slots", lambda self, request, start, end: right(self, request, start, end) % 64 + 8)


# What each slot is told


def _slots(change: Callable[[Slots], Slots]) -> AbstractContextManager[object]:
    right = Layout.slots
    return mock.patch.object(Layout, "slots", lambda self, batch: change(right(self, batch)))


def noise_keyed_by_slot() -> AbstractContextManager[object]:
    """Noise depends on where in the block a token falls, not on its position in the text."""
    return _slots(lambda s: replace(s, position=s.depth))


def noise_keyed_by_row() -> AbstractContextManager[object]:
    """Noise depends on the request's place in the batch."""
    return _slots(lambda s: replace(s, position=s.position + 1000 * s.request))


def noise_reused_by_neighbours() -> AbstractContextManager[object]:
    """Two neighbouring positions share their noise. Every comparison of texts is blind to it; the law is not."""
    return _slots(lambda s: replace(s, position=s.position // 2))


def penalties_of_the_wrong_slot() -> AbstractContextManager[object]:
    """Every slot sees the history of the request, without the guesses on its own path (as several servers did)."""
    return _slots(lambda s: replace(s, path=torch.full_like(s.path, NONE)))


def penalties_of_a_sibling() -> AbstractContextManager[object]:
    """Paths of a tree are mixed up between rows."""
    return _slots(lambda s: replace(s, path=s.path.roll(1, 0)))


def min_tokens_counts_rounds() -> AbstractContextManager[object]:
    """The length seen by min_tokens leaves out the guesses before the slot."""
    return _slots(lambda s: replace(s, position=s.position - s.depth))


def bad_word_across_a_block() -> AbstractContextManager[object]:
    """A bad word of several tokens is only recognised after committed tokens."""
    right = Processors._tail
    return mock.patch.object(Processors, "_tail", lambda self, path, size: right(self, (), size))


# Filters


def top_k_after_the_fact() -> AbstractContextManager[object]:
    """The token is drawn from everything, and replaced by the best one where a filter would have removed it."""
    right, survivors = sampling.TextSampler._host_choice, sampling.survivors

    def wrong(self: sampling.TextSampler, slot: sampling._Slot) -> int:
        with mock.patch.object(sampling, "survivors", lambda row, top, params: None):
            drawn = right(self, slot)
        kept = survivors(slot.row, slot.top, slot.params) if slot.params.temperature else None
        return drawn if kept is None or drawn in kept else slot.best

    return mock.patch.object(sampling.TextSampler, "_host_choice", wrong)


@contextmanager
def top_p_from_another_row() -> Iterator[None]:
    """The mass that top-p needs is that of the row before."""
    right, before = sampling._nucleus, [0.0]

    def wrong(tempered: Row, top_p: float) -> Ids:
        mass = float(np.exp(tempered).sum())
        borrowed, before[0] = before[0] or mass, mass
        return right(tempered, min(1.0, top_p * borrowed / mass))

    with mock.patch.object(sampling, "_nucleus", wrong):
        yield


# Ends


@contextmanager
def eos_overrun() -> Iterator[None]:
    """A stop token inside an accepted block does not end the text."""
    right = coupled.cut

    def wrong(batch: Batch, path: Tensor, accepted: Tensor, tokens: Tensor) -> Verdict:
        verdict = right(batch, path, accepted, tokens)
        deaf = replace(batch, requests=tuple(replace(r, stop_ids=frozenset()) for r in batch.requests))
        inside = (verdict.finish == Finish.STOP.value) & (verdict.counts < accepted + 1)
        return right(deaf, path, accepted, tokens) if bool(inside.any()) else verdict

    with mock.patch.object(coupled, "cut", wrong):
        yield


@contextmanager
def length_overrun() -> Iterator[None]:
    """max_tokens is only looked at between rounds, by the drafter's budget as by the rule."""
    right = coupled.cut

    def wrong(batch: Batch, path: Tensor, accepted: Tensor, tokens: Tensor) -> Verdict:
        long = tuple(replace(r, params=replace(r.params, max_tokens=r.params.max_tokens + 99)) for r in batch.requests)
        verdict = right(replace(batch, requests=long), path, accepted, tokens)
        over = verdict.counts >= torch.tensor([r.room for r in batch.requests])
        running = verdict.finish == Finish.RUNNING.value
        return replace(verdict, finish=torch.where(over & running, Finish.LENGTH.value, verdict.finish))

    def blind(self: Fixed, batch: Batch) -> Budget:
        able = [
            min(self._depth, room) if ready and pending == 1 else 0
            for ready, pending, room in zip(batch.ready, batch.pending, batch.room, strict=True)
        ]
        return Budget(tuple(able), tuple(able))

    with mock.patch.object(coupled, "cut", wrong), mock.patch.object(Fixed, "budget", blind):
        yield


@contextmanager
def stop_string_at_a_block_end() -> Iterator[None]:
    """A stop string that begins in one round and ends in the next is missed."""
    right = TextStream.push

    def wrong(self: TextStream, tokens: list[int], last: bool = False) -> int:
        self._shown.append(self._open)
        self._open = ""
        return right(self, tokens, last)

    with mock.patch.object(TextStream, "push", wrong):
        yield


# The rule


@contextmanager
def redraw_after_mismatch() -> Iterator[None]:
    """After a mismatch another token is drawn instead of the one that mismatched."""
    right = coupled.Coupled.__call__

    def wrong(self: coupled.Coupled, proposal: Proposal, scores: Scores, batch: Batch) -> Verdict:
        verdict = right(self, proposal, scores, batch)
        missed = (verdict.accepted < proposal.sizes) & (verdict.counts == verdict.accepted + 1)
        last = (verdict.counts - 1).clamp(min=0)[:, None]
        drawn = verdict.tokens.gather(1, last)
        redrawn = torch.where(missed[:, None], (drawn - 1).clamp(min=2), drawn)
        return replace(verdict, tokens=verdict.tokens.scatter(1, last, redrawn))

    with mock.patch.object(coupled.Coupled, "__call__", wrong):
        yield


@contextmanager
def last_guess_unchecked() -> Iterator[None]:
    """The deepest guess of a chain is taken without being compared."""
    right = coupled.agreeing

    def wrong(proposal: Proposal, choice: Tensor) -> Tensor:
        alive = right(proposal, choice)
        last = (proposal.sizes - 1).clamp(min=0)[:, None]
        reached = (alive.sum(1) >= proposal.sizes - 1) & (proposal.sizes > 0)
        return alive.scatter(1, last, reached[:, None]) if proposal.columns and proposal.linear else alive

    with mock.patch.object(coupled, "agreeing", wrong):
        yield


@contextmanager
def padding_that_leaks() -> Iterator[None]:
    """Columns beyond a request's size are judged like guesses: a shorter tree in a ragged batch gains tokens nobody scored."""
    right = coupled.agreeing

    def wrong(proposal: Proposal, choice: Tensor) -> Tensor:
        full = torch.full_like(proposal.sizes, proposal.columns)
        filler = choice.gather(1, proposal.parents.clamp(min=ROOT) + 1)
        unused = torch.arange(proposal.columns) >= proposal.sizes[:, None]
        return right(replace(proposal, sizes=full, tokens=torch.where(unused, filler, proposal.tokens)), choice)

    with mock.patch.object(coupled, "agreeing", wrong):
        yield


# Preemption


@contextmanager
def retry_with_a_new_seed() -> Iterator[None]:
    """A preempted request comes back with fresh noise."""
    right = Scheduler._preempt

    def wrong(self: Scheduler) -> None:
        right(self)
        self.waiting[0].key += 1

    with mock.patch.object(Scheduler, "_preempt", wrong):
        yield


@contextmanager
def index_restarts_on_resume() -> Iterator[None]:
    """A preempted request counts its positions from the point where it was resumed."""
    preempt, right = Scheduler._preempt, Layout.slots
    resumed: dict[int, int] = {}

    def noting(self: Scheduler) -> None:
        preempt(self)
        resumed[self.waiting[0].id] = len(self.waiting[0].output)

    def wrong(self: Layout, batch: Batch) -> Slots:
        slots = right(self, batch)
        back = torch.tensor([resumed.get(r.id, 0) for r in slots.requests], dtype=torch.int64)
        return replace(slots, position=slots.position - back[slots.request])

    with mock.patch.object(Scheduler, "_preempt", noting), mock.patch.object(Layout, "slots", wrong):
        yield
