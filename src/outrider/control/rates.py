"""How often something happens at each position of a look-ahead: a request's own recent record, shrunk to everybody's.

Acceptance is no one number: it differs by position and drifts with the text. What is estimated is conditional: the probability
that guess i is accepted given that those before it were (and, with another instance, that it is offered given those before it).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

OWN = 0.92
"""What a request's older record is worth after one more observation: a memory of a dozen rounds."""
COMMON = 0.98
"""The same for everybody's record, by round."""
FADE = 0.97
"""What the record of a position is worth after a round that did not reach it. In time it is believed to be like the one before,
and tried again: bad luck must not shut a depth for good."""
LASTING = 0.995
"""What the lasting record of first positions is worth after one more round that told something: no pause wears it out."""
PULL, MOST_PULL = 4.0, 15.0
"""How many observations everybody's record is worth in a request's estimate: the least, which holds while there are too few
requests to compare, and the most, where requests differ by no more than luck."""


WEAK = 1.0
"""How many observations the prior is worth in everybody's estimate."""
EFFECTIVE = 1 + OWN
"""A fading record of weight n varies like one of so many times n equal observations."""


@dataclass(slots=True)
class Track:
    """Weighted counts by position: `tests` and the `hits` among them."""

    hits: list[float] = field(default_factory=list)
    tests: list[float] = field(default_factory=list)

    def renew(self, tests: int, hits: int) -> None:
        """The first position has this record, and no older one; deeper ones count half."""
        self.hits = [float(hits), *(0.5 * h for h in self.hits[1:])]
        self.tests = [float(tests), *(0.5 * n for n in self.tests[1:])]

    def fade(self, rounds: int = 1) -> None:
        """Rounds that told nothing."""
        keep = FADE**rounds
        self.hits, self.tests = [keep * h for h in self.hits], [keep * n for n in self.tests]

    @classmethod
    def empty(cls, positions: int) -> Track:
        return cls([0.0] * positions, [0.0] * positions)


class Rates:
    """Estimates for `positions` positions; `prior` is believed of the first one before anything was seen. `lasting`: tests and
    hits of the first one since long ago, to which everybody's record fades back while nothing is tried."""

    def __init__(self, positions: int, prior: float) -> None:
        self.positions, self.prior = positions, prior
        self.lasting = 0.0, 0.0
        self._common, self._rested = Track.empty(positions), 0

    @property
    def common(self) -> Track:
        """Everybody's record, as old as it is now."""
        if self._rested:
            self._common.fade(self._rested)
            self._rested = 0
        return self._common

    @common.setter
    def common(self, record: Track) -> None:
        self._common, self._rested = record, 0

    def rest(self) -> None:
        """A round that told nothing about anybody."""
        self._rested += 1

    def track(self) -> Track:
        """A new request's record."""
        return Track.empty(self.positions)

    def learn(self, round_: Iterable[tuple[Track, int, int]]) -> None:
        """One round's outcomes: `(record, hits, tested)`; of `tested` positions the first `hits` succeeded, the next one (if
        there is one) failed, and what comes after was not put to the test."""
        seen, won = [0] * self.positions, [0] * self.positions
        for own, hits, tested in round_:
            for i in range(min(tested, hits + 1, self.positions)):
                hit = i < hits
                own.tests[i] = OWN * own.tests[i] + 1.0
                own.hits[i] = OWN * own.hits[i] + hit
                seen[i] += 1
                won[i] += hit
            for i in range(min(tested, self.positions), self.positions):
                own.tests[i] *= FADE
                own.hits[i] *= FADE
        tests, good = self.common.tests, self.common.hits
        for i, count in enumerate(seen):
            keep = COMMON if count else FADE
            tests[i] = keep * tests[i] + count
            good[i] = keep * good[i] + won[i]
        if seen and seen[0]:
            self.lasting = LASTING * self.lasting[0] + seen[0], LASTING * self.lasting[1] + won[0]

    def doubt(self, share: float) -> None:
        """For this share of requests the record no longer holds."""
        keep = 1.0 - share
        self.common = Track([keep * h for h in self.common.hits], [keep * n for n in self.common.tests])

    def everybody(self) -> list[float]:
        """The common estimate by position; one never tested is believed to be like the one before it."""
        found, prior = [], (self.lasting[1] + WEAK * self.prior) / (self.lasting[0] + WEAK)
        for hits, tests in zip(self.common.hits, self.common.tests, strict=True):
            prior = (hits + WEAK * prior) / (tests + WEAK)
            found.append(prior)
        return found

    def of(self, own: Track, everybody: list[float], pull: float = PULL) -> list[float]:
        """A request's estimate by position."""
        return [(h + pull * m) / (n + pull) for h, n, m in zip(own.hits, own.tests, everybody, strict=True)]


def estimates(tracks: Sequence[Track], everybody: Sequence[float], pull: float = PULL) -> NDArray[np.float64]:
    """`Rates.of` for several requests, `[N, positions]`."""
    hits, tests = np.array([t.hits for t in tracks]), np.array([t.tests for t in tracks])
    return np.asarray((hits + pull * np.array(everybody)) / (tests + pull))


def pull(tracks: Sequence[Track]) -> float:
    """How much requests are to be taken for one another: `p (1 - p)` over the variance between their first positions that luck
    does not explain (the method of moments for a beta law). The best of many noisy records promises what it will not keep."""
    known = [(t.hits[0] / t.tests[0], t.tests[0]) for t in tracks if t.tests[0] >= 3]
    if len(known) < 4:
        return PULL
    mean = sum(rate for rate, _ in known) / len(known)
    spread = sum((rate - mean) ** 2 for rate, _ in known) / (len(known) - 1)
    single = max(1e-3, mean * (1 - mean))
    luck = sum(single / (EFFECTIVE * tests) for _, tests in known) / len(known)
    return min(MOST_PULL, max(PULL, single / max(1e-6, spread - luck)))
