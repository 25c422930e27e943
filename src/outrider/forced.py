"""Guesses that need no drafter: tokens that a request's own processors say must come next (a grammar's punctuation and keys).

They stand in for the drafter's guesses where those do not agree with them. The drafter is shown the round as if its guesses for
these requests had been turned down, in its own columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .drafters import _joint
from .protocols import Forcing
from .types import FORCED, NONE, ROOT, Batch, Budget, Proposal, Request, Scores, Verdict

OWN, GIVEN = 0, 1


class Forced:
    """Of one engine with `vocab_size` tokens. Between `lead` and `apart` it remembers one round's columns."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab = vocab_size
        self._own: Proposal | None = None
        self._renamed: Tensor | None = None

    def lead(self, batch: Batch, budget: Budget, own: Proposal) -> Proposal:
        """The drafter's guesses `own`, or what is forced, by request; as deep as the budget goes. Under the classical rules
        nothing but the text before decides which, since the drafter's guesses are draws."""
        self._own = self._renamed = None
        if batch.blind or not budget.any or not any(r.params.processors for r in batch.requests):
            return own
        limits = [min(d, n) for d, n in zip(budget.depth, budget.nodes, strict=True)]
        chains = [self._known(request, most) if most else [] for request, most in zip(batch.requests, limits, strict=True)]
        chosen = [
            GIVEN if chain and (request.sampled or not holds(own, b, chain)) else OWN
            for b, (request, chain) in enumerate(zip(batch.requests, chains, strict=True))
        ]
        if GIVEN not in chosen:
            return own
        given = Proposal.chains(chains, own.tokens.device, FORCED)
        whole, maps = _joint.select({OWN: own, GIVEN: given}, chosen)
        self._own, self._renamed = own, maps[OWN]
        return whole

    def ahead(self, request: Request, own: list[int], most: int) -> list[int]:
        """What `lead` makes of a chain of the drafter's."""
        chain = self._known(request, most) if request.params.processors else []
        return chain if chain and (request.sampled or own[: len(chain)] != chain) else own

    def apart(self, proposal: Proposal, verdict: Verdict, scores: Scores) -> tuple[Proposal, Verdict, Scores]:
        """What the drafter is to see of the round."""
        own, renamed, self._own, self._renamed = self._own, self._renamed, None, None
        if own is None or renamed is None or not proposal.columns:
            return proposal, verdict, scores
        renamed = renamed.to(verdict.path.device)
        back = _joint.inverse(renamed, proposal.columns)
        seen = _joint.verdict_for(own, back, verdict)
        return own, seen, _joint.scores_for(renamed, back, seen, verdict, scores)

    def _known(self, request: Request, most: int) -> list[int]:
        """What the first of a request's processors that knows anything says comes next. One that fails knows nothing: it will
        fail again where its failure counts."""
        for processor in request.params.processors:
            if isinstance(processor, Forcing):
                try:
                    chain = [int(token) for token in processor.forced(list(request.tokens), most)][:most]
                except Exception:
                    continue
                if chain and min(chain) >= 0 and max(chain) < self._vocab:
                    return chain
        return []


def holds(proposal: Proposal, b: int, chain: Sequence[int]) -> bool:
    """Whether a path of request b's guesses begins with `chain`."""
    size = min(proposal.widths[b], int(proposal.sizes[b]))
    tokens, parents = proposal.tokens[b, :size].tolist(), proposal.parents[b, :size].tolist()
    at = ROOT
    for token in chain:
        at = next((c for c in range(size) if parents[c] == at and tokens[c] == token), NONE - 1)
        if at < ROOT:
            return False
    return True
