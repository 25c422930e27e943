"""The formulas found in papers and articles, as they stand there, to be held against measurements.

`rate` is the chance that a guess is accepted, `depth` guesses are made per round, and one of them costs the share `cost` of a
plain pass. Checking them is taken to cost one plain pass, whatever their number: the measured model (`predict.py`) does not.
"""

from __future__ import annotations

from collections.abc import Sequence


def chain_tokens(rate: float, depth: int) -> float:
    """Expected tokens of a round when guesses are accepted independently (Leviathan et al. 2023, equation 1)."""
    return depth + 1.0 if rate >= 1.0 else (1.0 - rate ** (depth + 1)) / (1.0 - rate)


def textbook(rate: float, depth: int, cost: float) -> float:
    """Speed-up (1 - a^(K + 1)) / ((1 - a)(K c + 1)) of Leviathan et al. 2023, theorem 3.8."""
    return chain_tokens(rate, depth) / (depth * cost + 1.0)


def all_or_nothing(rate: float, depth: int) -> float:
    """Speed-up R K + (1 - R), as in articles: all guesses are right or none is, and neither drafting nor checking costs."""
    return rate * depth + (1.0 - rate)


def best_depth(rate: float, cost: float, depths: Sequence[int]) -> tuple[int, float]:
    """The depth of most textbook speed-up, and that speed-up; depth 0 (do not speculate) where none gains."""
    found = max(((textbook(rate, k, cost), -k) for k in depths), default=(0.0, 0))
    return (-found[1], found[0]) if found[0] > 1.0 else (0, 1.0)
