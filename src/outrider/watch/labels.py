"""Acceptance by label of the work (`SamplingParams.label`), over time, in bounded memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce

from ..types import NONE, Committed, StepEvent
from .drift import Drift

MOST = 32
"""Labels that are told apart; whoever comes later is counted under `OTHER`."""
UNLABELLED, OTHER = "unlabelled", "other"
BUCKETS = 64
"""Periods of a history. When it is full, neighbours are joined: all of the past is kept, more and more coarsely."""
FIRST_BUCKET = 16
"""Rounds of a period at first."""
RECENT = 0.98
"""What the recent acceptance is worth after one more first guess: a memory of about fifty."""
log = logging.getLogger("outrider.watch")


@dataclass(slots=True)
class Period:
    """Some rounds in a row: when they began (seconds since the epoch), and what was counted in them. `first` counts first
    guesses, `right` those of them that were right."""

    begun: float
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    first: int = 0
    right: int = 0

    def count(self, item: Committed, tested: bool, hit: bool) -> None:
        """One request's share of a round."""
        self.rounds += 1
        self.tokens += len(item.tokens)
        self.drafted += item.drafted
        self.accepted += item.accepted
        self.first += tested
        self.right += hit

    def join(self, later: Period) -> Period:
        """Both as one."""
        return Period(self.begun, *(getattr(self, name) + getattr(later, name) for name in COUNTS))


COUNTS = tuple(f.name for f in fields(Period) if f.name != "begun")


@dataclass(slots=True)
class History:
    """At most `BUCKETS` periods, oldest first; the last one is still being filled up to `size` rounds."""

    periods: list[Period] = field(default_factory=list)
    size: int = FIRST_BUCKET

    @property
    def total(self) -> Period:
        """All of it as one period."""
        return reduce(Period.join, self.periods, Period(self.periods[0].begun if self.periods else 0.0))

    def current(self, clock: Callable[[], float]) -> Period:
        """The period that a round belongs to."""
        if not self.periods or self.periods[-1].rounds >= self.size:
            if len(self.periods) >= BUCKETS:
                pairs = zip(self.periods[::2], self.periods[1::2], strict=True)
                self.periods = [early.join(late) for early, late in pairs]
                self.size *= 2
            self.periods.append(Period(clock()))
        return self.periods[-1]

    def add(self, tokens: Sequence[int], clock: Callable[[], float]) -> None:
        """Rounds without guesses: how many tokens each gave."""
        at = 0
        while at < len(tokens):
            period = self.current(clock)
            some = tokens[at : at + self.size - period.rounds]
            period.rounds += len(some)
            period.tokens += sum(some)
            at += len(some)


@dataclass(slots=True)
class Label:
    """One label's record. `recent`: share of first guesses that were right of late (0 before any were made)."""

    name: str
    history: History = field(default_factory=History)
    drift: Drift = field(default_factory=Drift)
    recent: float = 0.0
    _weight: float = 0.0

    def count(self, item: Committed, clock: Callable[[], float]) -> None:
        """One request's share of a round. A change of acceptance is told to the log."""
        tested = bool(item.offered_at) and item.offered_at[0] > 0
        hit = tested and bool(item.origins) and item.origins[0] != NONE
        self.history.current(clock).count(item, tested, hit)
        if not tested:
            return
        self._weight = RECENT * self._weight + 1
        self.recent += (hit - self.recent) / self._weight
        change = self.drift.see(hit)
        if change is not None:
            found = {
                "label": self.name,
                "before": round(change.before, 3),
                "after": round(change.after, 3),
                "since": change.since,
            }
            log.warning(
                "acceptance of %s changed: %.0f %% of first guesses were right, of the last %d %.0f %%",
                self.name,
                100 * change.before,
                change.since,
                100 * change.after,
                extra={"fields": found},
            )


class Labels(Mapping[str, Label]):
    """All labels met so far, by name. `clock` tells seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._found = dict[str, Label]()

    def observe(self, event: StepEvent) -> None:
        """Count a round in which guesses were made or tokens written."""
        plain = dict[str, list[int]]()
        for item in event.committed:
            if item.late:
                continue
            name = item.request.params.label or UNLABELLED
            if item.drafted:
                self._of(name).count(item, self._clock)
            elif item.tokens:
                plain.setdefault(name, []).append(len(item.tokens))
        for name, tokens in plain.items():
            self._of(name).history.add(tokens, self._clock)

    def _of(self, name: str) -> Label:
        found = self._found.get(name)
        if found is None:
            told = len(self._found.keys() - {UNLABELLED, OTHER})
            name = name if name == UNLABELLED or told < MOST else OTHER
            found = self._found.setdefault(name, Label(name))
        return found

    def __getitem__(self, name: str) -> Label:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._found))

    def __len__(self) -> int:
        return len(self._found)
