"""After drafting: guesses that their drafter itself believes in too little are not worth a row.

Only where a proposal carries the drafter's own account, `confidence [B, N]` (the probability that a node is accepted, given that
its parent was), and only for requests whose guesses are no draws: under the classical rules whether a guess is verified must not
depend on what it is. The account is read on the host, so it counts only where it lies there already.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from operator import mul

import numpy as np
import torch

from ..types import Batch, Proposal
from .costs import Costs
from .plan import Load


def shorten(batch: Batch, proposal: Proposal, load: Load | None, costs: Costs) -> Proposal:
    """The proposal without the ends of chains that do not pay; the same one where nothing is known, or nothing to drop."""
    confidence = getattr(proposal, "confidence", None)
    if load is None or not isinstance(confidence, torch.Tensor) or confidence.device.type != "cpu" or not proposal.linear:
        return proposal
    rows = confidence.tolist()
    chances = [
        [] if r.sampled else list(accumulate(row[:w], mul))
        for r, row, w in zip(batch.requests, rows, proposal.widths, strict=True)
    ]
    kept = worth(chances, sum(w for r, w in zip(batch.requests, proposal.widths, strict=True) if r.sampled), load, costs)
    widths = tuple(w if r.sampled else k for r, w, k in zip(batch.requests, proposal.widths, kept, strict=True))
    if widths == proposal.widths:
        return proposal
    sizes = proposal.sizes.minimum(torch.tensor(widths, dtype=torch.int64, device=proposal.sizes.device))
    return replace(proposal, sizes=sizes, widths=widths)


def worth(chances: list[list[float]], others: int, load: Load, costs: Costs) -> list[int]:
    """How many guesses of each chain to verify, when drafting is paid already: guesses in falling order of their chance, up to
    the number with most tokens per second. `others`: rows of guesses that are verified in any case."""
    items = sorted(((-chance, b, j) for b, row in enumerate(chances) for j, chance in enumerate(row)), key=lambda item: item)
    tokens = load.ready + np.concatenate([[0.0], np.cumsum([-chance for chance, _, _ in items])])
    rows = load.rows + others + np.arange(len(items) + 1.0)
    count = int((tokens / (costs.verify(load.batch, rows, load.chain) + costs.other(load.batch))).argmax())
    kept = [0] * len(chances)
    for _, b, _ in items[:count]:
        kept[b] += 1
    return kept
