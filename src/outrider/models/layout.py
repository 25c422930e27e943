"""The layout of a packed pass: which token goes into which row, at which position, into which KV slot, and what it may see.

Rows are grouped by request: first the known tokens that have no KV yet, then draft nodes. A node's KV lives at virtual index
`known + column`, past the request's known tokens, whatever its depth; its *position* is its depth. The same layout serves the
target's verification and the drafters' partial runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import tree
from ..protocols import Cache
from ..types import NONE, Batch, PassRows, Proposal, Request, Slots


@dataclass(frozen=True, slots=True)
class Span:
    """One request's rows `lo..hi`: `pending` known tokens from virtual index `start` on, then nodes `first..nodes`.
    `known` counts the request's known tokens that this pass can see; `prompt` marks a chunk of the prompt."""

    index: int
    request: Request
    lo: int
    hi: int
    start: int
    pending: int
    known: int
    first: int
    nodes: int
    prompt: bool

    @property
    def length(self) -> int:
        """Virtual indices the span's rows may look at."""
        return self.known + self.nodes


@dataclass(frozen=True, slots=True)
class Layout:
    """`tokens [R]`, where they write (`write [R]` KV slots) and what each row is (`rows`); `scored` lists the rows whose
    following token is asked for, `prompt` (host: row, index in the batch, position) prompt rows whose logits
    are. `linear` as in `Proposal`; `parents [B, N]` and `depths [B, N]` only where it is not."""

    spans: tuple[Span, ...]
    tokens: Tensor
    write: Tensor
    rows: PassRows
    scored: Tensor
    linear: bool
    proposal: Proposal
    ancestors: Tensor | None
    prompt: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def build(
        cls,
        batch: Batch,
        nodes: Proposal,
        cache: Cache,
        start: int | Sequence[int] = 0,
        computed: Sequence[int] | None = None,
    ) -> Layout:
        """Rows for the slots from `start` on: 0 takes in all pending tokens, k > 0 only nodes from column k - 1 on (one
        number for all requests, or one each). `computed` overrides, for a model with a cache of its own, how many tokens of
        each request have KV."""
        starts = [start] * len(batch) if isinstance(start, int) else start
        spans = _spans(batch, nodes, starts, computed or [r.computed for r in batch.requests])
        device = nodes.tokens.device
        flat = [(s.index, i, NONE) for s in spans for i in range(s.start, s.start + s.pending)]
        order = _order(spans)
        drawn = [(s.index, s.known + c, c) for s in spans for c in range(s.first, s.nodes)]
        known = torch.tensor([t for s in spans for t in s.request.tokens[s.start : s.start + s.pending]], dtype=torch.int64)
        table = torch.tensor(flat + drawn, dtype=torch.int64).reshape(-1, 3).to(device)
        request, virtual, column = table.unbind(1)
        tokens, position = known.to(device), virtual
        if drawn:
            at = table[len(flat) :]
            tokens = torch.cat([tokens, nodes.tokens[at[:, 0], at[:, 2]]])
            if not nodes.linear:
                depth = tree.depths(nodes.parents, nodes.sizes)[at[:, 0], at[:, 2]]
                base = at[:, 1] - at[:, 2] - 1
                position = torch.cat([virtual[: len(flat)], base + depth])
        slot = _slots(spans, column, len(flat), device)
        if order is not None:
            index = torch.tensor(order, device=device)
            tokens, position, request, virtual, slot = (x[index] for x in (tokens, position, request, virtual, slot))
        write = torch.cat([cache.slots(s.request, s.start, s.start + s.hi - s.lo) for s in spans])
        scored = torch.tensor(_scored(spans, batch), dtype=torch.int64, device=device)
        ancestors = None if nodes.linear or not drawn else tree.ancestors(nodes.parents)
        rows = PassRows(request, position, virtual, slot)
        return cls(tuple(spans), tokens, write, rows, scored, nodes.linear, nodes, ancestors)

    def reading(self, wanted: Callable[[Request], bool]) -> Layout:
        """The same pass, with logits for prompt rows of the requests that are `wanted`: all but the last, which has a slot."""
        spans = [s for s in self.spans if s.prompt and wanted(s.request)]
        found = [
            (s.lo + i, s.index, s.start + i)
            for s in spans
            for i in range(min(s.pending, s.request.prompt_len - 1 - s.start))
            if s.start + i >= len(s.request.prompt_logprobs)
        ]
        return replace(self, prompt=tuple(found)) if found else self

    def slots(self, batch: Batch) -> Slots:
        """Where the scored rows stand, for processors and noise."""
        request, slot, position = self.rows.request, self.rows.slot, self.rows.position + 1
        if len(self.scored) < len(request):
            request, slot, position = request[self.scored], slot[self.scored], position[self.scored]
        if self.proposal.columns == 0:
            return Slots(batch.requests, request, position, self.proposal.tokens[:1].expand(len(slot), 0), slot, slot)
        if self.linear:
            columns = torch.arange(self.proposal.columns, device=slot.device)
            path = self.proposal.tokens[request].masked_fill(columns >= slot[:, None], NONE)
            return Slots(batch.requests, request, position, path, slot, slot)
        paths, depth = tree.path_tokens(self.proposal)
        return Slots(batch.requests, request, position, paths[request, slot], depth[request, slot], slot)

    def visible(self, span: Span, window: int | None = None) -> Tensor | None:
        """`[rows, length]` bool: which virtual indices each row of `span` may attend to; None if all of them."""
        lo, hi = span.lo, span.hi
        if hi - lo == 1 and window is None and self.ancestors is None:
            return None
        virtual, position = self.rows.virtual[lo:hi, None], self.rows.position[lo:hi, None]
        key = torch.arange(span.length, device=virtual.device)[None]
        seen = key <= virtual
        where = key
        if self.ancestors is not None and span.nodes:
            mine = self.ancestors[span.index, :, : span.nodes]
            column = (virtual[:, 0] - span.known).clamp(min=0)
            tail = mine[column] & (virtual >= span.known)
            seen = torch.cat([seen[:, : span.known], tail], dim=1)
            depth = tree.depths(self.proposal.parents, self.proposal.sizes)[span.index, : span.nodes]
            where = torch.cat([key[0, : span.known], span.known - 1 + depth])[None]
        return seen if window is None else seen & (position - where < window)


def _spans(batch: Batch, nodes: Proposal, starts: Sequence[int], computed: Sequence[int]) -> list[Span]:
    spans, lo = [], 0
    for b, request in enumerate(batch.requests):
        start = starts[b]
        pending = batch.pending[b] if start == 0 else 0
        known = computed[b] + batch.pending[b]
        first, end = max(start - 1, 0), nodes.widths[b]
        count = pending + max(end - first, 0)
        if count == 0:
            continue
        at = computed[b] if start == 0 else known + first
        prompt = start == 0 and computed[b] < request.prompt_len
        spans.append(Span(b, request, lo, lo + count, at, pending, known, min(first, end), end, prompt))
        lo += count
    return spans


def _order(spans: list[Span]) -> list[int] | None:
    """Known tokens and nodes are gathered apart; this puts each request's rows together again (None if they are)."""
    if len(spans) <= 1 or not any(s.nodes > s.first for s in spans):
        return None
    order: list[int] = []
    total, seen_known, seen_nodes = sum(s.pending for s in spans), 0, 0
    for s in spans:
        count = s.hi - s.lo - s.pending
        order += range(seen_known, seen_known + s.pending)
        order += range(total + seen_nodes, total + seen_nodes + count)
        seen_known, seen_nodes = seen_known + s.pending, seen_nodes + count
    return order


def _slots(spans: list[Span], column: Tensor, known: int, device: torch.device) -> Tensor:
    last = []
    for s in spans:
        reaches = s.known == len(s.request.tokens)
        last += [NONE] * (s.pending - 1) + ([0 if reaches else NONE] if s.pending else [])
    return torch.cat([torch.tensor(last, dtype=torch.int64, device=device), column[known:] + 1])


def _scored(spans: list[Span], batch: Batch) -> list[int]:
    rows: list[int] = []
    for s in spans:
        if s.pending and batch.ready[s.index]:
            rows.append(s.lo + s.pending - 1)
        rows += range(s.lo + s.pending, s.hi)
    return rows
