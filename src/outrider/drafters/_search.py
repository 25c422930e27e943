"""Better sets of left-out blocks, looked for while texts are written (Xia et al. 2025, "SWIFT", arXiv 2410.06916).

A set is tried on the last written tokens: one pass of the target tells what share of them it would have guessed, each after the
true ones. With what it leaves out, that gives the speed it promises. Candidates leave out a few blocks more or less than the best
set so far, most by what earlier ones gained (Thompson sampling), some at random.
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
_TRIES, _PATIENCE = 400, 60
"""Candidates in all, and in a row without a better one, after which the search ends."""
_RANDOM = 8
"""One candidate in so many flips blocks at random."""
_FLIPS = 4
"""Most blocks that a candidate flips."""
_SPREAD = 0.02
"""What a block may be worth beside its record, give or take, at first; later what candidates have gained or lost on average."""
_ATTENTION, _MLP = 1 / 3, 2 / 3
"""Of a layer's time."""
_HEAD = 1.0
"""The vocabulary head's time, in layers."""
_DEPTHS = range(1, 9)
_IDLE = 1.0
"""Seconds between two rounds, beyond which nobody was writing."""


def parts(skipped: Skipped, layers: int) -> tuple[Part, ...]:
    """What runs of a decoder when `skipped` does not."""
    attention, mlp = skipped
    return tuple(Part(i, i not in attention, i not in mlp) for i in range(layers))


def worth(match: float, skipped: Skipped, layers: int) -> float:
    """The speed a set promises, in that of plain decoding: (1 - a^(d+1)) / ((1 - a) (1 + c d)) at the best depth d, where `match`
    a is the chance of a guess and c what a draft pass costs next to a whole one (Leviathan et al. 2023, theorem 3.8)."""
    cost = 1 - (_ATTENTION * len(skipped[0]) + _MLP * len(skipped[1])) / (layers + _HEAD)
    return max(sum(match**k for k in range(d + 1)) / (1 + cost * d) for d in _DEPTHS)


class Search:
    """Candidates and what became of them. The first and the last layer are left alone unless the first set leaves them out.

    The gain of leaving a block out is taken to be linear, with a normal prior: the posterior is a ridge regression over what
    candidates gained, and every candidate flips those blocks that a draw from it likes best."""

    def __init__(self, first: Skipped, layers: int, seed: int = 0) -> None:
        self.best, self.tries, self.since = first, 0, 0
        self._layers, self._random, self._spread = layers, np.random.default_rng(seed), _SPREAD
        self._blocks = [i + half * layers for half in (0, 1) for i in sorted(first[half] | set(range(1, layers - 1)))]
        self._precision = np.eye(2 * layers)
        self._gains = np.zeros(2 * layers)

    @property
    def done(self) -> bool:
        """Whether more tries are not worth their time."""
        return self.since >= _PATIENCE or self.tries >= _TRIES or not self._blocks

    def candidate(self) -> Skipped:
        """Another set."""
        vector = self._vector(self.best)
        flips: list[int] = self._random.permutation(self._blocks).tolist()
        if self.tries % _RANDOM:
            covariance = np.linalg.inv(self._precision)
            drawn = self._random.multivariate_normal(covariance @ self._gains, self._spread**2 * covariance)
            flips.sort(key=lambda i: drawn[i] * (2 * vector[i] - 1))
        for i in flips[: int(self._random.integers(1, _FLIPS + 1))]:
            vector[i] = 1 - vector[i]
        attention, mlp = (frozenset(int(i) for i in half.nonzero()[0]) for half in vector.reshape(2, -1))
        return attention, mlp

    def tell(self, candidate: Skipped, worth: float, best: float) -> bool:
        """What the candidate and the best set promise on the same tokens. True if the candidate is the best from now on."""
        change, gain = self._vector(candidate) - self._vector(self.best), worth - best
        self._precision += np.outer(change, change)
        self._gains += change * gain
        self._spread += 0.1 * (abs(gain) - self._spread)
        self.tries += 1
        self.since = 0 if gain > 0 else self.since + 1
        if gain > 0:
            self.best = candidate
        return gain > 0

    def _vector(self, skipped: Skipped) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """1 for each half that is left out: attention of all layers, then their MLPs."""
        vector = np.zeros(2 * self._layers)
        vector[[i + half * self._layers for half in (0, 1) for i in skipped[half]]] = 1
        return vector


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
        """What a set promises by the last tokens, guessed greedily; None where memory is short."""
        layers = self._view.num_layers
        logits = self._view.recall(request, parts(skipped, layers), self._window + 1)
        if logits is None:
            return None
        wanted = torch.tensor(request.tokens[-self._window :], device=logits.device)
        return worth(float((logits[:-1].argmax(1) == wanted).float().mean()), skipped, layers)
