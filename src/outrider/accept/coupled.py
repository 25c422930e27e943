"""The coupled rule: keep the longest drafted path that agrees with the target, plus the target's own next token.

The target's token at every slot is already fixed by model, request key and position (Gumbel-max with counter-based noise), so
verification is equality and the text cannot depend on the drafter. Drafters that add the same noise to their own logits accept
with probability at least (1 - TV) / (1 + TV) (Daliri, Musco and Suresh 2024, "Coupling without communication").

The plain twin is `oracle.accept`. On CPU it *is* the rule: a model pass leaves the caches cold for two dozen tensor operations,
and walking a few nodes in plain code takes a fifth of their time. Elsewhere the vectorised form runs, without a host sync.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import oracle, tree
from ..types import NONE, ROOT, Batch, Finish, Proposal, Scores, Verdict


class Coupled:
    """Accept while drafted token == target's token. Lossless at every temperature; no host sync."""

    name = "coupled"
    lossless = True

    def __call__(self, proposal: Proposal, scores: Scores, batch: Batch) -> Verdict:
        return follow(proposal, scores.choice, batch)


def follow(proposal: Proposal, choice: Tensor, batch: Batch) -> Verdict:
    """Keep the path that agrees with `choice [B, N + 1]`, whoever made the choice: the other rules end here, too."""
    return (walk if choice.device.type == "cpu" else vectorised)(proposal, choice, batch)


def walk(proposal: Proposal, choice: Tensor, batch: Batch) -> Verdict:
    """The rule in plain code, request by request."""
    n, rows = proposal.columns, []
    given = zip(choice.tolist(), proposal.tokens.tolist(), proposal.parents.tolist(), proposal.sizes.tolist(), strict=True)
    for request, ready, (choices, tokens, parents, size) in zip(batch.requests, batch.ready, given, strict=True):
        if not ready:
            rows.append([0, 0, Finish.RUNNING, *[NONE] * (2 * n + 1)])
            continue
        limits = oracle.Limits(request.stop_ids, request.room)
        found = oracle.accept(tokens[:size], parents[:size], choices, limits)
        count = len(found.tokens)
        path = [*found.path, *[NONE] * (n - found.accepted)]
        rows.append([found.accepted, count, found.finish, *path, *found.tokens, *[NONE] * (n + 1 - count)])
    table = torch.tensor(rows, dtype=torch.int64)
    return Verdict(table[:, 3 : 3 + n], table[:, 0], table[:, 3 + n :], table[:, 1], table[:, 2])


def vectorised(proposal: Proposal, choice: Tensor, batch: Batch) -> Verdict:
    """The rule on the device, all requests at once."""
    alive = agreeing(proposal, choice)
    accepted = alive.sum(1)
    path, slots = _path(proposal, alive)
    tokens = choice if proposal.linear else choice.gather(1, slots)
    steps = torch.arange(choice.shape[1], device=choice.device)
    return cut(batch, path, accepted, tokens.masked_fill(steps > accepted[:, None], NONE))


def agreeing(proposal: Proposal, choice: Tensor) -> Tensor:
    """`[B, N]` bool: nodes whose token, and every ancestor's, is the target's choice at its parent. At most one per depth,
    since siblings are distinct."""
    n = proposal.columns
    if n == 0:
        return torch.zeros_like(proposal.tokens, dtype=torch.bool)
    used = tree.used(proposal.sizes, n)
    if proposal.linear:
        return (used & (proposal.tokens == choice[:, :-1])).cumprod(1).bool()
    parents = proposal.parents.where(used, ROOT)  # columns not in use may hold anything
    agree = used & (proposal.tokens == choice.gather(1, parents + 1))
    ok = torch.nn.functional.pad(agree, (0, 1), value=True)
    up = torch.nn.functional.pad(parents.masked_fill(parents == ROOT, n), (0, 1), value=n)
    for _ in range(n.bit_length()):
        ok, up = ok & ok.gather(1, up), up.gather(1, up)
    return ok[:, :n]


def _path(proposal: Proposal, alive: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of the agreeing nodes in order of depth, padded with NONE, and the slots they and the root stand for."""
    batch, n = alive.shape
    columns = torch.arange(n, device=alive.device).expand(batch, n)
    if proposal.linear:
        return columns.where(alive, NONE), columns
    depth = tree.depths(proposal.parents, proposal.sizes)
    path = torch.full((batch, n + 1), NONE, dtype=torch.int64, device=alive.device)
    path = path.scatter(1, torch.where(alive, depth - 1, n), columns)[:, :n]
    return path, torch.nn.functional.pad(path + 1, (1, 0))


def cut(batch: Batch, path: Tensor, accepted: Tensor, tokens: Tensor) -> Verdict:
    """End what must end: at the first stop token, at the length limit, at an invalid choice. `tokens [B, N + 1]` holds the
    `accepted` tokens and the one after them (NONE if its choice was invalid), then NONE; what follows the cut is discarded."""
    device, columns = tokens.device, tokens.shape[1]
    steps = torch.arange(1, columns + 1, device=device)
    stop_ids, limit = _limits(batch, device)
    first_stop = torch.where((tokens[:, :, None] == stop_ids).any(2), steps, columns + 1).amin(1)
    counts = torch.minimum(torch.minimum((tokens != NONE).sum(1), first_stop), limit)
    finish = torch.where(counts == accepted, Finish.ERROR.value, Finish.RUNNING.value)
    finish = torch.where(counts == limit, Finish.LENGTH.value, finish)
    finish = torch.where(first_stop == counts, Finish.STOP.value, finish)
    finish = torch.where(limit < 0, Finish.RUNNING.value, finish)
    counts = counts.clamp(min=0)
    accepted = torch.minimum(accepted, counts)
    kept = steps <= counts[:, None]
    path = path.masked_fill(~(steps[:-1] <= accepted[:, None]), NONE)
    return Verdict(path, accepted, tokens.masked_fill(~kept, NONE), counts, finish)


def _limits(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """`(stop ids [B, 1, W], padded with a token nobody writes; tokens still allowed [B], -1 for requests that get none yet)`."""
    stops = [sorted(r.stop_ids) for r in batch.requests]
    widest = max(map(len, stops), default=0)
    rooms = [r.room if ready else -1 for r, ready in zip(batch.requests, batch.ready, strict=True)]
    rows = [[room, *s, *[NONE - 1] * (widest - len(s))] for room, s in zip(rooms, stops, strict=True)]
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    return table[:, None, 1:], table[:, 0]
