"""Drafters whose guesses are as good or bad as wanted, because they were told the plain answers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from ..protocols import Drafter, Start
from ..types import ROOT, Batch, Budget, Proposal, Request

Answers = Mapping[tuple[int, ...], Sequence[int]]
"""Plain answers by prompt, as token ids."""


class Replay(Drafter):
    """Knows the plain answers (by prompt) and offers them, spoiling a guess now and then: guesses as good or bad as wanted."""

    name = "replay"

    def __init__(self, answers: Answers, depth: int = 4, spoil: float = 0.0, seed: int = 0) -> None:
        self.answers, self.depth, self.nodes, self.spoil = answers, depth, depth, spoil
        self.rng = random.Random(seed)

    def start(self, start: Start) -> None:
        self.vocab = start.vocab_size

    def guess(self, request: Request, depth: int) -> list[int]:
        answer = self.answers[tuple(request.tokens[: request.prompt_len])]
        done = len(request.tokens) - request.prompt_len
        future = list(answer[done : done + depth])
        future += [self.rng.randrange(self.vocab) for _ in range(depth - len(future))]
        return [self.rng.randrange(self.vocab) if self.rng.random() < self.spoil else t for t in future]

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        return Proposal.chains([self.guess(r, budget.depth[b]) for b, r in enumerate(batch.requests)])


class Bushy(Replay):
    """The right continuation hidden in a random tree of wrong ones, at random columns."""

    name = "bushy"

    def __init__(self, answers: Answers, depth: int = 4, nodes: int = 12, seed: int = 0) -> None:
        super().__init__(answers, depth, 0.1, seed)
        self.nodes = nodes

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        return Proposal.trees([self.grow(r, budget.depth[b], budget.nodes[b]) for b, r in enumerate(batch.requests)])

    def grow(self, request: Request, depth: int, nodes: int) -> list[tuple[int, int]]:
        if not nodes:
            return []
        good = self.guess(request, depth)
        grown: list[tuple[int, int]] = []
        at, level = ROOT, 0
        while len(grown) < nodes:
            if level < depth and (self.rng.random() < 0.5 or nodes - len(grown) <= depth - level):
                fresh = (good[level], at)
            else:
                fresh = (self.rng.randrange(self.vocab), self.rng.randrange(-1, len(grown)))
            same = grown.index(fresh) if fresh in grown else None
            if same is None:
                grown.append(fresh)
                same = len(grown) - 1
            if level < depth and fresh == (good[level], at):
                at, level = same, level + 1
        return grown


class Ragged(Replay):
    """A chain of another length for every request, so that a batch's table of guesses has unused columns."""

    name = "ragged"

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        depths = [min(budget.depth[b], 1 + (r.id + len(r.tokens)) % self.depth) for b, r in enumerate(batch.requests)]
        return Proposal.chains([self.guess(r, d) for r, d in zip(batch.requests, depths, strict=True)])


class RaggedTrees(Bushy):
    """A tree of another size for every request."""

    name = "ragged-trees"

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        sizes = [min(budget.nodes[b], 1 + (r.id + len(r.tokens)) % self.nodes) for b, r in enumerate(batch.requests)]
        grown = zip(batch.requests, budget.depth, sizes, strict=True)
        return Proposal.trees([self.grow(r, min(depth, size), size) for r, depth, size in grown])
