"""What a drafter that reads the target's states of every token has seen of a request: states not read yet, KV already made.

A round shows the states of the tokens it fed. Which of a round's guesses were accepted only the device knows at that moment, so
the states of accepted rows are put in order there, and read no further than the request's tokens turn out to reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..types import Batch, PassRows, Request, Scores, Verdict


@dataclass(slots=True)
class Past:
    """Draft KV stands for positions `base .. computed - 1`; `pieces` are (first position, states `[n, W]`) in order, of which the
    last may be longer than what is valid. Before `base` nothing was seen: a gap, which the drafter does not look across."""

    base: int = 0
    computed: int = 0
    pieces: list[tuple[int, Tensor]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The first position of which nothing is known."""
        return max([self.computed, *(start + len(states) for start, states in self.pieces[-1:])])

    def add(self, start: int, states: Tensor) -> None:
        """States of the positions from `start` on; what was known of them is out of date, and before a gap lies nothing."""
        if start > self.end or start < self.base:
            self.base, self.computed, self.pieces = start, start, []
        self.computed = min(self.computed, start)
        kept = [(first, old[: start - first]) for first, old in self.pieces if first < start]
        if kept and start - self.computed > 1:  # unread, and more come: do not keep a whole batch's states alive for one request
            kept[-1] = (kept[-1][0], kept[-1][1].clone())
        self.pieces = [*kept, (start, states)]

    def unread(self, end: int) -> int:
        """How many positions below `end` have states but no KV."""
        return max(0, min(end, self.end) - self.computed)

    def rows(self, start: int, end: int) -> Tensor | None:
        """States `[end - start, W]`, or None if some are missing."""
        parts = [states[max(0, start - first) : end - first] for first, states in self.pieces if first < end]
        found = [p for p in parts if len(p)]
        if sum(map(len, found)) != end - start:
            return None
        return found[0] if len(found) == 1 else torch.cat(found)

    def read(self, end: int) -> None:
        """There is KV for all positions below `end`; the last one's states are kept, to be read again if nothing is added."""
        kept = [(first, states) for first, states in self.pieces if first + len(states) >= end]
        self.pieces = [(max(first, end - 1), states[max(0, end - 1 - first) :]) for first, states in kept]
        self.computed = end


Chunk = tuple[Request, Tensor, int]
"""A request, states of it that follow one another, and the position after the last of them."""


def together(chunks: Sequence[Chunk], most: int) -> Iterator[list[Chunk]]:
    """Chunks in groups of at most `most` rows, or of one."""
    some, rows = list[Chunk](), 0
    for one in chunks:
        if some and rows + len(one[1]) > most:
            yield some
            some, rows = [], 0
        some.append(one)
        rows += len(one[1])
    if some:
        yield some


def in_a_row(chunks: Sequence[Chunk]) -> NDArray[np.int64]:
    """`[3, N]`: of the states of all chunks, one after the other, the tokens they are paired with, positions, whose they are."""
    spans = [(upto - len(states), upto) for _, states, upto in chunks]
    tokens = [t for (r, _, _), (start, end) in zip(chunks, spans, strict=True) for t in r.tokens[start + 1 : end + 1]]
    places = np.concatenate([np.arange(start, end) for start, end in spans])
    return np.stack([np.array(tokens), places, np.repeat(np.arange(len(spans)), [end - start for start, end in spans])])


def in_order(batch: Batch, verdict: Verdict, scores: Scores, feature: str, fused: bool = False) -> list[Tensor]:
    """Per request the states of its committed rows by position, from `request.computed` on: `[n, W]`, of which as many count as
    the round committed. No host sync. `fused`: by a kernel."""
    rows, states = scores.rows, scores.features[feature]
    device, most = states.device, verdict.tokens.shape[1] - 1
    counts = [p + (most if ready else 0) for p, ready in zip(batch.pending, batch.ready, strict=True)]
    starts = [sum(counts[:b]) - r.computed for b, r in enumerate(batch.requests)]
    total = sum(counts)
    shift = torch.tensor(starts).to(device, non_blocking=True)
    if fused:
        table = states.new_zeros(total, states.shape[1])
        _arrange(states, rows, verdict.path.to(device), shift, table)
        return list(torch.split(table, counts))
    path = verdict.path.to(device)[rows.request]
    kept = (rows.slot <= 0) | (path == rows.slot[:, None] - 1).any(1)
    place = torch.where(kept, rows.position + shift[rows.request], total).clamp(0, total)
    table = states.new_zeros(total + 1, states.shape[1]).index_copy_(0, place, states)
    return list(torch.split(table[:total], counts))


def _arrange(states: Tensor, rows: PassRows, path: Tensor, shift: Tensor, table: Tensor) -> None:
    from ..kernels.moves import arrange

    if len(states):
        arrange(states, (rows.request, rows.position, rows.slot), path, shift, table)


def missing(request: Request) -> int:
    """The position after the last one whose state can be paired with a token: the last token's own state is still to come."""
    return len(request.tokens) - 1
