"""The default: look ahead as far as it pays in tokens per second of the whole batch, now, on this machine.

Before drafting, `plan.py` weighs chances (`rates.py`) against measured seconds (`costs.py`). Only past rounds count, so that
under the classical rules the number of guesses never depends on what was drawn. A plan is kept for a few rounds, and given up
only for one that is better by more than noise. Requests that are off are tried again from an allowance of 1 % of the time;
a trial that pays for itself may be repeated at once, which is how a request comes back on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from ..protocols import Drafter
from ..types import Batch, Budget, Proposal, StepEvent
from .book import Asked, Book
from .costs import Costs, bucket
from .cut import shorten
from .limits import Shape, bounds
from .plan import Load, Plan, Planner
from .probes import GAP, Allowance
from .rates import pull
from .story import Story

REPLAN, SETTLED = 3, 12
"""Rounds a plan is kept, if nobody comes or goes and no text turns: at first, and when it was confirmed again and again."""
BETTER = 1.02
"""A new plan must promise this much more than the old one ..."""
SURE = 1.03
"""... or this much, where none were made before ..."""
SAFER = 1.005
"""... or this much, if it is to make no guesses at all: being no slower than plain decoding comes first."""
REFERENCE = 0.005
"""Share of time for plain rounds while guesses are made."""
THINKING, WONDERING = 0.02, 0.005
"""Share of time that plans may take: with many requests, or a slow host, they are made less often; and while nobody is given
guesses."""
QUICK = 2e-4
"""Seconds that a plan takes, about. From one to the next no more than twice as long is believed: a busy machine stalls."""
FEW = 4
"""Rounds that tell something."""
LOSING = 0.97
"""Speed against plain decoding, as measured over a few rounds, below which the plan is made anew at once."""
FEWER = 8
"""While nobody is given guesses, a plan is made anew if the batch has become larger or smaller by one part in so many."""
PATIENCE = 8
"""Rounds of catching up in a row after which drafting time is booked all the same."""


class Goodput:
    """See above. `costs` may be filled beforehand (`calibrate.py`); `overlaps`: plain rounds can be launched ahead, so that what
    they take must be seen before guesses are compared with them; `clock` tells seconds."""

    name = "goodput"

    def __init__(self, drafter: Drafter, clock: Callable[[], float] = time.perf_counter) -> None:
        self.costs = Costs()
        self._shape, self._paced = Shape(drafter), bool(getattr(drafter, "paced", False))
        self._book = Book(drafter.depth)
        self._allowance = Allowance()
        self._story = Story(self.name, clock)
        self._clock, self._last = clock, float("-inf")
        self._planned, self._keep, self._among = -SETTLED, REPLAN, frozenset[int]()
        self._unsteady = 0
        self._gain, self._plain_at, self._drafted_at, self._off, self._stale = 1.0, 0, 0, False, False
        self._load: Load | None = None
        self._plain_sizes, self._referenced = set[int](), set[int]()
        self._next_plan, self._size, self._plain = float("-inf"), 0, 0
        self._thought = QUICK
        self.overlaps = False
        self._lately = deque[tuple[int, float]](maxlen=2 * FEW)

    def budget(self, batch: Batch) -> Budget:
        """The look-ahead of this round, from the rounds before."""
        limits = [bounds(batch, b, self._shape.depth) for b in range(len(batch))]
        free = [b for b, (low, high) in enumerate(limits) if high > low]
        depths = [low for low, _ in limits]
        probes = frozenset[int]()
        if free:
            self._plan(batch, limits)
            rests = self._rests(len(batch))
            for b in free:
                depths[b] = 0 if rests else min(limits[b][1], self._book.state(batch.requests[b]).depth or 0)
            self._story.count([depths[b] for b in free])
            if not rests:
                probes = self._probe(batch, limits, depths)
            if any(depths):
                self._drafted_at = self._book.round
            else:
                self._plain_at = self._book.round
        self._book.ask(batch, depths, probes)
        return self._shape.budget(batch, depths)

    @property
    def resting(self) -> bool:
        """Nobody was given guesses in the last round, and nobody is to get any in the next: the plan stands and no trial is due,
        or some rounds in a row are plain for comparison."""
        asked = self._book.open[-1] if self._book.open else None
        if asked is None or any(asked.depths):
            return False
        trial = self._allowance.ripe and self._book.round - self._drafted_at >= GAP
        anew = (self._stale or self._book.turned) and self._clock() >= self._next_plan
        return self._plain > 0 or (self._off and not anew and not trial)

    def rest(self, batch: Batch) -> Budget:
        """No guesses for anybody, as `resting` promised: a round that was launched ahead."""
        self._plain -= 1
        self._stale = self._stale or abs(len(batch) - self._size) * FEWER > self._size
        depths = [0] * len(batch)
        self._book.ask(batch, depths, ahead=True)
        return self._shape.budget(batch, depths)

    def cut(self, batch: Batch, proposal: Proposal) -> Proposal:
        """Drop guesses that their drafter itself believes in too little for their row to pay (`cut.py`)."""
        return shorten(batch, proposal, self._load, self.costs)

    def observe(self, event: StepEvent) -> None:
        """Learn what was accepted and how long it took."""
        asked = self._book.settle(event)
        now = self._clock()
        wall, self._last = min(event.seconds, now - self._last), now
        if asked is None or event.prefill:
            return
        batch, inside = len(event.committed), event.draft_seconds + event.verify_seconds
        self.costs.add_verify(batch, event.rows, event.verify_seconds)
        other = max(0.0, wall - inside)
        known = bucket(batch) in self._plain_sizes
        spare = max(0.0, other - self.costs.other(batch)) if known else 0.0
        if asked.deepest:
            self._book_drafting(asked, event.draft_seconds)
            if known:
                self.costs.add_wait(batch, spare)
            self._watch(asked, event, max(wall, inside))
        elif asked.ahead or not self.costs.ahead:
            self.costs.add_other(batch, other, asked.ahead)
            self._plain_sizes.add(bucket(batch))
        else:  # a round that might have been launched ahead, and was not since a trial was due, or had been
            self._allowance.pay(spare, 0.0)
        self._allowance.earn(max(wall, inside))
        if asked.probes:
            self._charge(asked, event, spare)

    @property
    def reason(self) -> str:
        """Why the depth was last changed."""
        return self._story.reason

    def explain(self) -> str:
        return self._story.explain()

    def _watch(self, asked: Asked, event: StepEvent, seconds: float) -> None:
        """Whether the last rounds with guesses were slower than plain ones, whatever was expected of them."""
        if asked.probes:
            return
        self._lately.append((sum(len(item.tokens) for item in event.committed), seconds))
        batch = len(event.committed)
        if len(self._lately) < FEW or bucket(batch) not in self._plain_sizes:
            return
        tokens, took = (sum(column) for column in zip(*self._lately, strict=True))
        plain = batch / (self.costs.plain(batch, batch) + self.costs.other(batch))
        if tokens / took < LOSING * plain:
            self._planned, self._next_plan = -SETTLED, float("-inf")
            self._lately.clear()

    def _plan(self, batch: Batch, limits: list[tuple[int, int]]) -> None:
        """Give every request that may look ahead a depth, anew or as before."""
        who = [b for b, (_, high) in enumerate(limits) if high]
        among = frozenset(batch.requests[b].id for b in who)
        settled = among == self._among and not self._book.turned and self._book.round - self._planned < self._keep
        begun = self._clock()
        if settled or begun < self._next_plan:
            return
        self._book.turned = False
        states = [self._book.state(batch.requests[b]) for b in who]
        load = self._measure(batch, [limits[b] for b in who], who)
        planner = Planner(load, self.costs)
        plan = planner.best()
        if all(s.depth is not None for s in states):
            kept = np.array([min(limits[b][1], max(limits[b][0], s.depth or 0)) for b, s in zip(who, states, strict=True)])
            old = planner.value(kept)
            least = BETTER if any(plan.depths) and any(old.depths) else SURE if any(plan.depths) else SAFER
            if plan.speed <= old.speed * least:
                plan = old
        same = all(s.depth == d for s, d in zip(states, plan.depths, strict=True))
        self._keep = min(2 * self._keep, SETTLED) if same else REPLAN
        for state, depth in zip(states, plan.depths, strict=True):
            state.depth = depth
        self._planned, self._among, self._load = self._book.round, among, load
        self._off, self._stale, self._size = not any(plan.depths), False, len(batch)
        self._lately.clear()
        self._gain = plan.speed / planner.value(load.low).speed if any(plan.depths) else 1.0
        ended = self._clock()
        self._thought = min(ended - begun, 2 * max(self._thought, QUICK))  # a stall is no price
        self._next_plan = ended + self._thought / (WONDERING if self._off else THINKING)
        mean = sum(plan.depths) / len(plan.depths)
        self._story.change(mean, lambda: self._why(planner, plan))

    def _rests(self, batch: int) -> bool:
        """Whether this round is plain for the sake of comparison: what plain decoding takes must be known well where guesses gain
        little. It costs about half a percent. Sizes of batches not met before are tried at once."""
        new = self.overlaps and bucket(batch) not in self._referenced
        self._referenced.add(bucket(batch))
        since = self._book.round - self._plain_at
        due = new or (self._gain > 1.0 and since >= max(GAP, (self._gain - 1.0) / REFERENCE))
        self._plain = (FEW if new else 1) if due else 0
        return due

    def _measure(self, batch: Batch, limits: list[tuple[int, int]], who: list[int]) -> Load:
        """The load, with every request's chances as they look now."""
        accept, offer, reach = self._book.accept, self._book.offer, self._book.reach
        common, offered, reached = accept.everybody(), offer.everybody(), reach.everybody()
        states = [self._book.state(batch.requests[b]) for b in who]
        alike, offering = pull([s.accept for s in states]), pull([s.offer for s in states])
        return Load(
            len(batch),
            sum(batch.ready),
            sum(batch.pending),
            np.array([accept.of(s.accept, common, alike) for s in states]),
            np.array([offer.of(s.offer, offered, offering) for s in states]),
            np.array([min(low, self._shape.depth) for low, _ in limits]),
            np.array([min(high, self._shape.depth) for _, high in limits]),
            self._book.width(self._shape.width),
            np.array([reach.of(s.reach, reached, offering) for s in states]),
            self._paced,
        )

    def _why(self, planner: Planner, plan: Plan) -> str:
        load = planner.load
        first = float(load.accept[:, 0].mean())
        if any(plan.depths):
            return f"first guess accepted {first:.0%}, {self._gain:.2f} times plain speed expected"
        one = planner.value(np.minimum(load.high, 1)).speed / plan.speed
        return f"first guess accepted {first:.0%}; with one guess each {one:.2f} times plain speed expected"

    def _probe(self, batch: Batch, limits: list[tuple[int, int]], depths: list[int]) -> frozenset[int]:
        """Requests that are off and get a guess all the same, while the allowance lasts; `depths` is changed."""
        book = self._book
        off = [b for b, (low, high) in enumerate(limits) if high > low and depths[b] == 0]
        waiting = [(book.state(batch.requests[b]), b) for b in off]
        due = [(s.drafted, b) for s, b in waiting if self._allowance.due(book.round - s.drafted, s.eager)]
        if not due or not self._allowance.any:
            return frozenset()
        costs, size, rows = self.costs, len(batch), sum(batch.pending) + sum(depths)
        others, deepest = sum(d > 0 for d in depths), max(depths)
        before = costs.plain(size, rows) + costs.guessing(size, others, deepest)
        chosen: set[int] = set()
        for _, b in sorted(due):
            rows_after = rows + round(self._shape.width)
            price = costs.plain(size, rows_after) + costs.guessing(size, others + 1, max(deepest, 1)) - before
            if not self._allowance.affords(price):
                break
            depths[b], others, deepest, rows = 1, others + 1, max(deepest, 1), rows_after
            chosen.add(b)
        return frozenset(chosen)

    def _charge(self, asked: Asked, event: StepEvent, spare: float) -> None:
        """Pay for probes what they took, less what they brought; `spare`: seconds that they kept from overlapping."""
        batch, items = len(event.committed), event.committed
        others = [d for b, d in enumerate(asked.depths) if d and b not in asked.probes]
        tokens = sum(len(item.tokens) for item in items)
        won = sum(items[b].accepted for b in asked.probes)
        rows = event.rows - sum(items[b].drafted for b in asked.probes)
        without = self.costs.plain(batch, rows) + self.costs.guessing(batch, len(others), max(others, default=0))
        extra = event.draft_seconds + event.verify_seconds + spare - without
        gain = won * (without + self.costs.other(batch)) / max(1, tokens - won)
        self._allowance.pay(extra, gain)
        for b in asked.probes:
            state, item = self._book.states.get(items[b].request.id), items[b]
            if state is not None:
                state.eager = item.accepted == item.drafted > 0 and gain >= extra

    def _book_drafting(self, asked: Asked, seconds: float) -> None:
        if not asked.deepest:
            return
        self._unsteady = 0 if asked.steady else self._unsteady + 1
        if asked.steady or self._unsteady >= PATIENCE:
            self.costs.add_draft(asked.drafted, asked.deepest, seconds)
