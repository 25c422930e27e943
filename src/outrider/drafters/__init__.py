"""Drafting methods, one file each. A file here registers itself by name; nothing else in the package names it."""

from __future__ import annotations

from collections.abc import Collection

AUTO = (
    ("suffix", "it needs no weights, and remembers longer repeats than prompt lookup does"),
    ("ngram", "prompt lookup needs no weights; it guesses only where the text repeats itself"),
)
"""What `draft="auto"` picks from while no trained drafter is at hand, the best first, and why."""


def pick(known: Collection[str]) -> tuple[str, str]:
    """The best of the drafters that are there, and the reason in words. Whether it pays on the traffic is the controller's
    business: it looks ahead only as far as that is worth the time."""
    return next((name, why) for name, why in AUTO if name in known)
