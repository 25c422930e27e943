"""How good guesses are: by position of the look-ahead, or place by place of texts that were written.

Chances by position are what reports carry. They say nothing about where rounds begin, though, and that depends on the depth: a
long look-ahead begins most rounds right after a mistake, a short one in the middle of what can be guessed. A record of every
place of a text (`Answer`) knows: rounds of any depth are walked through it, and the end of the text comes where it came.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Chances:
    """`accept[i]`: chance that guess i + 1 is right, given that those before it were. `offer[i]`: share of rounds in which there
    is such a guess. Past their ends the last value goes on (nothing is known better). `survival[i]`: share of all guesses at that
    position that were right, where it was measured: more than the product of the chances where deep guesses are made only in
    rounds that go well, as copying drafters do."""

    accept: tuple[float, ...]
    offer: tuple[float, ...] = (1.0,)
    survival: tuple[float, ...] = ()

    @classmethod
    def of_survival(cls, survival: Sequence[float], offer: Sequence[float] = (1.0,)) -> Chances:
        """From shares of all guesses at a position that were accepted, as reports have them (`acceptance_by_position`)."""
        before = (1.0, *survival)
        accept = [min(1.0, s / b) if b > 0 else 0.0 for b, s in zip(before, survival, strict=False)]
        return cls(tuple(accept) or (0.0,), tuple(offer) or (1.0,), tuple(survival))

    @property
    def rate(self) -> float:
        """One number for all positions, as the formulas want it: guesses accepted, of those that were put to the test."""
        given = self._given(len(self.accept))
        offered = [self.offered(i + 1) for i in range(len(given))]
        tested = sum(o * max(g, before) for o, g, before in zip(offered, given, (1.0, *given), strict=False))
        return sum(o * g for o, g in zip(offered, given, strict=True)) / tested if tested else 0.0

    def _given(self, depth: int) -> list[float]:
        """Of the guesses made at each position up to `depth`, the share that is right, all before them included."""
        given = list(self.survival[:depth])
        for i in range(len(given), depth):
            given.append((given[-1] if given else 1.0) * self.accept[min(i, len(self.accept) - 1)])
        return given

    def offered(self, position: int) -> float:
        """Share of rounds that have a guess at `position` (from 1)."""
        return self.offer[min(position, len(self.offer)) - 1]

    def round(self, depth: int) -> tuple[float, float]:
        """Expected tokens and expected guesses of a round that looks `depth` ahead, far from the end of the text."""
        offered = [self.offered(i + 1) for i in range(depth)]
        return 1.0 + sum(g * o for g, o in zip(self._given(depth), offered, strict=True)), sum(offered)

    def deepest(self, depth: int) -> list[float]:
        """Chance that exactly 0, 1, ... `depth` guesses are offered."""
        offered = [1.0, *(self.offered(i + 1) for i in range(depth)), 0.0]
        return [max(0.0, a - b) for a, b in pairwise(offered)]


@dataclass(frozen=True, slots=True)
class Answer:
    """One text, place by place: had a round begun with `t + 1` tokens written, `right[t]` guesses would have been right of
    `depth` asked for, with `rows[t]` guesses in the pass. The text had `tokens` tokens and was allowed `limit`; `prompt` is how
    many came before it."""

    right: tuple[int, ...]
    rows: tuple[int, ...]
    depth: int
    tokens: int
    limit: int
    prompt: int = 0

    def ask(self, written: int, depth: int) -> int:
        """How far a round looks ahead: never past the last token but one that may be written."""
        return max(0, min(depth, self.limit - written - 1))

    def guesses(self, written: int, asked: int, tree: float = 0.0) -> int:
        """Guesses in the pass of a round that asked for so many levels; `tree`: as many as a tree of so many has, else they grow
        with its depth."""
        if not asked:
            return 0
        found = self.rows[written - 1]
        if found <= self.depth:
            return min(found, asked)
        return min(found, round(tree)) if tree else math.ceil(found * asked / self.depth)

    def gained(self, written: int, asked: int) -> int:
        """Tokens of such a round: the guesses that are right and one more, up to the end of the text."""
        return min(min(self.right[written - 1], asked) + 1, self.tokens - written)


@dataclass(frozen=True, slots=True)
class Record:
    """Answers that were written with a drafter looking on."""

    answers: tuple[Answer, ...]

    @property
    def depth(self) -> int:
        """How far was looked."""
        return max((a.depth for a in self.answers), default=0)

    @property
    def chances(self) -> Chances:
        """By position, over rounds that begin anywhere with room to look all the way ahead."""
        spots = [
            (r, min(n, a.depth))
            for a in self.answers
            for t, (r, n) in enumerate(zip(a.right, a.rows, strict=True))
            if a.tokens - t - 1 > a.depth
        ]
        offered = [sum(n > i for _, n in spots) for i in range(self.depth)]
        kept = [sum(r > i for r, _ in spots) for i in range(self.depth)]
        tested = [sum(r >= i and n > i for r, n in spots) for i in range(self.depth)]
        known = sum(1 for n in tested if n)
        accept = tuple(k / t for k, t in zip(kept[:known], tested[:known], strict=True))
        return Chances(accept or (0.0,), tuple(o / len(spots) for o in offered) if spots else (0.0,))

    @property
    def rate(self) -> float:
        """Guesses that were right, of those put to the test, over rounds as the deepest look-ahead makes them."""
        hits = misses = 0
        for answer in self.answers:
            written = 1
            while written < answer.tokens:
                asked = answer.ask(written, answer.depth)
                right = min(answer.right[written - 1], asked)
                hits += right
                misses += right < min(answer.guesses(written, asked), answer.tokens - written)
                written += answer.gained(written, asked)
        return hits / (hits + misses) if hits + misses else 0.0

    def groups(self, size: int) -> Iterator[tuple[Answer, ...]]:
        """The answers in groups that are written together; where there are fewer than `size`, they are taken again."""
        answers = self.answers
        if 0 < len(answers) < size:
            answers = tuple(answers[i % len(answers)] for i in range(size))
        for i in range(0, len(answers), size):
            yield answers[i : i + size]
