"""What the host tells a captured round, and where it lies: one buffer, sent in one copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

KEEP = -1
"""In place of a number that only the device knows yet."""


class Shape(NamedTuple):
    """`requests` B, `rows` R, `columns` N, whether guesses branch, a bound on sequence lengths, whether any request filters, what
    is shown of the target's states (see `protocols.Needs`)."""

    requests: int
    rows: int
    columns: int
    tree: bool
    longest: int
    filters: bool = False
    features: tuple[str, ...] = ()

    def within(self, other: Shape) -> bool:
        """Whether `other` can do the same, of the same kind and at most twice as large."""
        sizes = zip(self[:2], other[:2], strict=True)
        return self[2:4] + self[5:] == other[2:4] + other[5:] and self[4] <= other[4] and all(a <= b <= 2 * a for a, b in sizes)


@dataclass(frozen=True, slots=True)
class Fields:
    """One int32 buffer seen as its parts; the same on host (numpy) and device (torch). `first [B + 1]` is the first row of every
    request; `last`, `previous`, `length`, `room` are the host's word on a lane, or KEEP. From `sizes` on it holds guesses;
    `source` is never told by the host."""

    lane: Any
    first: Any
    last: Any
    previous: Any
    length: Any
    room: Any
    tiles: Any
    sizes: Any
    tokens: Any
    parents: Any
    source: Any

    @classmethod
    def of(cls, flat: Any, shape: Shape, tiles: int) -> Fields:
        b, n = shape.requests, shape.columns
        counts = (b, b + 1, b, b, b, b, 3 * tiles, b, b * n, b * n, b * n)
        parts, start = [], 0
        for count in counts:
            parts.append(flat[start : start + count])
            start += count
        parts[6] = parts[6].reshape(tiles, 3)
        parts[8:] = [part.reshape(b, n) for part in parts[8:]]
        return cls(*parts)

    @staticmethod
    def size(shape: Shape, tiles: int) -> int:
        return Fields.told(shape, tiles) + shape.requests * shape.columns

    @staticmethod
    def told(shape: Shape, tiles: int) -> int:
        """How much of it the host tells."""
        return Fields.guesses(shape, tiles) + shape.requests * (1 + 2 * shape.columns)

    @staticmethod
    def guesses(shape: Shape, tiles: int) -> int:
        """Where guesses begin."""
        return 6 * shape.requests + 1 + 3 * tiles
