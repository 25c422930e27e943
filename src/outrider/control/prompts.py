"""Which rounds wait for the device to read prompts: where rounds are launched ahead, the first one after a prompt does, and what
it takes is no price of anything."""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE = 8
"""Such rounds in a row, without another in between, after which waiting is what rounds do here."""


@dataclass(slots=True)
class Prompts:
    """Of one controller."""

    _read: bool = False
    _row: int = 0

    def told(self, reads: bool) -> bool:
        """A round was told that read prompts, or did not. Whether it waited for some."""
        after, self._read = self._read, reads
        if reads:
            return False
        self._row = self._row + 1 if after else 0
        return 0 < self._row <= PATIENCE

    @property
    def near(self) -> bool:
        """Whether the next round will wait."""
        return self._read and self._row < PATIENCE
