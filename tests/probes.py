"""Drafters that exercise the seams before any real method needs them. They check what they are given, and fail loudly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from outrider import tree
from outrider.bench.probes import Bushy, Replay
from outrider.protocols import Drafter, KVNeed, Needs, Start
from outrider.types import NONE, PROBE, Batch, Budget, PassOutput, Proposal, Request, Resume, Scores, Verdict

__all__ = ["Bushy", "Exiter", "Merger", "Owner", "Prober", "Reader", "Replay", "Sleeper"]


class Reader(Drafter):
    """Reads features of every row, the prompt's included, and drafts what followed the most similar earlier state."""

    name = "reader"
    depth = nodes = 3
    needs = Needs(features=("hidden:last", "hidden:0,2"), logits=True)

    def __init__(self) -> None:
        self.states: dict[int, dict[int, torch.Tensor]] = {}

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        out = []
        for b, request in enumerate(batch.requests):
            if not budget.depth[b]:
                out.append([])
                continue
            mine = self.states[request.id]
            have = [p for p in range(len(request.tokens) - 1) if p in mine]
            assert have == list(range(len(request.tokens) - 1)), "a state of some position is missing"
            if len(have) < 2:
                out.append([])
                continue
            now = mine[have[-1]]
            best = max(have[:-1], key=lambda p: float(torch.cosine_similarity(mine[p], now, dim=0)))
            out.append(request.tokens[best + 1 : best + 1 + budget.depth[b]])
        return Proposal.chains(out)

    def observe(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        rows, last, pair = scores.rows, scores.features["hidden:last"], scores.features["hidden:0,2"]
        assert last.shape[0] == pair.shape[0] == rows.position.shape[0] and pair.shape[1] == 2 * last.shape[1]
        assert scores.logits is not None and scores.logits.shape[0] == int((rows.slot >= 0).sum())
        paths = verdict.path.tolist()
        for row in range(rows.position.shape[0]):
            b, slot = int(rows.request[row]), int(rows.slot[row])
            if slot <= 0 or slot - 1 in paths[b]:
                self.states.setdefault(batch.requests[b].id, {})[int(rows.position[row])] = last[row]

    def release(self, request: Request) -> None:
        self.states.pop(request.id, None)


class Owner(Bushy):
    """Keeps KV of its own in the pool: every token, at its virtual index. Preemption, trees and moves must keep it right."""

    name = "owner"
    needs = Needs(kv=KVNeed(layers=2, heads=1, dim=2))

    def start(self, start: Start) -> None:
        super().start(start)
        assert start.pool is not None
        self.pool = start.pool
        self.checked = 0

    def _put(self, request: Request, first: int, tokens: Sequence[int]) -> None:
        if tokens:
            data = torch.tensor(tokens, dtype=torch.float64).view(-1, 1, 1).expand(-1, 1, 2)
            slots = self.pool.slots(request, first, first + len(tokens))
            for layer in range(2):
                self.pool.write(layer, slots, data + 1, -data - 1)

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        for b, request in enumerate(batch.requests):
            have = request.computed
            for layer in range(2):
                keys, values = self.pool.view(layer, request, have)
                want = torch.tensor(request.tokens[:have], dtype=torch.float64) + 1
                assert torch.equal(keys[:, 0, 0], want) and torch.equal(values[:, 0, 1], -want), "the pool lost tokens"
                self.checked += have
            self._put(request, have, request.tokens[have : have + batch.pending[b]])
        trees = [self.grow(r, budget.depth[b], budget.nodes[b]) for b, r in enumerate(batch.requests)]
        for b, request in enumerate(batch.requests):
            self._put(request, request.computed + batch.pending[b], [t for t, _ in trees[b]])
        return Proposal.trees(trees)

    def observe(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        for b, request in enumerate(batch.requests):
            if not proposal.widths[b]:
                self._put(request, request.computed, request.tokens[request.computed : request.computed + batch.pending[b]])


class Exiter(Drafter):
    """Runs the target's first layers, drafts from their exit, and lets verification resume there."""

    name = "exiter"
    needs = Needs(target=True)

    def __init__(self, layers: int = 2, depth: int = 3) -> None:
        self.layers, self.depth, self.nodes = layers, depth, depth

    def start(self, start: Start) -> None:
        assert start.view is not None
        self.view = start.view

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        chains: list[list[int]] = [[] for _ in batch.requests]
        parts: list[PassOutput] = []
        for level in range(max(budget.depth) + 1):
            out = self.view.run(batch, Proposal.chains(chains, self.view.device), range(self.layers), start=level, kv="shared")
            parts.append(out)
            if out.logits is None or out.slots is None:
                continue
            for b, token in zip(
                out.slots.request.tolist(), self.view.sampler.choose(out.logits, out.slots).tolist(), strict=True
            ):
                if len(chains[b]) == level < budget.depth[b]:
                    chains[b].append(token)
            if not any(len(c) == level + 1 for c in chains):
                break
        return replace(Proposal.chains(chains, self.view.device), resume=Resume(self.layers, tuple(parts)))


class Prober(Bushy):
    """Marks some nodes as probes: scored, but no guesses."""

    name = "prober"

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        made = super().propose(batch, budget)
        source = torch.where(torch.arange(made.columns) % 3 == 1, PROBE, made.source)
        return replace(made, source=source)


@dataclass
class Sleeper(Drafter):
    """Any drafter, awake only every so many rounds; it sees nothing of the rounds in between."""

    inner: Drafter
    every: int
    name: str = "sleeper"
    rounds: int = 0
    woken: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.depth, self.nodes, self.needs = self.inner.depth, self.inner.nodes, self.inner.needs

    def start(self, start: Start) -> None:
        self.inner.start(start)

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        self.rounds += 1
        if self.rounds % (self.every + 1):
            return Proposal.empty(len(batch))
        self.woken.append(self.rounds)
        return self.inner.propose(batch, budget)

    def observe(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        if proposal.columns:
            self.inner.observe(batch, proposal, verdict, scores)

    def release(self, request: Request) -> None:
        self.inner.release(request)


class Merger(Drafter):
    """Two drafters, one tree."""

    name = "merger"

    def __init__(self, one: Drafter, two: Drafter) -> None:
        self.both = (one, two)
        self.depth, self.nodes = max(one.depth, two.depth), one.nodes + two.nodes

    def start(self, start: Start) -> None:
        for drafter in self.both:
            drafter.start(start)

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        half = tuple(n // 2 for n in budget.nodes)
        budget = Budget(tuple(min(d, h) for d, h in zip(budget.depth, half, strict=True)), half)
        self.parts = [d.propose(batch, budget) for d in self.both]
        # Which law drew a merged node cannot be told: without q its guesses are judged as certain ones, which is exact, too.
        self.parts = [replace(p, source=torch.full_like(p.source, i), q=None) for i, p in enumerate(self.parts)]
        merged, self.maps = tree.merge(self.parts)
        return merged

    def observe(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        if not proposal.columns:
            return
        for drafter, part, back in zip(self.both, self.parts, self.maps, strict=True):
            old = torch.full((len(batch), proposal.columns + 1), NONE, dtype=torch.int64)
            own = torch.arange(part.columns).expand_as(back)
            old.scatter_(1, torch.where(back == NONE, proposal.columns, back), own)
            old[:, proposal.columns] = NONE
            path = old.gather(1, torch.where(verdict.path == NONE, proposal.columns, verdict.path))
            path = path.masked_fill((path == NONE).cumsum(1) > 0, NONE)[:, : part.columns]
            drafter.observe(batch, part, replace(verdict, path=path, accepted=(path != NONE).sum(1)), scores)

    def release(self, request: Request) -> None:
        for drafter in self.both:
            drafter.release(request)
