"""Two controllers that measure: one lets a drafter guess without ever verifying, one changes the depth every few rounds."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
SLOW = 1.15
"""Times longer than usual that the reading of a prompt took where a host has a slow moment."""

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
class Stretch:
    """So many `rounds` of one depth in the text of this number, and the mean of what they took on the host, in seconds."""

    text: int
    batch: int
    depth: int
    rounds: int
    others: float
    drafts: float


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
        self._resumes = False
        self._open = deque[Asked](maxlen=8)
        self._last: float | None = None
        self._fresh, self._size, self._begun = True, 0, False
        self._before = 0.0
        self._row: tuple[tuple[int, int], list[tuple[float, float]]] = (0, 0), []
        self._firsts: list[tuple[int, int, float]] = []
        self._walls: dict[tuple[int, int], list[float]] = {}
        self._stretches: list[Stretch] = []
        self._counted = Counter[int]()
        self._texts: list[int] = []
        self._readings: dict[int, float] = {}

    def wake(self, size: int, which: int = 0) -> None:
        """A new group of so many texts is about to begin, those of prompts number `which`."""
        self._flush()
        self._size = size
        self._texts.append(which)
        self._last, self._fresh, self._left, self._begun = None, True, 0, False
        self._open.clear()

    @property
    def most(self) -> int | None:
        """The greatest depth, if there is any but 0."""
        return max(self._depths) or None

    @property
    def least(self) -> int:
        """Rounds that were measured of the depth that was met least."""
        return min(self._counted[depth] for depth in self._depths)

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
        wish = super().budget(batch) if self._depth else Budget.none(len(batch))
        found = replace(wish, depth=tuple(min(d, self._depth) for d in wish.depth))  # requests name the greatest
        self._note(batch, max(found.depth, default=0))
        return found

    def cut(self, batch: Batch, proposal: Proposal) -> Proposal:
        """See whether passes go on from states of the draft, and keep everything."""
        self._resumes = self._resumes or proposal.resume is not None
        return proposal

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
        if asked.depth:
            add("verify", batch, event.rows, event.verify_seconds)
            if self._resumes:
                self.samples.resumed[batch, asked.depth].append((event.rows, event.verify_seconds))
        else:
            add("plain", batch, 0, event.verify_seconds)
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

    def read(self, seconds: float) -> None:
        """What the reading of the group's prompts took."""
        self._readings[len(self._texts) - 1] = seconds
        self.samples.add("reading", self._size, 0, seconds)

    def _flush(self) -> None:
        """A stretch is over. Its rounds count with their mean: one that was told late makes the next one short."""
        (batch, depth), found = self._row
        self._row = (0, 0), []
        if found:
            others, drafts = (sum(part) / len(found) for part in zip(*found, strict=True))
            self._stretches.append(Stretch(len(self._texts) - 1, batch, depth, len(found), others, drafts))
            self._counted[depth] += len(found)

    def close(self) -> None:
        """All is measured. What a text's first round with guesses and the one before it, in which it may have been launched, took
        beyond such rounds is the drafter's own reading. Of the host's part texts written in one of its slow moments do not count,
        which last for many stretches, so that some depths meet more of them than others; the reading of the prompt tells."""
        self._flush()
        slow = self._slow()
        for stretch in self._stretches:
            for _ in range(0 if stretch.text in slow else stretch.rounds):
                self.samples.add("other", stretch.batch, stretch.depth, stretch.others)
                if stretch.depth:
                    self.samples.add("draft", stretch.batch, stretch.depth, stretch.drafts)
        usual = {key: sum(walls) / len(walls) for key, walls in self._walls.items()}
        for batch, depth, seconds in self._firsts:
            if (batch, depth) in usual and (batch, 0) in usual:
                self.samples.add("begin", batch, 0, seconds - usual[batch, depth] - usual[batch, 0])

    def _slow(self) -> set[int]:
        """Texts whose prompts took longer to read than the same ones usually did. None, if some depth was met in no others."""
        usual = {
            which: median(s for t, s in self._readings.items() if self._texts[t] == which)
            for which in {self._texts[t] for t in self._readings}
        }
        slow = {t for t, seconds in self._readings.items() if seconds > SLOW * usual[self._texts[t]]}
        met, left = ({s.depth for s in self._stretches if s.text not in out} for out in (set[int](), slow))
        return slow if met == left else set()

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
