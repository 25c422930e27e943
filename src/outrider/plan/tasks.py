"""What to expect of a draft model where nothing was measured: shares of guesses accepted, by kind of task.

The ranges are those that articles on serving with speculation repeat for a general draft model of the same family. They trace
back to no one measurement, and measurements differ (Mahmoud 2026, arXiv:2604.14682, finds more accepted in chat than in code): a
benchmark on one's own prompts replaces them at once.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from ..errors import BadInput


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of text, with the published range of the share of guesses accepted."""

    name: str
    low: float
    high: float
    source: str = "ranges published for general draft models; measure your own prompts (outrider bench)"

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


TASKS = (
    Task("code", 0.55, 0.65),
    Task("summarise", 0.45, 0.55),
    Task("creative", 0.25, 0.35),
    Task("question", 0.30, 0.40),
)


def find(name: str) -> Task:
    """Raises `BadInput`, with the closest name, for a task that is not in the table."""
    names = [t.name for t in TASKS]
    if name in names:
        return TASKS[names.index(name)]
    close = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise BadInput(f"no task {name!r}; {hint}there are {', '.join(names)}; or give --acceptance, or a bench result with --from")
