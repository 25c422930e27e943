"""Log-probabilities of what was written, from the rows of the pass that wrote it.

Measured after the verdict, on the device and without a host sync: the rows of the slots on the accepted path are gathered, and
only the k likeliest tokens, the chosen one and its rank go to the host, with the rest of the round. A token's numbers are a
function of its own row alone. They are computed in fp64 and rounded to fp32, far above fp64's own rounding noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .protocols import Sampler
from .types import NONE, Batch, Logprob, Proposal, Request, Scores, Slots, Verdict

BLOCK = 64
"""Rows that are worked on at once, to bound memory."""
Rows = list[tuple[Logprob, ...]]


@dataclass(frozen=True, slots=True)
class Table:
    """One line per measured row: `requests` and `limits` (k) on the host; ids `[S, 1 + k]` (the chosen token, then the likeliest
    in order of rank), log-probabilities `[S, 1 + k]` fp32, rank of the chosen token `[S]`."""

    requests: tuple[int, ...]
    limits: tuple[int, ...]
    ids: Tensor
    values: Tensor
    ranks: Tensor

    def read(self, spell: Callable[[int, int], str]) -> dict[int, Rows]:
        """Per request of the batch, its rows in order. `spell(request, token)` gives a token's text. One device-to-host copy for
        each tensor. Tokens that cannot occur (probability 0) are left out."""
        found: dict[int, Rows] = {b: [] for b in self.requests}
        tables = (self.ids.tolist(), self.values.tolist(), self.ranks.tolist())
        for b, k, ids, values, rank in zip(self.requests, self.limits, *tables, strict=True):
            row = [(ids[0], values[0], rank)]
            best = zip(ids[1 : k + 1], values[1 : k + 1], range(1, k + 1), strict=False)
            row += [entry for entry in best if entry[0] != ids[0] and entry[1] > -math.inf]
            found[b].append(tuple(Logprob(*entry, spell(b, entry[0])) for entry in row))
        return found


@dataclass(frozen=True, slots=True)
class Measured:
    """A round's log-probabilities, still on the device. Of each request that asked, as many rows as its proposal could give
    tokens; those past what it committed mean nothing."""

    raw: Table | None = None
    processed: Table | None = None
    prompt: Table | None = None


def asks(request: Request) -> bool:
    """Whether a pass must give logits for this request's tokens."""
    return request.params.logprobs is not None


def asks_prompt(request: Request) -> bool:
    """Likewise for its prompt; the samples of one prompt share those of the first."""
    return request.params.prompt_logprobs is not None and request.index == 0


def measure(batch: Batch, proposal: Proposal, scores: Scores, verdict: Verdict, sampler: Sampler) -> Measured | None:
    """What the batch asked for; None, at no cost, if that is nothing."""
    if scores.logits is None and scores.prompt is None:
        return None
    asking = [b for b, r in enumerate(batch.requests) if batch.ready[b] and asks(r)]
    prompt = _prompt(batch, scores) if scores.prompt is not None else None
    if not asking or scores.logits is None or scores.slots is None:
        return None if prompt is None else Measured(prompt=prompt)
    owners, rows, chosen = _rows(batch, proposal, verdict, asking)
    modes = [batch.requests[b].params.logprobs_mode for b in owners]
    raw = [i for i, mode in enumerate(modes) if mode != "processed"]
    processed = [i for i, mode in enumerate(modes) if mode != "raw"]
    logits, slots = scores.logits, scores.slots

    def law(at: Tensor) -> Tensor:
        where = Slots(slots.requests, slots.request[at], slots.position[at], slots.path[at], slots.depth[at])
        return sampler.law(logits[at], where)

    def table(picked: list[int], source: Callable[[Tensor], Tensor]) -> Table | None:
        if not picked:
            return None
        at = torch.tensor(picked, device=rows.device)
        who = tuple(owners[i] for i in picked)
        limits = tuple(batch.requests[b].params.logprobs or 0 for b in who)
        return _table(who, limits, rows[at], chosen[at], source)

    return Measured(table(raw, lambda at: logits[at]), table(processed, law), prompt)


def _rows(batch: Batch, proposal: Proposal, verdict: Verdict, asking: list[int]) -> tuple[list[int], Tensor, Tensor]:
    """The rows of `Scores.logits` behind the tokens of a verdict: (whose, on the host; which row `[S]`; token `[S]`, NONE where
    nothing was committed). On the CPU those that committed nothing are left out."""
    base, bases = 0, []
    for ready, width in zip(batch.ready, proposal.widths, strict=True):
        bases.append(base)
        base += int(ready) + width
    flat = [(b, i, bases[b]) for b in asking for i in range(proposal.widths[b] + 1)]
    device = verdict.tokens.device
    which, step, first = torch.tensor(flat, dtype=torch.int64, device=device).unbind(1)
    slots = torch.nn.functional.pad(verdict.path + 1, (1, 0))  # NONE + 1: where the path ends, the root's slot stands in
    rows, tokens = first + slots[which, step], verdict.tokens[which, step]
    owners = [b for b, _, _ in flat]
    kept = committed(tokens)
    if kept is None:
        return owners, rows, tokens
    return [owners[i] for i in kept.tolist()], rows[kept], tokens[kept]


def committed(tokens: Tensor) -> Tensor | None:
    """Which of `tokens [S]` a verdict committed; None, for all of them, where knowing would mean waiting for the device."""
    return (tokens != NONE).nonzero()[:, 0] if tokens.device.type == "cpu" else None


def _prompt(batch: Batch, scores: Scores) -> Table | None:
    """The tokens after the prompt rows that were asked for."""
    prompt = scores.prompt
    if prompt is None or not scores.prompt_at:
        return None
    chosen = torch.tensor([batch.requests[b].tokens[p + 1] for b, p in scores.prompt_at], dtype=torch.int64).to(prompt.device)
    who = tuple(b for b, _ in scores.prompt_at)
    limits = tuple(batch.requests[b].params.prompt_logprobs or 0 for b in who)
    return _table(who, limits, torch.arange(len(who), device=prompt.device), chosen, lambda at: prompt[at])


def _table(
    who: tuple[int, ...], limits: tuple[int, ...], rows: Tensor, chosen: Tensor, source: Callable[[Tensor], Tensor]
) -> Table:
    """Work through the rows a block at a time."""
    spans = [slice(lo, lo + BLOCK) for lo in range(0, len(who), BLOCK)]
    parts = [rank_rows(source(rows[s]), chosen[s], max(limits)) for s in spans]
    ids, values, ranks = (torch.cat(column) for column in zip(*parts, strict=True))
    return Table(who, limits, ids, values, ranks)


def rank_rows(scores: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of unnormalised log-probabilities `scores [S, V]`: ids `[S, 1 + k]` of `chosen [S]` and the k likeliest (ties by id), their
    log-probabilities in fp32, and the rank `[S]` of `chosen`: 1 + how many tokens are likelier, or equal with a lower id."""
    k = min(k, scores.shape[1])
    total = scores.double().logsumexp(1, keepdim=True)
    chosen = chosen.clamp(min=0)[:, None]
    mine = scores.gather(1, chosen)
    numbers = torch.arange(scores.shape[1], device=scores.device)
    ranks = 1 + ((scores > mine) | ((scores == mine) & (numbers < chosen))).sum(1)
    ids = torch.cat([chosen, best(scores, k)], dim=1)
    return ids, (scores.gather(1, ids).double() - total).float(), ranks


def best(scores: Tensor, k: int) -> Tensor:
    """Ids `[S, k]` of the k largest of each row `[S, V]`, best first, equal ones by id (`topk` leaves both open)."""
    if k == 0:
        return torch.empty(scores.shape[0], 0, dtype=torch.int64, device=scores.device)
    values, ids = scores.topk(k, dim=1)
    if scores.device.type != "cpu" or not bool(((scores >= values[:, -1:]).sum(1) == k).all()):
        ids = _first_of_ties(scores, values[:, -1:], k)
    ids = ids.sort(dim=1).values
    order = scores.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _first_of_ties(scores: Tensor, last: Tensor, k: int) -> Tensor:
    """Ids `[S, k]`, in any order, of what is above `last [S, 1]`, the k-th largest, and of the first that equal it."""
    tied, above = scores == last, scores > last
    kept = above | (tied & (tied.cumsum(1) <= k - above.sum(1, keepdim=True)))
    numbers = torch.arange(scores.shape[1], device=scores.device)
    ids = torch.where(kept, numbers, scores.shape[1]).topk(k, dim=1, largest=False).values
    return ids.clamp(max=scores.shape[1] - 1)  # a row with NaN keeps too few; it stands for nothing
