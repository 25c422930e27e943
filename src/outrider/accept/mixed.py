"""One batch, several rules: every request is judged by its own."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..protocols import AcceptanceRule
from ..types import Batch, Proposal, Scores, Verdict


def judge(rules: list[AcceptanceRule], proposal: Proposal, scores: Scores, batch: Batch) -> Verdict:
    """`rules[b]` judges request b; requests with equal rules are judged together. Rows keep the batch's order."""
    groups: list[tuple[AcceptanceRule, list[int]]] = []
    for b, rule in enumerate(rules):
        found = next((members for other, members in groups if other is rule), None)
        if found is None:
            groups.append((rule, [b]))
        else:
            found.append(b)
    if len(groups) == 1:
        return groups[0][0](proposal, scores, batch)
    verdicts = [rule(*part(members, proposal, scores, batch)) for rule, members in groups]
    order = torch.tensor([b for _, members in groups for b in members], device=proposal.tokens.device).argsort()
    fields = [
        torch.cat(f)[order] for f in zip(*((v.path, v.accepted, v.tokens, v.counts, v.finish) for v in verdicts), strict=True)
    ]
    return Verdict(*fields)


def part(members: list[int], proposal: Proposal, scores: Scores, batch: Batch) -> tuple[Proposal, Scores, Batch]:
    """The share of some requests in a round. Features stay whole: rules do not read them."""
    rows = torch.tensor(members, device=proposal.tokens.device)
    tokens, parents, sizes, source = (t[rows] for t in (proposal.tokens, proposal.parents, proposal.sizes, proposal.source))
    q = None if proposal.q is None else proposal.q[rows]
    mine = Proposal(tokens, parents, sizes, source, tuple(proposal.widths[b] for b in members), proposal.linear, q)
    processed = None if scores.processed is None else scores.processed[rows]
    told = replace(scores, choice=scores.choice[rows], processed=processed, logits=None)
    fields = (batch.requests, batch.pending, batch.ready, batch.room)
    return mine, told, Batch(*(tuple(f[b] for b in members) for f in fields))  # type: ignore[arg-type]
