"""Two controllers that measure: one lets a drafter guess without ever verifying, one changes the depth every few rounds."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from .. import metrics
from ..control import Fixed
from ..protocols import Drafter
from ..types import PROBE, ROOT, Batch, Budget, Proposal, Stats, StepEvent
from .costs import Samples

LENGTH, PLAIN_LENGTH = 5, 6
"""Rounds of a stretch; plain ones may be launched ahead, which takes a round more to show."""
QUICK, LONGER = 0.01, 12
"""Seconds of a round below which stretches have so many rounds more: a host takes some to find its pace again."""
SKIPPED, PLAIN_SKIPPED = 1, 2
"""Rounds at the beginning of a stretch that do not count. Nor does its last one: the next round, of another depth, may be
launched before it is told."""
FEW, STALL = 5, 8.0
"""Rounds of a depth after which one that takes so many times the middle one of the last is a stall, and does not count."""

Tree = list[tuple[int, int]]
"""Guesses as (token, parent's index)."""


def right(tree: Tree, text: Sequence[int]) -> int:
    """How many guesses of a tree a text that goes on like this would have accepted."""
    at, count = ROOT, 0
    for token in text:
        found = next((i for i, (guess, parent) in enumerate(tree) if parent == at and guess == token), None)
        if found is None:
            break
        at, count = found, count + 1
    return count


def middle(found: Sequence[float]) -> list[float]:
    """The middle half, in order; of few, all."""
    cut = len(found) // 4 if len(found) >= 4 * FEW else 0
    return sorted(found)[cut : len(found) - cut]


class Watch(Fixed):
    """As `fixed`, and sees whether there are nodes to be scored that are no guesses."""

    name = "watch"
    probing = False

    def cut(self, batch: Batch, proposal: Proposal) -> Proposal:
        """Look, and keep everything."""
        self.probing = self.probing or bool((proposal.source == PROBE).any())
        return proposal


class Lookout(Fixed):
    """Asks for `depth` levels in every round and keeps none, so that a round commits one token: the i-th entry of `trees` was
    guessed with i + 1 tokens written. For one request at a time."""

    name = "lookout"

    def __init__(self, drafter: Drafter, depth: int) -> None:
        super().__init__(drafter)
        self.depth = self._depth = depth
        self.trees: list[Tree] = []
        self.widths: list[int] = []
        self._asked = False

    def budget(self, batch: Batch) -> Budget:
        """As far as there is room, once the prompt is read."""
        found = super().budget(batch)
        self._asked = found.any
        return found

    def cut(self, batch: Batch, proposal: Proposal) -> Proposal:
        """Write the guesses down and drop them."""
        if self._asked:
            size = int(proposal.sizes[0])
            tokens, parents = (t[0, :size].tolist() for t in (proposal.tokens, proposal.parents))
            self.trees.append(list(zip(tokens, parents, strict=True)))
            self.widths.append(proposal.widths[0])
        return Proposal.empty(len(batch))


@dataclass(frozen=True, slots=True)
class Asked:
    """A round that was launched: who took part, how deep, and whether it counts."""

    ids: tuple[int, ...]
    depth: int
    counts: bool


class Stretches(Fixed):
    """Always the same depth for a few rounds, then another of `depths` or none, in random order; seconds go to `samples`, what
    was accepted at the greatest depth to `stats`. `inside` adds up all rounds after a text's first token. Texts begin with a
    plain stretch, so that their reading is that of plain decoding. Once somebody of the group has ended, rounds do not count."""

    name = "stretches"

    def __init__(
        self, drafter: Drafter, depths: Sequence[int], samples: Samples, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(drafter)
        self.samples, self.stats, self.inside = samples, Stats(), 0.0
        self._depths, self._clock, self._random = [0, *depths], clock, random.Random(0)
        self._queue: list[int] = []
        self._left = self._at = 0
        self._open = deque[Asked](maxlen=8)
        self._last: float | None = None
        self._fresh, self._size, self._begun = True, 0, False
        self._before = 0.0
        self._row: tuple[tuple[int, int], list[tuple[float, float]]] = (0, 0), []
        self._firsts: list[tuple[int, int, float]] = []
        self._walls: dict[tuple[int, int], list[float]] = {}

    def wake(self, size: int) -> None:
        """A new group of so many texts is about to begin."""
        self._size = size
        self._flush()
        self._last, self._fresh, self._left, self._begun = None, True, 0, False
        self._open.clear()

    @property
    def least(self) -> int:
        """Rounds that were measured of the depth that was met least."""
        return min(len(self.samples.parts["other"].get((self._size, depth), ())) for depth in self._depths)

    @property
    def resting(self) -> bool:
        """Within a plain stretch."""
        return self._depth == 0 and self._left > 0

    def rest(self, batch: Batch) -> Budget:
        """A plain round that was launched ahead."""
        self._turn(batch)
        self._note(batch, 0)
        return super().rest(batch)

    def budget(self, batch: Batch) -> Budget:
        """The stretch's depth, as far as there is room."""
        reading = not batch.writes
        if not reading:
            self._turn(batch)
        found = super().budget(batch)
        self._note(batch, max(found.depth, default=0))
        return found

    def observe(self, event: StepEvent) -> None:
        """Book a round's seconds."""
        now, last = self._clock(), self._last
        self._last = now
        asked = self._match(event)
        if event.prefill or last is None:
            return
        wall, batch = now - last, len(event.committed)
        self.inside += wall
        if asked is None or batch != self._size or not any(item.tokens for item in event.committed):
            return
        before, self._before = self._before, wall
        if asked.depth and self._fresh:
            self._fresh = False
            self._firsts.append((batch, asked.depth, before + wall))
            return
        if not asked.counts:
            self._flush()
            return
        add, walls = self.samples.add, self._walls.setdefault((batch, asked.depth), [])
        walls.append(wall)
        if len(walls) > FEW and wall > STALL * median(walls[-8 * FEW :]):
            return
        add("verify", batch, event.rows, event.verify_seconds)
        if self._row[0] != (batch, asked.depth):
            self._flush()
            self._row = (batch, asked.depth), []
        self._row[1].append((wall - event.verify_seconds - event.draft_seconds, event.draft_seconds))
        if asked.depth:
            nodes = (event.rows - batch) / batch
            if nodes > asked.depth:
                add("nodes", batch, asked.depth, nodes)
        if asked.depth == max(self._depths):
            for item in event.committed:
                metrics.add(self.stats, item)

    def _flush(self) -> None:
        """A stretch is over. Its rounds count with their mean: one that was told late makes the next one short."""
        (batch, depth), found = self._row
        others, drafts = (sum(part) / max(1, len(found)) for part in (zip(*found, strict=True) if found else ((), ())))
        for _ in found:
            self.samples.add("other", batch, depth, others)
            if depth:
                self.samples.add("draft", batch, depth, drafts)
        self._row = (0, 0), []

    def close(self) -> None:
        """All is measured. What a text's first round with guesses and the one before it, in which it may have been launched, took
        beyond such rounds is the drafter's own reading. Of the host's part the usual pace counts: its slow moments and its quick
        ones last for many stretches, and some depths met more of them than others."""
        self._flush()
        for part in ("other", "draft"):
            for (batch, _), found in self.samples.parts[part].items():
                found[:] = middle(found) if batch == self._size else found
        usual = {key: sum(walls) / len(walls) for key, walls in self._walls.items()}
        for batch, depth, seconds in self._firsts:
            if (batch, depth) in usual and (batch, 0) in usual:
                self.samples.add("begin", batch, 0, seconds - usual[batch, depth] - usual[batch, 0])

    def _turn(self, batch: Batch) -> None:
        """Go on with the stretch, or begin another."""
        if not self._left:
            if not self._queue:
                self._queue = self._random.sample(self._depths, len(self._depths))
            roomy = batch.requests[0].params.max_tokens >= 4 * (LENGTH + LONGER)
            more = LONGER if self._begun and roomy and 0 < self._before < QUICK else 0
            self._depth = self._queue.pop() if self._begun else 0
            self._begun = True
            self._left, self._at = (LENGTH if self._depth else PLAIN_LENGTH) + more, 0
        self._left -= 1
        self._at += 1

    def _note(self, batch: Batch, depth: int) -> None:
        skipped = SKIPPED if self._depth else PLAIN_SKIPPED
        counts = self._at > skipped and self._left > 0 and depth == self._depth
        self._open.append(Asked(tuple(r.id for r in batch.requests), depth, counts))

    def _match(self, event: StepEvent) -> Asked | None:
        """What was asked in the round of an event; rounds that were launched and never read are passed over."""
        ids = tuple(item.request.id for item in event.committed)
        while self._open:
            asked = self._open.popleft()
            if asked.ids == ids[: len(asked.ids)]:
                return asked
        return None
