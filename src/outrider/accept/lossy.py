"""Rules that change what the model writes. They must be asked for by name, and everything they touch says so.

Both keep guesses that the model finds likely enough, whatever their draft thought of them, follow the longest kept path, and draw
the token after it from the model. At T = 0 the model finds one token likely, and they write what the others write. Plain twin:
`plain.longest`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import Batch, Proposal, Scores, Verdict
from .sift import Round, settle


@dataclass(frozen=True, slots=True)
class Typical:
    """LOSSY. Typical acceptance (Cai et al. 2024, Medusa): keep x if p(x) > min(eps, delta * exp(-entropy of p))."""

    eps: float = 0.09
    delta: float = 0.3
    name = "typical"
    lossless = False

    def __call__(self, proposal: Proposal, scores: Scores, batch: Batch) -> Verdict:
        given = Round.of(proposal, scores)
        spread = torch.special.entr(given.p).sum(2).gather(1, given.above)
        return settle(
            given, longest(given, given.at(given.p) > (self.delta * (-spread).exp()).clamp(max=self.eps)), given.p, batch
        )


@dataclass(frozen=True, slots=True)
class Threshold:
    """LOSSY. Keep x if p(x) >= share."""

    share: float = 0.3
    name = "threshold"
    lossless = False

    def __call__(self, proposal: Proposal, scores: Scores, batch: Batch) -> Verdict:
        given = Round.of(proposal, scores)
        return settle(given, longest(given, given.at(given.p) >= self.share), given.p, batch)


def longest(given: Round, kept: Tensor) -> Tensor:
    """`keep [B, N]` for `settle`: a slot prefers the child with the most kept nodes below, the first of equals."""
    columns = given.proposal.columns
    rows = torch.arange(len(kept), device=kept.device)
    height = torch.zeros(len(kept), columns + 1, dtype=torch.int64, device=kept.device)
    own = torch.zeros_like(given.tokens)
    for j in reversed(range(columns)):
        above = given.above[:, j]
        own[:, j] = (height[:, j + 1] + 1) * (kept[:, j] & given.live[:, j])
        height[rows, above] = torch.maximum(height[rows, above], own[:, j])
    order = columns - torch.arange(columns, device=kept.device)
    return (own * (columns + 1) + order) * (own > 0)
