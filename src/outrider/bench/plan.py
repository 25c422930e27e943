"""What to measure: drafters and depths on one side, workloads, temperatures and loads on the other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import control as controllers
from ..config import SamplingParams
from ..errors import BadInput
from .workloads import Workload

PLAIN = "none"
MOST_CELLS = 1000
"""A sweep of more result rows than this is a slip of the finger."""


@dataclass(frozen=True, slots=True)
class Point:
    """Conditions under which plain and drafted runs are compared. `batch`: prompts answered together, each group after the one
    before; or `rate`: requests per second that arrive whether or not the ones before are done (then `batch` is None)."""

    temperature: float = 0.0
    batch: int | None = 1
    rate: float | None = None

    @property
    def group(self) -> int:
        """How many prompts warm up together."""
        return self.batch or 1

    def __str__(self) -> str:
        load = f"batch {self.batch}" if self.rate is None else f"{self.rate:g} requests/s"
        return f"T = {self.temperature:g}, {load}"

    @property
    def words(self) -> str:
        """For people who do not know what T and a batch are."""
        choice = "greedy" if self.temperature == 0 else f"sampled at temperature {self.temperature:g}"
        if self.rate is not None:
            return f"{choice}, {self.rate:g} requests per second"
        return f"{choice}, {'one request' if self.batch == 1 else f'{self.batch} requests'} at a time"


@dataclass(frozen=True, slots=True)
class Plan:
    """`depths`: how far every drafter is told to look ahead (None: as far as the controller thinks it pays); `limit`: prompts per
    workload; `repeats`: pairs of runs; `control`: who decides how far to look ahead. Every temperature is combined with every
    batch size and every rate. Raises `BadInput` for what cannot be measured."""

    drafts: tuple[str, ...]
    workloads: tuple[Workload, ...]
    max_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0,)
    depths: tuple[int | None, ...] = (None,)
    batches: tuple[int, ...] = (1,)
    rates: tuple[float, ...] = ()
    seed: int = 0
    repeats: int = 3
    limit: int | None = None
    control: str = controllers.DEFAULT

    def __post_init__(self) -> None:
        for name in ("repeats", "limit"):
            _at_least_one(name, getattr(self, name))
        for name, each in (("batch", self.batches), ("depth", self.depths)):
            for value in each:
                _at_least_one(name, value)
        for rate in self.rates:
            if not (math.isfinite(rate) and rate > 0):
                raise BadInput(f"rate must be requests per second, above 0, got {rate:g}")
        if not self.drafts or not self.workloads:
            raise BadInput("nothing to measure: name a drafter and a workload")
        if not self.temperatures or not self.depths or not (self.batches or self.rates):
            raise BadInput("nothing to measure: give a temperature, and a batch size or a rate")
        twice = _repeated([w.name for w in self.workloads])
        if twice is not None:
            raise BadInput(f"two workloads are called {twice!r}; name each once, or rename a file")
        if len(self.workloads) * len(self.points) * (len(self.arms) + 1) > MOST_CELLS:
            raise BadInput(f"the sweep has more than {MOST_CELLS} rows; give fewer values")

    @property
    def points(self) -> tuple[Point, ...]:
        """Temperatures times loads, each once."""
        loads = [(b, None) for b in dict.fromkeys(self.batches)] + [(None, r) for r in dict.fromkeys(self.rates)]
        return tuple(Point(t, *load) for t, load in itertools.product(dict.fromkeys(self.temperatures), loads))

    @property
    def arms(self) -> tuple[tuple[str, int | None], ...]:
        """What is compared with plain decoding: drafter and depth, each once."""
        return tuple(itertools.product((d for d in dict.fromkeys(self.drafts) if d != PLAIN), dict.fromkeys(self.depths)))

    @property
    def runs(self) -> int:
        """How many runs it takes, each one's warm-up included (on a GPU that may be several, which nobody can foretell)."""
        return len(self.workloads) * len(self.points) * (2 * len(self.arms) or 1) * (self.repeats + 1)

    def params(self, point: Point, depth: int | None = None) -> SamplingParams:
        """Of every request of a cell. The depth changes the text of no request under the default rule."""
        return SamplingParams(temperature=point.temperature, max_tokens=self.max_tokens, seed=self.seed, depth=depth)

    @property
    def settings(self) -> dict[str, Any]:
        """For the report."""
        names = ("drafts", "max_tokens", "temperatures", "depths", "batches", "rates", "seed", "repeats", "limit", "control")
        return {name: getattr(self, name) for name in names}


def _at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise BadInput(f"{name} must be at least 1, got {value}")


def _repeated(names: Sequence[str]) -> str | None:
    return next((n for n in names if names.count(n) > 1), None)
