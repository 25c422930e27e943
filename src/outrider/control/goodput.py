"""The default: look ahead as far as it pays in tokens per second of the whole batch, now, on this machine.

Before drafting, `plan.py` weighs chances (`rates.py`) against measured seconds (`costs.py`). Only past rounds count, so that
under the classical rules the number of guesses never depends on what was drawn. A plan is kept for a few rounds, and given up
only for one that is better by more than noise. Requests that are off are tried again from an allowance of 1 % of the time;
a trial that pays for itself may be repeated at once, which is how a request comes back on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median_low

import numpy as np

from ..protocols import Drafter
from ..types import Batch, Budget, Proposal, StepEvent
from .book import Asked, Book
from .costs import CROWD, bucket
from .cut import shorten
from .judge import ODD
from .limits import Shape, all_bounds
from .lookout import Lookout
from .plan import FREE, Load, Plan, Planner
from .plan import limits as depths_worth
from .probes import AS_DEAR, GAP, NEAR, SPARSE, TRIED, Allowance, halves
from .prompts import Prompts
from .shelf import Known
from .stalls import LEAST, SPIKE
from .story import Story, why
from .thought import TASTE
from .trees import Trees
from .usual import Usual

REPLAN, SETTLED = 3, 12
"""Rounds a plan is kept, if nobody comes, few go and no text turns: at first, and when it was confirmed again and again."""
BETTER = 1.02
"""A new plan must promise this much more than the old one ..."""
SURE = 1.03
"""... or this much, where none were made before ..."""
SAFER = 1.005
"""... or this much, if it is to make no guesses at all: being no slower than plain decoding comes first."""
REFERENCE = 0.005
"""Share of time for plain rounds while guesses are made."""
FEW = 4
"""Plain rounds in a row that tell what they take, launched ahead; and rounds in a row that may be stalls."""
FEWER = 8
"""A plan stands until a batch has become smaller by one part in so many; while it gives nobody guesses, or larger."""


class Goodput:
    """See above. `known` is what was learned before, if anything was; `costs` may be filled beforehand (`calibrate.py`);
    `overlaps`: plain rounds can be launched ahead, so that what they take must be seen before guesses are compared with them;
    `clock` tells seconds."""

    name = "goodput"

    def __init__(self, drafter: Drafter, clock: Callable[[], float] = time.perf_counter, known: Known | None = None) -> None:
        self.known = known or Known(drafter.depth)
        self.costs, self._stalls = self.known.costs, self.known.stalls
        self._shape, self._paced = Shape(drafter), bool(getattr(drafter, "paced", False))
        self._stalls.paced = self._paced
        self._book = Book(self.known)
        self._allowance = Allowance(self.known.trials, self.known.purse)
        self._trees = self.known.trees = self.known.trees or Trees(self._shape.width, fixed=self._paced)
        self._story = Story(self.name, clock)
        self._clock, self._last = clock, float("-inf")
        self._planned, self._keep, self._among = -SETTLED, REPLAN, frozenset[int]()
        self._gain, self._plain_at, self._drafted_at = 1.0, 0, 0
        self._off = self._stale = self._late = False
        self._load: Load | None = None
        self._plain_sizes, self._referenced = self.known.plain, self.known.referenced
        self._size = self._width = self._plain = 0
        self._usual_depth: int | None = None
        self.overlaps, self._eager = False, False
        self._judge, self._lookout, self._watches, self._spikes = self.known.judge, Lookout(), False, 0
        self._usual, self._thought = Usual(self.costs), self.known.thought
        self._before: Asked | None = None
        self._longer: tuple[float, int, int] | None = None  # of the last round, if plain and launched ahead: its size and rows
        self._given_up, self._prompts = False, Prompts()
        self._judge.inherit()

    def budget(self, batch: Batch) -> Budget:
        """The look-ahead of this round, from the rounds before."""
        return self._within(batch, all_bounds(batch, self._shape.depth))

    def _within(self, batch: Batch, limits: list[tuple[int, int]]) -> Budget:
        """The same, between least and most look-ahead of every request."""
        free = [b for b, (low, high) in enumerate(limits) if high > low]
        depths = [low for low, _ in limits]
        probes = frozenset[int]()
        if free and not self._grows(len(batch)):
            self._plan(batch, limits)
            rests = not any(depths) and self._rests(len(batch))
            wishes = [0 if rests else min(limits[b][1], self._book.state(batch.requests[b]).depth or 0) for b in free]
            most = self._stalls.within(len(batch), max(wishes))
            for b, wish in zip(free, wishes, strict=True):
                depths[b] = min(wish, most)
            self._story.count([depths[b] for b in free])
            self._off = self._off or (not most and not rests)
            if not rests and not self._waited_for:  # what a trial takes then, nobody can tell
                probes = self._probe(batch, limits, depths)
            if any(depths):
                self._drafted_at = self._book.round
            else:
                self._plain_at = self._book.round
        return self._asked(batch, depths, probes)

    @property
    def _waited_for(self) -> bool:
        """Whether the last round that was told read prompts: the device has nothing to do until the first one after it comes."""
        return self.overlaps and self._prompts.near

    def _grows(self, size: int) -> bool:
        """Whether a large batch has just become larger, and may go on so: guesses would keep those who come next waiting."""
        before, self._width = self._width, size
        return self.overlaps and size > CROWD and (size - before) * FEWER > before

    def _asked(self, batch: Batch, depths: list[int], probes: frozenset[int] = frozenset(), foreseen: bool = False) -> Budget:
        """Note it down."""
        if any(depths):
            self._stalls.use(len(batch), max(depths))
            self._trees.used(len(batch))
        self._judge.tick(len(batch))
        budget = self._shape.budget(batch, depths, self._trees.now)
        self._book.ask(batch, depths, probes, batch.blind, foreseen, self._trees.chains(budget))
        return budget

    @property
    def resting(self) -> bool:
        """Nobody was given guesses in the last round, and nobody is to get any in the next: the plan gives none and no trial is
        due, or some rounds in a row are plain for comparison."""
        asked = self._book.open[-1] if self._book.open else None
        if asked is None or any(asked.depths):
            return False
        trial = self._allowance.ripe(len(asked.ids)) and (self._eager or self._book.round - self._drafted_at >= GAP)
        return self._plain > 0 or (self._off and not trial)

    def rest(self, batch: Batch) -> Budget:
        """No guesses for anybody, as `resting` promised: a round launched ahead, while the device works. A plan that is due
        is made meanwhile."""
        if self._late or (self._off and (self._stale or self._book.turned) and self._thought.due()):
            self._plan(batch, all_bounds(batch, self._shape.depth))
        self._plain, self._width = self._plain - 1, len(batch)
        self._stale = self._stale or abs(len(batch) - self._size) * FEWER > self._size
        self._judge.tick(len(batch))
        self._book.ask(batch, [0] * len(batch), ahead=True)
        return Budget.none(len(batch))

    def cut(self, batch: Batch, proposal: Proposal) -> Proposal:
        """Drop guesses that their drafter itself believes in too little for their row to pay (`cut.py`)."""
        return shorten(batch, proposal, self._load, self.costs)

    def observe(self, event: StepEvent) -> None:
        """Learn what was accepted and how long it took."""
        asked, before = self._book.settle(event), self._before
        now = self._clock()
        wall, self._last, self._before = min(event.seconds, now - self._last), now, asked
        self._thought.lived(wall)
        waits = self._prompts.told(event.prefill > 0) and self.overlaps
        longer, self._longer = self._longer, None
        if asked is None or event.prefill:
            return
        if asked.ahead and not asked.deepest:
            self._longer = wall, len(event.committed), event.rows
        self._allowance.earn(wall, len(event.committed))
        if self._stalls.wait(wall):
            self._again()
        if self._passes(asked) and len(event.committed) > CROWD and self._book.round % SPARSE:
            return
        # What passes between two rounds is this one's price only if those beside it are like it: it may have been drafted in the
        # time of the one before, and the one after in its own.
        after = self._book.open[0] if self._book.open else None
        alone = (asked.early and not asked.like(before)) or (after is not None and not asked.like(after))
        spiked = not waits and self._spiked(asked, event, wall)
        if not waits and not spiked:
            if asked.deepest and not self.costs.tried:
                self._allowance.owe(min(event.draft_seconds, event.verify_seconds), len(event.committed))
            self._learn(asked, event, wall, alone)
        if asked.deepest and not alone and not waits:
            self._hear(asked, event, wall)
        if asked.probes:
            more = longer[0] - self._usual.seconds(self._book.round, *longer[1:]) if longer else 0.0
            early = 0.0 if not asked.early or asked.ahead else max(event.draft_seconds, more)  # begun in the last one's time
            self._charge(asked, event, wall + early, spiked, asked.early and bool(before and before.probes))
        if self._given_up and asked.deepest and not asked.probes:
            self._regret(event, wall)

    def _regret(self, event: StepEvent, wall: float) -> None:
        """A round with guesses that was under way when they were given up: if it paid, the plan is made anew."""
        batch, tokens, self._given_up = len(event.committed), sum(len(item.tokens) for item in event.committed), False
        if tokens * self._usual.seconds(self._book.round, batch, batch) > batch * wall:
            self._again()

    def _again(self) -> None:
        """The plan is to be made anew at once."""
        self._stale, self._planned = True, -SETTLED
        self._thought.urge()

    def _passes(self, asked: Asked) -> bool:
        """Whether it was a plain round among plain ones, which tells little."""
        return self._off and asked.ahead and not asked.deepest

    def _spiked(self, asked: Asked, event: StepEvent, wall: float) -> bool:
        """Whether the round took so much longer than expected that it tells nothing about the next."""
        batch = len(event.committed)
        known = bucket(batch) in self._plain_sizes
        if not known and asked.deepest:
            return False
        usual = self._expected(asked, event) if known else event.verify_seconds + LEAST / SPIKE
        self._spikes = self._spikes + 1 if wall > SPIKE * usual else 0
        if not 0 < self._spikes <= (FEW if known else 2 * FEW):  # again and again: the machine is that slow now
            return False
        if not known:
            self._referenced.discard(bucket(batch))  # something was compiled: once more
        elif asked.deepest:
            self._stalls.saw(batch, asked.deepest, wall - usual)
            if not self.costs.tried:  # better a rough price than none
                self.costs.add_draft(asked.drafted, asked.deepest, min(event.draft_seconds, usual), asked.chain)
        return True

    def _learn(self, asked: Asked, event: StepEvent, wall: float, alone: bool) -> None:
        """Enter the parts of a round into the tables. Together they are all that passed since the round before: what was hidden
        behind something else took no time, and what no part reports was waited for. `alone`: among others of another kind."""
        batch, costs = len(event.committed), self.costs
        costs.add_verify(batch, event.rows, event.verify_seconds, asked.chain)
        known = bucket(batch) in self._plain_sizes
        if asked.deepest:
            rest = max(0.0, wall - event.verify_seconds - (costs.other(batch) if known else 0.0))
            drafting = min(event.draft_seconds, rest) if known else event.draft_seconds
            self._book_drafting(asked, drafting)
            if known:
                costs.add_wait(batch, asked.deepest, rest - drafting, asked.chain)
        elif costs.ahead and not asked.ahead:  # it might have been, and was not since a trial was due, or had been
            self._allowance.wait(max(0.0, wall - event.verify_seconds - costs.other(batch)), batch)
        elif not (asked.ahead and alone):
            costs.add_other(batch, max(0.0, wall - event.verify_seconds - event.draft_seconds), asked.ahead)
            self._plain_sizes.add(bucket(batch))

    def _hear(self, asked: Asked, event: StepEvent, wall: float) -> None:
        """Compare a round with guesses with plain ones, whatever was expected of it."""
        batch = len(event.committed)
        if bucket(batch) in self._plain_sizes:
            tokens = sum(len(item.tokens) for item in event.committed)
            plain = batch / self._usual.seconds(self._book.round, batch, batch)
            if batch == 1 and not asked.probes:
                self._lookout.saw(tokens > 1, min(wall, ODD * self._expected(asked, event)), tokens / plain)
            if not self._watches and self._judge.add(batch, tokens, wall, plain, steady=asked.steady):
                self._again()
                self._judge.renew()

    def _expected(self, asked: Asked, event: StepEvent) -> float:
        """Seconds that such a round should take."""
        size, now = len(event.committed), self._book.round
        return self._usual.seconds(now, size, event.rows, asked.drafted, asked.deepest, asked.chain)

    @property
    def reason(self) -> str:
        """Why the depth was last changed."""
        return self._story.reason

    def explain(self) -> str:
        return self._story.explain()

    def _plan(self, batch: Batch, limits: list[tuple[int, int]]) -> None:
        """Give every request that may look ahead a depth, anew or as before."""
        held, self._late = self._late, False
        who = [b for b, (_, high) in enumerate(limits) if high]
        among = frozenset(batch.requests[b].id for b in who)
        alike = among <= self._among and len(self._among - among) * FEWER < max(FEWER, len(self._among))
        settled = alike and not self._book.turned and self._book.round - self._planned < self._keep
        if settled or not who:  # everybody was in the last plan
            return
        states = [self._book.state(batch.requests[b]) for b in who]
        begun, new = self._clock(), held or any(s.depth is None for s in states)
        idle = self._thought.rests(bucket(len(batch)), self._load is not None and self._load.fresh)
        due = self._thought.due(new, idle)
        idles = self._waited_for and not self._book.open  # it is planned in the device's time, at the latest in the next round
        self._late = due and new and idles and not held and self._usual_depth is not None
        if self._late or not due:
            self._stale, self._off = self._stale or (new and not due), self._off or (idle and self._usual_depth is None)
            for state in states:
                state.depth = self._usual_depth if state.depth is None else state.depth
            return
        self._book.turned = False
        planner = self._trees.choose(self._measure(batch, [limits[b] for b in who], who), self.costs)
        load, plan = planner.load, self._best(planner)
        if not new or (self.costs.tried and not any(s.depth for s in states)):
            kept = np.array([min(limits[b][1], max(limits[b][0], s.depth or 0)) for b, s in zip(who, states, strict=True)])
            kept = np.maximum(load.low, np.minimum(kept, self._stalls.within(len(batch), int(kept.max(initial=0)))))
            old = planner.value(kept)
            least = BETTER if any(plan.depths) and any(old.depths) else SURE if any(plan.depths) else SAFER
            if plan.speed <= old.speed * least:
                plan = old
        self._watches = not any(plan.depths) and self._lookout.stays and len(batch) == 1 and not self._judge.rests(1)
        if self._watches:
            plan = self._best(Planner(replace(load, low=np.maximum(load.low, np.minimum(load.high, 1))), self.costs))
        self._given_up = not any(plan.depths) and any(s.depth for s in states)
        self._keep = min(2 * self._keep, SETTLED) if [s.depth for s in states] == list(plan.depths) else REPLAN
        if not self.costs.tried and len(batch) == 1:
            self._keep = TASTE
        for state, depth in zip(states, plan.depths, strict=True):
            state.depth = depth
        self._planned, self._among, self._load = self._book.round, among, load
        self._off, self._stale, self._size = not any(plan.depths), False, len(batch)
        self._judge.renew()
        self._gain = plan.speed / planner.least.speed if any(plan.depths) else 1.0
        self._thought.planned(self._clock() - begun, bucket(len(batch)) if self._off else None)
        self._usual_depth = median_low(plan.depths) if plan.depths else None
        mean = sum(plan.depths) / len(plan.depths)
        self._story.change(mean, lambda: why(planner, plan, self._gain))

    def _best(self, planner: Planner) -> Plan:
        """The best plan, without depths that would cost a stall now, and with none while guessing has to rest. What drafting
        takes is found out with one guess; where many share a pass, deeper ones tell more."""
        load, stalls = planner.load, self._stalls
        most = int(load.high.max(initial=0))
        if self._judge.rests(load.batch):
            return planner.least
        if not self.costs.tried and not self.overlaps and load.batch == 1:
            return planner.value(np.maximum(load.low, np.minimum(load.high, 1)))
        open_ = frozenset(d for d in range(most + 1) if stalls.open(load.batch, d))
        plan = planner.best()
        if len(open_) > most:
            stalls.content()
            return plan
        best = planner.best(open_)
        if max(plan.depths) not in open_ and plan.speed > best.speed * BETTER:
            stalls.want(load.batch, max(plan.depths), plan.speed / best.speed - 1)
        else:
            stalls.content()
        return best

    def _rests(self, batch: int) -> bool:
        """Whether this round is plain for the sake of comparison: what plain decoding takes must be known well where guesses gain
        little. It costs about half a percent. Sizes of batches not met before are tried at once."""
        since, size = self._book.round - self._plain_at, bucket(batch)
        new = self.overlaps and (size not in self._referenced or (size not in self._plain_sizes and since >= FEW * GAP))
        self._referenced.add(size)
        due = new or (self._gain > 1.0 and since >= max(GAP, (self._gain - 1.0) / REFERENCE))
        self._plain = (FEW if new else 1) if due else 0
        return due

    def _measure(self, batch: Batch, limits: list[tuple[int, int]], who: list[int]) -> Load:
        """The load, with every request's chances as they look now."""
        low, high = (np.minimum(np.array(ends), self._shape.depth) for ends in zip(*limits, strict=True))
        load = self._book.load(batch, [self._book.state(batch.requests[b]) for b in who], low, high)
        return replace(load, width=self._book.width(len(batch), self._shape.width), paced=self._paced)

    def _probe(self, batch: Batch, limits: list[tuple[int, int]], depths: list[int]) -> frozenset[int]:
        """Requests that are off and get a guess all the same, while the allowance lasts; `depths` is changed."""
        book, self._eager = self._book, False
        if self._off and not self._allowance.ripe(len(batch), 1.0 if len(batch) > CROWD else NEAR):
            return frozenset()
        off = [b for b, (low, high) in enumerate(limits) if high > low and depths[b] == 0]
        waiting = [(book.state(batch.requests[b]), b) for b in off]
        due = [(s.drafted, b) for s, b in waiting if s.eager or book.round - s.drafted >= GAP]
        if not due:
            return frozenset()
        costs, size, rows = self.costs, len(batch), sum(batch.pending) + sum(depths)
        others, deepest, linear = sum(d > 0 for d in depths), max(depths), self._trees.linear
        before = costs.working(size, rows, others, deepest, linear)
        b = min(due)[1]
        depth = limits[b][1] if self._paced and 1 < size <= FREE else self._stalls.least(size, limits[b][1])
        if size == 1:
            least = self._trial(1, rows, (0, 1), depth)
            deeper = [d for d in depths_worth(limits[b][1]) if d > depth and self._stalls.price(1, d) == 0]
            depth = max([d for d in deeper if self._trial(1, rows, (0, 1), d) <= AS_DEAR * least], default=depth)
        extra = self._stalls.price(size, max(deepest, depth)) - before
        prices = ((n, self._trial(size, rows, (others, n), depth, deepest) + extra) for n in halves(min(len(due), TRIED)))
        count = next((n for n, price in prices if self._allowance.affords(price, size)), 0)
        chosen = [b for _, b in sorted(due)[:count]]
        for b in chosen:
            depths[b] = min(depth, limits[b][1])
        return frozenset(chosen)

    def _trial(self, size: int, rows: int, drafted: tuple[int, int], depth: int, deepest: int = 0) -> float:
        """Seconds of a round in which, beside those who guess anyhow up to `deepest`, some more do: `drafted` says how many."""
        after, chain = rows + round(drafted[1] * depth * self._trees.now), self._trees.linear
        return self.costs.working(size, after, sum(drafted), max(depth, deepest), chain)

    def _charge(self, asked: Asked, event: StepEvent, wall: float, stalled: bool, joined: bool) -> None:
        """Pay for probes what they took, less what they brought."""
        batch, tokens = len(event.committed), sum(len(item.tokens) for item in event.committed)
        won = sum(event.committed[b].accepted for b in asked.probes)
        without = self._book.without_probes(asked, event.committed, event.rows)
        extra, gain = wall - without, won * without / max(1, tokens - won)
        self._allowance.pay(extra, gain, stalled, batch, joined)
        if batch == 1:
            self._lookout.saw(won > 0, min(wall, ODD * self._expected(asked, event)), tokens * without)
            if self._off and self._lookout.stays:
                self._again()
        self._eager = self._book.tried(asked, event.committed, gain >= extra) or self._eager

    def _book_drafting(self, asked: Asked, seconds: float) -> None:
        known, costs, shape = self._book.caught_up(asked), self.costs, (asked.drafted, asked.deepest)
        if known or (costs.tried and seconds < costs.draft(*shape, asked.chain)):  # catching up takes longer
            costs.add_draft(*shape, seconds, asked.chain)
