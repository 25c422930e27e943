"""How long readers wait: for the first token, for each further one, and between two pieces of text.

A round that commits k tokens delivers them together. *Inter-token* latency spreads its wait over them, wait / k for each, so that
it compares with plain decoding; a *pause* is the wait itself, which is what a reader of the stream sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..types import Finish, StepEvent


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds that 50, 90 and 99 % of `count` waits do not exceed (linear interpolation between neighbours)."""

    p50: float
    p90: float
    p99: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles | None:
        """None where there was no wait."""
        if not seconds:
            return None
        p50, p90, p99 = np.percentile(np.asarray(seconds), (50, 90, 99)).tolist()
        return cls(p50, p90, p99, len(seconds))


@dataclass(frozen=True, slots=True)
class Latency:
    """Of the answers of a row; None where too few tokens were written to have any."""

    first_token: Percentiles | None
    inter_token: Percentiles | None
    pause: Percentiles | None
    answer: Percentiles | None


@dataclass(slots=True, eq=False)
class Times:
    """Waits in seconds. `arrived` tells when a request came, by id, where that was before the engine took it."""

    arrived: dict[int, float] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)
    _last: dict[int, float] = field(default_factory=dict)

    def hear(self, event: StepEvent, now: float) -> None:
        """Take in a round that was told at `now` (`time.perf_counter`)."""
        for item in event.committed:
            if item.late:
                continue
            request, count = item.request, len(item.tokens)
            came = self.arrived.get(request.id, request.started)
            if count and request.id in self._last:
                wait = now - self._last[request.id]
                self.pauses.append(wait)
                self.tokens += [wait / count] * count
            elif count:
                self.first.append(now - came)
            if count:
                self._last[request.id] = now
            if item.finish is not Finish.RUNNING:
                self.answers.append(now - came)
                self._last.pop(request.id, None)


def latency(times: Sequence[Times]) -> Latency:
    """Over several runs."""
    first, tokens, pauses, answers = (
        [wait for one in times for wait in getattr(one, name)] for name in ("first", "tokens", "pauses", "answers")
    )
    return Latency(*map(Percentiles.of, (first, tokens, pauses, answers)))
