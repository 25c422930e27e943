"""Whom this package believes: its own drafters, which tests see to."""

from __future__ import annotations

from .protocols import Drafter

TRUSTING = True
"""Whether this package's own drafters are believed to leave alone what is not theirs, and to be sound where somebody looks again.
That they are is seen to by tests, where nobody is trusted, and not in every round: looking takes longer than much of what they
do."""


def own(drafter: Drafter) -> bool:
    """Whether a drafter, with all its members, is this package's."""
    mine = type(drafter).__module__.partition(".")[0] == __name__.partition(".")[0]
    return TRUSTING and mine and all(own(m.drafter) for m in getattr(drafter, "members", ()))
