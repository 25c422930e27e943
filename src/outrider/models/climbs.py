"""Guesses of an EAGLE network as one replay of a CUDA graph: read what is new, then one pass of the layer per level.

What is new: the target's states of tokens accepted since. After a captured round they lie in the lane's ring (`kernels.ring`),
and how many they are only the device need know, so that the next guess can be launched before the host has read the round; else
the host tells their addresses, so that nothing is copied to begin with. KV of guesses lies in the target's pool behind the
committed one, where the next round's true states write over it. Nothing of a guess is read by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..types import Request
from .eagle_fused import FusedEagle
from .lanes import filters, staged
from .replay import Replays
from .rounds import GUESSING, LENGTHS, bucket
from .rows import Rows, tiles_of

FRESH = (8, 16, 48)
"""Tokens to be read per request, at most: in the round after one with so many guesses, and after many plain ones."""
READS, FEW = (FRESH[-1], 256), 4
"""The same where nothing is guessed; the latter, for few requests, are most prompts: launch by launch it takes far longer to read
them."""


class Shape(NamedTuple):
    """`requests` B, `fresh` tokens M, `depth` D, `width` k, a bound on sequence lengths, whether any request filters, and what is
    done: one `kind` does not stand in for another."""

    requests: int
    fresh: int
    depth: int
    width: int
    longest: int
    filters: bool
    kind: type[Climb]


class Asked(NamedTuple):
    """What is wanted for a request: the `states [n, W]` of its last n known tokens but one, None if they are in the ring; at most
    how many are `unread`; levels and nodes allowed; known tokens, 0 if only the device knows."""

    states: Tensor | None
    unread: int
    depth: int
    nodes: int
    known: int = 0


class Climbs:
    """Climbs of one network. `usable`: ids that can be chosen; `ids [n]`: the target's tokens that it scores, None: the first."""

    def __init__(self, net: FusedEagle, replays: Replays[Climb], usable: int, ids: Tensor | None, width: int) -> None:
        self.net, self.replays, self.usable, self.ids, self.width = net, replays, usable, ids, width
        self.stage = replays.stage
        self.ring = self.stage.machine.ring(net.feature, net.reads, net.dtype)
        self._last: tuple[Climb, int, Shape] | None = None
        self.shown = max(usable, net.plan.vocab if ids is None else int(ids.max()) + 1)

    def holds(self, request: Request) -> bool:
        """Whether a request's guesses can be made here, lanes permitting."""
        return not self.replays.off and self.stage.holds(request)

    def room(self, requests: Sequence[Request]) -> bool:
        return len(requests) <= GUESSING[-1] and self.stage.book.room(requests)

    def deepest(self, room: int, chain: bool = False) -> int:
        """Levels whose fed nodes, which lie behind the known tokens but the last, find room where there is some for so many."""
        return (room + 1) // (1 if chain else self.width) + 1

    def reads(self, requests: int) -> int:
        """How many tokens the host may know of, of each of so many requests, to be read by a replay."""
        return READS[requests <= FEW]

    def widths(self, asked: Sequence[Asked], chain: bool) -> tuple[int, ...]:
        """Host bounds of how many guesses there are."""
        width = 1 if chain else self.width
        return tuple(min(a.nodes, offered(a.depth, width)) if a.depth > 0 else 0 for a in asked)

    @property
    def most(self) -> int:
        """Tokens that can be read from the ring at once."""
        return min(FRESH[-1], self.ring.states.shape[1])

    def mark(self, requests: Sequence[Request], upto: Sequence[int]) -> None:
        """Note that all positions below `upto` have been read: these requests' next guesses go on from the ring."""
        lanes = self.stage.book.take(requests)
        at, marks = staged(np.array([lanes, upto]), self.net.device).to(self.net.device, non_blocking=True)
        self.ring.upto.index_copy_(0, at, marks.int())

    def climb(self, requests: Sequence[Request], asked: Sequence[Asked], chain: bool) -> tuple[Tensor, Tensor, Tensor] | None:
        """Tokens and parents `[C, N]` and sizes `[C]` on the device, which the next climb overwrites; None where it cannot be
        captured. States lie row after row; there is KV before them, and a request's blocks have room for what is fed. A `chain`
        is fed one node a level, not k."""
        depth = max(a.depth for a in asked)
        fresh = bucket(min(depth + 1, FRESH[-1]), FRESH)  # what a round with as many guesses leaves to be read
        if fresh is not None and max(a.unread for a in asked) > fresh:
            if not self.read(requests, asked):
                return None
            asked = [a._replace(states=None if a.states is None else a.states[-1:], unread=1) for a in asked]
        return self._play(requests, asked, fresh, depth, Strand if chain else Branching)

    def read(self, requests: Sequence[Request], asked: Sequence[Asked]) -> bool:
        """Make KV of all that is unread, and no guesses; whether it could be done."""
        return self._play(requests, asked, bucket(max(a.unread for a in asked), READS), 1, Reading) is not None

    def _play(
        self, requests: Sequence[Request], asked: Sequence[Asked], fresh: int | None, depth: int, kind: type[Climb]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        self._last = None  # which would keep the memory of all graphs, if that were needed now
        lag = max((a.unread for a in asked if a.states is None), default=0)
        reach = max(len(r.tokens) + r.flying for r in requests) + lag + depth
        longest = bucket(reach, LENGTHS)
        count = bucket(len(requests), GUESSING)
        if fresh is None or longest is None or count is None:
            return None
        width = self.width if kind is Branching else 1
        shape = Shape(count, fresh, depth, width, longest, any(map(filters, requests)), kind)
        made = self.replays.get(shape, lambda s: s.kind(s, self))
        if made is None:
            return None
        self._last = None if kind is Reading else (made, reach, shape)
        return made.play(requests, asked, self.stage.book.take(requests))

    def repeat(self, requests: Sequence[Request], further: int) -> bool:
        """Play what was played last once more, for the same requests, each at most so many tokens `further`; whether that could
        be done. What is roomier than need be is not played for ever."""
        if self._last is None:
            return False
        made, reach, wanted = self._last
        longest = reach + further
        if not made.told or not self.replays.has(made.shape, made) or longest > made.shape.longest:
            return False
        if self.stage.book.take(requests) != [lane for lane, *_ in made.told]:
            return False
        if made.shape != wanted and not self.replays.bears(wanted):
            return False
        self._last = made, longest, wanted
        made.replay()
        return True


def offered(depth: int, width: int) -> int:
    """Nodes that so many levels offer."""
    return width + (depth - 1) * width**2


class Climb:
    """One captured shape: what chains and trees have in common."""

    def __init__(self, shape: Shape, owner: Climbs) -> None:
        from ..kernels.attention import rows_per_tile
        from ..kernels.choose import Work
        from ..kernels.climb import HEAD, Stand

        self.shape, self.owner, self.nodes = shape, owner, offered(shape.depth, shape.width)
        self.longest = shape.longest + shape.depth  # where this stands in for a shape with fewer levels
        net, device = owner.net, owner.net.device
        b, fresh, k = shape.requests, shape.fresh, shape.width
        self.host = np.zeros((b, HEAD + fresh), dtype=np.int64)
        self.host[:, 0] = owner.stage.machine.padding
        self.told: list[tuple[int, int, int, int]] = []
        self.given = torch.from_numpy(self.host).to(device)
        self.stand = Stand.make(b, fresh, k, shape.depth, device)
        self.states = torch.zeros(b * fresh, net.reads, dtype=net.dtype, device=device)
        size = rows_per_tile(net.plan.heads // net.plan.pairs)
        self.tiles = [self._tiles(rows, size, device) for rows in (1, k)]
        self.ends = torch.arange(1, b + 1, device=device) * fresh - 1
        self.work = Work.make(b * k, owner.usable, device, filters=shape.filters)
        self.tokens = torch.zeros(b, self.nodes, dtype=torch.int64, device=device)
        self.parents = torch.arange(-1, self.nodes - 1, device=device).repeat(b, 1)
        self.sizes = torch.zeros(b, dtype=torch.int64, device=device)
        self.nothing = torch.zeros(b * max(k, fresh), 0, dtype=torch.int32, device=device)
        self._prepare(device)
        self.replay = owner.replays.capture(self._work)

    def _prepare(self, device: torch.device) -> None:
        """For heirs: make buffers."""

    def _tiles(self, rows: int, size: int, device: torch.device) -> Tensor:
        ends = range(0, (self.shape.requests + 1) * rows, rows)
        return torch.tensor(tiles_of(pairwise(ends), size), dtype=torch.int32).to(device)

    def play(self, requests: Sequence[Request], asked: Sequence[Asked], lanes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Run it. Nothing waits for the device."""
        told = [(lane, one.depth, one.nodes, one.known) for lane, one in zip(lanes, asked, strict=True)]
        known = any(one.states is not None for one in asked)
        if known or told != self.told:
            self._tell(requests, asked, lanes)
            self.told = [] if known else told
        self.replay()
        count, columns = len(asked), min(self.nodes, max(one.nodes for one in asked))
        return self.tokens[:count, :columns], self.parents[:count, :columns], self.sizes[:count]

    def _tell(self, requests: Sequence[Request], asked: Sequence[Asked], lanes: Sequence[int]) -> None:
        """What the host knows, to the device."""
        host = self.host
        host[:, 1:] = 0
        host[:, 0] = self.owner.stage.machine.padding
        count = len(asked)
        rows = [(lane, -1, 0, one.known, one.depth, one.nodes) for lane, one in zip(lanes, asked, strict=True)]
        host[:count, :6] = rows
        for row, request, one in zip(host, requests, asked, strict=False):
            if one.states is not None:
                tokens, fresh = request.tokens, len(one.states)
                row[1:4] = len(tokens), fresh, one.states.data_ptr()
                row[-fresh:] = tokens[-fresh:]
        self.given.copy_(staged(host, self.given.device), non_blocking=True)

    @torch.inference_mode()
    def _work(self) -> None:
        """What the graph holds."""
        from ..kernels import climb

        climb.stand(self.given, self.owner.stage.machine.lanes, self.owner.ring, self.shape.width, self.stand)
        table = self.owner.stage.machine.table(self.given[:, 0].contiguous())
        self._guess(*self._read(table), table)

    def _guess(self, hidden: Tensor, logits: Tensor, table: Tensor) -> None:
        """All levels, from state and scores `[B, .]` of the last known token."""
        raise NotImplementedError

    def _read(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """KV of what is new; state and scores of the last of it, `[B, .]`."""
        query, rows, residual = self._store(table)
        return self.owner.net.leave(query[self.ends], rows, residual[self.ends])

    def _store(self, table: Tensor) -> tuple[Tensor, Rows, Tensor]:
        """KV of what is new; its queries, where those of the last of it look, and the residual."""
        from ..kernels import climb
        from ..kernels.attention import Where

        net, stand = self.owner.net, self.stand
        climb.collect(self.given, stand.attend, self.owner.ring, self.states)
        x, residual = net.enter(net.net.fuse(self.states), stand.token)
        where = Where(stand.attend[self.ends], stand.known, self.nothing, table, self.tiles[0], self.longest)
        rows = Rows(stand.token, stand.position, stand.write, where, False, False, self.longest)
        return net.project(x, rows), rows, residual

    def _feed(self, hidden: Tensor, node: Node, level: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """State and scores `[B k, .]` of the nodes that are fed at a level."""
        from ..kernels.attention import Where

        net, stand, at = self.owner.net, self.stand, level - 1
        x, residual = net.enter(hidden, node.token, node.source)
        where = Where(stand.node_attend[at], stand.known, node.path, table, self.tiles[1], self.longest)
        branches = node.source is not None
        rows = Rows(node.token, stand.node_position[at], stand.node_write[at], where, branches, False, self.longest)
        return net.leave(net.project(x, rows), rows, residual)

    def _blank(self) -> Tensor:
        """Scores `[B k, V]` of tokens that cannot be."""
        rows = self.shape.requests * self.shape.width
        return torch.full((rows, self.owner.shown), float("-inf"), device=self.given.device)

    def _asked(self, level: int) -> Any:
        """What is to be chosen at a level: below the root there are k rows of each request, at the root one."""
        from ..kernels.choose import Asked as Drawn

        lane, position, k = self.stand.lane, self.stand.asked[level], self.shape.width
        return Drawn(lane, position) if level or k == 1 else Drawn(lane[::k].contiguous(), position[::k].contiguous())


class Node(NamedTuple):
    """Nodes to be fed, `[B k]`: tokens, the rows `source` of the states they hang under (None: their own), paths."""

    token: Tensor
    source: Tensor | None
    path: Tensor


class Reading(Climb):
    """No guesses: KV of what is new, and nothing else."""

    def _guess(self, hidden: Tensor, logits: Tensor, table: Tensor) -> None:
        """There are none."""

    def _read(self, table: Tensor) -> tuple[Tensor, Tensor]:
        query, _, residual = self._store(table)
        return query, residual


class Strand(Climb):
    """A chain."""

    def _prepare(self, device: torch.device) -> None:
        self.chosen = torch.zeros(self.shape.depth, self.shape.requests, dtype=torch.int64, device=device)

    def _guess(self, hidden: Tensor, logits: Tensor, table: Tensor) -> None:
        from ..kernels import climb
        from ..kernels.choose import choose

        owner, chosen, scores = self.owner, self.chosen, self._blank()
        for level in range(self.shape.depth):
            if level:
                hidden, logits = self._feed(hidden, Node(chosen[level - 1], None, self.nothing), level, table)
            climb.spread(logits, owner.ids, scores)
            choose(scores, self._asked(level), owner.stage.machine.lanes, self.work, chosen[level])
        climb.chain(self.given, chosen, self.tokens, self.sizes)


class Branching(Climb):
    """A tree, as `drafters._climb` grows it: every level feeds the best nodes of the one before, in the end the best are kept."""

    def _prepare(self, device: torch.device) -> None:
        from ..kernels.branch import Front, Offered

        b, k, depth = self.shape.requests, self.shape.width, self.shape.depth
        self.all = Offered.make(b, self.nodes, device)
        self.fronts = [Front.make(b * k, depth, device) for _ in range(depth + 1)]

    def _guess(self, hidden: Tensor, logits: Tensor, table: Tensor) -> None:
        from ..kernels import branch, choose, climb

        owner, scores = self.owner, self._blank()
        noisy = torch.empty_like(scores)
        for level in range(self.shape.depth):
            front = self.fronts[level]
            if level:
                hidden, logits = self._feed(hidden, Node(front.token, front.row, front.path), level, table)
            count = len(logits)
            climb.spread(logits, owner.ids, scores)
            choose.scores(scores[:count], self._asked(level), owner.stage.machine.lanes, self.work, noisy[:count])
            found = branch.children(noisy[:count], self.shape.width)
            branch.select(self.given, self.stand.known, found, level, (front, self.fronts[level + 1]), self.all)
        branch.keep(self.given, self.all, self.tokens, self.parents, self.sizes)
