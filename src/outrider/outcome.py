"""What a round came to, read from the device in one copy, and each request's share of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Any

import torch

from . import metrics
from .logprobs import Measured, Rows
from .types import NONE, PROBE, Batch, Committed, Finish, Logprob, Request

if TYPE_CHECKING:
    from .engine import Pending

FINISHES = tuple(Finish)
"""By number."""
OWN = (NONE,)
"""Origins of one token of the target's own."""
Shown = tuple[tuple[Logprob, ...], ...] | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Host copies of a verdict and of the proposal it judged, one list per request."""

    batch: Batch
    accepted: list[int]
    counts: list[int]
    finish: list[int]
    sizes: list[int]
    tokens: list[list[int]]
    path: list[list[int]]
    guesses: list[list[int]]
    parents: list[list[int]]
    source: list[list[int]]
    raw: dict[int, Rows] = field(default_factory=dict)
    processed: dict[int, Rows] = field(default_factory=dict)
    prompt: dict[int, Rows] = field(default_factory=dict)
    waited: float = 0.0
    linear: bool = False

    def committed(self) -> tuple[Committed, ...]:
        """Everybody's share, finished. Call after the scheduler has booked the round."""
        return tuple([self._quick(b) or self.commit(b) for b in range(len(self.batch))])

    def _quick(self, b: int) -> Committed | None:
        """`commit` of what most shares are: one token more behind a chain of guesses or none, no end, nothing told but its text.
        None for others."""
        request, size, kept = self.batch.requests[b], self.sizes[b], self.accepted[b]
        if self.finish[b] or self.counts[b] != kept + 1 or request.finish is not Finish.RUNNING:
            return None
        if self.prompt or request.params.logprobs is not None or request.failures:
            return None
        if size and (not self.linear or PROBE in self.source[b][:size]):
            return None
        fresh = self.tokens[b]
        if len(fresh) > kept + 1:
            fresh = fresh[: kept + 1]
        piece = "" if request.text is None else request.text.next(fresh)
        if piece is None:
            return None
        if not size:
            request.origins.append(NONE)
            metrics.add_plain(request.stats)
            return Committed(request, tuple(fresh), OWN, 0, 0, (), (), piece, Finish.RUNNING)
        origins = (*self.source[b][:kept], NONE)
        request.origins += origins
        metrics.add_chain(request.stats, size, kept)
        rejected = tuple(self.guesses[b][kept:size])
        return Committed(request, tuple(fresh), origins, size, kept, (1,) * size, rejected, piece, Finish.RUNNING)

    def commit(self, b: int) -> Committed:
        """Finish one request's share: stop strings, statistics, text. Call after the scheduler has booked the round."""
        request, count = self.batch.requests[b], self.counts[b]
        if request.finish is not Finish.RUNNING:  # stopped while the round was in flight: it keeps what it had
            return Committed(request, (), (), 0, 0, (), (), "", request.finish, late=True)
        fresh = self.tokens[b][:count]
        finish = FINISHES[self.finish[b]]
        used = _write(request, fresh, finish)
        if used < count or (request.text is not None and request.text.stopped is not None):
            finish = Finish.STOP
            del request.tokens[len(request.tokens) - (count - used) :]
        if finish is Finish.ERROR:
            found = request.failures.get(tuple(request.tokens))
            request.error = found or "the model's scores were not finite, or every token was forbidden"
        request.finish = finish
        kept, depths, offered = self._offered(b, used, finish) if self.sizes[b] else (0, (), 0)
        origins = [NONE] * used
        if kept:
            source = self.source[b]
            origins[:kept] = [source[c] if source[c] != PROBE else NONE for c in self.path[b][:kept]]
        request.origins += origins
        if request.failures:  # of positions that are history by now
            request.failures = {k: v for k, v in request.failures.items() if len(k) >= len(request.tokens)}
        raw, processed = self._logprobs(b, used) if request.params.logprobs is not None or self.prompt else (None, None)
        piece = request.text.pop(finish is not Finish.RUNNING) if request.text is not None else ""
        rejected = self._rejected(b, kept) if self.sizes[b] else ()
        item = Committed(
            request,
            tuple(fresh[:used]),
            tuple(origins),
            offered,
            sum(o != NONE for o in origins) if kept else 0,
            depths,
            rejected,
            piece,
            finish,
            raw,
            processed,
        )
        metrics.add(request.stats, item)
        return item

    def _logprobs(self, b: int, used: int) -> tuple[Shown, Shown]:
        """Log-probabilities of the tokens that were used, booked with the request: what it asked for first, then the processed
        ones of a request that asked for both."""
        request = self.batch.requests[b]
        params = request.params
        request.prompt_logprobs += self.prompt.get(b, [])
        if params.logprobs is None:
            return None, None
        first = self.processed if params.logprobs_mode == "processed" else self.raw
        one = tuple(first.get(b, ())[:used])
        request.logprobs += one
        if params.logprobs_mode != "both":
            return one, None
        two = tuple(self.processed.get(b, ())[:used])
        request.processed_logprobs += two
        return one, two

    def _offered(self, b: int, used: int, finish: Finish) -> tuple[int, tuple[int, ...], int]:
        """Accepted nodes that were used, which depths had a guess, and how many guesses count: those at depths the text reached,
        if it ended here."""
        kept, size, source = min(self.accepted[b], used), self.sizes[b], self.source[b]
        depth: list[int] = []
        for parent in self.parents[b][:size]:
            depth.append(1 if parent < 0 else depth[parent] + 1)
        reach = used if finish is not Finish.RUNNING else size
        if PROBE not in source[:size]:  # then no depth is left out
            depth = depth if reach >= size else [d for d in depth if d <= reach]
            return kept, (1,) * max(depth, default=0), len(depth)
        offered = [d for c, d in enumerate(depth) if source[c] != PROBE and d <= reach]
        seen = set(offered)
        return kept, tuple([int(d in seen) for d in range(1, max(offered, default=0) + 1)]), len(offered)

    def _rejected(self, b: int, kept: int) -> tuple[int, ...]:
        """The first guess that was turned down and what hung below it, along the first branch: what a person wants to see."""
        size, parents, source, path = self.sizes[b], self.parents[b], self.source[b], self.path[b]
        if kept == size:
            return ()
        at, shown = path[kept - 1] if kept else NONE, []
        for c in range(size):
            if parents[c] == at and source[c] != PROBE and c not in path[:kept]:
                shown.append(self.guesses[b][c])
                at = c
        return tuple(shown)


def _write(request: Request, fresh: list[int], finish: Finish) -> int:
    """Hand tokens to the text; the stop token itself is no part of it. Returns how many tokens were used."""
    if request.text is None:
        return len(fresh)
    ends = finish is Finish.STOP and bool(fresh)
    body = fresh[:-1] if ends else fresh
    used = request.text.push(body, last=finish is not Finish.RUNNING)
    return used + 1 if ends and request.text.stopped is None else used


def _told(batch: Batch, linear: bool, rows: list[list[int]], guesses: list[Any]) -> Outcome:
    """The outcome of a captured round, whose answer has arrived."""
    columns = (len(rows[0]) - 3) // 2
    accepted, counts, finish = map(list, islice(zip(*rows, strict=True), 3))
    tokens, path = [row[3 : 3 + columns] for row in rows], [row[3 + columns :] for row in rows]
    sizes, drafted, parents, source = guesses
    return Outcome(batch, accepted, counts, finish, sizes, tokens, path, drafted, parents, source, linear=linear)


def read(pending: Pending) -> Outcome:
    """Everything the host wants to know about a round, in one device-to-host copy (and a few more for log-probabilities)."""
    if pending.answer is not None:
        begun = time.perf_counter()
        answer = pending.answer.read()
        return replace(_told(pending.batch, pending.proposal.linear, *answer), waited=time.perf_counter() - begun)
    batch, proposal, verdict, measured = pending.batch, pending.proposal, pending.verdict, pending.logprobs
    heads = (verdict.accepted, verdict.counts, verdict.finish, proposal.sizes)
    tables = (verdict.tokens, verdict.path, proposal.tokens, proposal.parents, proposal.source)
    if verdict.counts.device.type == "cpu":
        columns, spans = [h.tolist() for h in heads], [t.tolist() for t in tables]
    else:
        packed = torch.cat([torch.stack(heads, dim=1), *tables], dim=1).tolist()
        columns = [[row[i] for row in packed] for i in range(len(heads))]
        edges = accumulate((t.shape[1] for t in tables), initial=len(heads))
        spans = [[row[lo:hi] for row in packed] for lo, hi in pairwise(edges)]
    accepted, counts, finish, sizes = columns
    tokens, path, guesses, parents, source = spans
    shares = (accepted, counts, finish, sizes, tokens, path, guesses, parents, source)
    outcome = Outcome(batch, *shares, linear=proposal.linear)
    return outcome if measured is None else _with_logprobs(outcome, measured)


def _with_logprobs(outcome: Outcome, measured: Measured) -> Outcome:
    def spell(b: int, token: int) -> str:
        text = outcome.batch.requests[b].text
        return "" if text is None else text.piece(token)

    parts = {name: getattr(measured, name) for name in ("raw", "processed", "prompt")}
    return replace(outcome, **{name: table.read(spell) for name, table in parts.items() if table is not None})
