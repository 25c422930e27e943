"""Lookups whose guesses are seen beforehand: guesses are made where there are some and they pay, and nowhere else."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import accumulate

import pytest

from outrider.bench.simulate import Clock, laptop, overlapped
from outrider.config import SamplingParams
from outrider.control import Fixed, Foresight
from outrider.control.costs import CROWD
from outrider.control.fees import Fee
from outrider.control.foresight import LEANS, _together
from outrider.control.pace import ENOUGH, FEW, LATER, Pace
from outrider.control.probes import SPARSE
from outrider.control.streaks import LONGEST, Streaks, Text
from outrider.protocols import Controller
from outrider.types import NONE, Batch, Committed, Finish, Proposal, Request, StepEvent

from .test_lookout import stretches

DEPTH, ENDLESS, WRONG = 10, 10**6, -1


@dataclass
class Copies:
    """A text in which token p is p, and a lookup: there is a guess at `offered` places, right as far as `right` goes."""

    offered: list[bool]
    right: list[bool]
    depth: int = DEPTH
    nodes: int = DEPTH

    def preview(self, request: Request, most: int) -> list[int]:
        at, found, good = len(request.tokens), list[int](), True
        if not self.offered[at]:
            return found
        for p in range(at, at + most):
            good = good and self.right[p]
            found.append(p if good else WRONG)
        return found


def copies(seed: int, shortest: int, longest: int, poor: float = 0.2) -> Copies:
    """Half of it copied, in stretches of so many tokens; elsewhere there is a guess at one place in three, seldom right."""
    rng, kinds = random.Random(seed), stretches(seed, shortest, longest) * 8
    return Copies(
        [rng.random() < (0.95 if kind else 0.3) for kind in kinds], [rng.random() < (0.93 if kind else poor) for kind in kinds]
    )


@dataclass
class Desk:
    """One request and one controller, on a card (plain rounds are launched ahead) or a laptop."""

    lookup: Copies
    controller: Controller
    clock: Clock
    card: bool
    slow: float = 1.0
    request: Request = field(default_factory=lambda: Request(1, [0], 0, SamplingParams(max_tokens=ENDLESS), key=1, seed=1))
    known: int = 1
    rounds: list[tuple[int, int, float]] = field(default_factory=list)
    _flying: list[StepEvent] = field(default_factory=list)
    _rng: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self, tokens: int) -> float:
        """Tokens per second over so many more."""
        begun, at = self.clock.now, self.known
        while self.known < at + tokens:
            self.step()
        return (self.known - at) / (self.clock.now - begun)

    def step(self) -> None:
        """As the engine does: the next round is launched before the last one is told, or even read."""
        blind = bool(self._flying) and self.card and self.controller.resting
        if not blind:
            self.request.tokens = list(range(self.known))
        batch = Batch((self.request,), (1,), (True,), (64,), blind)
        budget = self.controller.rest(batch) if blind else self.controller.budget(batch)
        asked = budget.depth[0]
        if asked:
            guess = self.lookup.preview(self.request, asked)
            draft = self.noisy(2e-4 * self.slow)
        else:
            guess, draft = [], 0.0
        self.controller.cut(batch, Proposal.chains([guess]))
        rows = 1 + len(guess)
        verify = self.noisy((overlapped if self.card else laptop)(rows, 1) * (1.15 if self.card and rows > 1 else 1.0))
        lost = self.noisy(2.5e-4) if self.card and not blind else 0.0
        right = next((i for i, token in enumerate(guess) if token == WRONG), len(guess))
        self.clock.now += draft
        if not self.card:
            self.clock.now += verify
        self.tell()
        if self.card:
            self.clock.now += verify + lost
        self.known += right + 1
        tokens = tuple(range(self.known - right - 1, self.known))
        origins = (0,) * right + (NONE,)
        item = Committed(self.request, tokens, origins, len(guess), right, (1,) * len(guess), (), "", Finish.RUNNING)
        waited = 0.0 if not self.card else 0.6 * verify
        event = StepEvent((item,), draft, verify, draft + verify + lost, 0, rows, budget.depth, waited)
        self.rounds.append((asked, right, draft + verify + lost))
        self._flying.append(event)
        if not self.card:
            self.tell()

    def tell(self) -> None:
        for event in self._flying:
            self.request.tokens = list(range(event.committed[0].tokens[-1] + 1))
            self.controller.observe(event)
        self._flying.clear()

    def noisy(self, seconds: float) -> float:
        return seconds * max(0.5, self._rng.gauss(1.0, 0.05)) * (5.0 if self._rng.random() < 0.01 else 1.0)


def speed(lookup: Copies, card: bool, depth: int | None, slow: float = 1.0) -> float:
    """With foresight, or at a fixed depth."""
    clock = Clock()
    if depth is None:
        controller: Controller = Foresight(lookup, clock)  # type: ignore[arg-type]
        assert isinstance(controller, Foresight)
        controller.overlaps = card
    else:
        controller = Fixed(replace(lookup, depth=depth, nodes=depth))  # type: ignore[arg-type]
    desk = Desk(lookup, controller, clock, card, slow)
    desk.run(60)
    return desk.run(1500)


@pytest.mark.parametrize("card", [True, False], ids=["card", "laptop"])
@pytest.mark.parametrize(("shortest", "longest"), [(6, 25), (3, 8), (40, 120)])
def test_no_fixed_depth_is_faster_by_more_than_a_little(card: bool, shortest: int, longest: int) -> None:
    lookup = copies(1, shortest, longest)
    fixed = [speed(lookup, card, depth) for depth in (0, 2, 4, 8, DEPTH)]
    assert max(fixed) > 1.05 * fixed[0]
    assert speed(lookup, card, None) >= (1.05 if card else 0.95) * max(fixed)


@pytest.mark.parametrize("card", [True, False], ids=["card", "laptop"])
def test_where_nothing_is_copied_nothing_is_lost(card: bool) -> None:
    lookup = Copies([True] * 4000, [i % 12 == 0 for i in range(4000)])
    assert speed(lookup, card, None) >= 0.985 * speed(lookup, card, 0)


@pytest.mark.parametrize("card", [True, False], ids=["card", "laptop"])
def test_slow_lookups_do_no_harm(card: bool) -> None:
    """Guesses that take a hundred times as long as they should are hardly asked for."""
    lookup = copies(3, 6, 25)
    assert speed(lookup, card, None, slow=100 if card else 1000) >= 0.97 * speed(lookup, card, 0)


@pytest.mark.parametrize("card", [True, False], ids=["card", "laptop"])
def test_a_first_short_answer_loses_little(card: bool) -> None:
    """Of what guesses cost nothing is known yet; where something is copied, it is used all the same."""
    for lookup, least in ((Copies([True] * 400, [i % 5 == 0 for i in range(400)]), 0.96), (copies(4, 20, 40), 1.1)):
        clock, plain = Clock(), Clock()
        controller = Foresight(lookup, clock)  # type: ignore[arg-type]
        controller.overlaps = card
        fixed = Fixed(replace(lookup, depth=0, nodes=0))  # type: ignore[arg-type]
        assert Desk(lookup, controller, clock, card).run(128) >= least * Desk(lookup, fixed, plain, card).run(128)


def test_streaks_are_told_apart() -> None:
    request = Request(1, [0], 1, SamplingParams(), key=1, seed=1)
    streaks, text = Streaks(), Text(request)
    for _ in range(200):  # three right, one wrong, nothing
        assert text.look(streaks, lambda: [1, 1, 1, 2])
        request.tokens = [*request.tokens, 1, 1, 1, 3]
        assert text.look(streaks, lambda: [])
        request.tokens = [*request.tokens, 9]
    chances = streaks.chances()
    assert min(chances[:3]) > 0.95 and chances[3] < 0.1 and len(chances) == LONGEST + 1
    text.look(streaks, lambda: [1] * 8)
    assert text.look(streaks, lambda: []), "a text is looked at once"
    outlook = text.outlook(chances, 8)
    assert outlook[3] == pytest.approx(3.0, abs=0.2) and outlook[8] - outlook[3] < 0.2
    assert text.outlook(chances, 2) == outlook[:3]
    request.tokens = [*request.tokens, 1]
    assert not text.look(streaks, lambda: None)


def test_a_lookup_that_cannot_tell_is_controlled_as_any_other() -> None:
    class Dumb(Copies):
        def preview(self, request: Request, most: int) -> list[int]:
            return None  # type: ignore[return-value]

    lookup = Dumb([True] * 4000, [True] * 4000)
    clock = Clock()
    desk = Desk(Copies(lookup.offered, lookup.right), Foresight(lookup, clock), clock, card=False)  # type: ignore[arg-type]
    assert desk.run(500) > 2 * speed(lookup, False, 0)


def test_there_is_time_to_look_where_the_host_waits() -> None:
    pace = Pace()
    assert pace.affords(FEW) and not pace.affords(FEW + 1), "nothing is known yet"
    for _ in range(ENOUGH):
        pace.heard(1, 1e-3, 6e-4)
        pace.heard(64, 1.2e-3, 1e-4)
        pace.heard(5, 60e-3, 0.0)  # a CPU: nobody waits
        pace.looked(5e-5)
    assert pace.affords(1) and not pace.affords(64) and pace.affords(8)
    assert pace.affords(64, 80) and not pace.affords(64, 4)
    assert Pace().affords(1), "and one that knows nothing looks again"


def test_a_machine_that_was_slow_once_is_tried_again() -> None:
    pace = Pace()
    for _ in range(ENOUGH):
        pace.heard(1, 1e-3, 6e-4)
        pace.looked(1.0)
    refused = 0
    while not pace.affords(1):
        refused += 1
    assert refused == LATER
    for _ in range(ENOUGH):
        pace.looked(1e-5)
    assert pace.affords(1) and pace.later == LATER


def test_what_many_requests_would_take_is_found_out_with_one() -> None:
    """Eight texts are too many to be looked at while nobody knows what a look takes; then there is time for all."""
    lookup, clock = Copies([True] * 4000, [True] * 4000), Clock()
    controller, asked = Foresight(lookup, clock), 0  # type: ignore[arg-type]
    requests = tuple(Request(b + 1, [0], 0, SamplingParams(max_tokens=ENDLESS), key=b, seed=b) for b in range(8))
    batch = Batch(requests, (1,) * 8, (True,) * 8, (64,) * 8)
    for number in range(100):
        asked += bool(controller.budget(batch).any and controller._sees)
        clock.now += 0.1
        items = []
        for request in requests:
            request.tokens = [*request.tokens, number + 1]
            items.append(Committed(request, (number + 1,), (NONE,), 0, 0, (), (), "", Finish.RUNNING))
        controller.observe(StepEvent(tuple(items), 0.0, 0.1, 0.1, 0, 8, (0,) * 8))
    assert controller._pace.known and asked > 20


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("lucky", [0, 1, 5, 9, 10, 16])
def test_a_few_do_not_keep_the_others_waiting_unless_somebody_waits_for_their_places(
    lucky: int, queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 requests of which some have ten right guesses, in a round that takes half as long again as a plain one: most of them
    have to gain, since a batch ends with its slowest."""
    foresight = Foresight(copies(1, 5, 20))  # type: ignore[arg-type]
    prices = [1.0] * 300, [0.0] * 11, Fee(0.0, 0.5)
    monkeypatch.setattr(foresight, "_priced", lambda size, drafted: prices)
    requests = tuple(Request(i, [0], 1, SamplingParams(), key=i, seed=i) for i in range(16))
    batch = Batch(requests, (1,) * 16, (True,) * 16, (99,) * 16, queued=queued)
    outlooks = [[float(n) for n in range(11)] if b < lucky else [0.0] for b in range(16)]
    depth = foresight._worth(batch, outlooks, 10)
    assert (depth == 10) == (lucky > 9 or (lucky > 0 and queued)) and depth in (0, 10)


@dataclass
class Crowd:
    """16 requests, a round in flight as an engine has it. From round 200 on every one of them copies; `seen` has who was looked
    at, round by round, while the device was busy, and `guessed` whether the round had guesses."""

    depth: int
    extra: float = 2e-4
    size: int = 16
    seen: list[list[int]] = field(default_factory=list)
    guessed: list[bool] = field(default_factory=list)

    def run(self, rounds: int) -> Foresight:
        clock, looked, copying = Clock(), list[int](), False
        controller = Foresight(replace(copies(1, 5, 20), depth=self.depth, nodes=self.depth), clock)  # type: ignore[arg-type]

        def preview(request: Request, most: int) -> list[int]:
            looked.append(request.id)
            clock.now += 2.2e-5
            return [request.tokens[-1] + i + 1 for i in range(most)] if copying else []

        controller.preview, controller.overlaps, controller.costs.steady = preview, True, True
        requests = tuple(Request(b, [0], 0, SamplingParams(max_tokens=ENDLESS), key=b, seed=b) for b in range(self.size))
        plain = Batch(requests, (1,) * self.size, (True,) * self.size, (64,) * self.size)
        for _ in range(ENOUGH):
            controller._pace.looked(2.2e-5)
        depths = controller.budget(plain).depth
        for number in range(rounds):
            copying = number >= 200
            ahead = controller.rest(replace(plain, blind=True)).depth if controller.resting else None
            items = [self._written(r, d) for r, d in zip(requests, depths, strict=True)]
            ahead = controller.budget(plain).depth if ahead is None else ahead
            wall = 1e-3 + self.extra * any(depths)
            clock.now += wall
            controller._pace.heard(self.size, 1e-3, 3e-4)
            looked.clear()
            controller.observe(StepEvent(tuple(items), 0.0, wall, wall, 0, self.size + sum(depths), depths, 3e-4))
            self.seen.append(list(looked))
            self.guessed.append(any(depths))
            depths = ahead
        return controller

    @staticmethod
    def _written(request: Request, depth: int) -> Committed:
        tokens = [request.tokens[-1] + i + 1 for i in range(1 + depth)]
        request.tokens = [*request.tokens, *tokens]
        return Committed(request, tuple(tokens), (0,) * depth + (NONE,), depth, depth, (1,) * depth, (), "", Finish.RUNNING)


@pytest.mark.parametrize(("depth", "extra"), [(1, 2e-4), (2, 2e-4), (2, 1e-3), (3, 1e-3), (10, 1e-3)])
def test_a_large_batch_is_looked_at_a_part_at_a_time(depth: int, extra: float) -> None:
    """As long as nothing is foreseen that pays, every text in one of four rounds; what then pays is seen, and used."""
    crowd = Crowd(depth, extra)
    crowd.run(400)
    calm = crowd.seen[100:196]
    assert all(len(looked) <= crowd.size // SPARSE for looked in calm)
    for at in range(0, len(calm) - SPARSE, SPARSE):
        assert sorted(i for looked in calm[at : at + SPARSE] for i in looked) == list(range(crowd.size)), "each in its turn"
    assert not any(crowd.guessed[100:200])
    assert any(crowd.guessed[200 : 200 + 4 * SPARSE]), "what pays is seen within some turns"
    assert sum(crowd.guessed[220:]) > 150


def test_without_hints_a_large_batch_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Foresight, "_promises", lambda self, batch, limits: False)
    crowd = Crowd(10)
    crowd.run(400)
    assert not any(crowd.guessed[200:])


def test_hints_that_come_to_nothing_are_heard_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Foresight, "_promises", lambda self, batch, limits: True)
    monkeypatch.setattr(Foresight, "_decide", lambda self, batch, limits: ([0] * len(batch), 0.0))
    crowd = Crowd(10)
    crowd.run(400)
    awake = [number for number, looked in enumerate(crowd.seen) if len(looked) > crowd.size // SPARSE]
    assert len(awake) < 30 and not [n for n in awake if 300 <= n < 330]


def test_what_was_seen_some_tokens_ago_counts_while_it_comes_true() -> None:
    request = Request(1, [1, 2, 3], 3, SamplingParams(), key=1, seed=1)
    text, common = Text(request), [0.5] * (LONGEST + 1)
    assert text.look(Streaks(), lambda: [5, 6, 7]) and len(text.hope(common, 9)) == 4
    for token in (5, 6, 7, 8):
        request.tokens.append(token)
        assert text.hope(common, 9) == text.outlook(common, 9) and len(text.hope(common, 1)) == 2
    request.tokens[3:] = [9]
    assert text.hope(common, 9) == [0.0], "it did not come true"
    assert Text(request).hope(common, 9) == [0.0], "never looked at"


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("count", [2, 20])
def test_what_a_round_of_many_is_worth(queued: bool, count: int) -> None:
    """All depths at once, against one after the other."""
    rng, kept, depths = random.Random(count), 0.8, [1, 2, 3, 5]
    outlooks = [list(accumulate((rng.random() for _ in range(rng.randrange(6))), initial=0.0)) for _ in range(count - 1)]
    outlooks.append([0.0, 0.5, 0.75, 0.8, 0.85, 0.9])
    requests = tuple(Request(i, [0], 0, SamplingParams(), key=1, seed=1) for i in range(count))
    batch = Batch(requests, (1,) * count, (True,) * count, (64,) * count, queued=queued)
    power = -LEANS[count > CROWD]
    for k, (tokens, guesses) in zip(depths, _together(batch, outlooks, kept, depths), strict=True):
        more = [kept * o[min(k, len(o) - 1)] for o in outlooks]
        mean = sum((1 + m) ** power for m in more) / count
        assert tokens == pytest.approx(count + sum(more) if queued else count * mean ** (1 / power))
        assert guesses == sum(min(k, len(o) - 1) for o in outlooks)


def test_guesses_for_many_are_believed_to_wait_for_a_look_at_each() -> None:
    """Before any were seen: half a pass, or the looks, of which it is known what they take."""
    controller = Foresight(Copies([True], [True]))
    controller.costs.add_verify(60, 60, 1e-3)
    controller.costs.add_other(60, 1e-4, ahead=True)
    _, _, before = controller._priced(60, 50)
    for _ in range(ENOUGH):
        controller._pace.looked(2e-5)
    controller._prices.clear()
    _, _, after = controller._priced(60, 50)
    assert before.entering == pytest.approx(5e-4) and after.entering == pytest.approx(60 * 2e-5)
