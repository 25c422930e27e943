"""A decoding round as one replay of a CUDA graph: rows from lanes and guesses, the pass, the choice, the rule, the kept path.

A graph belongs to a shape: how many requests, rows and columns of guesses, chain or tree, how long a sequence may be. Shapes
come in buckets; what a round does not use are padding rows, which see nothing and write to the scratch page. Plain decoding has
buckets of its own, so it is never padded to a tree's rows. Graphs are captured when first needed and share their memory.
"""

from __future__ import annotations

import contextlib
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import OutriderWarning
from ..types import PassRows, Proposal, Verdict
from .answer import Answer, Mark, mark
from .fields import KEEP, Fields, Shape
from .graphs import GraphMemory
from .lanes import staged
from .rows import Rows, tiles_of

if TYPE_CHECKING:
    from ..kernels.ring import Ring
    from ..kernels.rounds import Lanes, RoundRows
    from .hf import Decoder

T = TypeVar("T")
REQUESTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
GUESSING = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Fewer sizes where there are guesses: rows, not requests, are what such a round costs."""
ROWS = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
"""Few small ones: a pass over 32 rows takes hardly longer than one over 8, and capturing as long as dozens of rounds."""
COLUMNS = (0, 16, 64)
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)
MOST = 128
"""Shapes that are kept captured at once."""
PATIENCE = 128
"""Times that a shape not captured yet is wanted, and a roomier one that is captured played in its place: capturing takes as long
as dozens of rounds."""
OFTEN = 16
"""Times after which it is worth a replay to bring guesses from where they lie."""
ALIGNED = 4
"""Numbers of four bytes that kernels like to read at once."""
ADMITTED, VIEWS = 64, 256
"""Places of guesses, and views of what it shows, that a round remembers."""


def shape_of(proposal: Proposal, longest: int, filters: bool = False, features: tuple[str, ...] = ()) -> Shape | None:
    """The smallest bucket for a proposal; None where there is none."""
    requests, columns = len(proposal.widths), max(proposal.widths, default=0)
    rows = requests + sum(proposal.widths)
    sizes = ((requests, GUESSING if columns else REQUESTS), (columns, COLUMNS), (longest, LENGTHS))
    found = [bucket(size, steps) for size, steps in sizes]
    if found[0] is None or found[1] is None or found[2] is None:
        return None
    total = found[0] if columns == 0 else bucket(rows, ROWS)
    if total is None:
        return None
    return Shape(found[0], total, found[1], columns > 0 and not proposal.linear, found[2], filters, features)


def spanned(requests: int, depth: int, features: tuple[str, ...]) -> list[Shape]:
    """The buckets of chains of `depth` guesses, for one request up to all, in short sequences; empty where there is none."""
    count, columns, most = bucket(requests, GUESSING), bucket(depth, COLUMNS), bucket(requests * (1 + depth), ROWS)
    if count is None or columns is None or most is None:
        return []
    rows = [r for r in ROWS if requests + depth <= r <= most]
    return [Shape(count, r, columns, False, LENGTHS[0], False, features) for r in rows]


def quiet(most: int, tried: int, features: tuple[str, ...]) -> list[Shape]:
    """The buckets of rounds of up to `most` requests without guesses, and of those of many in which `tried` of them have one, in
    short sequences."""
    last = bucket(most, REQUESTS) or REQUESTS[-1]
    none = [Shape(n, n, 0, False, LENGTHS[0], False, features) for n in REQUESTS if n <= last]
    rows = [(n, bucket(n // 2 + 1 + tried, ROWS)) for n in GUESSING if tried < n <= last]
    return none + [Shape(n, r, COLUMNS[1], False, LENGTHS[0], False, features) for n, r in rows if r is not None]


def bucket(count: int, steps: Sequence[int]) -> int | None:
    at = bisect_left(steps, count)
    return steps[at] if at < len(steps) else None


@dataclass(frozen=True, slots=True)
class Play:
    """A round to be played: lanes, host numbers of each request (KEEP where only the device knows), guesses, bound of rows."""

    lanes: list[int]
    numbers: tuple[Sequence[int], ...] | None
    proposal: Proposal


class Round:
    """One captured shape. `result [B, 3 + 2 (N + 1)]` int32: accepted, count, finish, tokens, path (see `kernels.rounds`)."""

    def __init__(self, shape: Shape, machine: Machine) -> None:
        from ..kernels.attention import rows_per_tile
        from ..kernels.choose import Work

        self.shape, self.machine = shape, machine
        self.per_tile = rows_per_tile(machine.group)
        tiles = shape.requests + (shape.rows // self.per_tile if shape.columns else 0)
        size, self.told, guesses = (count(shape, tiles) for count in (Fields.size, Fields.told, Fields.guesses))
        device, wide = machine.lanes.last.device, 3 + 2 * (shape.columns + 1)
        self.host = np.zeros(size, dtype=np.int32)
        self.given = Fields.of(self.host, shape, tiles)
        whole = torch.zeros(-(-size // ALIGNED) * ALIGNED + shape.requests * wide, dtype=torch.int32, device=device)
        self.flat, self.fields = whole[:size], Fields.of(whole[:size], shape, tiles)
        self.result = whole[len(whole) - shape.requests * wide :].view(shape.requests, wide)
        self.record = whole[guesses:]
        self.choice = torch.zeros(shape.rows, dtype=torch.int64, device=device)
        self.work = Work.make(shape.rows, machine.usable, device, filters=shape.filters)
        self.features: dict[str, Tensor] = {}
        self.stands = PassRows(*(self.choice for _ in range(4)))
        self.row, self.root = torch.arange(shape.rows, device=device), torch.zeros(shape.rows, dtype=torch.int64, device=device)
        self._last: tuple[object, ...] | None = None
        self._slots: Tensor | None = None
        self._admits: dict[tuple[Any, ...], torch.cuda.CUDAGraph | int] = {}
        self._shown: dict[tuple[int, int], tuple[Verdict, PassRows | None, dict[str, Tensor]]] = {}
        self._blank()
        self.graph = machine.captured(self._work)

    def _blank(self) -> None:
        """Nothing but padding: what capture runs on."""
        self.host[:] = 0
        self.given.lane[:] = self.machine.padding
        for part in (self.given.last, self.given.previous, self.given.length, self.given.room):
            part[:] = KEEP
        self.given.first[:] = np.arange(self.shape.requests + 1)
        self.flat.copy_(torch.from_numpy(self.host))

    def _work(self) -> None:
        """What the graph holds."""
        from ..kernels import choose, moves, rounds
        from ..kernels.attention import Where
        from ..kernels.ring import post

        machine, shape, fields = self.machine, self.shape, self.fields
        rows = rounds.prepare(machine.lanes, fields, shape.rows, (machine.decoder.vocab_size, machine.max_len), shape.tree)
        where = Where(rows.attend, rows.known, rows.path, machine.table(fields.lane), fields.tiles, shape.longest)
        packed = Rows(rows.token, rows.position, rows.write, where, shape.tree, False, shape.longest)
        self.features = dict.fromkeys(shape.features, self.choice)
        logits = machine.decoder.scored(packed, machine.cache, features=self.features)
        if shape.features:
            self.stands = self._stands(rows)
        choose.choose(logits, choose.Asked(rows.lane, rows.attend + 1), machine.lanes, self.work, self.choice)
        rounds.decide(machine.lanes, fields, self.choice, self.result, shape.tree)
        for name in shape.features:
            if name in machine.rings:
                post(self.features[name], fields.lane, fields.first, rows.known, self.result, machine.rings[name])
        if shape.tree:
            moves.move_path(machine.cache.groups(), where.table, rows.known, self.result, shape.columns)

    def _stands(self, rows: RoundRows) -> PassRows:
        """Which row belongs where, for those who read its states. In a plain round every row is a request's own."""
        position = rows.attend.long()
        if not self.shape.columns:
            return PassRows(self.row, position, position, self.root)
        first, last = self.fields.first, rows.known.shape[0] - 1
        request = torch.bucketize(self.row.int(), first[1:], right=True).clamp(max=last)
        slot = self.row - first[request]
        return PassRows(request, position, (rows.known[request] + slot - 1).long(), slot)

    def play(self, play: Play) -> Mark:
        """Run it. Nothing waits for the device. When it began: once all was told, which a slow host takes its time for."""
        said = (tuple(play.lanes), play.proposal.widths) if play.numbers is None else None
        if not self._same(play, said):
            self._last = self._slots = None
            self._fill(play)
            self.flat[: self.told].copy_(staged(self.host[: self.told], self.flat.device), non_blocking=True)
            self._last = said
        if play.proposal.unseen and play.proposal.columns:
            self._admit(play.proposal)
        started = mark(self.flat.device)
        if self.graph is None:
            self._work()
        else:
            self.graph.replay()
        return started

    def _admit(self, proposal: Proposal) -> None:
        """Guesses on the device, from where they lie. From places met again and again, which whoever guesses by a graph has, as a
        replay: that takes the host a fifth of the time of a launch."""
        from ..kernels.rounds import admit

        def work() -> None:
            admit(proposal, self.fields, self.machine.decoder.vocab_size)

        tensors = (proposal.tokens, proposal.parents, proposal.source, proposal.sizes)
        key = (tuple((t.data_ptr(), t.stride()) for t in tensors), proposal.columns, len(proposal.widths), proposal.linear)
        met = self._admits.pop(key, 0)
        if not isinstance(met, int):
            met.replay()
        else:
            work()
            met = (self.machine.captured(work) if met == OFTEN else None) or met + 1
        if len(self._admits) >= ADMITTED:
            del self._admits[next(iter(self._admits))]
        self._admits[key] = met

    def _same(self, play: Play, said: tuple[object, ...] | None) -> bool:
        """Whether the buffer already says what this round needs: the same lanes go on, and the device knows the rest."""
        told = not play.proposal.unseen and any(play.proposal.widths)
        return said is not None and said == self._last and not told

    def _fill(self, play: Play) -> None:
        given, proposal, count = self.given, play.proposal, len(play.lanes)
        given.lane[:count] = play.lanes
        given.lane[count:] = self.machine.padding
        ends = list(accumulate((w + 1 for w in proposal.widths), initial=0))
        given.first[: count + 1] = ends
        given.first[count + 1 :] = ends[-1]
        for part, numbers in zip(
            (given.last, given.previous, given.length, given.room), play.numbers or ([KEEP] * count,) * 4, strict=True
        ):
            part[:count] = numbers
            part[count:] = KEEP
        given.sizes[:] = 0
        given.sizes[:count] = proposal.widths
        self._tile(ends)
        if proposal.columns and not proposal.unseen:
            n = min(proposal.columns, self.shape.columns)
            given.sizes[:count] = proposal.sizes.numpy()
            given.tokens[:count, :n] = proposal.tokens[:, :n].numpy()
            given.parents[:count, :n] = proposal.parents[:, :n].numpy()

    def choices(self, count: int) -> Tensor:
        """`[count, N + 1]` of the target's tokens by request and slot, of what slots there are."""
        if self.shape.columns == 0:
            return self.choice[:count, None]
        if self._slots is None:
            at = self.fields.first[:-1, None] + torch.arange(self.shape.columns + 1, device=self.choice.device)
            self._slots = at.clamp(max=len(self.choice) - 1).long()
        return self.choice[self._slots[:count]]

    def shown(self, count: int, rows: int) -> tuple[Verdict, PassRows | None, dict[str, Tensor]]:
        """The captured rule's answer for so many requests, and of so many rows where they stand and the states that were asked
        for: views that the next round overwrites."""
        found = self._shown.get((count, rows))
        if len(self._shown) > VIEWS:
            self._shown.clear()
        if found is None or self.graph is None:  # without a graph, every play makes its own
            n, result = self.shape.columns, self.result[:count]
            table = (result[:, 4 + n : 4 + 2 * n], result[:, 0], result[:, 3 : 4 + n], result[:, 1], result[:, 2])
            states = {name: x[:rows] for name, x in self.features.items()}
            stands = PassRows(*(getattr(self.stands, f.name)[:rows] for f in fields(PassRows))) if states else None
            found = self._shown[count, rows] = Verdict(*table), stands, states
        return found

    def answer(self, proposal: Proposal, started: Mark) -> Answer:
        """What it came to, on its way to the host: with the guesses, where those are on the device."""
        b, n, count = self.shape.requests, self.shape.columns, len(proposal.widths)
        if not (proposal.unseen and proposal.columns):
            return Answer.of(self.result[:count], started, (proposal.sizes, proposal.tokens, proposal.parents, proposal.source))
        answer = Answer.of(self.record, started)
        whole, wide = answer.result, self.result.shape[1]
        columns = min(n, proposal.columns)  # the rest says nothing
        tables = (whole[b + i * b * n : b + (i + 1) * b * n].view(b, n)[:count, :columns] for i in range(3))
        return replace(answer, result=whole[-b * wide :].view(b, wide)[:count], guesses=(whole[:count], *tables))

    def _tile(self, ends: list[int]) -> None:
        """Rows of one request, so many at a time."""
        tiles, size = self.given.tiles, self.per_tile
        tiles[:] = 0
        count = len(ends) - 1
        if self.shape.columns == 0:
            tiles[:count, 0] = tiles[:count, 1] = np.arange(count)
            tiles[:count, 2] = 1
            return
        found = tiles_of(pairwise(ends), size)
        tiles[: len(found)] = found


class Machine:
    """What all rounds share: the decoder, its KV, the lanes, memory for graphs. `spare` is asked for memory that nobody uses;
    `patient`: what is roomier may stand in for what was seldom wanted (see `exact`); `count`: graphs that were ever captured."""

    def __init__(self, decoder: Decoder, cache: Any, lanes: Lanes, usable: int, max_len: int) -> None:
        self.graphs = lanes.last.device.type == "cuda"
        self.decoder, self.cache, self.lanes, self.usable, self.max_len = decoder, cache, lanes, usable, max_len
        self.padding = lanes.last.shape[0] - 1
        self.group = decoder.group
        self._memory: GraphMemory | None = None
        self.spare: Callable[[], None] = lambda: None
        self.patient, self.count = True, 0
        self._kept: dict[tuple[Any, ...], Any] = {}
        self._wanted = Counter[Shape]()
        self.rings: dict[str, Ring] = {}
        self._moved: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """What is asked for is what is run meanwhile: nothing roomier stands in for it."""
        before, self.patient = self.patient, False
        try:
            yield
        finally:
            self.patient = before

    def captured(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
        """`work` as a graph; None, once and for all, for a model whose pass cannot be captured: it is then run as it is."""
        if not self.graphs:
            return None
        try:
            return self.graph(work)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.graphs = False
            why = str(error).splitlines()[0]
            warnings.warn(f"rounds are not captured, which costs speed only: {why}", OutriderWarning, stacklevel=2)
            return None

    def graph(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """`work` as a graph, in the memory that all graphs of this target share."""
        if self._memory is None:
            self._memory = GraphMemory(self.lanes.last.device)
        self.count += 1
        return self._memory.capture(work)

    def ring(self, feature: str, width: int, dtype: torch.dtype) -> Ring:
        """Where captured rounds put the target's states called `feature`, of that width and type."""
        from ..kernels.ring import Ring

        if feature not in self.rings:
            self.rings[feature] = Ring.make(self.padding + 1, width, dtype, self.lanes.last.device)
            self._kept = {s: r for s, r in self._kept.items() if not (isinstance(s, Shape) and feature in s.features)}
        return self.rings[feature]

    def table(self, lane: Tensor) -> Tensor:
        """Block tables of the round's requests, `[B, blocks]`."""
        return self.lanes.table.index_select(0, lane)

    def round(self, shape: Shape) -> Round:
        """The captured round of a shape, or of a roomier one while this one was seldom wanted. It is captured now if there is
        neither, or if memory it moves has come or gone."""
        if shape.tree and self._moved != (moved := tuple((g.data_ptr(), tuple(g.shape)) for g in self.cache.groups())):
            self._kept = {s: r for s, r in self._kept.items() if not (isinstance(s, Shape) and s.tree)}
            self._moved = moved
        if self.patient and shape not in self._kept and self._wanted[shape] < PATIENCE:
            roomier = self._roomier(shape)
            if roomier:
                self._wanted[shape] += 1
                shape = min(roomier)
        return self.kept(shape, lambda: Round(shape, self))

    def plays(self, shape: Shape) -> bool:
        """Whether the round of a shape could be had at once."""
        return shape in self._kept or bool(self._roomier(shape))

    def _roomier(self, shape: Shape) -> list[Shape]:
        return [s for s in self.shapes if shape.within(s)]

    def kept(self, shape: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What was made for a shape, made now if it is new. Of `MOST` the one that was longest unused has to go; all have to, if
        there is no memory for a new one."""
        found = self._kept.pop(shape, None)
        if found is None:
            if len(self._kept) >= MOST:
                del self._kept[next(iter(self._kept))]
            found = self._made(make)
        self._kept[shape] = found
        made: T = found
        return made

    def _made(self, make: Callable[[], T]) -> T:
        try:
            return make()
        except torch.OutOfMemoryError:
            if not self._kept:
                raise
        self.forget()
        return make()

    def forget(self) -> None:
        """Drop all graphs, and give their memory back, with whatever can be spared."""
        if self.graphs:
            torch.cuda.synchronize()  # none of them may be running
        self._kept.clear()
        self._wanted.clear()
        self._memory = None
        self.spare()
        if self.graphs:
            torch.cuda.empty_cache()

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(shape for shape in self._kept if isinstance(shape, Shape))
