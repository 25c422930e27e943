"""The coupled rule: keep the longest drafted path that agrees with the target, plus the target's own next token.

The target's token at every slot is already fixed by model, request key and position (Gumbel-max with counter-based noise), so
verification is equality and the text cannot depend on the drafter. Drafters that add the same noise to their own logits accept with
probability at least (1 - TV) / (1 + TV) (Daliri, Musco and Suresh 2024, "Coupling without communication").
The plain twin is `oracle.accept`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import tree
from ..types import NONE, ROOT, Batch, Finish, Proposal, Scores, Verdict


class Coupled:
    """Accept while drafted token == target's token. Lossless at every temperature; no host sync."""

    name = "coupled"
    lossless = True

    def __call__(self, proposal: Proposal, scores: Scores, batch: Batch) -> Verdict:
        alive = agreeing(proposal, scores.choice)
        depth = torch.where(alive, tree.depths(proposal.parents, proposal.sizes), 0)
        path = _path(alive, depth)
        slots = torch.cat([path.new_zeros(len(batch), 1), path + 1], dim=1)
        accepted = alive.sum(1)
        steps = torch.arange(slots.shape[1], device=slots.device)
        tokens = scores.choice.gather(1, slots.clamp(min=0)).masked_fill(steps > accepted[:, None], NONE)
        return cut(batch, path, accepted, tokens)


def agreeing(proposal: Proposal, choice: Tensor) -> Tensor:
    """`[B, N]` bool: nodes whose token, and every ancestor's, is the target's choice at its parent. At most one per depth,
    since siblings are distinct."""
    n = proposal.columns
    used = torch.arange(n, device=choice.device) < proposal.sizes[:, None]
    agree = used & (proposal.tokens == choice.gather(1, proposal.parents + 1))
    if n == 0:
        return agree
    ok = torch.nn.functional.pad(agree, (0, 1), value=True)
    up = torch.nn.functional.pad(proposal.parents.masked_fill(proposal.parents == ROOT, n), (0, 1), value=n)
    for _ in range(n.bit_length()):
        ok, up = ok & ok.gather(1, up), up.gather(1, up)
    return ok[:, :n]


def _path(alive: Tensor, depth: Tensor) -> Tensor:
    """Columns of the agreeing nodes in order of depth, padded with NONE."""
    batch, n = alive.shape
    columns = torch.arange(n, device=alive.device).expand(batch, n)
    path = torch.full((batch, n + 1), NONE, dtype=torch.int64, device=alive.device)
    target = torch.where(alive, depth - 1, n)
    return path.scatter(1, target, columns)[:, :n]


def cut(batch: Batch, path: Tensor, accepted: Tensor, tokens: Tensor) -> Verdict:
    """End what must end: at the first stop token, at the length limit, at an invalid choice. `tokens [B, N + 1]` holds
    `accepted + 1` tokens per request; everything after the cut is discarded."""
    device, steps = tokens.device, torch.arange(tokens.shape[1], device=tokens.device)
    stops = [sorted(r.stop_ids) for r in batch.requests]
    widest = max(map(len, stops), default=0)
    stop_ids = torch.tensor([s + [NONE - 1] * (widest - len(s)) for s in stops], device=device).reshape(len(batch), widest)
    limit = torch.tensor([r.room for r in batch.requests], device=device)
    ready = torch.tensor(batch.ready, device=device)
    far = tokens.shape[1] + 1
    is_stop = (tokens[:, :, None] == stop_ids[:, None, :]).any(2)
    first_stop = torch.where(is_stop, steps, far).amin(1)
    invalid = torch.where((tokens == NONE) & (steps <= accepted[:, None]), steps, far).amin(1)
    counts = torch.minimum(torch.minimum(accepted + 1, first_stop + 1), torch.minimum(limit, invalid))
    counts = torch.where(ready, counts, 0)
    stopped, ended = first_stop < counts, counts >= limit
    finish = torch.where(ended, Finish.LENGTH.value, Finish.RUNNING.value)
    finish = torch.where(invalid == counts, Finish.ERROR.value, finish)
    finish = torch.where(stopped, Finish.STOP.value, finish)
    finish = torch.where(ready, finish, Finish.RUNNING.value)
    accepted = torch.minimum(accepted, counts)
    path = path.masked_fill(torch.arange(path.shape[1], device=device) >= accepted[:, None], NONE)
    return Verdict(path, accepted, tokens.masked_fill(steps >= counts[:, None], NONE), counts, finish)
