"""A trace in numbers: acceptance in all, by position, by label and over time."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from ..types import NONE
from .labels import UNLABELLED
from .reader import Round, Share

STRETCHES = 8
"""Parts that a trace is cut into to show it over time."""


@dataclass(slots=True)
class Tally:
    """Counts of shares: those that gave tokens or had guesses. By position: how many were offered and kept."""

    shares: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    depth: int = 0
    off: int = 0
    offered: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def add(self, share: Share) -> None:
        if not share.tokens and not share.drafted:
            return
        self.shares += 1
        self.tokens += share.tokens
        self.drafted += share.drafted
        self.accepted += share.accepted
        self.depth += share.depth
        self.off += not share.depth
        self.offered = [a + b for a, b in zip_longest(self.offered, share.offered, fillvalue=0)]
        self.kept = [a + b * o for a, b, o in zip_longest(self.kept, share.kept, share.offered, fillvalue=0)]

    @property
    def tau(self) -> float:
        return self.tokens / self.shares if self.shares else 0.0

    @property
    def alpha(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def as_json(self) -> dict[str, Any]:
        """What a script wants to know."""
        return {
            "tokens": self.tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens_per_round": self.tau,
            "acceptance_rate": self.alpha,
            "acceptance_by_position": [k / o if o else 0.0 for k, o in zip(self.kept, self.offered, strict=True)],
            "mean_depth": self.depth / self.shares if self.shares else 0.0,
            "without_guesses": self.off / self.shares if self.shares else 0.0,
        }


@dataclass(frozen=True, slots=True)
class Series:
    """Columns with one number for each round that was read to the end of its prompts: `first` guesses, those that were `right`,
    the mean `depth`, and `tokens` in `seconds`."""

    first: array[float] = field(default_factory=lambda: array("d"))
    right: array[float] = field(default_factory=lambda: array("d"))
    depth: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[float] = field(default_factory=lambda: array("d"))
    seconds: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.depth)

    def add(self, one: Round) -> None:
        """A round in which everybody wrote."""
        tested = [share for share in one.requests if share.offered and share.offered[0]]
        self.first.append(len(tested))
        self.right.append(sum(share.kept[0] for share in tested))
        self.depth.append(sum(share.depth for share in one.requests) / len(one.requests))
        self.tokens.append(sum(share.tokens for share in one.requests))
        self.seconds.append(one.seconds)

    def binned(self, bins: int) -> Iterator[tuple[float, float | None, float, float]]:
        """At most so many stretches: the round in the middle, acceptance of first guesses (None without any), depth, tokens per
        second."""
        size = max(1, -(-len(self) // bins))
        for at in range(0, len(self), size):
            part = slice(at, at + size)
            first, count = sum(self.first[part]), len(self.depth[part])
            seconds = sum(self.seconds[part])
            alpha = sum(self.right[part]) / first if first else None
            speed = sum(self.tokens[part]) / seconds if seconds else 0.0
            yield at + (count + 1) / 2, alpha, sum(self.depth[part]) / count, speed


@dataclass(slots=True)
class Digest:
    """All that is worth knowing of a trace; `add` takes its rounds in order."""

    rounds: int = 0
    all: Tally = field(default_factory=Tally)
    labels: dict[str, Tally] = field(default_factory=dict)
    series: Series = field(default_factory=Series)
    origins: Counter[int] = field(default_factory=Counter)
    drafters: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    def add(self, one: Round) -> None:
        self.rounds += 1
        self.drafters[one.drafter] += 1
        self.draft += one.draft
        self.verify += one.verify
        self.other += one.other
        for share in one.requests:
            self.all.add(share)
            self.labels.setdefault(share.label or UNLABELLED, Tally()).add(share)
            self.origins.update(origin for origin in share.origins if origin != NONE)
            if share.finish is not None:
                self.ended[share.finish] += 1
        if one.requests and not one.prefill:
            self.series.add(one)

    @property
    def seconds(self) -> float:
        return self.draft + self.verify + self.other

    @property
    def over_time(self) -> list[tuple[float, float | None, float, float]]:
        """A few stretches of `series`."""
        return list(self.series.binned(STRETCHES))

    def as_json(self) -> dict[str, Any]:
        """The summary as scripts read it."""
        names = ("round", "acceptance", "depth", "tokens_per_second")
        over_time = [dict(zip(names, stretch, strict=True)) for stretch in self.over_time]
        return {
            "rounds": self.rounds,
            **self.all.as_json(),
            "tokens_per_second": self.all.tokens / self.seconds if self.seconds else 0.0,
            "draft_seconds": self.draft,
            "verify_seconds": self.verify,
            "other_seconds": self.other,
            "drafters": dict(self.drafters),
            "origins": {str(origin): count for origin, count in sorted(self.origins.items())},
            "ended": dict(self.ended),
            "labels": {name: tally.as_json() for name, tally in self.labels.items()},
            "over_time": over_time,
        }
