"""What was promised, and what came true of it."""

from __future__ import annotations

from dataclasses import dataclass

PRIOR = 4.0
"""Weight of what is believed before anything was seen, in guesses."""


@dataclass(slots=True)
class Tally:
    """Tokens promised, and tokens accepted of them."""

    promised: float = 0.0
    accepted: float = 0.0

    def add(self, promise: float, accepted: int, keep: float) -> None:
        """One more promise; of what was counted before, the share `keep` is left."""
        self.promised, self.accepted = self.promised * keep + promise, self.accepted * keep + accepted

    def share(self, prior: float) -> float:
        """How much of a promise comes true."""
        return (self.accepted + PRIOR * prior) / (self.promised + PRIOR)
