"""Rounds of made-up requests before the first real one.

On a GPU guesses are captured graphs, one per size of batch and depth: each takes as long to capture as dozens of rounds, and what
kernels it needs are compiled when they are first met. Here that happens before anybody waits for it. From the same rounds it is
known what guesses take on this machine, for one request as for many, so that the first plan weighs measured seconds. Nothing of
the text is kept, nor how often guesses came true in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .config import SamplingParams
from .control import Goodput
from .control.costs import bucket
from .control.limits import bounds
from .control.plan import limits
from .control.shelf import Known
from .engine import Engine
from .errors import OutOfMemory
from .protocols import Drafter
from .types import Batch, Budget, Finish, Request

SIZES = (1, 4, 2, 8, 16, 32, 64)
"""Requests of a batch, the most telling first."""
PLAIN, ROUNDS = 4, 3
"""Rounds without guesses, which are launched ahead, and of each depth: the first one may have to be captured."""
SECONDS, WHOLE = 4.0, 60.0
"""Seconds of rounds, and with all that is compiled and captured, from which on no more is begun."""
STALL = 0.1
"""A round counts for at most so many seconds: the rest is compiling."""
TEXT = "The lighthouse keeper had written to the harbour master every Friday for eleven years, and"
"""What the made-up requests go on with."""


class Drill(Goodput):
    """Gives everybody `asked` levels, and learns what that takes; what is known of texts is not touched."""

    def __init__(self, drafter: Drafter, known: Known) -> None:
        own = Known(known.positions, costs=known.costs, stalls=known.stalls, plain=known.plain, referenced=known.referenced)
        super().__init__(drafter, known=own)
        self.overlaps, self.asked = True, 0

    def budget(self, batch: Batch) -> Budget:
        """As many levels as were asked for, where there is room."""
        return self._asked(batch, [min(self.asked, bounds(batch, b, self._shape.depth)[1]) for b in range(len(batch))])

    @property
    def resting(self) -> bool:
        """While none are asked for."""
        return not self.asked


class Rehearsal:
    """Plays `engine`, which has a `Drill`, with requests that go on with `prompt`. `clock` tells seconds."""

    def __init__(
        self, engine: Engine, drill: Drill, prompt: Sequence[int], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.engine, self.drill, self.prompt, self.clock = engine, drill, list(prompt), clock
        self.depths = limits(engine.drafter.drafter.depth)
        self._begun, self._spent = clock(), 0.0

    def whole(self) -> int:
        """All depths for all sizes of batches; how many sizes there was time and memory for."""
        plan = [(0, PLAIN + 1), *((depth, ROUNDS) for depth in self.depths)]
        return self._ended([self._play(size, plan) for size in SIZES if self._goes_on])

    def again(self) -> int:
        """What was used since the last rehearsal, once: it has to be captured anew."""
        met = self.drill.known.stalls.met
        plans = {s: [(0, 1), *((d, 1) for d in self.depths if met.get((bucket(s), d), 0) > 0)] for s in SIZES}
        return self._ended([self._play(size, plan) for size, plan in plans.items() if len(plan) > 1 and self._goes_on])

    @property
    def _goes_on(self) -> bool:
        return self.engine.drafter.working and self._spent < SECONDS and self.clock() - self._begun < WHOLE

    def _ended(self, played: Sequence[bool]) -> int:
        """What stalled did so for good, and from now on it is counted what is used."""
        stalls = self.drill.known.stalls
        stalls.prices.clear()
        stalls.met.update(dict.fromkeys(stalls.met, 0))
        return sum(played)

    def _play(self, size: int, plan: Sequence[tuple[int, int]]) -> bool:
        """Rounds for so many requests, by depth; whether they came to their end."""
        tokens = sum((1 + depth) * rounds for depth, rounds in plan) + 2 * (1 + max(self.depths))
        target = self.engine.target
        if size * (len(self.prompt) + tokens + target.cache.block_size) > target.cache.capacity:
            return False
        params = SamplingParams(temperature=0.0, max_tokens=max(1, min(tokens, target.max_len - len(self.prompt))))
        requests = [Request(-1 - i, list(self.prompt), len(self.prompt), params, key=i, seed=i) for i in range(size)]
        try:
            for request in requests:
                self.engine.add(request)
            return all(self._round(requests, depth) for depth, rounds in plan for _ in range(rounds))
        except OutOfMemory:
            return False
        finally:
            self.drill.asked = 0
            self.engine.abort(requests)

    def _round(self, requests: Sequence[Request], depth: int) -> bool:
        """One round; whether everybody goes on."""
        self.drill.asked, begun = depth, self.clock()
        done = self.engine.step() is not None and all(r.finish is Finish.RUNNING for r in requests)
        self._spent += min(STALL, self.clock() - begun)
        return done and self._goes_on
