"""`goodput` for lookups, whose guesses can be seen without being made.

A lookup takes the host some microseconds, and the device nothing. So whether guesses pay need not be tried: while the device is
busy it is seen what would be guessed next (`Drafter.preview`), and when the text has gone on, whether that was right. From this
(`streaks.py`) follows what the guess at hand is worth. Guesses are asked for in the rounds where there are some and they pay; all
others are plain, and launched ahead. Where the host has no time for it, and for all other drafters, it is plain `goodput`.

Which rounds have guesses depends on the text before them alone, as the classical rules want it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..protocols import Drafter
from ..types import Batch, Budget, Finish, Request, StepEvent
from .book import Asked
from .costs import CROWD, bucket
from .fees import Fee
from .goodput import Goodput
from .judge import MANY as JUDGED
from .limits import all_bounds, is_open
from .plan import limits as depths_worth
from .probes import SPARSE
from .shelf import Known
from .streaks import Preview, Text
from .tally import Tally

MARGIN = 1.02
"""Guesses must promise so much more than a plain round."""
LEANS = 1.0, 2.0
"""Tokens of a round are averaged as their power to the minus so much, in batches of few and of many: 1 is the mean time per
token, infinity the slowest's."""
MANY = 64
"""New tokens from which on a look is one of catching up."""
FRESH = 16
"""Decisions after which the prices of rounds are read anew."""
KEEP, FORGET = 0.98, 0.99
"""How much of what was promised and kept is left after one more round with guesses, and after one without."""
UNSEEN = 0.5
"""Passes that a guess is believed to cost where rounds are launched ahead, before it was seen: as long as a look at all texts, at
least."""
LONG = 8
"""Rounds with guesses in a row whose time is told before their end."""
UNHEARD = 256
"""Rounds in which hints are not listened to, at most."""
SLOW = 0.05
"""What the mean depth that is told moves by in a round."""


@dataclass(slots=True)
class Stretch:
    """Rounds with guesses in a row, with the plain ones before and after, in whose time some of their work may have been done:
    together they took what they took. `size`: the size class of the batch, which is the same in all of them; `whole`: the first
    was a plain one."""

    size: int = 0
    seconds: float = 0.0
    parts: float = 0.0
    plain: int = 0
    guessed: int = 0
    tokens: int = 0
    whole: bool = False

    def add(self, asked: Asked, event: StepEvent, wall: float) -> None:
        """One more round."""
        self.seconds += wall
        if not asked.deepest:
            self.plain += 1
            self.whole = self.whole or not self.guessed
            return
        self.guessed += 1
        self.parts += event.verify_seconds + event.draft_seconds
        self.tokens += sum(len(item.tokens) for item in event.committed)


class Foresight(Goodput):
    """See above. `preview` is the drafter's own, until an engine gives the guarded one."""

    def __init__(self, drafter: Drafter, clock: Callable[[], float] = time.perf_counter, known: Known | None = None) -> None:
        super().__init__(drafter, clock, known)
        self.preview: Preview = getattr(drafter, "preview", lambda request, most: None)
        self._texts = dict[int, Text]()
        self._able, self._sees, self._wakes = True, False, False
        self._pace, self._stretch = self.known.pace, Stretch()
        self._timely: tuple[int, int] = 0, 1
        self._batch: Batch | None = None
        self._prices, self._read = dict[tuple[int, int], tuple[list[float], list[float], Fee]](), 0
        self._mean = 0.0
        self._deaf, self._doubt = 0, SPARSE
        self._decided: tuple[object, list[int], float] = (), [], 0.0

    def budget(self, batch: Batch) -> Budget:
        """Guesses where they are there and pay."""
        self._batch = batch
        limits = all_bounds(batch, self._shape.depth)
        free = [b for b, (_, high) in enumerate(limits) if high]
        self._sees = self._able and self._there(len(batch)) > 0 and not any(low for low, _ in limits) and bool(free or self._sees)
        if not self._sees:
            return self._within(batch, limits)
        rests = (bool(free) and self._rests(len(batch))) or self._judge.rests(len(batch))
        depths = [0] * len(batch) if rests else self._depths(batch, limits)
        self._heed(any(depths))
        if rests:
            self._stalls.content()
        self._story.count([depths[b] for b in free])
        if any(depths):
            self._drafted_at = self._book.round
        else:
            self._plain_at = self._book.round
        self._tell(max(depths))
        asked = self._asked(batch, depths, foreseen=True)
        self._book.open[-1] = replace(self._book.open[-1], promised=self._decided[2] if any(depths) else 0.0)
        return asked

    @property
    def resting(self) -> bool:
        """Nobody was given guesses in the last round, and what was seen since promises nothing."""
        if not self._sees:
            return super().resting
        asked = self._book.open[-1] if self._book.open else None
        return asked is not None and not any(asked.depths) and (self._plain > 0 or not self._wakes)

    def rest(self, batch: Batch) -> Budget:
        """No guesses for anybody, as `resting` promised."""
        self._batch, self._plain_at = batch, self._book.round
        self._tell(0)
        return super().rest(batch)

    def observe(self, event: StepEvent) -> None:
        """Learn from a round, and look what would be guessed now."""
        super().observe(event)
        for item in event.committed:
            if item.finish is not Finish.RUNNING:
                self._texts.pop(item.request.id, None)
        if self._book.round % 256 == 0:  # some ended unseen
            self._texts = {i: t for i, t in self._texts.items() if t.request.finish is Finish.RUNNING}
        if self._able and self._there(len(event.committed)):
            self._look(event)
        else:
            self._sees = False
            self._taste(event)

    def _heed(self, guesses: bool) -> None:
        """A hint that came to nothing is not listened to again for a while, a longer one each time."""
        if guesses:
            self._doubt = SPARSE
        elif self._wakes:
            self._deaf, self._doubt = self._book.round + self._doubt, min(2 * self._doubt, UNHEARD)
        self._wakes = self._wakes and guesses

    def _there(self, size: int) -> int:
        """In how many rounds so many texts are looked at, a part in each; 0 where there is no time for it, as it was found some
        rounds ago."""
        when = size + (self._book.round // FRESH << 20)
        if self._timely[0] != when:
            turns = SPARSE if size > CROWD else 1
            self._timely = when, turns * self._pace.affords(size, turns)
        return self._timely[1]

    def _taste(self, event: StepEvent) -> None:
        """Find out what a look takes, where there are too many to look at all."""
        if not self._able or self._pace.known:
            return
        for request in _writing(event)[:1]:
            self._seen(self._texts.setdefault(request.id, Text(request)))

    def _look(self, event: StepEvent) -> None:
        """See what would be guessed for everybody who writes: where the batch is large and nothing pays, for a few in a round.
        Whoever is new is seen here first, while the device is busy: a long prompt takes its time."""
        turns = 1 if self._wakes or any(event.depths) else self._there(len(event.committed))
        turn = self._book.round % turns
        until = self._clock() + self._pace.spare(len(event.committed)) if turns > 1 else math.inf
        for request in _writing(event)[turn::turns]:
            text = self._texts.setdefault(request.id, Text(request))
            if self._able and (text.length or self._clock() < until):  # who is new can wait for a turn
                self._seen(text)
        if turn or (turns > 1 and self._book.round < self._deaf):
            return
        batch, self._wakes = self._batch, False
        if batch is not None and self._able and not self._judge.rests(len(batch)):
            limits = all_bounds(batch, self._shape.depth)
            self._wakes = any(self._depths(batch, limits)) if turns == 1 else self._promises(batch, limits)
        self._read += 1
        if self._read % FRESH == 0:
            self._prices.clear()

    def _promises(self, batch: Batch, limits: Sequence[tuple[int, int]]) -> bool:
        """Whether guesses may pay, by what was seen some tokens ago: then all texts are worth a look, which decides."""
        common, gain = self.known.streaks.chances(), self._gain
        known = [self._texts.get(r.id) if high else None for r, (_, high) in zip(batch.requests, limits, strict=True)]
        outlooks = [[0.0] if t is None else t.hope(common, high) for t, (_, high) in zip(known, limits, strict=True)]
        found, self._gain = self._limit(batch, outlooks) > 0, gain  # which is for those who decide
        return found

    def _seen(self, text: Text) -> Text:
        """A text, brought up to its last token."""
        if text.length == len(text.request.tokens):
            return text
        begun, new = self._clock(), not text.length or len(text.request.tokens) - text.length > MANY
        self._able = text.look(self.known.streaks, lambda: self.preview(text.request, self._shape.depth))
        if not new:
            self._pace.looked(self._clock() - begun)
        return text

    def _depths(self, batch: Batch, limits: Sequence[tuple[int, int]]) -> list[int]:
        """For each request as many guesses as pay. What was decided on the same texts stands."""
        texts = tuple((r.id, len(r.tokens), high) for r, (_, high) in zip(batch.requests, limits, strict=True))
        key = texts, self._book.going
        if key != self._decided[0]:
            self._decided = key, *self._decide(batch, limits)
        return list(self._decided[1])

    def _decide(self, batch: Batch, limits: Sequence[tuple[int, int]]) -> tuple[list[int], float]:
        """Depths, and the tokens that they promise."""
        common, outlooks = self.known.streaks.chances(), list[list[float]]()
        for request, (_, high) in zip(batch.requests, limits, strict=True):
            known = high and request.id in self._texts and self._able
            outlooks.append(self._seen(self._texts[request.id]).outlook(common, high) if known else [0.0])
        limit = self._limit(batch, outlooks)
        depths = [min(limit, len(o) - 1) for o in outlooks]
        return depths, sum(o[d] for o, d in zip(outlooks, depths, strict=True))

    def _limit(self, batch: Batch, outlooks: Sequence[Sequence[float]]) -> int:
        """The depth that pays best by these outlooks; 0 where none does, or there is nothing to guess."""
        most = max(map(len, outlooks)) - 1
        if most < 1:
            self._stalls.content()
            return 0
        return self._worth(batch, outlooks, most)

    def _worth(self, batch: Batch, outlooks: Sequence[Sequence[float]], most: int) -> int:
        """The depth that brings most tokens per second, if everybody goes as far as that; 0 where none does."""
        size, ready, rows = len(batch), sum(batch.ready), sum(batch.pending)
        drafted = sum(len(o) > 1 for o in outlooks)
        passes, drafting, fee = self._priced(size, drafted)
        beside = fee.each if self._book.going else fee.entering
        plain, kept = ready / self._at(passes, rows), self._kept(size).share(1.0)
        ideal = ready + kept * sum([o[-1] for o in outlooks])  # which no mean exceeds
        if ideal <= MARGIN * plain * (self._at(passes, rows) + drafting[1] + beside):
            self._stalls.content()
            self._gain = 1.0
            return 0
        best, wish, speeds = 0, 0, {0: MARGIN * plain}
        stalls, tried = bool(self._stalls.prices), depths_worth(most)
        found = [(ready + kept * outlooks[0][k], k) for k in tried] if size == 1 else _together(batch, outlooks, kept, tried)
        for k, (tokens, guesses) in zip(tried, found, strict=True):
            speeds[k] = tokens / (self._at(passes, rows + guesses) + drafting[k] + beside)
            if speeds[k] > speeds[wish]:
                wish = k
            if speeds[k] > speeds[best] and (not stalls or self._stalls.open(size, k)):
                best = k
        if wish != best:
            self._stalls.want(size, wish, speeds[wish] / speeds[best] - 1)
        else:
            self._stalls.content()
        self._gain = max(1.0, speeds[best] / plain) if best else 1.0
        return best

    def _kept(self, size: int) -> Tally:
        """What became of such promises: those that are believed are the best of many, and so a little too good."""
        return self.known.kept.setdefault(bucket(size), Tally())

    def _priced(self, size: int, drafted: int) -> tuple[list[float], list[float], Fee]:
        """Seconds of passes and the rest by rows, of drafting by depth, and beside both, read from the tables now and then."""
        key = size, bucket(drafted)
        if key not in self._prices:
            depth, costs = self._shape.depth, self.costs
            passes = costs.verify(size, np.arange(1.0, size * (depth + 1) + 1)) + costs.other(size)
            drafting = costs.drafts(drafted, np.arange(depth + 1.0))
            unseen = max(UNSEEN * costs.plain(size, size), self._pace.looks(size)) if costs.ahead else 0.0
            self._prices[key] = passes.tolist(), drafting.tolist(), self.known.fees.of(size, unseen)
        return self._prices[key]

    @staticmethod
    def _at(passes: Sequence[float], rows: int) -> float:
        return passes[min(rows, len(passes)) - 1]

    def _passes(self, asked: Asked) -> bool:
        """Where guesses are foreseen, no plain round: it ends a stretch."""
        return not self._sees and super()._passes(asked)

    def _learn(self, asked: Asked, event: StepEvent, wall: float, alone: bool) -> None:
        """Plain rounds among plain ones tell what those take; the others, all together, what guessing does."""
        after = self._book.open[0] if self._book.open else None
        self._pace.heard(len(event.committed), wall, event.waited)
        if self._stretch.size != bucket(len(event.committed)):
            self._stretch = Stretch(bucket(len(event.committed)))
        guesses, next_ = asked.foreseen and asked.deepest > 0, after is not None and after.foreseen and after.deepest > 0
        if not guesses:
            self._kept(len(event.committed)).add(0.0, 0, FORGET)
            self.known.fees.pause(len(event.committed))
        if not guesses and not next_ and not self._stretch.guessed:
            super()._learn(asked, event, wall, alone)
            self._stretch = Stretch(self._stretch.size)
            return
        self.costs.add_verify(len(event.committed), event.rows, event.verify_seconds)
        if guesses:
            self.costs.add_draft(asked.drafted, asked.deepest, event.draft_seconds)
            if any(item.drafted for item in event.committed):
                self._kept(len(event.committed)).add(asked.promised, sum(i.accepted for i in event.committed), KEEP)
        self._stretch.add(asked, event, wall)
        if self._stretch.guessed and ((not next_ and not guesses) or self._stretch.guessed >= LONG):
            self._close(len(event.committed))

    def _close(self, batch: int) -> None:
        """What guessing took in such a stretch."""
        stretch, self._stretch, costs = self._stretch, Stretch(self._stretch.size), self.costs
        if bucket(batch) not in self._plain_sizes:
            return
        other = costs.other(batch)
        plain = costs.plain(batch, batch) + other
        seconds, count = max(0.0, stretch.seconds - stretch.plain * plain), stretch.guessed
        if stretch.whole:
            self.known.fees.add(batch, count, seconds - stretch.parts - count * other)
        for _ in range(count):
            if self._judge.add(batch, stretch.tokens / count, seconds / count, batch / plain, JUDGED):
                self._judge.renew()

    def _hear(self, asked: Asked, event: StepEvent, wall: float) -> None:
        """Stretches are judged as a whole."""
        if not self._sees:
            super()._hear(asked, event, wall)

    def _tell(self, depth: int) -> None:
        self._mean += SLOW * (depth - self._mean)
        if self._book.round % LONG == 0:
            self._story.change(round(self._mean, 1) if self._mean >= 2 * SLOW else 0.0, self._reckoning)

    def _reckoning(self) -> str:
        chances = self.known.streaks.chances()
        return f"lookups right in {chances[0]:.0%} of cases, in {chances[3]:.0%} after three that were; used where they pay"


def _together(batch: Batch, outlooks: Sequence[Sequence[float]], kept: float, depths: Sequence[int]) -> list[tuple[float, int]]:
    """What a round is worth in tokens, and how many guesses it has, if everybody goes as far as one of `depths` and the share
    `kept` comes true. While others wait, all tokens are worth the same: whoever ends makes room. Else a round that takes longer
    for a few is no gain for the others, and a batch ends with its slowest: what counts is a mean that leans to those who get
    little."""
    lucky, most, ready = [o for o in outlooks if len(o) > 1], depths[-1], sum(batch.ready)
    whole = np.array([[*o[: most + 1], *[o[-1]] * (most + 1 - len(o))] for o in lucky])
    more, counts = kept * whole[:, depths], np.array([len(o) - 1 for o in lucky])
    guesses = np.minimum(counts[:, None], depths).sum(axis=0).tolist()
    if batch.queued:
        tokens = ready + more.sum(axis=0)
    else:
        leans = LEANS[ready > CROWD]
        mean = (ready - len(lucky) + ((1 + more) ** -leans).sum(axis=0)) / max(1, ready)
        tokens = ready * np.maximum(1e-9, mean) ** (-1 / leans)
    return list(zip(tokens.tolist(), guesses, strict=True))


def _writing(event: StepEvent) -> list[Request]:
    """Those of a round who go on writing, and for whom it is open how far to look ahead."""
    return [i.request for i in event.committed if i.tokens and i.finish is Finish.RUNNING and is_open(i.request)]
