"""Drafting methods, one file each. A file here registers itself by name; nothing else in the package names it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..trained import Trained

AUTO = (
    ("suffix", "it needs no weights, and remembers longer repeats than prompt lookup does"),
    ("ngram", "prompt lookup needs no weights; it guesses only where the text repeats itself"),
)
"""What `draft="auto"` picks from where no trained drafter fits, the best first, and why."""
WORTH = 1.2
"""Tokens per round on held-out prompts below which a trained drafter cannot pay for its own passes."""


def pick(known: Collection[str], trained: Sequence[Trained] = ()) -> tuple[str, Trained | None, str]:
    """The best of the drafters that are there, where it is if it was trained, and the reason in words. `trained`: those that fit
    the target, the best first. Whether it pays on the traffic is the controller's business: it looks ahead only as far as that is
    worth the time."""
    able = [t for t in trained if t.method in known]
    for found in able:
        if found.tau >= WORTH:
            return found.method, found, f"it was trained for this model: {found.tau:.2f} tokens per round on held-out prompts"
    name, why = next((name, why) for name, why in AUTO if name in known)
    weak = f"; the best that was trained for this model writes only {able[0].tau:.2f} tokens per round" if able else ""
    return name, None, why + weak
