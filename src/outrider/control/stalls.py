"""Shapes that cost something once: on a GPU the first round of a depth and a size of batch may have to be captured.

Such a stall is no part of what a depth costs, and it must not be paid for every depth that looks a little better. So a depth not
met before has to wait until what was lost by not using it has grown to the price of a stall: then, at the worst, twice as much is
lost as by knowing beforehand. Where stalls are not seen nothing waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .costs import CROWD, bucket, robust

FIRST = 8
"""Uses of a shape in which a stall is taken for its price: something roomier may stand in for it at first."""
SPIKE = 8.0
"""A round that takes so many times what was expected is a stall, not a sample."""
LEAST = 0.02
"""Seconds below which a stall is not worth waiting for."""

Shape = tuple[int, int]


@dataclass(slots=True)
class Stalls:
    """`met`: uses by size class of the batch and depth; `forgone`: seconds lost so far by not using a depth. `ready`: whether so
    many requests can look so far ahead without a stall, as far as whoever would stall can tell. `paced`: the drafter goes no
    deeper than it pays, so that what is captured does not follow from the depth it may go to, but for crowds, where it goes
    as deep as that."""

    met: dict[Shape, int] = field(default_factory=dict)
    prices: deque[float] = field(default_factory=lambda: deque[float](maxlen=5))
    forgone: dict[Shape, float] = field(default_factory=dict)
    wish: tuple[Shape, float] | None = None
    ready: Callable[[int, int], bool] = lambda batch, depth: False
    paced: bool = False

    @property
    def usual(self) -> float:
        """Seconds that a new shape costs once; 0 where none was seen to."""
        return robust(self.prices) if self.prices else 0.0

    def price(self, batch: int, depth: int) -> float:
        """What the next use of a depth may cost beside its own time."""
        shape = self.shape(batch, depth)
        if self.prices and shape not in self.met and self.ready(batch, depth):
            self.met[shape] = 0
        return 0.0 if not self.prices or shape in self.met else self.usual

    def use(self, batch: int, depth: int) -> None:
        """A round of this depth is about to run."""
        shape = self.shape(batch, depth)
        self.met[shape] = self.met.get(shape, 0) + 1

    def saw(self, batch: int, depth: int, seconds: float) -> None:
        """A round of this depth took so much longer than it should."""
        if seconds >= LEAST and self.met.get(self.shape(batch, depth), 0) <= FIRST:
            self.prices.append(seconds)

    def open(self, batch: int, depth: int) -> bool:
        """Whether a depth may be used: it was met, costs nothing, or was missed for long enough."""
        return self.price(batch, depth) <= self.forgone.get(self.shape(batch, depth), 0.0)

    def within(self, batch: int, depth: int) -> int:
        """The greatest depth up to this one that may be used; 0 is always one."""
        return next((d for d in range(depth, 0, -1) if self.open(batch, d)), 0)

    def least(self, batch: int, most: int) -> int:
        """The depth with which to try whether guesses pay: the least that costs no stall, else 1."""
        return next((d for d in range(1, most + 1) if self.open(batch, d)), 1)

    def want(self, batch: int, depth: int, gain: float) -> None:
        """From now on this depth is missed: it would be faster by this share."""
        self.wish = self.shape(batch, depth), min(1.0, gain)

    def content(self) -> None:
        """Nothing is missed."""
        self.wish = None

    def wait(self, seconds: float) -> bool:
        """Time went by; whether the depth that is missed may be used from now on."""
        if self.wish is None:
            return False
        shape, gain = self.wish
        self.forgone[shape] = self.forgone.get(shape, 0.0) + gain * seconds
        if self.forgone[shape] < self.usual:
            return False
        self.wish = None
        return True

    def used(self, batch: int, depth: int) -> bool:
        """Whether a round of this depth, or one that may have gone as deep, was run."""
        return self.met.get(self.shape(batch, depth), 0) > 0

    def shape(self, batch: int, depth: int) -> Shape:
        """What has to be captured once."""
        return bucket(batch), min(depth, 1) if self.paced and batch <= CROWD else depth
