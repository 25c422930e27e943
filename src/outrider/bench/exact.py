"""The law of the classical rules by enumeration: every draft, every outcome of every test, with its exact probability.

The rules' plain twins run on an enumerated `Source`: a uniform that is asked "below t?" splits its interval, so a number that is
used twice (as planted bugs do) is integrated exactly, too. Drafts and targets are random laws of the whole prefix. Two laws
are compared with the target's: of one round, continued by the target (which suffices, by induction over rounds), and of whole
texts written by as many rounds as it takes. They agree to 1e-12, or a bug is at work.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from ..accept.plain import PLAIN, Guesses, Law, Path, Steps
from ..noise import ACCEPT, DRAFT
from .chance import Chance, Key, Keyed, Word, Worst, chi_squared, outcomes

__all__ = ["TOLERANCE", "chi_squared", "law_error", "planted"]
TOLERANCE = 1e-12
"""How far an enumerated law may be from the target's in any text's probability."""


@dataclass(frozen=True)
class World:
    """Random laws of the next token, target's and draft's, for every prefix. `kind`: `mixed`; `zeros`, some tokens impossible, as
    after top-k; `same`, q = p; `apart`, no token in common. `shape[d]` is how many children a node at depth d has."""

    vocab: int
    shape: tuple[int, ...]
    kind: str = "mixed"
    seed: int = 0
    cache: dict[tuple[str, Word], list[float]] = field(default_factory=dict)

    def law(self, who: str, prefix: Word) -> list[float]:
        """`who`: p or q."""
        if self.kind == "same":
            who = "p"
        found = self.cache.get((who, prefix))
        if found is None:
            rng = random.Random(f"{self.seed} {who} {prefix}")
            weights = [rng.expovariate(1.0) ** 2 + 1e-3 for _ in range(self.vocab)]
            gone = [rng.randrange(self.vocab)] if self.kind == "zeros" else []
            if self.kind == "apart":
                shuffled = random.Random(f"{self.seed} {prefix}").sample(range(self.vocab), self.vocab)
                gone = shuffled[: self.vocab // 2] if who == "p" else shuffled[self.vocab // 2 :]
            weights = [0.0 if v in gone else w for v, w in enumerate(weights)]
            total = sum(weights)
            found = self.cache[who, prefix] = [w / total for w in weights]
        return found

    def text(self, word: Word, prefix: Word = ()) -> float:
        """The target's probability of writing `word` after `prefix`."""
        return math.prod(self.law("p", prefix + word[:i])[v] for i, v in enumerate(word))


class Drafting:
    """How a round's guesses come about, in steps that planted bugs replace. A drawn tree: children without replacement from q."""

    drawn = True

    def __init__(self, world: World) -> None:
        self.world = world

    def key(self, round_: int, slot: int, depth: int) -> Key:
        """What a slot's draws are keyed by (DRAFT and the child's rank are added)."""
        return (round_, slot)

    def told(self, q: list[float]) -> list[float]:
        """The q that the rule is told."""
        return q

    def sees(self, p: list[float]) -> list[float]:
        """The p that the rule is told."""
        return p

    def dropped(self, q: list[float], token: int) -> bool:
        """Whether a guess is dropped once it has been looked at."""
        return False

    def child(self, source: Keyed, key: Key, rest: list[float]) -> int:
        return source.draw(key, rest)

    def guesses(self, prefix: Word, source: Keyed) -> Guesses:
        """One round's tree after `prefix`, breadth first."""
        tokens, parents, words, depths = list[int](), list[int](), [prefix], [0]
        slot = 0
        while slot < len(words):
            if depths[slot] < len(self.world.shape):
                for token in self.children(words[slot], slot, depths[slot], source):
                    tokens.append(token)
                    parents.append(slot - 1)
                    words.append((*words[slot], token))
                    depths.append(depths[slot] + 1)
            slot += 1
        p = [self.sees(self.world.law("p", w)) for w in words]
        q = [self.told(self.world.law("q", w)) if self.drawn else [0.0] * self.world.vocab for w in words]
        return Guesses(tokens, parents, p, q)

    def children(self, word: Word, slot: int, depth: int, source: Keyed) -> list[int]:
        q = self.world.law("q", word)
        rest, found = list(q), list[int]()
        for rank in range(self.world.shape[depth]):
            if sum(rest) <= 0:
                break
            token = self.child(source, (*self.key(source.round_, slot, depth), DRAFT, rank), rest)
            rest[token] = 0.0
            if self.dropped(q, token):
                break
            found.append(token)
        return found


class Certain(Drafting):
    """Deterministic guesses: the likeliest under q, without telling q."""

    drawn = False

    def child(self, source: Keyed, key: Key, rest: list[float]) -> int:
        return max(range(len(rest)), key=lambda v: rest[v])


@dataclass(frozen=True)
class Subject:
    """What is put to the test: a rule, its steps, and the way drafts are made."""

    rule: Callable[[Steps], Path]
    steps: type[Steps] = Steps
    drafting: type[Drafting] = Drafting

    def round(self, world: World, prefix: Word, chance: Chance, round_: int) -> Word:
        """The tokens that one round writes."""
        source = Keyed(chance, round_)
        given = self.drafting(world).guesses(prefix, source)
        path, last = self.rule(self.steps(given, source))
        return (*(given.tokens[j] for j in path), last)

    def worst(self, world: World) -> float:
        """1 if a round whose every uniform is 0 writes something impossible, else 0."""
        given = self.drafting(world).guesses((), Keyed(Chance([], []), 0))
        path, last = self.rule(self.steps(given, Worst()))
        return float(world.text((*(given.tokens[j] for j in path), last)) == 0)


def round_error(subject: Subject, world: World) -> float:
    """Largest error in the law of one round's tokens, continued by the target to one token more than a round can write."""
    length = len(world.shape) + 1
    law: dict[Word, float] = defaultdict(float)
    for mass, word in outcomes(lambda chance: subject.round(world, (), chance, 0)):
        law[word] += mass
    error = 0.0
    for word in itertools.product(range(world.vocab), repeat=length):
        got = sum(law[word[:n]] * world.text(word[n:], word[:n]) for n in range(1, length + 1) if word[:n] in law)
        error = max(error, abs(got - world.text(word)))
    return max(error, subject.worst(world))


def text_error(subject: Subject, world: World, length: int) -> float:
    """Largest error in the law of texts of `length` tokens, written by as many rounds as it takes."""

    def write(chance: Chance) -> Word:
        word: Word = ()
        while len(word) < length:
            word += subject.round(world, word, chance, len(word))
        return word[:length]

    law: dict[Word, float] = defaultdict(float)
    for mass, word in outcomes(write):
        law[word] += mass
    words = itertools.product(range(world.vocab), repeat=length)
    return max(abs(law[word] - world.text(word)) for word in words)


CHAIN, LONG, TREE = World(3, (1, 1), seed=16), World(2, (1, 1), seed=37), World(3, (2, 1), seed=9)


def worlds(seed: int = 0) -> list[World]:
    """Small worlds of every kind: chains to depth 3, trees of two levels; a second or two for each rule."""
    shapes = [World(5, (1, 1, 1)), World(3, (1, 1, 1)), World(5, (3,)), World(3, (2, 2)), World(4, (2, 2)), World(5, (2, 1))]
    kinds = [World(3, (1, 1), kind) for kind in ("zeros", "same", "apart")] + [
        World(4, (2, 1), "zeros"),
        World(4, (2, 1), "apart"),
    ]
    return [replace(w, seed=seed + i, cache={}) for i, w in enumerate(shapes + kinds)]


def law_error(rule: str, bug: str | None = None) -> float:
    """Largest error in any text's probability under a rule, drawn and deterministic guesses; with `bug`, a name in `planted()`,
    under that bug instead. Right rules stay below `TOLERANCE`."""
    if bug is not None:
        return planted()[bug]()
    errors = []
    for drafting in (Drafting, Certain):
        subject = Subject(_rule(rule), drafting=drafting)
        errors += [round_error(subject, w) for w in worlds()]
        errors += [text_error(subject, replace(w, cache={}), 3) for w in (LONG, World(3, (1,)), World(2, (2, 1)))]
    return max(errors)


def _rule(name: str) -> Callable[[Steps], Path]:
    return tree_block if name == "block" else PLAIN[name]


def tree_block(do: Steps) -> Path:
    """`block` as the product runs it: trees are judged by traversal."""
    chain = all(parent == j - 1 for j, parent in enumerate(do.given.parents))
    return PLAIN["block" if chain else "traversal"](do)


# Planted bugs: each must be found. Steps of a rule, then steps of drafting.


class ResidualSkipped(Steps):
    """After a rejection the next token is drawn from p."""

    def left(self, g: float, r: Law, s: Law) -> list[float]:
        return list(r)


class Loose(Steps):
    """Accepts on u * q <= p."""

    def kept(self, node: int, share: float, whole: float) -> bool:
        return super().kept(node, share + 1e-300, whole)


class SiblingKept(Steps):
    """A drawn sibling is not removed from q."""

    def without(self, s: Law, token: int) -> list[float]:
        return list(s)


class Reused(Steps):
    """The residual is drawn with the number of the test that failed."""

    def end(self, slot: int, r: Law) -> int:
        children = self.given.children(slot)
        return self.source.pick(ACCEPT, children[-1] + 1, r) if children else super().end(slot, r)


class LookThenDrop(Drafting):
    """The likeliest token is dropped from the proposal once drawn."""

    def dropped(self, q: list[float], token: int) -> bool:
        return token == max(range(len(q)), key=lambda v: q[v])


class ByPosition(Drafting):
    """Draft noise keyed by position alone, so that the next round draws with numbers that this one has looked at."""

    def key(self, round_: int, slot: int, depth: int) -> Key:
        return (-1, round_ + depth)


class ByDepth(Drafting):
    """Sibling subtrees share their noise."""

    def key(self, round_: int, slot: int, depth: int) -> Key:
        return (round_, -1 - depth)


class WrongHeat(Drafting):
    """The q that is told has another temperature than the one that drew."""

    def told(self, q: list[float]) -> list[float]:
        weights = [b**1.25 for b in q]
        return [w / sum(weights) for w in weights]


class FilterLate(Drafting):
    """The rule is told a p without the filter that the target's law has (worlds of kind `zeros`)."""

    def sees(self, p: list[float]) -> list[float]:
        weights = [max(a, 0.05) for a in p]
        return [w / sum(weights) for w in weights]


class FilterLateDraws(Steps):
    """... and the filter comes last, on the token that is drawn."""

    def end(self, slot: int, r: Law) -> int:
        cut = [a if a > min(self.given.p[slot]) else 0.0 for a in r]
        return super().end(slot, cut if sum(cut) > 0 else r)


class GreedySoft(Drafting):
    """The likeliest guess is taken, but verified as if drawn from q."""

    def child(self, source: Keyed, key: Key, rest: list[float]) -> int:
        return max(range(len(rest)), key=lambda v: rest[v])


def planted() -> dict[str, Callable[[], float]]:
    """Known bugs by name; each gives its law's error, which must be far above `TOLERANCE`."""
    rejection, traversal, block = PLAIN["rejection"], PLAIN["traversal"], PLAIN["block"]
    once: Mapping[str, tuple[Subject, World]] = {
        "residual skipped": (Subject(rejection, ResidualSkipped), CHAIN),
        "redraw after mismatch": (Subject(rejection, ResidualSkipped, Certain), CHAIN),
        "look then drop": (Subject(rejection, drafting=LookThenDrop), CHAIN),
        "look then drop under block": (Subject(block, drafting=LookThenDrop), CHAIN),
        "noise shared by sibling subtrees under traversal": (Subject(traversal, drafting=ByDepth), TREE),
        "sibling not removed from q": (Subject(rejection, SiblingKept), World(3, (2, 1), seed=7)),
        "sibling not removed from q under traversal": (Subject(traversal, SiblingKept), World(3, (2, 1), seed=7)),
        "wrong temperature in q": (Subject(rejection, drafting=WrongHeat), CHAIN),
        "wrong temperature in q under block": (Subject(block, drafting=WrongHeat), CHAIN),
        "top-k after the fact": (Subject(rejection, FilterLateDraws, FilterLate), World(3, (1, 1), "zeros")),
        "acceptance stream reused for the residual": (Subject(rejection, Reused), CHAIN),
        "<= for < at p = 0": (Subject(rejection, Loose), World(3, (1, 1), "apart")),
        "greedy draft verified with soft q": (Subject(rejection, drafting=GreedySoft), CHAIN),
    }
    tests: dict[str, Callable[[], float]] = {name: partial(round_error, *case) for name, case in once.items()}
    tests["draft noise keyed by position under block"] = partial(text_error, Subject(block, drafting=ByPosition), LONG, 3)
    return tests
