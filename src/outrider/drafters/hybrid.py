"""Several drafters: the cheap one first, the next one where it pays; or all of them, merged into one tree.

**Cascade.** Members are asked in order. For every request the guess at hand is worth the tokens it is expected to bring, by what
the member itself expects (if it has a method `expected`) or by the length of its guess, corrected by the share that came true
recently of such promises; the next member is worth what it brought when it was asked. It is asked if tokens per second gain by
it, (1 + next) / (pass + spent + cost) > (1 + now) / (pass + spent), all times measured here. The better guess is taken, and the
lesser one beside it, as in a merge, where there is room and its rows are worth it. (Oliaro et al. 2024 put lookup before a model
by a fixed threshold of its score; Chen et al. 2024 cascade models.) Under the classical rules costs count as nothing, so that the
text does not depend on a clock, nothing decides but what was before the draft, and one guess is taken alone.

On a GPU nothing is read for it: where one member's guesses go into the pass alone they stay where they are, and what became of
them is told by the text (`_ledger.py`). While what lookups see coming (`Drafter.preview`) is worth less than the guesses of
members that need nothing of the host, those alone guess, in rounds that are launched ahead; for more than two requests always,
if they do well.

**Merge.** All members guess, equal paths become one node; the first member to offer a node owns it. Draft probabilities do not
survive that (which distribution drew a merged node?): under the classical rules its guesses then count as certain ones.

A member that crashes is switched off alone. `Proposal.source` is the member's number.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import registry, tree
from ..control.costs import CROWD, Floats
from ..errors import BadInput
from ..protocols import Drafter, Needs
from ..registry import register
from ..types import NONE, Batch, Budget, Proposal, Request, Scores, Verdict
from . import _joint
from ._alike import Alike
from ._beats import HOPED, TOLL, Beats
from ._ledger import Entry, Ledger
from ._members import FIRST, PACED, Cold, Hand, Member, members
from ._panel import Panel, brief

_EXPLORE = 64
"""Rounds after which members are asked once, to measure them anew, as far as time allows (see `Member.look`)."""
_STANDS = 4
"""Rounds launched ahead for which it stands that there is nothing to look up."""
_CROWD = 2
"""Requests at most for whom it is looked what lookups see coming; for more the model alone is asked, in rounds launched ahead,
since looking takes the host longer than the device takes for a pass."""
_WATCHED = 4
"""Requests of such a crowd of which it is told what became of their guesses: they are asked alike."""
_WELL = 0.5
"""Tokens that a model's guess must bring as a rule to be all that such a crowd is given."""
_DEEPER = 16
"""Rounds after which a guess may go one level deeper than seems to pay: what is never tried is never known better."""
_ROW = 0.15
"""Tokens that each row of a lesser guess must be expected to bring to be verified beside the better one."""


@register("hybrid")
class Hybrid(Panel):
    """A cascade of drafters, or their guesses in one tree."""

    paced: bool

    @dataclass(frozen=True, slots=True)
    class Config:
        """`members`: drafters from the cheapest to the dearest, as NAME+NAME(key=value;key=value), by default suffix and the best
        one that was trained for the model, if any was; `merge`: ask all and merge their guesses into one tree, instead of one
        after the other; `whole`: without one of its members it shall not start."""

        members: str = "suffix+ngram"
        merge: bool = False
        whole: bool = False

    def __init__(self, config: Config) -> None:
        self._join([registry.parse(spec) for spec in members(config.members)], config.merge, config.whole)

    @classmethod
    def composed(cls, config: Config, find: registry.Finder) -> Hybrid:
        """A hybrid whose members have from `find` what their specs leave out."""
        drafters = [registry.parse(spec, find(spec), find) for spec in members(config.members)]
        made = cls.__new__(cls)
        made._join(drafters, config.merge, config.whole)
        return made

    @classmethod
    def within(cls, values: Mapping[str, str]) -> list[str]:
        """The members' specs, as options give them."""
        return members(values.get("members", cls.Config().members))

    @classmethod
    def of(cls, drafters: Sequence[Drafter], merge: bool = False) -> Hybrid:
        """A hybrid of drafters that were made already."""
        made = cls.__new__(cls)
        made._join(drafters, merge)
        return made

    def _join(self, drafters: Sequence[Drafter], merge: bool, whole: bool = False) -> None:
        owners = [d.name for d in drafters if d.needs.kv is not None]
        if len(owners) > 1:
            raise BadInput(f"hybrid: {' and '.join(owners)} each want KV memory in the target's pool, which serves one; drop one")
        self.members = [Member(drafter, i) for i, drafter in enumerate(drafters)]
        self.merge, self.whole, self.paced = merge, whole, not merge
        self.depth, self.nodes = max(d.depth for d in drafters), sum(d.nodes for d in drafters)
        features = dict.fromkeys(f for d in drafters for f in d.needs.features)
        kv = next((d.needs.kv for d in drafters if d.needs.kv is not None), None)
        self.needs = Needs(tuple(features), any(d.needs.logits for d in drafters), kv, any(d.needs.target for d in drafters))
        self.needs = replace(self.needs, gaps=not any(d.needs.every for d in drafters))
        self._beats = Beats()
        self._clear()

    def _clear(self) -> None:
        """As before the first request."""
        self._parts, self._maps, self._empty = dict[int, Proposal](), dict[int, Tensor](), dict[int, Proposal]()
        self._best: list[int] = []  # by request: whose guess went alone
        self._solo, self._ledger = NONE, Ledger()  # the member whose guesses were all there was
        self._cold, self._tells = Cold((), False, 0), (0, False)  # whether all of so many members tell beforehand what they guess
        self._told: list[set[int]] = []  # by request: members whose guess is in the proposal, or who had none
        self._rounds, self._look, self._alike, self._light = 0, 0, Alike(), None
        self._beats.pause()

    def renew(self) -> bool:
        """If all members can, it can. What they take on this machine is no text, nor is how often their guesses came true."""
        renewed = [m.reason is None and m.drafter.renew() for m in self.members]  # each of them, whatever the others can
        if not all(renewed):
            return False
        self._clear()
        for member in self.members:
            member.forget()
        return True

    def follows(self, requests: Sequence[Request], guessing: bool = True) -> bool:
        """While there are no guesses, all members may be able to go on; and with the one member that needs nothing of the host,
        while what lookups see coming promises less, or where there are too many requests to look and it does well."""
        alive = [m for m in self.members if m.reason is None]
        notes = all(m.drafter.follows(requests, False) for m in alive)
        if not guessing or not notes:
            return notes
        self._counted(len(requests) > _CROWD)
        models = [m for m in alive if not m.lookup]
        if self.merge or len(models) != 1 or not models[0].drafter.follows(requests, True):
            return False
        if len(requests) > _CROWD:
            return self._crowded(requests)
        texts = tuple((r.id, len(r.tokens)) for r in requests)
        if texts != self._cold.texts and not (self._rounds < self._cold.until and self._cold.by == tuple(r.id for r in requests)):
            longer = HOPED if any(r.classical for r in requests) else self._beats.ratio + self._cold.is_so * TOLL
            least, lookups = longer * (1 + models[0].usual()) - 1, [m for m in alive if m.lookup]
            most = max((self._promise(m, r) for m in lookups for r in requests), default=0.0)
            until = self._rounds + (_STANDS if most < least / 4 else 0)
            self._cold = Cold(texts, most < least, until)
        return self._cold.is_so

    def _crowded(self, requests: Sequence[Request]) -> bool:
        """Whether so many are given a model's guesses alone, since it does well. Under the classical rules texts decide."""
        models = [m for m in self.members if m.reason is None and not m.lookup]
        many = len(requests) > _CROWD and len(models) == 1 and not any(r.classical for r in requests)
        return many and models[0].usual() >= _WELL

    def preview(self, request: Request, most: int) -> list[int] | None:
        """See `protocols.Drafter`: the first member's that sees anything, where all can tell."""
        alive = [m for m in self.members if m.reason is None]
        if self._tells[0] != len(alive):
            able = not self.merge and all(m.lookup and self._preview(m, request, 1) is not None for m in alive)
            self._tells = len(alive), able
        if not self._tells[1]:
            return None
        return next((found for m in alive if (found := self._preview(m, request, most))), [])

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        """Raises `RuntimeError` when no member is left: the hybrid is then switched off as a whole."""
        if not any(m.reason is None for m in self.members):
            raise RuntimeError("none of its members is left: " + "; ".join(m.reason or "" for m in self.members))
        self._rounds, self._device, self._light = self._rounds + 1, 0.0, None
        self._few, self._solo = len(batch), NONE
        self._counted(len(batch) > _CROWD)
        if self._rounds % _DEEPER and (again := self._go_on(batch, budget)) is not None:
            return again
        self._beats.begin(time.perf_counter(), batch.blind, len(batch))
        self._settle(batch)
        whole = (self._merged if self.merge else self._cascade)(batch, budget)
        self._beats.made(time.perf_counter(), len(batch), sum(batch.pending) + sum(whole.widths), self._device)
        like = None if self._solo == NONE else self._like(batch, budget, self.members[self._solo])
        self._alike.note(like, tried=self._rounds % _DEEPER == 0)
        return whole

    def _cascade(self, batch: Batch, budget: Budget) -> Proposal:
        named = any(r.classical or r.params.depth is not None for r in batch.requests)
        crowd = self._crowded(batch.requests)
        if crowd and not named:
            return self._shared(batch, budget)
        best, value, spent = [NONE] * len(batch), [0.0] * len(batch), 0.0
        self._parts, none, told = {}, [0] * len(batch), [set[int]() for _ in batch.requests]
        unseen = batch.blind or crowd  # what there is to look up is not known, or not looked at
        begun = not named and self._begins(batch)
        for member in sorted(self.members, key=lambda m: m.lookup) if begun else self.members:
            if member.reason is not None or (member.lookup and (unseen or (begun and any(c != NONE for c in best)))):
                continue
            hands = [
                Hand(v, 0 if c == NONE else self._parts[c].widths[b], spent)
                for b, (c, v) in enumerate(zip(best, value, strict=True))
            ]
            self._look = member.look(time.perf_counter(), max(budget.depth)) if self._rounds % _EXPLORE == 0 else 0
            levels = [self._levels(member, batch, budget, b, hand) for b, hand in enumerate(hands)]
            if named:
                member.trees.whole()
            asked = [n > 0 for n in levels]
            if not any(asked):
                continue
            part, seconds = self._ask(member, batch, member.budget(levels, budget, none))
            spent += seconds
            if part is None:
                continue
            for b, request in enumerate(batch.requests):
                worth = member.worth(request) if part.widths[b] else -1.0
                if worth >= 0 and (best[b] == NONE or worth > value[b]):
                    best[b], value[b] = member.index, worth
                if asked[b] and worth < 0:
                    told[b].add(member.index)
        beside = [self._beside(batch, budget, b, best[b]) for b in range(len(batch))]
        self._told = [t | {c} | more for t, c, more in zip(told, best, beside, strict=True)]
        if not self._parts:
            return Proposal.empty(len(batch), self._start.device)
        if any(beside):
            self._gather()
            return self._joined([{c} | more for c, more in zip(best, beside, strict=True)], best)
        self._best, used = best, {c for c in best if c != NONE}
        if len(used) == 1:
            [self._solo] = used
            alone = self._parts[self._solo]
            if all(c != NONE or not w for c, w in zip(best, alone.widths, strict=True)):
                return alone
            self._solo = NONE
        self._gather()
        whole, self._maps = _joint.select(self._parts, best)
        return whole

    def _beside(self, batch: Batch, budget: Budget, b: int, best: int) -> set[int]:
        """Members whose guesses for request b are worth their rows beside those of the `best`. None where a classical rule is in
        the batch, since merged guesses are no draws; nor where guesses lie on a device: looking at them takes longer than they
        are worth."""
        found = set[int]()
        if best == NONE or any(r.classical for r in batch.requests) or any(p.unseen for p in self._parts.values()):
            return found
        room = budget.nodes[b] - self._parts[best].widths[b]
        for i, part in self._parts.items():
            width = part.widths[b]
            if i != best and 0 < width <= room and self.members[i].worth(batch.requests[b]) >= _ROW * width:
                found.add(i)
                room -= width
        return found

    def _joined(self, chosen: Sequence[set[int]], best: Sequence[int]) -> Proposal:
        """One proposal in which request b has the guesses of all members in `chosen[b]`. Those of an owner of KV, which is moved
        along the accepted path, keep their columns; else the first member comes first."""
        order = sorted(self._parts, key=lambda i: (self.members[i].drafter.needs.kv is None, -best.count(i), i))
        parts = [_joint.only(self._parts[i], [i in c for c in chosen]) for i in order]
        whole, maps = tree.merge(parts)
        self._maps = dict(zip(order, maps, strict=True))
        return whole

    def _merged(self, batch: Batch, budget: Budget) -> Proposal:
        self._parts, used, asked = {}, [0] * len(batch), [n > 0 for n in budget.nodes]
        for member in sorted(self.members, key=lambda m: m.drafter.needs.kv is None):  # whose KV is moved keeps its columns
            if member.reason is None:
                levels = [min(d, member.wish(r)) for d, r in zip(budget.depth, batch.requests, strict=True)]
                part, _ = self._ask(member, batch, member.budget(levels, budget, used))
                used = [u + w for u, w in zip(used, part.widths if part is not None else [0] * len(used), strict=True)]
        if not self._parts:
            return Proposal.empty(len(batch), self._start.device)
        self._gather()
        self._told = [set(self._parts) if a else set() for a in asked]
        if sum(p.columns > 0 for p in self._parts.values()) > 1:
            self._parts = {i: replace(p, q=None, resume=None) for i, p in self._parts.items()}
        whole, maps = tree.merge(list(self._parts.values()))
        self._maps = dict(zip(self._parts, maps, strict=True))
        return whole

    def _levels(self, member: Member, batch: Batch, budget: Budget, b: int, hand: Hand) -> int:
        """How many levels a member is to guess for request b; 0 where that is not expected to bring more tokens per second than
        the guess at hand, or than none. Where there is none and the request names a depth, that."""
        request = batch.requests[b]
        most = min(budget.depth[b], member.wish(request)) if budget.nodes[b] else 0
        if not most:
            return 0
        if request.classical:
            return most if not hand.width or member.outlook(request) > hand.value else 0
        if not hand.width and (not member.index or request.params.depth is not None):
            return most
        if not member.pace.seconds and request.params.depth is None:
            return min(most, FIRST)
        until, usual = member.stands.get(request.id, (0, 0))
        deeper = self._rounds % _DEEPER == 0
        if batch.blind and self._rounds < until and usual <= most and not hand.width:
            return min(most, usual + deeper)
        passes, spent = self._passes(batch, budget), hand.spent + (0.0 if batch.blind else member.launch)
        now = (1 + hand.value) / max(1e-9, hand.spent + passes[hand.width])
        few = min(most, self._look if member.pace.sure else FIRST)  # one time may have been a stall
        if hand.width and self._beats.timed and (1 + most) / (spent + passes[0]) <= now:
            return few  # not even if all were right
        levels, speed = member.best(request, most, passes, spent)
        if speed <= now and self._beats.timed:
            return few
        if not hand.width:
            member.stands[request.id] = self._rounds + PACED, levels
        return most if request.params.depth is not None else min(most, levels + deeper)

    def _shared(self, batch: Batch, budget: Budget) -> Proposal:
        """For a crowd a model's guesses alone: as many levels for everybody, which stands for some rounds; for a large one chains
        as long as was asked for."""
        member = next(m for m in self.members if m.reason is None and not m.lookup)
        if len(batch) > CROWD:
            most, member.trees.now, member.shared = member.drafter.depth, member.trees.widths[0], (0, 0, 0)
        else:
            levels = member.together(self._rounds, len(batch), max(budget.depth), lambda: self._passes(batch, budget))
            most = min(member.drafter.depth, levels + (self._rounds % _DEEPER == 0))
        asked = [min(d, most) if n else 0 for d, n in zip(budget.depth, budget.nodes, strict=True)]
        self._parts, self._few = {}, _WATCHED
        part, _ = self._ask(member, batch, member.budget(asked, budget, [0] * len(batch)))
        if part is None:
            return Proposal.empty(len(batch), self._start.device)
        self._best = [member.index if width else NONE for width in part.widths]
        self._solo, self._told = member.index, [{member.index}] * len(batch)
        return part

    def _passes(self, batch: Batch, budget: Budget) -> Floats:
        """Seconds of a pass by the rows of guesses of each request; nothing before one was timed."""
        count, pending, most = len(batch), sum(batch.pending), max(self.nodes, *budget.nodes) + 1  # nodes are rounded up
        return self._beats.passes(self._rounds, batch.blind, count, pending + count * most)[pending:][::count]

    def observe(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        """Every member sees the round in its own columns, also the rounds in which it was not asked."""
        if self._light is not None and proposal.columns:
            self._gone_on(batch, self._light, proposal, verdict, scores)
            return
        if not proposal.columns:
            self._idle(batch, verdict, scores)
            return
        if self._solo != NONE:
            self._alone(batch, verdict, scores)
            return
        self._ledger.note(batch.requests, [Entry()] * len(batch), batch.blind)
        parts, maps = self._parts, self._maps
        self._parts, self._maps = {}, {}
        for member in self.members:
            if member.reason is not None:
                continue
            part = parts.get(member.index)
            if part is None:
                part = Proposal.empty(len(batch), proposal.tokens.device)
                renamed = part.tokens
            else:
                renamed = maps[member.index]
            back = _joint.inverse(renamed, proposal.columns)
            seen = _joint.verdict_for(part, back, verdict)
            self._count(member, batch, seen, bool(parts))
            if type(member.drafter).observe is Drafter.observe:
                continue
            needs = member.drafter.needs
            shown = needs.features or needs.logits or part.columns
            told = _joint.scores_for(renamed, back, seen, verdict, scores) if shown else scores
            self._show(member, batch, part, seen, told)

    def _idle(self, batch: Batch, verdict: Verdict, scores: Scores) -> None:
        """A round without guesses: nothing is to be told apart, and nothing has to be read."""
        self._parts, self._maps, nothing = {}, {}, self._nothing(len(batch))
        self._beats.pause()
        self._alike.forget()
        self._settle(batch)
        self._ledger.pause(batch.requests)
        for member in (m for m in self.members if m.reason is None):
            member.pauses += 1
            if type(member.drafter).observe is not Drafter.observe:
                self._show(member, batch, nothing, verdict, scores)

    def _alone(self, batch: Batch, verdict: Verdict, scores: Scores) -> None:
        """A round in which one member's guesses were all there was. Its columns are the whole's, of the others nothing was
        accepted. Whoever reads states and cannot do without the host is shown its own."""
        solo, none, told = self.members[self._solo], self._nothing(len(batch)), batch.requests[: self._few]
        whole = solo.made(self._parts[self._solo])
        self._ledger.note(told, [self._entry(b, r) for b, r in enumerate(told)], batch.blind)
        self._ledger.skip(batch.requests[self._few :])
        seen = brief(batch, solo, whole, verdict)
        for member in (m for m in self.members if m.reason is None and type(m.drafter).observe is not Drafter.observe):
            needs = member.drafter.needs
            if member is solo:
                self._show(member, batch, whole, seen if needs.features else verdict, scores)
                continue
            nothing = replace(seen, path=verdict.path[:, :0], accepted=torch.zeros_like(verdict.accepted))
            shown, follows = scores, scores.answer is not None and member.drafter.follows(batch.requests, False)
            if (needs.features or needs.logits) and not follows:
                back = _joint.inverse(none.tokens, whole.columns)
                shown = _joint.scores_for(none.tokens, back, nothing, verdict, scores)
            self._show(member, batch, none, nothing, shown)
        self._parts = {}
