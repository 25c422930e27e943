"""The classical rules in plain Python, one request at a time: what the vectorised forms are held to, and what is enumerated.

Written to be read. Randomness comes from a `Source`, so that the same code runs on the product's streams (`Streams`) and on an
enumeration of everything that can happen (`bench.exact`). Steps that a planted bug may replace are methods of `Steps`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..noise import ACCEPT, RESIDUAL
from ..oracle import uniform

Law = Sequence[float]


class Source(Protocol):
    """Uniform numbers u in [0, 1) by purpose and slot of a round; asking twice gives the same u."""

    def below(self, purpose: int, slot: int, share: float, whole: float) -> bool:
        """Whether u * whole < share."""
        ...

    def pick(self, purpose: int, slot: int, weights: Law) -> int:
        """The first index whose cumulated weight exceeds u times the total."""
        ...


@dataclass(frozen=True, slots=True)
class Streams:
    """The product's uniforms for one round of one request."""

    key: int
    start: int

    def below(self, purpose: int, slot: int, share: float, whole: float) -> bool:
        return uniform(self.key, purpose, slot, self.start) * whole < share

    def pick(self, purpose: int, slot: int, weights: Law) -> int:
        aim, mass = uniform(self.key, purpose, slot, self.start) * sum(weights), 0.0
        for v, weight in enumerate(weights):
            mass += weight
            if mass > aim:
                return v
        raise ValueError("nothing to pick from")


@dataclass(frozen=True, slots=True)
class Guesses:
    """One request's round: `tokens` and `parents` of the nodes, the laws `p` and `q` of every slot (all zeros in q: no draw)."""

    tokens: Sequence[int]
    parents: Sequence[int]
    p: Sequence[Law]
    q: Sequence[Law]

    def children(self, slot: int) -> list[int]:
        return [j for j, parent in enumerate(self.parents) if parent == slot - 1]


class Steps:
    """The parts of the rules, over one round's guesses and one source. `Path`: accepted columns and the token after them."""

    def __init__(self, given: Guesses, source: Source) -> None:
        self.given, self.source = given, source

    def kept(self, node: int, share: float, whole: float) -> bool:
        """The acceptance test of a node."""
        return self.source.below(ACCEPT, node + 1, share, whole)

    def left(self, g: float, r: Law, s: Law) -> list[float]:
        """What remains of g * r once s is taken off, unnormalised."""
        return [max(g * a - b, 0.0) for a, b in zip(r, s, strict=True)]

    def without(self, s: Law, token: int) -> list[float]:
        """The law of the next draw without replacement."""
        rest = [0.0 if v == token else b for v, b in enumerate(s)]
        total = sum(rest)
        return [b / total for b in rest] if total > 0 else rest

    def drawn_from(self, slot: int, s: Law, token: int) -> Law:
        """What drew `token`: `s`, or a point mass where slot's guesses are no draws."""
        if any(b > 0 for b in self.given.q[slot]):
            return s
        return [float(v == token) for v in range(len(s))]

    def rest(self, slot: int, left: Law) -> list[float]:
        """`left` as a law; the target's own where rounding left nothing."""
        total = sum(left)
        return [a / total for a in left] if total > 0 else list(self.given.p[slot])

    def end(self, slot: int, r: Law) -> int:
        """The token after the last accepted one."""
        return self.source.pick(RESIDUAL, slot, r)


Path = tuple[list[int], int]


def top_down(do: Steps) -> Path:
    """`rejection`: at every slot try the children in order, restart at the first that is kept."""
    given, path, slot = do.given, list[int](), 0
    while True:
        r, s, found = given.p[slot], given.q[slot], None
        for child in given.children(slot):
            token = given.tokens[child]
            s_now = do.drawn_from(slot, s, token)
            if s_now[token] <= 0:
                continue
            if do.kept(child, r[token], s_now[token]):
                found = child
                break
            r, s = do.rest(slot, do.left(1.0, r, s_now)), do.without(s_now, token)
        if found is None:
            return path, do.end(slot, r)
        path.append(found)
        slot = found + 1


def bottom_up(do: Steps) -> Path:
    """`traversal`: children before parents, a whole path at a time."""
    path = _visit(do, 0, 1.0)
    assert path is not None
    return path


def _visit(do: Steps, slot: int, g: float) -> Path | None:
    """The path that ends in the subtree of `slot`, None if all of it is turned down."""
    given = do.given
    r, s = given.p[slot], given.q[slot]
    for child in given.children(slot):
        token = given.tokens[child]
        s_now = do.drawn_from(slot, s, token)
        if s_now[token] <= 0:
            continue
        found = _visit(do, child + 1, min(g * r[token] / s_now[token], 1.0))
        if found is not None:
            return [child, *found[0]], found[1]
        left = do.left(g, r, s_now)
        g = _ratio(sum(left), g)
        r, s = do.rest(slot, left), do.without(s_now, token)
    if slot == 0 or do.kept(slot - 1, g, 1.0):
        return [], do.end(slot, r)
    return None


def _ratio(mass: float, g: float) -> float:
    whole = mass + 1 - g
    return mass / whole if whole > 0 else 1.0


def block(do: Steps) -> Path:
    """`block`, for one chain: P_i = min(P_{i-1} p_i / q_i, 1), the last i with u_i < h_i ends the block."""
    given, columns = do.given, len(do.given.tokens)
    drawn = [do.drawn_from(i, given.q[i], given.tokens[i]) for i in range(columns)]
    level = [1.0]
    for i, token in enumerate(given.tokens):
        level.append(min(level[i] * given.p[i][token] / drawn[i][token], 1.0) if drawn[i][token] > 0 else 0.0)
    for i in range(columns, -1, -1):
        left = do.left(level[i], given.p[i], drawn[i]) if i < columns else [level[i] * a for a in given.p[i]]
        if i == 0 or do.kept(i - 1, _ratio(sum(left), level[i]), 1.0):
            return list(range(i)), do.end(i, do.rest(i, left))
    raise AssertionError("the root always ends the block")


def longest(do: Steps, kept: Sequence[bool]) -> Path:
    """The lossy rules: the longest path of nodes that were found likely enough; a draw that hits a guess goes on there."""
    given = do.given
    height = [0] * (len(given.tokens) + 1)
    own = [0] * len(given.tokens)
    for j in range(len(given.tokens) - 1, -1, -1):
        own[j] = height[j + 1] + 1 if kept[j] else 0
        height[given.parents[j] + 1] = max(height[given.parents[j] + 1], own[j])
    path, slot = list[int](), 0
    while True:
        children = given.children(slot)
        best = max(children, key=lambda j: (own[j], -j), default=None)
        if best is None or not own[best]:
            token = do.end(slot, given.p[slot])
            best = next((j for j in children if given.tokens[j] == token), None)
            if best is None:
                return path, token
        path.append(best)
        slot = best + 1


def typical(do: Steps, eps: float = 0.09, delta: float = 0.3) -> Path:
    """Keep x if p(x) > min(eps, delta * exp(-H(p)))."""
    given, kept = do.given, []
    for token, parent in zip(given.tokens, given.parents, strict=True):
        p = given.p[parent + 1]
        entropy = -math.fsum(a * math.log(a) for a in p if a > 0)
        kept.append(p[token] > min(eps, delta * math.exp(-entropy)))
    return longest(do, kept)


def threshold(do: Steps, share: float = 0.3) -> Path:
    """Keep x if p(x) >= share."""
    given = do.given
    return longest(do, [given.p[parent + 1][t] >= share for t, parent in zip(given.tokens, given.parents, strict=True)])


PLAIN = {
    "rejection": top_down,
    "block": block,
    "traversal": bottom_up,
    "typical": typical,
    "threshold": threshold,
}
"""Plain twins by name."""
