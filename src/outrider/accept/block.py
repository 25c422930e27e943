"""Block verification: the longest prefix of a chain that passes as a whole (Sun et al. 2025, arXiv 2403.10444).

Never shorter, on average, than token by token, and optimal for one chain. A tree is judged by `traversal`, which is the same
rule where nothing branches. Plain twin: `plain.block`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from ..types import Batch, Proposal, Scores, Verdict
from .sift import Round, first, settle, tests
from .traversal import Traversal


class Block:
    """Accept up to the last node whose test passes. Lossless in law."""

    name = "block"
    lossless = True

    def __call__(self, proposal: Proposal, scores: Scores, batch: Batch) -> Verdict:
        if not proposal.linear:
            return Traversal()(proposal, scores, batch)
        given = Round.of(proposal, scores)
        odds, rest = chain(given)
        passed = (tests(batch, given) < odds) & given.live
        found = passed.flip(1).cummax(1).values.flip(1)
        return settle(given, first(given, found), rest, batch)


def chain(given: Round) -> tuple[Tensor, Tensor]:
    """`odds [B, N]`, the probability h_i of each node's test, and `rest [B, N + 1, V]`, the residual of each slot."""
    p, columns = given.p, given.proposal.columns
    live = pad(given.live, (0, 1))[:, :, None]
    guess = one_hot(pad(given.tokens, (0, 1)), p.shape[2]).to(p.dtype)
    q = torch.where(given.q.sum(2, keepdim=True) > 0, given.q, guess).where(live, 0.0)  # past the end of a chain nothing is drawn
    ratio = (given.at(p) / given.at(q)).nan_to_num(0.0, posinf=0.0)
    level = torch.ones_like(p[:, :, 0])
    for i in range(columns):
        level[:, i + 1] = (level[:, i] * ratio[:, i]).clamp(max=1)
    rest = (level[:, :, None] * p - q).clamp(min=0)
    mass = rest.sum(2)
    whole = mass + 1 - level
    odds = torch.where(whole > 0, mass / whole, torch.where(mass.isnan(), level, 1.0))
    return odds[:, 1:], torch.where(mass[:, :, None] > 0, rest, p)
