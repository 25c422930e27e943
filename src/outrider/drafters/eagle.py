"""EAGLE, versions 1, 2, 3 and 3.1 (Li et al. 2024, 2025): one decoder layer that reads the target's own states guesses level by
level.

Which version it is, its checkpoint says. Draft KV of known tokens always comes from the target's true states, which every round
shows; KV of guesses lives for one round, beside the pool. So before guessing the drafter reads what was accepted since, however
many rounds ago, and nothing else has to be repaired: not full acceptance, not idle rounds, not preemption. Its KV lies in the
target's pool, at the position of the state it was made from (a token is paired with the state one token before it).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import BadInput, DrafterMismatch, OutriderWarning
from ..models import checkpoint as files
from ..models import eagle_files, eagle_fused
from ..models.climbs import FEW, Asked, Climbs
from ..models.eagle_net import attend
from ..models.hf import resolved
from ..models.products import pack
from ..models.replay import Replays
from ..models.rounds import COLUMNS
from ..protocols import Drafter, KVNeed, Needs, PoolView, Start, Teacher
from ..registry import register
from ..types import Batch, Budget, Proposal, Request, Scores, Verdict
from ._again import Again
from ._climb import Climber, Ground, Limits
from ._eagle import EaglePupil, EagleTraining
from ._grown import Part, joined
from ._known import KnownKV
from ._lags import BESIDE, Lags
from ._past import Chunk, Past, in_order, missing

_FEW = 48
"""Unread tokens up to which all requests are read in one pass."""
_CHUNK = 512
"""Tokens of a request read in one pass where there are more."""


@register("eagle")
class Eagle(Drafter):
    """One layer over the target's states, guessing a tree level by level."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`path`: directory of the drafter, or hub id. `depth`: levels guessed; `width`: nodes fed per level, and children looked
        at under each (1: a chain); `nodes`: guesses kept, the likeliest ones."""

        path: str
        depth: int = 5
        width: int = 4
        nodes: int = 15

    Training = EagleTraining

    @classmethod
    def pupil(cls, teacher: Teacher, options: Mapping[str, Any]) -> EaglePupil:
        """A drafter to be trained; see `protocols.Pupil`."""
        return EaglePupil(teacher, EagleTraining(**options))

    def __init__(self, config: Config) -> None:
        for name in ("depth", "width", "nodes"):
            if getattr(config, name) < 1:
                raise BadInput(f"eagle needs {name} >= 1, got {getattr(config, name)}")
        self.path = files.folder("eagle", config.path)
        self.config, self.found = config, eagle_files.describe(self.path, files.config_of(self.path))
        self.depth = config.depth
        self.nodes = config.depth if config.width == 1 else max(config.nodes, config.depth)
        plan = self.found.plan
        self.needs = Needs((self.found.feature,), kv=KVNeed(1, plan.pairs, plan.dim), target=True, gaps=True)
        self._pasts: dict[int, Past] = {}
        self._lags: Lags | None = None
        self._alone, self._again = True, Again(None)
        self._hopes: dict[int, Tensor | None] = {}
        self.climbs: Climbs | None = None

    def memory(self, dtype: torch.dtype) -> tuple[int, int]:
        """The layer's weights. What it borrows is the target's."""
        return files.numbers(self.path) * dtype.itemsize, 0

    def start(self, start: Start) -> None:
        """Load the network. Raises `DrafterMismatch` if it is for another target."""
        if start.view is None or start.pool is None:
            raise DrafterMismatch("eagle needs a view of the target and KV memory in its pool; start it through an engine")
        made = files.read(self.path)
        files.same_target(made, start.fingerprint, start.name)
        layers, there = made.own.get("layers"), start.view.num_layers
        if isinstance(layers, int) and layers != there:
            raise DrafterMismatch(f"{self.path.name} was trained for a target of {layers} layers, {start.name} has {there}")
        self.feature = resolved(self.found.feature, start.view.num_layers)
        rows = eagle_files.Rows(*start.view.rows())
        self.net, ids = eagle_files.build(made, rows, start.dtype, start.name)
        self.pool: PoolView = start.pool
        self.sampler, self.device, self._alone = start.sampler, start.device, start.alone
        width = min(self.config.width, self.found.plan.vocab)
        stage, self.climbs, self._lags = start.view.stage, None, None
        if stage is not None and eagle_fused.supports(self.net) and self._kind is start.dtype:
            fused = eagle_fused.FusedEagle(self.net, (self.pool.keys(0), self.pool.values(0)), self.feature)
            self.climbs = Climbs(fused, Replays(stage, self.name), start.usable, ids, width)
            self._bound(self.climbs.deepest(self.nodes, chain=self.nodes <= self.depth))
            if self.climbs.most >= 2 * (self.depth + 1):
                self._lags = Lags(self.climbs, 1 + (self.depth if self._alone else max(self.depth, BESIDE)))
        else:
            pack(self.net)
        self._kv, self._again = KnownKV(self.net, self.pool, self.climbs), Again(self.climbs)
        self.climber, self.chain = (Climber(self.net, start.sampler, start.vocab_size, ids, k) for k in (width, 1))

    def _bound(self, most: int) -> None:
        """No more levels than a replay has room for."""
        if self.depth > most:
            why = f"eagle looks {most} levels ahead here, not {self.depth}: its nodes need room on a GPU; nodes=... gives it more"
            warnings.warn(why, OutriderWarning, stacklevel=2)
            self.depth = most

    def renew(self) -> bool:
        """What it keeps belongs to requests. Where graphs could not be had, a new one may have them."""
        return self.climbs is None or not self.climbs.replays.off

    def follows(self, requests: Sequence[Request], guessing: bool = True) -> bool:
        """Whether the ring has the states of all of them. Wide guesses are for rounds that are not captured."""
        captured = self.nodes <= COLUMNS[-1] or not guessing
        if self._lags is None or self.climbs is None or self.climbs.replays.off:
            return False
        return captured and self._lags.has(requests)

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        """Read what is new, then one pass of the layer per level. A request whose states are not known gets no guesses."""
        if (again := self._again.repeat(batch, budget)) is not None:
            return again
        self._hopes = {}
        able = [b for b, r in enumerate(batch.requests) if batch.ready[b] and budget.nodes[b] and budget.depth[b]]
        able = [b for b in able if self._follows(batch.requests[b]) or self._known(batch.requests[b])]
        parts = []
        replayed = self._replayed(batch, budget, able)
        if replayed is not None:
            parts, able = [replayed], [b for b in able if b not in replayed.members]
        able = [b for b in able if not self._follows(batch.requests[b])]
        for drawn in (False, True):
            members = [b for b in able if batch.requests[b].sampled == drawn]
            if members:
                parts.append(self._part(batch, budget, members, drawn))
        proposal = self.sampler.attach(batch, joined(parts, len(batch), self.device))
        whole = replayed is not None and len(replayed.members) == len(batch) and all(map(self._follows, batch.requests))
        return self._again.note(batch, budget, proposal, whole)

    def expected(self, request: Request) -> float | None:
        """Tokens of the last guess for `request` that the network expects to be accepted; None where it cannot say."""
        hope = self._hopes.get(request.id)
        return None if hope is None else float(hope)

    @torch.inference_mode()
    def _part(self, batch: Batch, budget: Budget, members: list[int], drawn: bool) -> Part:
        """Guesses for requests that are all drawn for, or all not."""
        limits = Limits(tuple(budget.depth[b] for b in members), tuple(budget.nodes[b] for b in members))
        linear = all(n <= d for d, n in zip(limits.depths, limits.nodes, strict=True))  # fed one node a level, not k
        climber = self.chain if linear and not drawn else self.climber
        ground = self._read([batch.requests[b] for b in members], climber.fed(max(limits.depths)))
        width, chain = climber.width, climber.width == 1
        tokens, parents, sizes = (climber.strands if self.climber.width == 1 or drawn else climber.branching)(ground, limits)
        hope = climber.hope
        self._hopes |= {batch.requests[b].id: None if hope is None else hope[c] for c, b in enumerate(members)}
        most = [width * d if chain or drawn else width + (d - 1) * width**2 for d in limits.depths]
        widths = tuple(min(n, m) for n, m in zip(limits.nodes, most, strict=True))
        return Part(tuple(members), tokens, parents, sizes, widths, chain)

    @torch.inference_mode()
    def _replayed(self, batch: Batch, budget: Budget, able: list[int]) -> Part | None:
        """Guesses, as one replay, for those of the requests `able` whose past has no gap and whose blocks have the room."""
        climbs = self.climbs
        if climbs is None:
            return None
        members = [b for b in able if climbs.holds(batch.requests[b]) and not self._pasts[batch.requests[b].id].base]
        if len(batch) < 2 * len(members) < 2 * len(batch) and all(map(self._follows, batch.requests)):
            members = list(range(len(batch)))  # those without guesses, too, with no nodes: nothing has to be put in its place
        whole = len(members) == len(batch)  # then it is the same object, about which more is known
        requests = batch.requests if whole else tuple(batch.requests[b] for b in members)
        if not members or not climbs.room(requests):
            return None
        self._catch_up([(r, missing(r) - 1, climbs.reads(len(requests)) - 1) for r in requests if not self._follows(r)])
        self._kv.pay(requests)
        chain = climbs.width == 1 or all(budget.nodes[b] <= budget.depth[b] for b in members)
        asked = [self._asked(batch, b, budget, chain) for b in members]
        made = climbs.climb(requests, asked, chain)
        if made is None:
            return None
        for request in requests:
            self._pasts[request.id].read(missing(request))
        if self._lags is not None:
            self._lags.read(requests)
        return Part(tuple(members), *made, climbs.widths(asked, chain), chain)

    def _asked(self, batch: Batch, b: int, budget: Budget, chain: bool) -> Asked:
        """As one replay, no further ahead than what is fed has room, since more levels launch by launch take far longer, and what
        is in the ring cannot be read there."""
        assert self.climbs is not None
        request, nodes = batch.requests[b], budget.nodes[b]
        depth = min(budget.depth[b], self.climbs.deepest(batch.room[b], chain))
        if self._lags is not None and request in self._lags:
            length = 0 if batch.blind else len(request.tokens)
            return Asked(None, self._lags.unread(request, self._behind(batch, request)), depth, nodes, length)
        states = self._unread(request)
        return Asked(states, len(states), depth, nodes)

    def _behind(self, batch: Batch, request: Request) -> int | None:
        """How many states up to the last known token's the host thinks were not read; None where it does not know the text."""
        return None if batch.blind else missing(request) - self._pasts[request.id].computed

    def _follows(self, request: Request) -> bool:
        return self._lags is not None and request in self._lags

    def _unread(self, request: Request) -> Tensor:
        """States `[n, W]` of the last known tokens, row after row: of all that have no KV, at least one."""
        past, end = self._pasts[request.id], missing(request)
        states = past.rows(min(past.computed, end - 1), end)
        assert states is not None
        return states.contiguous()

    def _known(self, request: Request) -> bool:
        """Whether the states of all tokens since the request's base are there."""
        past, end = self._pasts.get(request.id), missing(request)
        return past is not None and end > past.base and past.rows(min(past.computed, end - 1), end) is not None

    def _read(self, requests: Sequence[Request], room: int) -> Ground:
        """Make KV of all that is known, and stand on it."""
        self._catch_up([(r, missing(r) - 1, _FEW) for r in requests])
        ends = [missing(r) for r in requests]
        pasts = [self._pasts[r.id] for r in requests]
        starts = [min(p.computed, end - 1) for p, end in zip(pasts, ends, strict=True)]
        states = [p.rows(s, e) for p, s, e in zip(pasts, starts, ends, strict=True)]
        ground = self._feed(requests, starts, [s for s in states if s is not None], room)
        for past, end in zip(pasts, ends, strict=True):
            past.read(end)
        return ground

    def _catch_up(self, due: Sequence[tuple[Request, int, int]]) -> None:
        """Of requests, positions and numbers: read states below the position until at most so many are unread, a chunk at a time,
        those of several requests together."""
        while due:
            due = [one for one in due if self._pasts[one[0].id].unread(one[1]) > one[2]]
            chunks = list[Chunk]()
            for request, end, _ in due:
                past = self._pasts[request.id]
                upto = min(past.computed + _CHUNK, end)
                states = past.rows(past.computed, upto)
                if states is None:
                    past.base = past.computed = min(end, past.end)
                else:
                    chunks.append((request, states, upto))
            there = {request.id for request, _, _ in chunks}
            due = [one for one in due if one[0].id in there]
            self._kv.make(chunks)
            for request, _, upto in chunks:
                self._pasts[request.id].read(upto)

    def _feed(self, requests: Sequence[Request], starts: list[int], states: list[Tensor], room: int) -> Ground:
        """Run the layer over known tokens: `states[c]` of positions from `starts[c]` on, right-aligned in one pass, with room for
        `room` guesses behind the KV."""
        net, device = self.net, self.device
        counts = [len(s) for s in states]
        most, ends = max(counts), [s + len(x) for s, x in zip(starts, states, strict=True)]
        known = [r.tokens[e - n + 1 : e + 1] for r, e, n in zip(requests, ends, counts, strict=True)]
        tokens = torch.tensor([[0] * (most - len(some)) + some for some in known])
        facts = torch.tensor([starts, ends, [self._pasts[r.id].base for r in requests]])
        tokens, (start, end, base) = tokens.to(device, non_blocking=True), facts.to(device, non_blocking=True)
        if min(counts) == most:
            features = torch.stack(states)
        else:
            features = torch.stack([torch.nn.functional.pad(s, (0, 0, most - len(s), 0)) for s in states])
        position = end[:, None] - most + torch.arange(most, device=device)
        real, size = position >= start[:, None], self.pool.block_size
        table = self.pool.table(requests)
        key_at = torch.arange(max(ends), device=device)
        slot = table[:, key_at // size] * size + key_at % size  # [C, S]; past a request's own blocks the scratch page
        x, residual = net.enter(net.fuse(features), tokens)
        query, key, value = net.project(x, position.clamp(min=0))
        write = slot.gather(1, position.clamp(min=0)).where(real, 0)
        self.pool.write(0, write.flatten(), key.flatten(0, 1).to(self._kind), value.flatten(0, 1).to(self._kind))
        keys, values = (self._gathered(pool, slot, room) for pool in (self.pool.keys(0), self.pool.values(0)))
        seen = (key_at >= base[:, None])[:, None] & (key_at <= position[:, :, None])
        seen = seen | (~real[:, :, None] & (key_at == 0))  # a row that only pads looks somewhere, at nobody's cost
        mixed = attend(query, keys[:, : len(key_at)], values[:, : len(key_at)], seen, net.scale)
        hidden = net.leave(residual, mixed)[:, -1:]
        return Ground(tuple(requests), hidden, keys, values, seen[:, -1], end + 1)

    @property
    def _kind(self) -> torch.dtype:
        return self.pool.keys(0).dtype

    def _gathered(self, pool: Tensor, slot: Tensor, room: int) -> Tensor:
        """`[C, S + room, KV, D]`: what lies in `slot [C, S]`, and zeros."""
        out = pool.new_zeros(slot.shape[0], slot.shape[1] + room, *pool.shape[1:])
        out[:, : slot.shape[1]] = pool[slot]
        return out

    @torch.inference_mode()
    def observe(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        """Note the states of all that was committed; those of a captured round are in the ring. A prompt's are read at once where
        samples of one prompt share the KV, and where there are many: then others may begin with it."""
        if self._again.passed(batch, proposal, scores.answer is not None) or self._passed(batch, proposal, verdict, scores):
            return
        rest = self._outside(batch, scores)
        if rest and batch.blind:  # where these stand is not known, and never will be
            for b in rest:
                self.release(batch.requests[b])
        elif rest:
            found = in_order(batch, verdict, scores, self.feature, self.climbs is not None)
            self._catch_up([self._note(batch.requests[b], found[b], len(batch) <= FEW) for b in rest])
        self._grow([b for b in range(len(batch)) if b not in rest], batch, proposal, verdict.tokens.shape[1] - 1)

    def _passed(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> bool:
        """Whether it was a plain round like the last, of which the ring has all that there is to note."""
        lags, climbs = self._lags, self.climbs
        if lags is None or climbs is None or climbs.replays.off or scores.answer is None:
            return False
        plain = not any(proposal.widths) and verdict.tokens.shape[1] == 1  # nor had another drafter any
        return batch.blind and plain and lags.passed(batch.requests)

    def _note(self, request: Request, states: Tensor, few: bool) -> tuple[Request, int, int]:
        """States of a request from `request.computed` on, as many as the round turns out to commit; what is to be read."""
        if request.id not in self._pasts or request.computed == request.taken:
            self._pasts[request.id] = self._begun(request)
        past = self._pasts[request.id]
        past.add(request.computed, states)
        end = request.computed + len(states)
        if request.computed < request.prompt_len:  # its end is read with the first captured round's
            follows = self._lags is not None and self.climbs is not None and self.climbs.holds(request) and request.room > 1
            waits = follows and few and end >= request.prompt_len and request.params.n == 1
            return request, min(end, missing(request)), _CHUNK if waits else 0
        return request, request.computed, _CHUNK

    def _outside(self, batch: Batch, scores: Scores) -> list[int]:
        """Those of a round whose states the host must note, because they are not in the ring."""
        lags, climbs = self._lags, self.climbs
        if lags is None or climbs is None:
            return list(range(len(batch)))
        if scores.answer is None or climbs.replays.off:
            self._leave([r for r in batch.requests if r in lags], lags, batch.blind)
            return list(range(len(batch)))
        new = [r for r in batch.requests if r not in lags and self._whole(r)]
        self._catch_up([(r, missing(r), 0 if r.params.n > 1 else _CHUNK) for r in new])
        self._kv.owe([(r, self._pasts[r.id], missing(r)) for r in new])
        lags.enter(new, [missing(r) for r in new])
        return [b for b, r in enumerate(batch.requests) if r not in lags]

    def _grow(self, followed: list[int], batch: Batch, proposal: Proposal, columns: int) -> None:
        """The ring holds more of these requests: as many states as a path is long, or as another drafter's guess may be, which
        has no more than so many columns."""
        if self._lags is not None and followed:
            whole = len(followed) == len(batch)
            requests = batch.requests if whole else tuple(batch.requests[b] for b in followed)
            deepest = [max(self.depth, r.params.depth or 0) for r in requests]
            more = [
                min(proposal.widths[b], d) if self._alone else min(BESIDE, columns)
                for b, d in zip(followed, deepest, strict=True)
            ]
            self._lags.grow(requests, [self._behind(batch, r) for r in requests], [1 + n for n in more])

    def _whole(self, request: Request) -> bool:
        """Whether all states up to the last known token's are known or have been read."""
        past = self._pasts.get(request.id)
        return past is not None and not past.base and past.end >= missing(request)

    def _leave(self, requests: list[Request], lags: Lags, blind: bool) -> None:
        """A round that was not captured. What the ring holds is read; where it cannot be, the past is lost."""
        standing = [r for r in requests if r.computed == missing(r) and not blind]
        self._kv.pay(standing)
        there = lags.leave(standing)
        for request in requests:
            lags.drop(request)
            self._kv.drop(request)
            past, whole = self._pasts[request.id], there and request in standing
            past.base, past.computed, past.pieces = 0 if whole else request.computed, request.computed, []

    def _begun(self, request: Request) -> Past:
        """A request that begins, maybe with KV that it took over: of earlier ones, all of it (see `shared`), or of its twin."""
        twin = self._pasts.get(request.twin.id) if request.twin is not None else None
        if request.computed > request.taken:
            return Past(request.computed, request.computed)
        return Past(0 if twin is None else min(twin.base, request.computed), request.computed)

    def shared(self, request: Request) -> int:
        """See `protocols.Sharing`. What is owed of one that has written for a while is made: it may never be given guesses."""
        past, again = self._pasts.get(request.id), self._again.read(request)
        if len(request.tokens) > request.prompt_len + 1:
            self._kv.pay_for(request)
        return self._kv.made(request, max(past.computed, again)) if past is not None and not past.base else 0

    def release(self, request: Request) -> None:
        """Forget a request."""
        self._pasts.pop(request.id, None)
        self._again.forget()
        self._kv.drop(request)
        if self._lags is not None:
            self._lags.drop(request)
