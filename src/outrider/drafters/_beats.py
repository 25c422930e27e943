"""How long rounds take that are launched ahead of being read, and those that wait for what the host finds in a text."""

from __future__ import annotations

from ._members import Clock

HOPED = 1.5
"""Times longer that the latter are believed to take before both were seen."""
MOST = 4.0
"""Times longer at most: a stall is no rule."""


class Beats:
    """Of rounds with guesses. A round's time is that until the next one begins, if that is like it: one launched ahead begins in
    the time of the one before."""

    def __init__(self) -> None:
        self._clocks = {True: Clock(), False: Clock()}
        self._last: tuple[float, bool, int] | None = None

    def begin(self, now: float, ahead: bool, count: int) -> None:
        """A round with guesses for `count` requests begins, in seconds; `ahead`: the one before was not read."""
        last, self._last = self._last, (now, ahead, count)
        if last is not None and last[1:] == (ahead, count):
            self._clocks[ahead].add(now - last[0])

    def pause(self) -> None:
        """A round without guesses."""
        self._last = None

    @property
    def ratio(self) -> float:
        """Times longer that waiting rounds take."""
        ahead, waiting = self._clocks[True], self._clocks[False]
        if not (ahead.sure and waiting.sure):
            return HOPED
        return min(MOST, max(1.0, waiting.seconds / max(1e-9, ahead.seconds)))
