"""Several drafters side by side, each kept from harming the others: one that crashes is switched off alone."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from .. import tree
from ..control.streaks import Text
from ..errors import OutriderError, OutriderWarning, out_of_memory
from ..protocols import Drafter, Forcing, Isolating, Sharing, Start
from ..types import NONE, Batch, Budget, Proposal, Request, Scores, Verdict
from ._alike import Alike, Like
from ._beats import Beats
from ._ledger import Entry, Ledger
from ._members import Learned, Member

_PATIENCE = 3
"""Unsound proposals before a member is switched off."""


class Panel(Drafter):
    """Members, and how they are asked and told. `whole`: without one of them it shall not start. `_parts`: guesses of this round
    by member; `_told`, by request: members whose guess is in the proposal, or who had none; `_best`, by request: whose guess
    went alone; `_asked`: what the last member was; `_light`: the one whose guesses go on as in the round before; `_device`:
    seconds of this round's replays; `_few`: requests, from the first on, of which it is told what became of their guesses."""

    members: list[Member]
    whole: bool
    _parts: dict[int, Proposal]
    _ledger: Ledger
    _alike: Alike
    _empty: dict[int, Proposal]
    _told: list[set[int]]
    _best: list[int]
    _few: int
    _asked: Budget
    _device: float
    _light: Member | None
    _beats: Beats

    def memory(self, dtype: torch.dtype) -> tuple[int, int]:
        """What all members take."""
        each = [member.drafter.memory(dtype) for member in self.members]
        return sum(once for once, _ in each), sum(token for _, token in each)

    @property
    def reach(self) -> int:
        """Levels beyond which no member goes but lookups, whose guesses take nothing: deeper ones need no rehearsal."""
        return max((m.drafter.depth for m in self.members if not m.lookup), default=1)

    def isolate(self) -> None:
        """Let the members that can keep groups apart do so."""
        for member in self.members:
            if isinstance(member.drafter, Isolating):
                member.drafter.isolate()

    def learned(self) -> list[dict[bool, Learned]]:
        """See `protocols.Learning`, by member."""
        return [copy.deepcopy(member.learned) for member in self.members]

    def relearn(self, learned: list[dict[bool, Learned]]) -> None:
        """See `protocols.Learning`."""
        for member, one in zip(self.members, learned, strict=True):
            member.learned = one

    def _counted(self, many: bool) -> None:
        """Whether so many requests are written that something else is learned of them than of few."""
        for member in self.members:
            member.many = many

    def start(self, start: Start) -> None:
        """Start every member with what it asked for itself."""
        self._start = start
        for member in self.members:
            needs = member.drafter.needs
            view, pool = start.view if needs.target else None, start.pool if needs.kv is not None else None
            own = replace(start, view=view, pool=pool, alone=False)
            try:
                member.drafter.start(own)
                member.begin()
            except OutriderError:
                raise
            except (Exception, SystemExit) as error:
                if self.whole:
                    raise
                self._stop(member, f"it failed to start with {type(error).__name__}: {error}")

    def shared(self, request: Request) -> int:
        """See `protocols.Sharing`."""
        least = len(request.tokens)
        for member in self.members:
            drafter = member.drafter
            if member.reason is None and drafter.needs.kv is not None and isinstance(drafter, Sharing):
                try:
                    least = min(least, drafter.shared(request))
                except (Exception, SystemExit) as error:
                    self._failed(member, (request,), error)
                    least = 0
        return least

    def release(self, request: Request) -> None:
        self._ledger.forget(request)
        self._alike.forget()
        for member in self.members:
            member.records.pop(request.id, None)
            member.texts.pop(request.id, None)
            member.stands.pop(request.id, None)
            self._forget(member, request)

    def _begins(self, batch: Batch) -> bool:
        """Whether all have just begun to write, beside a model whose guesses leave time to look at prompts."""
        first = all(len(r.tokens) == r.prompt_len + 1 for r in batch.requests)
        return first and any(m.replayed and m.reason is None for m in self.members)

    def _go_on(self, batch: Batch, budget: Budget) -> Proposal | None:
        """The guesses of a round that goes on as the one before; None where it does not, or has to be looked at after all."""
        like = self._alike.again(batch, budget)
        if like is None or like.member.reason is not None:
            return None
        try:
            part = like.member.drafter.propose(batch, like.asked)
            sound = part.unseen and (like.member.signs(part) or self._sound(like.member, part, like.asked))
        except (Exception, SystemExit):  # it is asked once more, where that counts
            sound = False
        if not sound:
            return None
        self._light, like.member.levels = like.member, like.levels
        self._beats.pause()
        self._settle(batch)
        return like.member.signed(part)

    def _gone_on(self, batch: Batch, member: Member, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        """What became of it only the member is told."""
        self._ledger.pause(batch.requests)
        whole = member.made(proposal)
        seen = brief(batch, member, whole, verdict) if member.drafter.needs.features else verdict
        self._show(member, batch, whole, seen, scores)

    def _like(self, batch: Batch, budget: Budget, solo: Member) -> Like | None:
        """This round, if others can go on as it did: with guesses of a member that needs nothing of the host, nor does anybody
        else see what becomes of them."""
        others = (m for m in self.members if m.reason is None and m is not solo)
        if not batch.blind or not solo.replayed or any(r.classical for r in batch.requests):
            return None
        if any(type(m.drafter).observe is not Drafter.observe for m in others):
            return None
        return Like(batch.requests, budget, solo, self._asked, solo.levels)

    def _ask(self, member: Member, batch: Batch, budget: Budget) -> tuple[Proposal | None, float]:
        """A member's guesses, if they are sound, and the seconds they took."""
        if not budget.any:
            return None, 0.0
        started, part, before, self._asked = time.perf_counter(), None, self._replays, budget
        try:
            member.trees.used()
            part = member.drafter.propose(batch, budget)
            if not self._sound(member, part, budget):
                member.strikes += 1
                part = None
                if member.strikes >= _PATIENCE:
                    self._stop(member, f"it made {_PATIENCE} unsound proposals")
        except (Exception, SystemExit) as error:
            part = None
            self._failed(member, batch.requests, error)
        else:
            member.starved = False
        finally:
            if any(r.sampled for r in batch.requests):
                # What a member drew and did not report must not be taken for another's.
                self._start.sampler.attach(batch, Proposal.empty(len(batch), self._start.device))
        seconds = time.perf_counter() - started
        replayed = part is not None and part.unseen and member.drafter.follows(batch.requests, True)
        device = self._replays - before if replayed else None
        member.took(max(budget.depth), seconds, device)
        self._device += device or 0.0
        if part is None:
            return None, seconds
        levels = [min(pair) if nodes else 0 for *pair, nodes in zip(budget.depth, part.widths, budget.nodes, strict=True)]
        member.levels = max(levels)
        for b, request in enumerate(batch.requests[: self._few]):
            if budget.nodes[b]:
                record = member.record(request)
                record.promise, record.levels = member.promise(request, levels[b]) if levels[b] else 0.0, levels[b]
        part = self._parts[member.index] = member.signed(part)
        return part, seconds

    @property
    def _replays(self) -> float:
        """Seconds that the device has worked on replays of drafters, so far."""
        stage = None if self._start.view is None else self._start.view.stage
        return 0.0 if stage is None else float(stage.meter.seconds)

    def _preview(self, member: Member, request: Request, most: int) -> list[int] | None:
        """What a member would guess, if it can tell."""
        try:
            return member.drafter.preview(request, most)
        except (Exception, SystemExit) as error:
            self._stop(member, f"it failed with {type(error).__name__}: {error}")
            return None

    def _promise(self, member: Member, request: Request) -> float:
        """Tokens that a lookup sees coming; no end of them where it cannot tell, so that it is asked."""
        text = member.texts.setdefault(request.id, Text(request))
        if not text.look(member.streaks, lambda: self._preview(member, request, member.drafter.depth)):
            return float("inf")
        return text.outlook(member.streaks.chances(), member.drafter.depth)[-1]

    def _gather(self) -> None:
        """All guesses to the target's device."""
        device = self._start.device
        for i, part in self._parts.items():
            if part.unseen:  # nobody looked how many there are
                most = torch.tensor(part.widths).to(device, non_blocking=True)
                self._parts[i] = replace(part, sizes=part.sizes.minimum(most))
            elif part.tokens.device.type != device.type:
                self._parts[i] = part.to(device)

    def _settle(self, batch: Batch) -> None:
        """Book what became of members' guesses that went alone."""
        for request, entry, right in self._ledger.told(batch.requests, batch.blind):
            for member in self.members:
                said = entry.asked.get(member.index)
                member.book(request, None if said is None else right if member.index == entry.member else 0, said)

    def _count(self, member: Member, batch: Batch, seen: Verdict, drafted: bool) -> None:
        """Book what became of a member's guesses beside others'. What was turned down in their favour cannot be told."""
        accepted = seen.accepted.tolist()
        for b, request in enumerate(batch.requests):
            member.book(request, accepted[b] if drafted and member.index in self._told[b] else None)

    def _entry(self, b: int, request: Request) -> Entry:
        """What is to be told of a request's round: not whose guesses a grammar may have replaced."""
        if any(isinstance(p, Forcing) for p in request.params.processors):
            return Entry()
        asked = {i: self.members[i].record(request) for i in self._told[b] if i != NONE}
        return Entry(self._best[b], {i: (record.promise, record.levels) for i, record in asked.items()})

    def _nothing(self, count: int) -> Proposal:
        """No guesses for so many requests, on the target's device."""
        if count not in self._empty:
            self._empty[count] = Proposal.empty(count, self._start.device)
        return self._empty[count]

    def _failed(self, member: Member, requests: Sequence[Request], error: BaseException) -> None:
        """It is switched off; for want of memory only if it did no better the next time. What it knows of these requests may be
        half-written, so it forgets them."""
        if out_of_memory(error) and not member.starved:
            member.starved = True
            for request in requests:
                self._forget(member, request)
        else:
            self._stop(member, f"it failed with {type(error).__name__}: {error}")

    def _sound(self, member: Member, part: object, budget: Budget) -> bool:
        """Whether guesses are possible. Those of this package's own are looked at once, by the guard."""
        if not isinstance(part, Proposal) or len(part.widths) != len(budget.nodes):
            return False
        fits = all(isinstance(w, int) and w <= n for w, n in zip(part.widths, budget.nodes, strict=True))
        if part.unseen or member.trusted:  # the guard puts right what could not be
            return fits and tree.well_formed(part)
        return fits and bool(tree.validate(part, self._start.vocab_size).all())

    def _show(self, member: Member, batch: Batch, part: Proposal, verdict: Verdict, scores: Scores) -> None:
        try:
            member.drafter.observe(batch, part, verdict, scores)
        except (Exception, SystemExit) as error:
            self._stop(member, f"it failed while observing with {type(error).__name__}: {error}")

    def _forget(self, member: Member, request: Request) -> None:
        try:
            member.drafter.release(request)
        except (Exception, SystemExit) as error:
            self._stop(member, f"it failed while releasing a request with {type(error).__name__}: {error}")

    def _stop(self, member: Member, why: str) -> None:
        if member.reason is not None:
            return
        member.reason = f"{member.drafter.name!r} was switched off: {why}"
        wanted = {f for m in self.members if m.reason is None for f in m.drafter.needs.features}
        self.needs = replace(self.needs, features=tuple(f for f in self.needs.features if f in wanted))
        with contextlib.suppress(OutriderWarning):  # a caller may have turned warnings into errors
            text = f"hybrid: its member {member.reason}; the others go on, the text is unaffected"
            warnings.warn(text, OutriderWarning, stacklevel=2)


def brief(batch: Batch, member: Member, part: Proposal, verdict: Verdict) -> Verdict:
    """A verdict on a member's part with no more tokens than may have been right: of a chain its length, of a tree on the device
    its levels. As it is where nobody knows, or others may stand in for them."""
    if any(r.params.processors for r in batch.requests) or not (part.linear or part.unseen):
        return verdict
    longest = max(part.widths) if part.linear else member.levels
    return replace(verdict, tokens=verdict.tokens[:, : longest + 1])
