"""How often something happens at each position of a look-ahead: a request's own recent record, shrunk to everybody's.

Acceptance is no one number: it differs by position and drifts with the text. What is estimated is conditional: the probability
that guess i is accepted given that those before it were (and, with another instance, that it is offered given those before it).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

OWN = 0.92
"""What a request's older record is worth after one more observation: a memory of a dozen rounds."""
COMMON = 0.98
"""The same for everybody's record, by round."""
FADE = 0.97
"""What the record of a position is worth after a round that did not reach it. In time it is believed to be like the one before,
and tried again: bad luck must not shut a depth for good."""
EARLY = 16
"""Rounds with guesses in which a request is a newcomer, less so each time. The record of those who write now is, once most of a
batch have ended, that of the few whose guesses come true least, who need more rounds than others: it says nothing of
those who begin."""
NEWER = 0.98
"""What the record of newcomers is worth after one more observation: some fifty are remembered, of many requests or of few."""
LASTING = 0.995
"""What the lasting record of first positions is worth after one more round that told something: no pause wears it out."""
PULL, MOST_PULL = 4.0, 15.0
"""How many observations everybody's record is worth in a request's estimate: the least, which holds while there are too few
requests to compare, and the most, where requests differ by no more than luck."""


WEAK, FIRM = 1.0, 24.0
"""How many observations the prior is worth in estimates for many, and at most what newcomers' record of long ago is: a few
trials, of a few requests, do not outweigh it."""
EFFECTIVE = 1 + OWN
"""A fading record of weight n varies like one of so many times n equal observations."""


@dataclass(slots=True)
class Track:
    """Weighted counts by position: `tests` and the `hits` among them, in `age` rounds."""

    hits: list[float] = field(default_factory=list)
    tests: list[float] = field(default_factory=list)
    age: int = 0

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


class Beliefs(NamedTuple):
    """Chances by position: of those who write now, and of those who begin."""

    everybody: list[float]
    newcomers: list[float]


class Record:
    """Of many requests together. `lasting`: tests and hits of the first position since long ago, to which the rest fades back
    while nothing is tried."""

    def __init__(self, positions: int) -> None:
        self.lasting = 0.0, 0.0
        self._lately, self._rested = Track.empty(positions), 0

    @property
    def lately(self) -> Track:
        """The record as old as it is now."""
        if self._rested:
            self._lately.fade(self._rested)
            self._rested = 0
        return self._lately

    def rest(self) -> None:
        """A round that told nothing about anybody."""
        self._rested += 1

    def add(self, seen: Sequence[int], won: Sequence[int], keep: float, each: bool = False) -> None:
        """A round's tests and hits by position; what is older is worth `keep` where there are any: after each one, or all."""
        tests, hits = self.lately.tests, self.lately.hits
        for i, count in enumerate(seen):
            share = FADE if not count else keep**count if each else keep
            tests[i], hits[i] = share * tests[i] + count, share * hits[i] + won[i]
        if seen and seen[0]:
            self.lasting = LASTING * self.lasting[0] + seen[0], LASTING * self.lasting[1] + won[0]

    def doubt(self, share: float) -> None:
        """For this share of requests it no longer holds."""
        lately, keep = self.lately, 1.0 - share
        lately.tests, lately.hits = [keep * n for n in lately.tests], [keep * h for h in lately.hits]

    def chances(self, prior: float, firm: float = WEAK, most: int | None = None) -> list[float]:
        """By position, of all or the first `most`; one never tested is believed to be like the one before it, the first one like
        `prior`. The lasting record counts for `firm` observations at most."""
        found, prior = [], (self.lasting[1] + WEAK * prior) / (self.lasting[0] + WEAK)
        lately = self.lately
        weight = max(WEAK, min(firm, self.lasting[0] - lately.tests[0])) if lately.tests else WEAK
        for hits, tests in zip(lately.hits[:most], lately.tests[:most], strict=True):
            prior = (hits + weight * prior) / (tests + weight)
            found.append(prior)
            weight = WEAK
        return found


class Rates:
    """Estimates for `positions` positions; `prior` is believed of the first one before anything was seen."""

    def __init__(self, positions: int, prior: float) -> None:
        self.positions, self.prior = positions, prior
        self.common, self.newcomers = Record(positions), Record(positions)

    def rest(self) -> None:
        """A round that told nothing about anybody."""
        self.common.rest()
        self.newcomers.rest()

    def track(self) -> Track:
        """A new request's record."""
        return Track.empty(self.positions)

    def learn(self, round_: Iterable[tuple[Track, int, int]], rounds: int = 1) -> None:
        """One round's outcomes: `(record, hits, tested)`; of `tested` positions the first `hits` succeeded, the next one (if
        there is one) failed, and what comes after was not put to the test. It stands for so many `rounds` of these requests."""
        seen, won, new, good = ([0] * self.positions for _ in range(4))
        for own, hits, tested in round_:
            early = own.age < EARLY
            own.age += rounds if tested else 0
            for i in range(min(tested, hits + 1, self.positions)):
                hit = i < hits
                own.tests[i] = OWN * own.tests[i] + 1.0
                own.hits[i] = OWN * own.hits[i] + hit
                seen[i] += 1
                won[i] += hit
                if early:
                    new[i] += 1
                    good[i] += hit
            for i in range(min(tested, self.positions), self.positions):
                own.tests[i] *= FADE
                own.hits[i] *= FADE
        self.common.add(seen, won, COMMON)
        if any(new):
            self.newcomers.add(new, good, NEWER, each=True)

    def doubt(self, share: float) -> None:
        """For this share of those who write the record no longer holds."""
        self.common.doubt(share)

    def everybody(self, most: int | None = None) -> list[float]:
        """The chances of those who write, at all positions or the first `most`."""
        return self.common.chances(self.prior, most=most)

    def beliefs(self, most: int | None = None) -> Beliefs:
        """The chances of those who write, and of those who begin: who may be like either is believed the better, since it is soon
        known which."""
        everybody, newcomers = self.everybody(most), self.newcomers.chances(self.prior, FIRM, most)
        return Beliefs(everybody, list(map(max, everybody, newcomers)))


def estimate(own: Track, beliefs: Beliefs, pull: float = PULL) -> list[float]:
    """A request's chances at the positions of `beliefs`: its record, shrunk to everybody's, or to that of newcomers as long as it
    is one."""
    new = max(0.0, 1.0 - own.age / EARLY)
    pairs = zip(own.hits, own.tests, *beliefs, strict=False)
    return [(h + pull * (m + new * (b - m))) / (n + pull) for h, n, m, b in pairs]


def estimates(tracks: Sequence[Track], beliefs: Beliefs, pull: float = PULL) -> NDArray[np.float64]:
    """`estimate` for several requests, `[N, positions]`."""
    if not any(t.age for t in tracks):  # nothing is known of anybody
        return np.tile(np.array(beliefs.newcomers), (len(tracks), 1))
    hits, tests = np.array([t.hits for t in tracks]), np.array([t.tests for t in tracks])
    new = np.maximum(0.0, 1.0 - np.array([t.age for t in tracks]) / EARLY)[:, None]
    everybody, newcomers = np.array(beliefs.everybody), np.array(beliefs.newcomers)
    return np.asarray((hits + pull * (everybody + new * (newcomers - everybody))) / (tests + pull))


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
