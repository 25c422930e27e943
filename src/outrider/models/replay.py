"""What a drafter does in a round, as graphs beside the target's rounds: on its lanes, in the memory of its graphs.

A drafter always has another way to make the same guesses, launch by launch. It goes that way where this one cannot be gone, for
want of memory or because something cannot be captured; a warning says so once.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch

from ..errors import OutriderWarning
from ..types import Request
from .answer import between, mark
from .lanes import LaneBook, fits
from .loans import Loans
from .rounds import Machine

T = TypeVar("T")
S = TypeVar("S", bound=tuple[Any, ...])
MOST = 96
"""Shapes that a drafter keeps captured at once."""
PATIENCE = 64
"""Times that a shape not captured yet is wanted, and a roomier one that is captured played in its place."""


@dataclass(slots=True)
class Meter:
    """`seconds` that the device has worked on drafters' replays so far, by what each took when it was captured."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Stage:
    """Where captured work runs: the target's `machine`, its `book` of lanes; whoever writes to its KV spoils `loans`; `meter`
    tells how long."""

    machine: Machine
    book: LaneBook
    loans: Loans
    meter: Meter = field(default_factory=Meter)
    _fit: dict[int, bool] = field(default_factory=dict)

    def holds(self, request: Request) -> bool:
        """Whether a lane can hold what decides this request's tokens."""
        found = self._fit.get(request.id)
        if found is None:
            found = self._fit[request.id] = fits(request)
        return found

    def release(self, request: Request) -> None:
        self._fit.pop(request.id, None)


class Replays(Generic[T]):
    """What was captured for a drafter called `name`, by shape; of `MOST` the one longest unused goes."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.stage, self.name = stage, name
        self.off = False
        self._made: dict[tuple[Any, ...], T] = {}
        self._wanted = Counter[tuple[Any, ...]]()

    def get(self, shape: S, make: Callable[[S], T]) -> T | None:
        """What was made for a shape, or for a roomier one while this one was seldom wanted; made now if there is neither, None
        where it cannot be."""
        if self.off:
            return None
        if shape not in self._made and self.stage.machine.patient and self.bears(shape):
            shape = cast(S, min((s for s in self._made if within(shape, s)), default=shape))
        found = self._made.pop(shape, None)
        if found is None:
            if len(self._made) >= MOST:
                del self._made[next(iter(self._made))]
            found = self._new(make, shape)
            if found is None:
                return None
        self._made[shape] = found
        return found

    def bears(self, shape: S) -> bool:
        """Whether something roomier may do once more for a shape that is not there."""
        self._wanted[shape] += 1
        return self._wanted[shape] <= PATIENCE

    def has(self, shape: S, made: T) -> bool:
        """Whether this is what there is for a shape."""
        return not self.off and self._made.get(shape) is made

    def _new(self, make: Callable[[S], T], shape: S) -> T | None:
        """What is made for a shape; where there is no memory for it, once all others are gone."""
        try:
            return make(shape)
        except torch.OutOfMemoryError:
            self._made.clear()
            self.stage.machine.forget()
        except (RuntimeError, ValueError) as error:
            self._stop(str(error).splitlines()[0])
            return None
        try:
            return make(shape)
        except torch.OutOfMemoryError:
            self._stop("there is no memory for it")
            return None

    def _stop(self, why: str) -> None:
        self.off = True
        self._made.clear()
        warnings.warn(f"{self.name} is not captured, which costs speed only: {why}", OutriderWarning, stacklevel=2)

    def capture(self, work: Callable[[], object]) -> Callable[[], Any]:
        """`work` as one replay of a graph; where there are no graphs, as it is."""
        machine, meter = self.stage.machine, self.stage.meter
        if not machine.graphs:
            return work
        replay = machine.graph(work).replay
        seconds = _timed(replay, machine.lanes.last.device)

        def play() -> None:
            meter.seconds += seconds
            replay()

        return play


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that a device takes for work which nobody misses if it is done twice."""
    work()
    started = mark(device)
    work()
    ended = mark(device)
    if isinstance(ended, torch.cuda.Event):
        ended.synchronize()
    return between(started, ended)


def within(shape: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether what was captured for `other` can do what `shape` asks for: its numbers are no smaller, and of requests, which come
    first, there are at most twice as many; all else is the same."""
    pairs = zip(shape, other, strict=True)
    if isinstance(shape[0], int) and other[0] > 2 * shape[0]:
        return False
    return all(a <= b if isinstance(a, int) and isinstance(b, int) else a == b for a, b in pairs)
