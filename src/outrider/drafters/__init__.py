"""Drafting methods, one file each. A file here registers itself by name; nothing else in the package names it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..trained import Trained

AUTO = (
    ("suffix", "it needs no weights, and remembers longer repeats than prompt lookup does"),
    ("ngram", "prompt lookup needs no weights; it guesses only where the text repeats itself"),
)
"""What `draft="auto"` picks from where no trained drafter fits, the best first, and why."""
BOTH = "hybrid"
"""Asks the first of them that is there, and a trained drafter where that one knows nothing better."""
WORTH = 1.2
"""Tokens per round on held-out prompts below which a trained drafter cannot pay for its own passes."""
CARD_WORTH = 1.6
"""The same on a GPU, where its rounds take up to 1.5 plain ones of a small model (an H200, 135 million weights). A large model
may win with less; then name the drafter."""


def pick(known: Collection[str], trained: Sequence[Trained] = (), card: bool = False) -> tuple[str, Trained | None, str]:
    """The best of the drafters that are there, what was trained of it, and the reason in words. `trained`: those that fit the
    target, the best first, of which one must reach so many tokens per round, more of them on a `card`. Whether it pays on the
    traffic is the controller's business: it looks ahead only as far as that is worth the time."""
    worth = CARD_WORTH if card else WORTH
    able = [t for t in trained if t.method in known]
    name, why = next((name, why) for name, why in AUTO if name in known)
    for found in able:
        if found.tau >= worth:
            reason = f"was trained for this model: {found.tau:.2f} tokens per round on held-out prompts"
            if BOTH not in known:
                return found.method, found, f"it {reason}"
            return BOTH, found, f"{name} where the text repeats itself, else {found.method}, which {reason}"
    if able:
        why += f"; the best that was trained for this model writes only {able[0].tau:.2f} tokens per round"
        why += f"; less than {worth:g} does not pay here"
    return name, None, why


def members(known: Collection[str], trained: Trained) -> str:
    """The members of a hybrid with a drafter that was trained."""
    return f"{next(name for name, _ in AUTO if name in known)}+{trained.method}"
