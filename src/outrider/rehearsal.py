"""Rounds of made-up requests before the first real one.

On a GPU guesses are captured graphs, one per size of batch and depth: each takes as long to capture as dozens of rounds, and what
kernels it needs are compiled when they are first met. Here that happens before anybody waits for it. From the same rounds it is
known what guesses take on this machine, for one request as for many, so that the first plan weighs measured seconds. Nothing of
the text is kept, nor how often guesses came true in it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .config import SamplingParams
from .control import Goodput
from .control.limits import bounds
from .control.plan import limits
from .control.shelf import Known
from .engine import Engine
from .errors import OutOfMemory
from .protocols import Drafter
from .types import Batch, Budget, Finish, Request, StepEvent
from .watch import Watch

SIZES = (1, 4, 2, 8, 16, 32, 64)
"""Requests of a batch, the most telling first."""
MOST = max(SIZES)
SETTLING, PLAIN, ROUNDS = 2, 9, 5
"""Rounds that tell nothing (what comes next is captured in the time of the first, and played in the second), those without
guesses, which are launched ahead (so many that reading what they leave is captured, too), and those of each depth and width."""
SECONDS, WHOLE = 6.0, 60.0
"""Seconds of rounds, and with all that is compiled and captured, from which on no more is begun."""
STALL = 0.1
"""A round counts for at most so many seconds: the rest is compiling."""
ROWS = 512
"""Rows from which on only chains are rehearsed: wider guesses of as many requests do not pay."""
SLACK = 16
"""Tokens that those write whose prompt is read first."""
SHORTER, KINDS = 9, 8
"""Each of so many requests is so much shorter than the one before."""
TEXT = (
    "The lighthouse keeper had written to the harbour master every Friday for eleven years. He reported the weather, the oil "
    "that was left, how many ships had passed and in which direction, and whether the stairs were swept. Nobody ever answered. "
    "When the new harbour master cleared the attic, she found five hundred and seventy letters in a sea chest, tied with tarred "
    "string, and sat down on the floor to read them. By the evening she knew three things that were on no chart, and"
)
"""What the made-up requests go on with."""


@dataclass(frozen=True, slots=True)
class Scene:
    """`rounds` with so many levels of guesses, of so many nodes each."""

    depth: int
    width: float
    rounds: int


CALM, PAUSE = Scene(0, 1.0, 1), Scene(0, 1.0, PLAIN)
"""A round without guesses, and some in a row."""


class Drill(Goodput):
    """Gives everybody guesses as a scene says, and learns what that takes; what is known of texts is not touched."""

    def __init__(self, drafter: Drafter, known: Known) -> None:
        own = Known(known.positions, costs=known.costs, stalls=known.stalls, plain=known.plain, referenced=known.referenced)
        super().__init__(drafter, known=own)
        if self._paced and not known.rows:  # its guesses are as wide as it likes
            own.rows = known.rows
        self.overlaps, self.depth, self.deaf = True, 0, False
        self.widths = self._trees.widths

    def set(self, scene: Scene) -> None:
        """What the next rounds are like."""
        self.depth, self._trees.now = scene.depth, scene.width

    def budget(self, batch: Batch) -> Budget:
        """As many levels as the scene has, where there is room."""
        return self._asked(batch, [min(self.depth, bounds(batch, b, self._shape.depth)[1]) for b in range(len(batch))])

    def observe(self, event: StepEvent) -> None:
        """Nothing is learned while it is `deaf`."""
        if self.deaf:
            self._before, self._last = self._book.settle(event), self._clock()
        else:
            super().observe(event)

    @property
    def resting(self) -> bool:
        """While there are to be no guesses."""
        return not self.depth


class Unwatched(Watch):
    """What is rehearsed is told to nobody."""

    def observe(self, event: StepEvent) -> None:
        """Nothing is learned."""


class Rehearsal:
    """Plays `engine`, which has a `Drill`, with up to `most` requests that go on with `prompt`."""

    def __init__(self, engine: Engine, drill: Drill, prompt: Sequence[int], most: int = MOST) -> None:
        self.engine, self.drill = engine, drill
        engine.watch = Unwatched()
        self.prompt = list(prompt[: max(1, engine.target.max_len // 2)])
        self.sizes = [size for size in SIZES if size < 2 * most]
        drafter = engine.drafter.drafter
        self.depths = sorted({*limits(getattr(drafter, "reach", drafter.depth)), *limits(drafter.depth)[-1:]})
        self._begun, self._spent = time.perf_counter(), 0.0
        self._met: set[tuple[int, int]] = set()

    def whole(self) -> int:
        """All depths for all sizes of batches; how many sizes there was time and memory for."""
        return self._played({size: self._scenes(size, self.depths, ROUNDS) for size in self.sizes})

    def again(self) -> int:
        """What was used since the last rehearsal, once: it has to be captured anew. The least guesses always are: what is read
        now and then, though nobody guesses, goes the same way."""
        stalls = self.drill.known.stalls
        used = {size: [d for d in self.depths if d == 1 or stalls.used(size, d)] for size in self.sizes}
        return self._played({size: self._scenes(size, depths, 1) for size, depths in used.items()})

    def _scenes(self, size: int, depths: Sequence[int], rounds: int) -> list[Scene]:
        least = self.drill.widths[0]
        pairs = [(depth, width) for depth in depths for width in self.drill.widths]
        return [PAUSE, *(Scene(d, w, rounds) for d, w in pairs if w == least or size * (1 + d * w) <= ROWS)]

    @property
    def _goes_on(self) -> bool:
        in_time = self._spent < SECONDS and time.perf_counter() - self._begun < WHOLE
        return in_time and self.engine.drafter.working and self.sound

    def _played(self, scenes: Mapping[int, Sequence[Scene]]) -> int:
        """Play scenes, by size of the batch; how many sizes came to their end. What stalled did so for good, and from now on it
        is counted what is used. What was not played is not there."""
        played = [self._play(size, some) for size, some in scenes.items() if self._goes_on]
        stalls = self.drill.known.stalls
        stalls.prices.clear()
        stalls.met = dict.fromkeys(self._met, 0) if self.sound else {}
        return sum(played)

    @property
    def sound(self) -> bool:
        """Whether memory was enough: else what was captured may be gone, and the drafter may do without."""
        return not self.engine.recovery.retries

    def _play(self, size: int, scenes: Sequence[Scene]) -> bool:
        """Rounds for so many requests; whether they came to their end."""
        tokens = sum((1 + scene.depth) * scene.rounds for scene in scenes) + SETTLING + SLACK + 2 * (1 + max(self.depths))
        target = self.engine.target
        if size * (len(self.prompt) + tokens + target.cache.block_size) > target.cache.capacity:
            return False
        params = SamplingParams(temperature=0.0, max_tokens=max(1, min(tokens, target.max_len - len(self.prompt))))
        prompts = [self.prompt[: max(1, len(self.prompt) - SHORTER * (i % KINDS))] for i in range(size)]
        requests = [Request(-1 - i, list(p), len(p), params, key=i, seed=i) for i, p in enumerate(prompts)]
        try:
            for request in requests:
                self.engine.add(request)
            if not self._begin(requests):
                return False
            for scene in scenes:
                for i in range(scene.rounds):
                    self.drill.deaf = i < SETTLING
                    if not self._round(requests, scene):
                        return False
                if scene.depth:
                    self._met.add(self.drill.known.stalls.shape(size, scene.depth))
            return True
        except OutOfMemory:
            return False
        finally:
            self.drill.deaf = False
            self.drill.set(CALM)
            self.engine.abort(requests)
            self.engine.ground()

    def _begin(self, requests: Sequence[Request]) -> bool:
        """Prompts, and what is done once after them: a first guess may read all of one. Whether everybody goes on."""
        self.drill.deaf, left, scene = True, SETTLING, CALM
        while left and self._round(requests, scene):
            if all(r.computed >= r.prompt_len for r in requests):
                left, scene = left - 1, Scene(1, self.drill.widths[0], 1)
        return not left

    def _round(self, requests: Sequence[Request], scene: Scene) -> bool:
        """One round; whether everybody goes on."""
        self.drill.set(scene)
        begun = time.perf_counter()
        done = self.engine.step() is not None and all(r.finish is Finish.RUNNING for r in requests)
        self._spent += min(STALL, time.perf_counter() - begun)
        return done and self._goes_on
