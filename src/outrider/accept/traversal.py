"""Traversal verification: leaves first, whole paths at once (Weng et al. 2025, arXiv 2505.12398).

A path is judged by the probability of all of its tokens, so a guess that top-down rejection would drop survives when what
follows it makes up for it. On a chain it is block verification. Plain twin: `plain.bottom_up`.
"""

from __future__ import annotations

from ..types import Batch, Proposal, Scores, Verdict
from .sift import Round, first, settle, sift, tests, upward


class Traversal:
    """Of all nodes, children before parents, the first that passes its test ends the path. Lossless in law."""

    name = "traversal"
    lossless = True

    def __call__(self, proposal: Proposal, scores: Scores, batch: Batch) -> Verdict:
        given = Round.of(proposal, scores)
        sifted = sift(given, bottom_up=True)
        found = upward(given, tests(batch, given) < sifted.level[:, 1:])
        return settle(given, first(given, found), sifted.rest, batch)
