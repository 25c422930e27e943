"""Whether guessing pays, by nothing but the tokens and the whole time of the rounds that were run.

Tables and chances may be wrong in ways nobody thought of. Where rounds with guesses were slower than plain ones although the plan
had just been made anew, guessing rests: longer every time, until it has been seen to pay.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

from .costs import CROWD, bucket

FEW, ENOUGH, MANY = 4, 12, 48
"""Rounds that tell something, and those that tell enough: of large batches and of one request."""
LOSING, PAYING = 0.97, 1.02
"""Speed against plain decoding."""
ODD = 3.0
"""A round counts for at most so many times the middle one: the machine stalls now and then."""
REST, LONGEST = 64, 8192
"""Rounds without guesses after a verdict: at first, and at most."""
HANDED = 4 * REST
"""The same at most by what another controller found, whose texts may have been of another kind: in large batches. In small ones,
where texts differ more from one batch to the next, `REST`."""


@dataclass(slots=True)
class Case:
    """One size class of the batch. `rest`: rounds that guessing still has to rest; `next`: how many it will the next time;
    `short` and `long`: of the last rounds the seconds that plain ones would have taken for their tokens, and those they took."""

    rest: int = 0
    next: int = REST
    heard: int = 0
    short: deque[tuple[float, float]] = field(default_factory=lambda: deque[tuple[float, float]](maxlen=2 * FEW))
    long: deque[tuple[float, float]] = field(default_factory=lambda: deque[tuple[float, float]](maxlen=MANY))

    def add(self, tokens: float, seconds: float, plain: float, enough: int, steady: bool) -> bool:
        """As the judge's, who believes what `enough` rounds say. While guessing rests, those who were promised guesses have them,
        which says nothing new."""
        if self.rest:
            return False
        if steady:
            self.short.append((tokens / plain, seconds))
        self.long.append((tokens / plain, seconds))
        self.heard += 1
        if len(self.long) >= enough and self.heard % FEW == 0:
            whole = _speed(self.long)
            if whole < LOSING:
                self.rest, self.next = self.next, min(LONGEST, 2 * self.next)
                self.short.clear()
                self.long.clear()
                return True
            if whole > PAYING:
                self.next = REST
        return len(self.short) >= FEW and _speed(self.short) < LOSING


@dataclass(slots=True)
class Judge:
    """Rounds of batches of different size classes are not compared, and a verdict holds for its own alone."""

    _cases: defaultdict[int, Case] = field(default_factory=lambda: defaultdict(Case))

    def case(self, batch: int) -> Case:
        """What is known of batches like this."""
        return self._cases[bucket(batch)]

    def add(self, batch: int, tokens: float, seconds: float, plain: float, enough: int = ENOUGH, steady: bool = True) -> bool:
        """A round with guesses gave so many tokens; `plain`: tokens per second without guesses; `enough` of them tell enough, in
        large batches; `steady`: nobody had to catch up with the text in it, which says nothing about the next few where many do.
        True where the last few were slower than that, so that the plan is to be made anew."""
        return self.case(batch).add(tokens, seconds, plain, max(enough, MANY // batch), steady or batch <= CROWD)

    def inherit(self) -> None:
        """Another controller goes on with what is known."""
        for size, case in self._cases.items():
            most = HANDED if size > bucket(CROWD) else REST
            case.rest, case.next = min(case.rest, most), min(case.next, HANDED)

    def renew(self) -> None:
        """The plan is a new one."""
        for case in self._cases.values():
            case.short.clear()

    def rests(self, batch: int) -> bool:
        """Whether guessing has to rest in a batch of this size."""
        return self.case(batch).rest > 0

    def tick(self, batch: int) -> None:
        """A round of such a batch was launched."""
        case = self.case(batch)
        case.rest = max(0, case.rest - 1)


def _speed(rounds: deque[tuple[float, float]]) -> float:
    most = ODD * median(seconds for _, seconds in rounds)
    return sum(plain for plain, _ in rounds) / max(1e-12, sum(min(most, seconds) for _, seconds in rounds))
