"""Who was asked for what, round by round, and each request's record."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..types import Batch, Committed, Finish, Request, StepEvent
from .costs import CROWD, bucket
from .plan import Ints, Load
from .rates import OWN, Beliefs, Track, estimate, estimates, pull
from .shelf import Known
from .turns import Turns

_TIDY = 256
"""Rounds between looks for requests that ended unseen (stopped by the user)."""
PATIENCE = 8
"""Rounds of catching up in a row after which drafting time is booked all the same."""
ENOUGH = 16
"""Requests of a round with guesses that are learned from, beside those that are only tried: of more, others each round. To book
all of a crowd takes the host longer than the device takes to guess."""
_NEVER = -(10**9)


@dataclass(slots=True)
class State:
    """What is remembered of a request. `reach`: how often a position was offered where all before it were accepted; `depth`: what
    the last plan gave it (None: none did yet); `drafted`: the round it was last drafted for; `eager`: its last probe paid for
    itself, so the next may follow at once."""

    request: Request
    accept: Track
    offer: Track
    reach: Track
    depth: int | None = None
    drafted: int = _NEVER
    eager: bool = False
    turns: Turns = field(default_factory=Turns)


@dataclass(frozen=True, slots=True)
class Asked:
    """A round's budget, as it was asked for: `depths` by request, the `deepest` of them, how many requests were `drafted` for;
    `probes`: indices of requests that are only tried; `steady`:
    all who were drafted for had been in the round before, so that the time taken is not that of catching up; `ahead`: it was
    launched before the round before it was read; `early`: before that was told, at least; `chain`: as for `Costs`;
    `foreseen`: its guesses were known beforehand (`foresight.py`), and so many tokens `promised` by them."""

    ids: tuple[int, ...]
    depths: tuple[int, ...]
    deepest: int
    drafted: int
    probes: frozenset[int] = frozenset()
    steady: bool = True
    ahead: bool = False
    early: bool = False
    foreseen: bool = False
    promised: float = 0.0
    chain: bool = False

    def like(self, other: Asked | None) -> bool:
        """Whether another round was asked for the same, as far as time is concerned."""
        if other is None:
            return False
        form = self.deepest, bucket(self.drafted), self.chain
        return form == (other.deepest, bucket(other.drafted), other.chain)


@dataclass(slots=True)
class Book:
    """Records by request, on top of what is known already. Budgets and events are matched by who took part, in order, so that
    rounds may be in flight. `turned`: a text has turned since somebody last looked; `going`: the last round has guesses;
    `unsteady`: rounds in a row in which somebody caught up with the text; `turn`: rounds that were learned from."""

    known: Known
    round: int = 0
    turned: bool = False
    going: bool = False
    unsteady: int = 0
    turn: int = 0
    states: dict[int, State] = field(default_factory=dict)
    open: deque[Asked] = field(default_factory=lambda: deque[Asked](maxlen=8))

    def state(self, request: Request) -> State:
        found = self.states.get(request.id)
        if found is None:
            accept, offer, reach = (Track.empty(self.known.positions) for _ in range(3))
            found = self.states[request.id] = State(request, accept, offer, reach)
        return found

    def ask(
        self,
        batch: Batch,
        depths: Sequence[int],
        probes: frozenset[int] = frozenset(),
        ahead: bool = False,
        foreseen: bool = False,
        chain: bool = False,
    ) -> None:
        """Note what this round asks for."""
        steady = True
        drafted = [self.state(r) for r, depth in zip(batch.requests, depths, strict=True) if depth] if any(depths) else []
        for state in drafted:
            steady = steady and state.drafted == self.round - 1
            state.drafted = self.round
        ids, early, deepest = tuple([r.id for r in batch.requests]), len(self.open) > 0, max(depths, default=0)
        asked = Asked(ids, tuple(depths), deepest, len(drafted), probes, steady, ahead, early, foreseen, chain=chain)
        self.open.append(asked)
        self.round, self.going = self.round + 1, deepest > 0
        if self.round % _TIDY == 0:
            self.states = {i: s for i, s in self.states.items() if s.request.finish is Finish.RUNNING}

    def settle(self, event: StepEvent) -> Asked | None:
        """Learn from a round; what had been asked in it, or None if nobody knows."""
        ids = tuple([item.request.id for item in event.committed])
        while self.open:
            asked = self.open.popleft()
            if asked.ids == ids:
                break
        else:
            return None
        if not asked.foreseen:  # whoever knows the guesses asks for good ones only
            if asked.deepest:
                self._learn(event, asked)
            else:  # what is known grows older
                self.known.chances(len(ids)).rest()
        if asked.deepest:
            self._measure(event.committed)
        self._forget(event.committed)
        return asked

    def _learn(self, event: StepEvent, asked: Asked) -> None:
        """Who was offered guesses, and how many were right."""
        items, turns = event.committed, -(-asked.drafted // ENOUGH)
        self.turn += 1
        some = enumerate(b for b, depth in enumerate(asked.depths) if depth)
        chosen = [b for i, b in some if i % turns == self.turn % turns or b in asked.probes]
        drafted = [(self.state(items[b].request), items[b], asked.depths[b]) for b in chosen if items[b].tokens]
        chances = self.known.chances(len(event.committed))
        beliefs = chances.accept.beliefs(1)
        turned = sum(self._turn(s, c, beliefs) for s, c, _ in drafted)
        self.turned = self.turned or turned > 0
        if turned:
            chances.accept.doubt(turned / len(drafted))
        chances.accept.learn(((s.accept, c.accepted, len(c.offered_at)) for s, c, _ in drafted), turns)
        whole = [(s, c, d, len(c.offered_at)) for s, c, d in drafted if c.finish is Finish.RUNNING]
        chances.offer.learn(((s.offer, n, d) for s, _, d, n in whole), turns)
        chances.reach.learn(((s.reach, min(c.accepted + 1, n), min(c.accepted + 1, d)) for s, c, d, n in whole), turns)

    def _measure(self, items: Sequence[Committed]) -> None:
        """How many rows a level of guesses has had lately."""
        crowd = len(items) > CROWD
        levels, nodes = self.known.nodes(crowd)
        for item in items:
            if item.offered_at:
                levels, nodes = OWN * levels + len(item.offered_at), OWN * nodes + item.drafted
        self.known.rows[crowd] = levels, nodes

    def caught_up(self, asked: Asked) -> bool:
        """Whether drafting in a round took what it takes: nobody had to catch up with the text, or somebody always has."""
        self.unsteady = 0 if asked.steady else self.unsteady + 1
        return asked.steady or self.unsteady >= PATIENCE

    def without_probes(self, asked: Asked, items: Sequence[Committed], rows: int) -> float:
        """Seconds that a round of so many rows should have taken without its probes."""
        others = [d for b, d in enumerate(asked.depths) if d and b not in asked.probes]
        left, batch, costs = rows - sum(items[b].drafted for b in asked.probes), len(items), self.known.costs
        return costs.working(batch, left, len(others), max(others, default=0), asked.chain) + costs.other(batch)

    def tried(self, asked: Asked, items: Sequence[Committed], paid: bool) -> bool:
        """Who was only tried may be tried again at once if guesses were right, all of them in a batch, and `paid` for themselves;
        whether anybody may."""
        eager = False
        for b in asked.probes:
            item, state = items[b], self.states.get(items[b].request.id)
            if state is not None:
                right = item.accepted > 0 if len(items) == 1 else item.accepted == item.drafted > 0
                state.eager = right and paid
                eager = eager or state.eager
        return eager

    def width(self, batch: int, most: float) -> float:
        """Rows of a level in batches like one of this size, of at most `most`, which is believed before anything was seen."""
        levels, nodes = self.known.nodes(batch > CROWD)
        return min(most, max(1.0, (nodes + most) / (levels + 1.0)))

    def load(self, batch: Batch, states: Sequence[State], low: Ints, high: Ints) -> Load:
        """A batch with the chances of requests who may look ahead, as they look now."""
        chances = self.known.chances(len(batch))
        common, offered, reached = chances.accept.beliefs(), chances.offer.beliefs(), chances.reach.beliefs()
        alike, offering = pull([s.accept for s in states]), pull([s.offer for s in states])
        return Load(
            len(batch),
            sum(batch.ready),
            sum(batch.pending),
            estimates([s.accept for s in states], common, alike),
            estimates([s.offer for s in states], offered, offering),
            low,
            high,
            reach=estimates([s.reach for s in states], reached, offering),
            fresh=not any(s.accept.age for s in states),
        )

    def _turn(self, state: State, item: Committed, beliefs: Beliefs) -> bool:
        """Whether a request's text has turned; its record then starts anew."""
        if not item.offered_at:
            return False
        hit = item.accepted > 0
        since = state.turns.see(estimate(state.accept, beliefs)[0], hit)
        if since is None:
            return False
        state.accept.renew(since[0] - 1, since[1] - hit)
        return True

    def _forget(self, items: Sequence[Committed]) -> None:
        for item in items:
            if item.finish is not Finish.RUNNING:
                self.states.pop(item.request.id, None)
