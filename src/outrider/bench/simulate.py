"""A world without a model: requests whose guesses are accepted with given chances, on a machine with given costs.

For controllers only: it runs budgets against them, draws what is offered and accepted, and hands back events like the engine's,
with its own clock. Speeds are expectations (of the chances, at the true costs), so that few rounds suffice for a comparison.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ..config import SamplingParams
from ..protocols import Controller
from ..types import NONE, Batch, Committed, Finish, Proposal, Request, StepEvent

LONG = 10**6
"""Tokens that a simulated request may write: no end in sight."""
EARLY = range(2, 10)
"""Uses of a shape at which parts of its rounds are compiled and captured."""


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Asks:
    """A drafter, as far as a controller looks at one."""

    depth: int
    nodes: int


@dataclass(frozen=True, slots=True)
class World:
    """`accept(b, round)`: chance that a guess of request b is accepted, given that those before it were. `offer`: chance that the
    drafter has guesses at all. `draft(depth, requests)` and `verify(rows, requests)`: seconds. `noise`: relative spread of every
    measurement; `stall`: chance that it takes ten times as long. `other`: seconds of a round besides, `lost` those of one that
    was not launched before the one before it was read. `unsaid(depth, requests)`: seconds of guessing that no part of a round
    reports, such as a device's; `behind`: drafting goes on behind the round before, so that only what is longer than that round
    is waited for. `capture`: seconds that the first round of a depth and a size of batch takes beside its own; `early`: while
    some such rounds are launched, so in the time of the one before, and plain ones, too."""

    accept: Callable[[int, int], float]
    draft: Callable[[int, int], float]
    verify: Callable[[int, int], float]
    batch: int = 1
    offer: Callable[[int, int], float] = lambda b, round_: 1.0
    noise: float = 0.05
    stall: float = 0.01
    other: float = 0.0
    lost: float = 0.0
    unsaid: Callable[[int, int], float] = lambda depth, requests: 0.0
    behind: bool = False
    capture: float = 0.0
    early: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """What one round was expected to bring, and to take; `depth` is the mean one."""

    depth: float
    tokens: float
    seconds: float
    plain_seconds: float


@dataclass(slots=True)
class Simulation:
    """Runs a controller in a world. `params` go to every request."""

    world: World
    controller: Controller
    clock: Clock
    seed: int = 0
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=LONG))
    rounds: list[Round] = field(default_factory=list)
    _rng: random.Random = field(init=False)
    _batch: Batch = field(init=False)
    _unread: StepEvent | None = None
    _started: float = 0.0
    _shapes: Counter[tuple[int, int]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        requests = tuple(_request(b, self.params) for b in range(self.world.batch))
        size = len(requests)
        self._batch = Batch(requests, (1,) * size, (True,) * size, (64,) * size)

    def run(self, count: int) -> list[Round]:
        """So many rounds more; these."""
        for _ in range(count):
            self._step()
        return self.rounds[-count:]

    def _step(self) -> None:
        world, number, batch = self.world, len(self.rounds), self._batch
        before, self._unread = self._unread, None
        ahead = before is not None and (world.behind or self.controller.resting)
        if ahead and (not world.behind or self.controller.resting):
            budget = self.controller.rest(batch)
        else:
            budget = self.controller.budget(replace(batch, blind=ahead))
        luck = random.Random(f"{self.seed} {number}")  # the same silences for every controller
        asked = [d if luck.random() < world.offer(b, number) else 0 for b, d in enumerate(budget.depth)]
        drafted, deepest = sum(d > 0 for d in budget.depth), max(budget.depth)
        draft = world.draft(deepest, drafted) if drafted else 0.0
        offered = self.controller.cut(batch, Proposal.chains([[0] * d for d in asked]))
        rows = len(batch) + sum(offered.widths)
        verify, other = world.verify(rows, len(batch)), world.other + world.lost * (not ahead)
        captured = self._captured(deepest, len(batch)) if drafted or world.early else 0.0
        if drafted:
            other += world.unsaid(deepest, drafted) + captured * (not world.early)
        items = tuple(self._commit(b, width, number) for b, width in enumerate(offered.widths))
        took = self._noisy(draft), self._noisy(verify), self._noisy(other)
        begun = self.clock.now
        if not world.behind:
            self.clock.now += took[0]
        self.clock.now += captured * world.early
        if before is not None:  # it is told after the next one was launched
            self.controller.observe(replace(before, seconds=self.clock.now - self._started) if world.early else before)
        self.clock.now += max(took[0], took[1] + took[2]) if world.behind else took[1] + took[2]
        event = StepEvent(items, took[0], took[1], sum(took), 0, rows, budget.depth)
        if world.lost:
            self._unread, self._started = event, begun
        else:
            self.controller.observe(event)
        expected = sum(_expected(world.accept(b, number), width) for b, width in enumerate(offered.widths))
        plain = world.verify(len(batch), len(batch)) + world.other
        whole = (max(draft, verify + other) if world.behind else draft + verify + other) + captured * world.early
        self.rounds.append(Round(sum(budget.depth) / len(batch), expected, whole, plain))

    def _captured(self, depth: int, batch: int) -> float:
        """Seconds that a shape takes beside its own, once."""
        self._shapes[depth, batch] += 1
        return self.world.capture if self._shapes[depth, batch] in (EARLY if self.world.early else (1,)) else 0.0

    def _commit(self, b: int, width: int, number: int) -> Committed:
        chance, kept = self.world.accept(b, number), 0
        while kept < width and self._rng.random() < chance:
            kept += 1
        origins = (0,) * kept + (NONE,)
        request = self._batch.requests[b]
        return Committed(request, (0,) * (kept + 1), origins, width, kept, (1,) * width, (), "", Finish.RUNNING)

    def _noisy(self, seconds: float) -> float:
        stalled = 10.0 if self._rng.random() < self.world.stall else 1.0
        return seconds * stalled * max(0.5, self._rng.gauss(1.0, self.world.noise))


def speed(rounds: list[Round]) -> float:
    """Tokens per second over these rounds."""
    return sum(r.tokens for r in rounds) / sum(r.seconds for r in rounds)


def against_plain(rounds: list[Round], batch: int = 1) -> float:
    """Speed relative to plain decoding in the same world."""
    return speed(rounds) * sum(r.plain_seconds for r in rounds) / (batch * len(rounds))


def _expected(chance: float, width: int) -> float:
    """Tokens of a round with `width` guesses."""
    return sum(chance**j for j in range(width + 1))


def _request(b: int, params: SamplingParams) -> Request:
    return Request(b + 1, [0], 0, params, key=b, seed=b)


def laptop(rows: int, requests: int) -> float:
    """Seconds of a pass on a small CPU: every row costs something (measured: SmolLM2-135M on two cores)."""
    points = ((1, 22.0), (8, 26.0), (16, 31.0), (64, 75.0))
    for (left, low), (right, high) in pairwise(points):
        if rows <= right:
            return (low + (high - low) * (rows - left) / (right - left)) / 1000
    return (75.0 + (rows - 64)) / 1000


def card(rows: int, requests: int) -> float:
    """Seconds of a pass on a GPU: rows are free until it is busy, at about 96 of them."""
    return (7.0 + 0.02 * requests + 0.06 * max(0, rows - 96)) / 1000


def overlapped(rows: int, requests: int) -> float:
    """Seconds the device takes for a pass whose launch it hides (measured: SmolLM2-135M on an H200, captured rounds)."""
    return (0.9 + 0.002 * requests + 0.0006 * rows) / 1000


def code_then_poetry(rounds: int, draft: float = 0.12) -> World:
    """One request whose guesses are mostly right for `rounds` rounds, mostly wrong for as many, and right again. A guess costs
    the share `draft` of a plain pass on a laptop."""
    return World(
        accept=lambda b, round_: 0.08 if rounds <= round_ < 2 * rounds else 0.85,
        draft=lambda depth, requests: draft * depth * laptop(1, 1),
        verify=laptop,
    )
