"""Rejection sampling: keep a guess with probability min(1, p / q), else draw from what p has left over q.

Chains: Leviathan et al. 2023 (algorithm 1), Chen et al. 2023. Trees of draws without replacement: children are tried in the order
in which they were drawn, each against what the ones before it left (Jeon et al. 2024; Chen et al. 2024, Sequoia). Guesses
without a known q are point masses: kept with probability p, in any order, which is lossless whoever made them, provided that
the maker has not seen this rule's randomness. Plain twin: `plain.top_down`.
"""

from __future__ import annotations

from ..types import Batch, Proposal, Scores, Verdict
from .sift import Round, first, settle, sift, tests


class Rejection:
    """Accept if u * q < p. Lossless in law, not token for token: the text depends on the drafts."""

    name = "rejection"
    lossless = True

    def __call__(self, proposal: Proposal, scores: Scores, batch: Batch) -> Verdict:
        given = Round.of(proposal, scores)
        sifted = sift(given, bottom_up=False)
        kept = tests(batch, given) * sifted.whole < sifted.share
        return settle(given, first(given, kept), sifted.rest, batch)
