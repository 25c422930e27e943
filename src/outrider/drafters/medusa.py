"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the target's last hidden state guess several tokens ahead at once.

There is no draft loop: one small product per position, then a tree whose shape was chosen beforehand, from how often each
head's first, second, ... candidate was right. Candidates are the best of the head's scores with the target's processors and
noise, so that they stay likely at any temperature; under the classical rules every node's children are draws from its head's
distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..errors import BadInput, DrafterMismatch
from ..models import checkpoint as files
from ..models import medusa_heads, medusa_replay
from ..models.products import pack
from ..models.replay import Replays
from ..models.rounds import COLUMNS
from ..protocols import Drafter, Needs, Start, Teacher
from ..registry import register
from ..types import NONE, ROOT, Batch, Budget, Proposal, Request, Scores, Slots, Verdict
from ._grown import Part, Shape, compact, groups, joined, prefix, sparse
from ._medusa import MedusaPupil, MedusaTraining
from ._medusa_joint import JointPupil

_GUESSED = (0.55, 0.17, 0.08, 0.05, 0.03, 0.02)
"""How often a head's candidates are right, by rank, where nobody measured it; each further head is right 0.8 times as often."""


@dataclass(frozen=True, slots=True)
class State:
    """The target's last state `[H]` of a request, seen when it had `length` tokens; at most `most` came since."""

    length: int
    most: int
    hidden: Tensor


@register("medusa")
class Medusa(Drafter):
    """Heads on the target's hidden state, and a tree chosen from their accuracies."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`path`: directory of the heads, or hub id. `depth`: heads used (0: all). `nodes`: nodes of the tree; no more than
        `depth` make a chain."""

        path: str
        depth: int = 0
        nodes: int = 12

    Training = MedusaTraining

    @classmethod
    def pupil(cls, teacher: Teacher, options: Mapping[str, Any]) -> MedusaPupil:
        """Heads to be trained; see `protocols.Pupil`."""
        training = MedusaTraining(**options)
        return JointPupil(teacher, training) if training.changes_target else MedusaPupil(teacher, training)

    def __init__(self, config: Config) -> None:
        for name, low in (("depth", 0), ("nodes", 1)):
            if getattr(config, name) < low:
                raise BadInput(f"medusa needs {name} >= {low}, got {getattr(config, name)}")
        self.config, self.path = config, files.folder("medusa", config.path)
        found = medusa_heads.check(self.path)
        count, _ = medusa_heads.shape_of(found, self.path)
        self.depth = min(config.depth or count, count)
        self.nodes = max(config.nodes, self.depth)
        self.needs = Needs(features=(medusa_replay.FEATURE,), target=True, gaps=True)  # the last state is all it reads
        own = found.get(files.KEY)
        measured = own.get("accuracies") if isinstance(own, Mapping) else None
        self.chances = [row[:1] if config.nodes <= self.depth else row for row in _chances(measured, count)]
        self._states: dict[int, State] = {}
        self._ringed: set[int] = set()
        self._shapes: dict[tuple[int, int], Shape] = {}
        self.replays: medusa_replay.MedusaReplays | None = None

    def memory(self, dtype: torch.dtype) -> tuple[int, int]:
        """The heads. What they borrow is the target's."""
        return files.numbers(self.path) * dtype.itemsize, 0

    def start(self, start: Start) -> None:
        """Load the heads. Raises `DrafterMismatch` if they are for another target."""
        if start.view is None:
            raise DrafterMismatch("medusa needs a view of the target; start it through an engine")
        self._began = start
        made = files.read(self.path)
        files.same_target(made, start.fingerprint, start.name)
        self.heads, self.ids = medusa_heads.build(made, start.view.rows()[1], start.dtype, start.name)
        if start.view.stage is not None:
            replays: Replays[medusa_replay.MedusaReplay] = Replays(start.view.stage, self.name)
            self.replays = medusa_replay.MedusaReplays(self.heads, replays, start.usable, self.ids)
        else:
            pack(self.heads)

    def renew(self) -> bool:
        """What it keeps belongs to requests. Where graphs could not be had, a new one may have them."""
        return self.replays is None or not self.replays.replays.off

    @cached_property
    def _none(self) -> Tensor:
        return torch.zeros(0, dtype=torch.int64, device=self._began.device)

    def follows(self, requests: Sequence[Request], guessing: bool = True) -> bool:
        """Whether the ring has the last state of all of them."""
        return self.nodes <= COLUMNS[-1] and all(r.id in self._ringed for r in requests)

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        """One product per head, then the tree. A request whose last state was not seen gets no guesses."""
        able = [b for b, r in enumerate(batch.requests) if batch.ready[b] and self._fresh(r)]
        parts = []
        for (shape, drawn), members in self._groups(batch, budget, able).items():
            replayed = None if drawn else self._replayed(batch, members, shape)
            told = [b for b in members if batch.requests[b].id not in self._ringed]
            if replayed is not None:
                parts.append(replayed)
            elif told:
                parts.append(self._part(batch, told, shape, drawn))
        return self._began.sampler.attach(batch, joined(parts, len(batch), self._began.device))

    def _fresh(self, request: Request) -> bool:
        if request.id in self._ringed:
            return True
        state = self._states.get(request.id)
        return state is not None and 0 < len(request.tokens) - state.length <= state.most

    def _groups(self, batch: Batch, budget: Budget, able: list[int]) -> dict[tuple[Shape, bool], list[int]]:
        """Members by the shape of their guesses, and whether these are draws."""
        found: dict[tuple[Shape, bool], list[int]] = {}
        for (nodes, depth, drawn), members in groups(batch, budget, able, self.depth).items():
            found.setdefault((self._shape(nodes, depth), drawn), []).extend(members)
        return found

    def _shape(self, nodes: int, depth: int) -> Shape:
        if (nodes, depth) not in self._shapes:
            self._shapes[nodes, depth] = sparse(self.chances, nodes, depth)
        return self._shapes[nodes, depth]

    @torch.inference_mode()
    def _replayed(self, batch: Batch, members: list[int], shape: Shape) -> Part | None:
        """Guesses in one shape as one replay, where that can hold all of these requests."""
        if self.replays is None or not all(self.replays.holds(batch.requests[b]) for b in members):
            return None
        requests = [batch.requests[b] for b in members]
        asked = [medusa_replay.Asked(r, self._last(r), 0 if batch.blind else len(r.tokens)) for r in requests]
        tree_ = medusa_replay.Shape(0, shape.parents, shape.ranks, shape.depths, shape.linear, False)
        made = self.replays.guess(asked, tree_)
        return None if made is None else Part(tuple(members), *made, (len(shape),) * len(members), shape.linear)

    def _last(self, request: Request) -> Tensor | None:
        return None if request.id in self._ringed else self._states[request.id].hidden

    @torch.inference_mode()
    def _part(self, batch: Batch, members: list[int], shape: Shape, drawn: bool) -> Part:
        """Guesses in one shape for some requests."""
        requests = tuple(batch.requests[b] for b in members)
        logits = self.heads(torch.stack([self._states[r.id].hidden for r in requests]))[:, : max(shape.depths)]
        whole = _whole(logits.float() if logits.dtype != torch.float64 else logits, self._began.vocab_size, self.ids)
        device, count = logits.device, len(requests)
        parents = torch.tensor(shape.parents).to(device, non_blocking=True).expand(count, -1)
        tokens, live = self._draw(requests, whole, shape) if drawn else self._best(requests, whole, shape)
        if drawn or shape.linear:  # what is behind a gap goes: a node's slot must stay what it was when its children were drawn
            sizes = prefix(live)
            tokens = tokens.where(tree.used(sizes, len(shape)), 0)
        else:
            tokens, parents, sizes = compact(tokens, parents, live)
        return Part(tuple(members), tokens, parents, sizes, (len(shape),) * count, shape.linear)

    def _best(self, requests: Sequence[Request], whole: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """Tokens `[C, N]` and which exist: the candidates of all heads at once; `whole [C, K, V]`. Processors that read a guess's
        own path see none of it here."""
        count, depth, vocab = whole.shape
        device = whole.device
        request = torch.arange(count, device=device).repeat_interleave(depth)
        length = torch.tensor([len(r.tokens) for r in requests]).to(device, non_blocking=True)
        position = length[request] + torch.arange(depth, device=device).repeat(count)
        path = self._none.expand(len(request), 0)
        slots = Slots(tuple(requests), request, position, path, torch.zeros_like(request))
        ranked = self._began.sampler.scores(whole.reshape(-1, vocab), slots).topk(max(shape.ranks) + 1)
        at = [(d - 1) * (max(shape.ranks) + 1) + r for d, r in zip(shape.depths, shape.ranks, strict=True)]
        index = torch.tensor(at).to(device, non_blocking=True)
        tokens = ranked.indices.view(count, -1).index_select(1, index)
        live = ranked.values.view(count, -1).index_select(1, index).isfinite()
        return tokens, live

    def _draw(self, requests: Sequence[Request], whole: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """The same, drawn level by level: the children of every node are draws by its own slot's stream."""
        count, device = len(requests), whole.device
        tokens = torch.zeros(count, len(shape), dtype=torch.int64, device=device)
        live = torch.zeros(count, len(shape), dtype=torch.bool, device=device)
        length = torch.tensor([len(r.tokens) for r in requests]).to(device, non_blocking=True)
        for level in range(max(shape.depths)):
            columns = [c for c, d in enumerate(shape.depths) if d == level + 1]
            above = sorted({shape.parents[c] for c in columns})
            paths = torch.tensor([_path(shape, p) for p in above]).view(len(above), level).to(device, non_blocking=True)
            request = torch.arange(count, device=device).repeat_interleave(len(above))
            path = tokens[:, paths].reshape(-1, level) if level else self._none.expand(len(request), 0)
            slot = (torch.tensor(above).to(device, non_blocking=True) + 1).repeat(count)
            slots = Slots(tuple(requests), request, length[request] + level, path, torch.full_like(request, level), slot)
            most = max(shape.ranks[c] for c in columns) + 1
            ranked = self._began.sampler.scores(whole[request, level], slots).topk(most)
            at = torch.tensor([above.index(shape.parents[c]) * most + shape.ranks[c] for c in columns])
            at = at.to(device, non_blocking=True)
            tokens[:, columns] = ranked.indices.view(count, -1).index_select(1, at)
            live[:, columns] = ranked.values.view(count, -1).index_select(1, at).isfinite()
        return tokens, live

    def observe(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        """Remember the state of the row whose token was accepted last; a captured round has put it into the ring."""
        ids = {r.id for r in batch.requests}
        if scores.answer is not None and self.replays is not None and not self.replays.replays.off:
            self._ringed |= ids
            return
        self._ringed -= ids
        if batch.blind:  # nobody knows where these stand
            return
        rows, hidden = scores.rows, scores.features[medusa_replay.FEATURE]
        count, device = len(batch), hidden.device
        known = torch.tensor([r.computed + p for r, p in zip(batch.requests, batch.pending, strict=True)])
        last = known.to(device, non_blocking=True) + verdict.counts.to(device).long() - 2
        path = verdict.path.to(device)[rows.request]
        kept = (rows.slot <= 0) | ((path == rows.slot[:, None] - 1) & (path != NONE)).any(1)
        hit = kept & (rows.position == last[rows.request])
        index = torch.zeros(count + 1, dtype=torch.int64, device=device)
        index.scatter_(0, torch.where(hit, rows.request, count), torch.arange(len(hit), device=device))
        states = hidden.index_select(0, index[:count])
        for b, request in enumerate(batch.requests):
            if batch.ready[b]:
                self._states[request.id] = State(len(request.tokens), verdict.tokens.shape[1], states[b])

    def release(self, request: Request) -> None:
        """Forget a request."""
        self._states.pop(request.id, None)
        self._ringed.discard(request.id)


def _path(shape: Shape, column: int) -> list[int]:
    """Columns from the root down to `column`."""
    path: list[int] = []
    while column != ROOT:
        path.append(column)
        column = shape.parents[column]
    return path[::-1]


def _whole(logits: Tensor, vocab: int, ids: Tensor | None) -> Tensor:
    """Logits `[C, K, n]` over the target's vocabulary `[C, K, vocab]`; what the heads do not know is impossible."""
    missing = max(0, vocab - logits.shape[2])
    if ids is None:
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))[..., :vocab]
    out = logits.new_full((*logits.shape[:2], vocab), float("-inf"))
    return out.index_copy_(2, ids, logits)


def _chances(measured: object, count: int) -> list[list[float]]:
    """Accuracies by head and rank: as measured, or a guess."""
    if isinstance(measured, list) and len(measured) >= count and all(isinstance(row, list) and row for row in measured):
        return [[float(x) for x in row] for row in measured[:count]]
    return [[x * 0.8**k for x in _GUESSED] for k in range(count)]
