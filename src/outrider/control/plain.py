"""What controllers that weigh no times have in common."""

from __future__ import annotations

from ..types import Batch, Budget, Proposal


class Plain:
    """Decides before every round anew, and keeps all guesses that come. `reason`: why it last changed its mind."""

    @property
    def reason(self) -> str:
        """There is none to tell."""
        return ""

    @property
    def resting(self) -> bool:
        """Never: what comes of a round may change the next."""
        return False

    def rest(self, batch: Batch) -> Budget:
        """No guesses for anybody."""
        return Budget.none(len(batch))

    def cut(self, batch: Batch, proposal: Proposal) -> Proposal:
        """All guesses are kept."""
        return proposal
