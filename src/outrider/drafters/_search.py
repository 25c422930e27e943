"""Better sets of left-out blocks, looked for while texts are written (Xia et al. 2025, "SWIFT", arXiv 2410.06916).

A set is worth what share of the last written tokens it would have guessed, each after the true ones: one pass of the target over
them. Candidates leave out as many blocks as the set in use, so they cost the same. Most exchange a few blocks that seem to do
harm for some that seem not to (Thompson sampling over each block's record), some are drawn at random.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from ..protocols import TargetView
from ..types import Part, Request

Skipped = tuple[frozenset[int], frozenset[int]]
"""Layers whose attention, and layers whose MLP is left out."""

SHARE = 0.05
"""Of the time spent writing, what the search may take."""
_GOOD = 0.97
_TRIES, _PATIENCE = 400, 60
"""Candidates in all, and in a row without a better one, after which the search ends."""
_RANDOM = 4
"""One candidate in so many is drawn at random."""
_SPREAD = 0.1
"""What a block whose record is empty may be worth, give or take."""
_IDLE = 1.0
"""Seconds between two rounds, beyond which nobody was writing."""


def parts(skipped: Skipped, layers: int) -> tuple[Part, ...]:
    """What runs of a decoder when `skipped` does not."""
    attention, mlp = skipped
    return tuple(Part(i, i not in attention, i not in mlp) for i in range(layers))


class Search:
    """Candidates and what became of them. The first and the last layer are left alone unless the first set leaves them out."""

    def __init__(self, first: Skipped, layers: int, seed: int = 0) -> None:
        self.best, self.tries, self.since, self.score = first, 0, 0, 0.0
        self._random = np.random.default_rng(seed)
        self._blocks = [sorted(half | set(range(1, layers - 1))) for half in first]
        self._record = np.zeros((2, 2, layers))  # per half: sums of gains, and how many

    @property
    def done(self) -> bool:
        """Whether more tries are not worth their time."""
        return self.score >= _GOOD or self.since >= _PATIENCE or self.tries >= _TRIES or not any(map(self._swaps, (0, 1)))

    def candidate(self) -> Skipped:
        """Another set, with as many blocks of each half as the best one."""
        if self.tries % _RANDOM == _RANDOM - 1:
            drawn = [self._random.permutation(b)[: len(s)] for b, s in zip(self._blocks, self.best, strict=True)]
            return frozenset(map(int, drawn[0])), frozenset(map(int, drawn[1]))
        halves = [half for half in (0, 1) if self._swaps(half)]
        half = int(self._random.choice(halves))
        count = int(self._random.integers(1, min(3, self._swaps(half)) + 1))
        sums, times = self._record[half]
        value = self._random.normal(sums / np.maximum(times, 1), _SPREAD / np.sqrt(times + 1))
        inside = sorted(self.best[half], key=lambda i: value[i])
        outside = sorted(set(self._blocks[half]) - self.best[half], key=lambda i: -value[i])
        changed = self.best[half] - set(inside[:count]) | set(outside[:count])
        return (changed, self.best[1]) if half == 0 else (self.best[0], changed)

    def tell(self, candidate: Skipped, score: float, best: float) -> bool:
        """What the candidate and the best set are worth on the same tokens. True if the candidate is the best from now on."""
        self.tries += 1
        for half in (0, 1):
            for blocks, gain in (
                (candidate[half] - self.best[half], score - best),
                (self.best[half] - candidate[half], best - score),
            ):
                for i in blocks:
                    self._record[half, :, i] += gain, 1
        better = score > best
        self.score = max(score, best)
        self.since = 0 if better else self.since + 1
        if better:
            self.best = candidate
        return better

    def _swaps(self, half: int) -> int:
        """How many blocks could be exchanged."""
        return min(len(self.best[half]), len(self._blocks[half]) - len(self.best[half]))


class Doses:
    """Runs a search in doses of one candidate, so that it takes no more than `SHARE` of the time in which texts are written."""

    def __init__(self, search: Search, view: TargetView, window: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.search, self._view, self._window, self._clock = search, view, window, clock
        self.writing = self.spent = self._dose = 0.0
        self._last: float | None = None

    def due(self, request: Request) -> bool:
        """Whether a dose may be taken now, on what this request wrote. Asked once a round: it tells the time by it."""
        now = self._clock()
        self.writing += 0.0 if self._last is None else min(now - self._last, _IDLE)
        self._last = now
        written = len(request.tokens) - request.prompt_len
        return written >= self._window and self.spent + self._dose <= SHARE * self.writing and not self.search.done

    def take(self, request: Request) -> bool:
        """Try one candidate. True if there is a better set than before."""
        started = self._clock()
        candidate = self.search.candidate()
        scores = [self._score(request, skipped) for skipped in (self.search.best, candidate)]
        self._last = self._clock()
        self._dose = self._last - started
        self.spent += self._dose
        return scores[0] is not None and scores[1] is not None and self.search.tell(candidate, scores[1], scores[0])

    def _score(self, request: Request, skipped: Skipped) -> float | None:
        """The share of the last tokens that would have been guessed greedily; None where memory is short."""
        logits = self._view.recall(request, parts(skipped, self._view.num_layers), self._window + 1)
        if logits is None:
            return None
        wanted = torch.tensor(request.tokens[-self._window :], device=logits.device)
        return float((logits[:-1].argmax(1) == wanted).float().mean())
