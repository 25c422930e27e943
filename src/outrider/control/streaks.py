"""How often a lookup is right, by how often in a row it has just been: copying comes in stretches.

After r right guesses in a row the next one is right with a chance of its own, and the one after that with the chance for r + 1.
So one row of chances tells what a guess of any length will bring. Every token of a text that a lookup had foretold, or not, is
an observation, whether its guess was in a pass or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..protocols import Drafter
from ..types import Request

Preview = Callable[[Request, int], "list[int] | None"]
LONGEST = 12
"""Rows of right guesses are told apart up to here."""
COMMON, OWN = 0.995, 0.95
"""What everybody's record of a row is worth after one more observation of it, and a request's own."""
HOPED, WEAK, PULL = 0.4, 2.0, 6.0
"""Chance of the first guess that is believed before anything was seen; observations that a belief is worth, and everybody's
record in a request's estimate."""


def previews(drafter: Drafter) -> bool:
    """Whether a drafter has a `preview` of its own: it looks guesses up."""
    return getattr(type(drafter), "preview", Drafter.preview) is not Drafter.preview


@dataclass(slots=True)
class Streaks:
    """Fading counts by row: `tests`, and the `hits` among them."""

    hits: list[float] = field(default_factory=lambda: [0.0] * (LONGEST + 1))
    tests: list[float] = field(default_factory=lambda: [0.0] * (LONGEST + 1))

    def learn(self, row: int, hit: bool, keep: float) -> None:
        """A guess after `row` right ones was right, or wrong."""
        self.tests[row] = keep * self.tests[row] + 1.0
        self.hits[row] = keep * self.hits[row] + hit

    def chances(self) -> list[float]:
        """By row; one that was seldom met is believed to be like the one before."""
        found, before = [], HOPED
        for hits, tests in zip(self.hits, self.tests, strict=True):
            before = (hits + WEAK * before) / (tests + WEAK)
            found.append(before)
        return found


@dataclass(slots=True)
class Text:
    """One request's: `length` known tokens when it was last looked at (0: not yet), what would be guessed `ahead` of them, the
    `row` of right guesses that ends there, and its own record."""

    request: Request
    length: int = 0
    row: int = 0
    ahead: list[int] = field(default_factory=list)
    own: Streaks = field(default_factory=Streaks)

    def look(self, common: Streaks, preview: Callable[[], list[int] | None]) -> bool:
        """Learn from the tokens that came since, and look what comes next. False where that cannot be told."""
        tokens = self.request.tokens
        if self.length == len(tokens):
            return True
        if self.length:
            self._learn(tokens[self.length :], common)
        found = preview()
        self.ahead = found or []
        if found is not None:
            self.length = len(tokens)
        return found is not None

    def _learn(self, fresh: list[int], common: Streaks) -> None:
        for token, guess in zip(fresh, self.ahead, strict=False):
            hit = token == guess
            self.own.learn(self.row, hit, OWN)
            common.learn(self.row, hit, COMMON)
            self.row = min(LONGEST, self.row + 1) if hit else 0
            if not hit:
                break
        if not self.ahead:
            self.row = 0

    def outlook(self, common: list[float], most: int) -> list[float]:
        """Tokens expected of the first 0, 1, ... guesses, of at most `most`."""
        found, chance, total = [0.0], 1.0, 0.0
        hits, tests, row = self.own.hits, self.own.tests, self.row
        for _ in self.ahead[:most]:
            chance *= (hits[row] + PULL * common[row]) / (tests[row] + PULL)
            total += chance
            found.append(total)
            if row < LONGEST:
                row += 1
        return found

    def hope(self, common: list[float], most: int) -> list[float]:
        """The same of a text that was looked at some tokens ago: as then, if what was seen came true, as far as it went; else
        nothing is expected."""
        if not self.ahead:
            return [0.0]
        fresh = self.request.tokens[self.length :]
        true = self.length > 0 and all(token == guess for token, guess in zip(fresh, self.ahead, strict=False))
        return self.outlook(common, most) if true else [0.0]
