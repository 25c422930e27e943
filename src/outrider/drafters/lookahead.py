"""Lookahead decoding (Fu, Bailis, Stoica and Zhang 2024): the target guesses for itself, by Jacobi iteration on tokens ahead.

A window of N - 1 levels and W columns rides along with every pass. Column 0 of level 0 is the last committed token; the rest of
level 0 is a chain under it; each deeper level hangs under its column. So level l, column i stands l + i tokens ahead, and the
window is a tree like any other: what the target chooses after the deepest node of a column is the Jacobi update of that column.
The N tokens of a column are then an n-gram that the target itself wrote; they go into a pool, by their first token, and the
pool's n-grams for the last committed token are the guesses (G at most). All in one pass, of (N - 1)(W + G) rows at most.

It works at T > 0 under the coupled rule because the noise is keyed by position: what a node is given is what that position will
get. Level 0 and the last column, which goes on from it, are one chain: the window's guess of the next W + N - 3 tokens, and
counted as that. The other nodes of the window are probes (`PROBE`): scored, kept where they happen to be right, but not counted.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from ..errors import BadInput
from ..protocols import Drafter, Start
from ..registry import register
from ..types import NONE, PROBE, ROOT, Batch, Budget, Proposal, Request, Scores, Verdict

_KEYS = 8192
"""First tokens that a request's pool keeps n-grams for; the longest unused goes first."""

Gram = tuple[int, ...]


class Pool:
    """N-grams by their first token: the `most` latest of each, latest first."""

    def __init__(self, size: int, most: int) -> None:
        self.size, self.most = size, most
        self.grams: OrderedDict[int, list[Gram]] = OrderedDict()
        self.length = 0

    def extend(self, tokens: list[int]) -> None:
        """Take in the n-grams of a text that were not seen yet. O(new tokens)."""
        for end in range(max(self.length + 1, self.size), len(tokens) + 1):
            self.put(tokens[end - self.size], tuple(tokens[end - self.size + 1 : end]))
        self.length = len(tokens)

    def put(self, first: int, rest: Gram) -> None:
        """Note an n-gram as the latest of its first token."""
        kept = self.grams.setdefault(first, [])
        self.grams.move_to_end(first)
        if rest in kept:
            kept.remove(rest)
        kept.insert(0, rest)
        del kept[self.most :]
        if len(self.grams) > _KEYS:
            self.grams.popitem(last=False)

    def guesses(self, first: int) -> list[Gram]:
        """What may follow `first`."""
        return self.grams.get(first, [])


class Tree:
    """A tree under construction, for at most `nodes` nodes of at most `depth` levels. Equal paths are one node."""

    def __init__(self, depth: int, nodes: int) -> None:
        self.depth, self.nodes = depth, nodes
        self.index: dict[tuple[int, int], int] = {}
        self.guess: list[bool] = []
        self.level: list[int] = []

    def add(self, token: int, parent: int, guess: bool) -> int | None:
        """The node for `token` under `parent`, made if need be; None where there is no room."""
        at = self.index.get((token, parent))
        if at is None:
            level = 1 if parent == ROOT else self.level[parent] + 1
            if level > self.depth or len(self.level) >= self.nodes:
                return None
            at = self.index[token, parent] = len(self.level)
            self.level.append(level)
            self.guess.append(False)
        self.guess[at] |= guess
        return at

    def chain(self, tokens: Gram) -> None:
        """Add guesses one under the other, as far as there is room."""
        at: int | None = ROOT
        for token in tokens:
            at = None if at is None else self.add(token, at, True)

    def copy(self) -> Tree:
        made = Tree(self.depth, self.nodes)
        made.index, made.guess, made.level = dict(self.index), list(self.guess), list(self.level)
        return made


@dataclass(slots=True)
class Window:
    """A request's window: `levels[l][i]` is level l, column i (`levels[0][0]` is the last committed token). While it warms up
    there are fewer levels and more columns. `words`: what is drawn from, by `chance`. `ends` are the slots whose choices update
    it this round (empty: it is not in the pass)."""

    pool: Pool
    levels: list[list[int]]
    words: list[int]
    chance: random.Random
    ends: list[int] = field(default_factory=list)

    def plant(self, tree: Tree) -> Tree | None:
        """`tree` with the window in it, None if not all of it has room."""
        spare, ends, last = tree.copy(), list[int](), len(self.levels[0]) - 1
        at: int | None = ROOT
        for i in range(last + 1):
            at = at if i == 0 or at is None else spare.add(self.levels[0][i], at, True)
            below = at
            for level in self.levels[1:]:
                below = None if below is None else spare.add(level[i], below, i == last)
            if below is None:
                return None
            ends.append(below + 1)
        self.ends = ends
        return spare

    def turn(self, fresh: list[int], size: int) -> None:
        """One Jacobi step: `fresh[i]` is what follows the deepest token of column i. A window that is still short of levels gets
        one; a full one gives its n-grams to the pool and drops its first level. It moves on by one position."""
        if len(self.levels) < size - 1:
            self.levels = [level[1:] for level in self.levels] + [fresh[1:]]
            return
        for i, token in enumerate(fresh):
            self.pool.put(self.levels[0][i], (*(level[i] for level in self.levels[1:]), token))
        self.levels = [*self.levels[1:], fresh]


@register("lookahead")
class Lookahead(Drafter):
    """Lookahead decoding with a window, a pool of n-grams, and no other model."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`window`: columns (W); `ngram`: tokens of an n-gram (N); `guesses`: n-grams tried per round (G)."""

        window: int = 5
        ngram: int = 4
        guesses: int = 5

    def __init__(self, config: Config) -> None:
        for name, low in (("window", 1), ("ngram", 2), ("guesses", 1)):
            if getattr(config, name) < low:
                raise BadInput(f"lookahead needs {name} >= {low}, got {getattr(config, name)}")
        self.config = config
        w, n = config.window, config.ngram
        self.depth = max(w + n - 3, n - 1)
        self.nodes = max((j + 1) * (w + n - 2 - j) - 1 for j in range(n - 1)) + config.guesses * (n - 1)
        self._windows: dict[int, Window] = {}

    def start(self, start: Start) -> None:
        self._device = start.device

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        trees = [self._tree(r, budget.depth[b], budget.nodes[b]) for b, r in enumerate(batch.requests)]
        made = Proposal.trees([list(t.index) for t in trees], self._device)
        flags = [[0 if g else PROBE for g in t.guess] + [0] * (made.columns - len(t.guess)) for t in trees]
        source = torch.tensor(flags, dtype=torch.int64).reshape(made.source.shape).to(self._device)
        return Proposal(made.tokens, made.parents, made.sizes, source, made.widths)

    def observe(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        """Read the target's choices after the window's deepest tokens; the one host sync of the method."""
        if not any(w.ends for w in (self._windows.get(r.id) for r in batch.requests) if w is not None):
            return
        choices = scores.choice.tolist()
        for b, request in enumerate(batch.requests):
            window = self._windows.get(request.id)
            if window is None or not window.ends:
                continue
            ends, window.ends = window.ends, []
            if max(ends) > proposal.widths[b]:  # the round went without it
                continue
            fresh = [choices[b][slot] for slot in ends]
            if NONE not in fresh:  # an end would freeze its column
                fresh = [window.chance.choice(window.words) if t in request.stop_ids else t for t in fresh]
                window.turn(fresh, self.config.ngram)

    def release(self, request: Request) -> None:
        self._windows.pop(request.id, None)

    def _tree(self, request: Request, depth: int, nodes: int) -> Tree:
        tree = Tree(depth, nodes)
        if depth == 0 or nodes == 0:
            return tree
        window = self._windows.get(request.id) or self._open(request)
        window.pool.extend(request.tokens)
        window.levels[0][0], window.ends = request.tokens[-1], []
        for gram in window.pool.guesses(request.tokens[-1]):
            tree.chain(gram)
        return window.plant(tree) or tree

    def _open(self, request: Request) -> Window:
        """A window whose first level is drawn from the prompt (W + N - 3 tokens)."""
        prompt = request.tokens[: request.prompt_len]
        words = [t for t in prompt if t not in request.stop_ids] or prompt
        chance = random.Random(request.key)
        first = [0, *chance.choices(words, k=self.config.window + self.config.ngram - 3)]
        window = Window(Pool(self.config.ngram, self.config.guesses), [first], words, chance)
        self._windows[request.id] = window
        return window
