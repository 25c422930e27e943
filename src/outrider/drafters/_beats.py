"""How long rounds take that are launched ahead of being read, and those that wait for what the host finds in a text."""

from __future__ import annotations

import numpy as np

from ..control.costs import Costs, Floats
from ..control.usual import Usual
from ._members import Clock

HOPED = 1.5
"""Times longer that the latter are believed to take before both were seen."""
TOLL = 0.4
"""What leaving rounds launched ahead and coming back to them takes beside the rounds that wait: so many times one launched ahead.
The device idles while the last of them is read, and again until the next two are under way."""
MOST = 4.0
"""Times longer at most: a stall is no rule."""


class Beats:
    """Of rounds with guesses. A round's time is that until the next one begins, if that is like it: one launched ahead begins in
    the time of the one before."""

    def __init__(self) -> None:
        self._clocks = {True: Clock(), False: Clock()}
        self._passes, self._known = {True: Usual(Costs()), False: Usual(Costs())}, set[bool]()
        self._last: tuple[float, bool, int] | None = None
        self._guess: tuple[float, int, int, float] | None = None

    def begin(self, now: float, ahead: bool, count: int) -> None:
        """A round with guesses for `count` requests begins, in seconds; `ahead`: the one before was not read."""
        last, self._last = self._last, (now, ahead, count)
        if last is None:
            return
        if last[1:] == (ahead, count):
            self._clocks[ahead].add(now - last[0])
        guess, self._guess = self._guess, None
        if guess is not None and last[1] == ahead:  # else it began too early, or too late
            since, requests, rows, replays = now - guess[0], *guess[1:]
            self._passes[ahead].costs.add_verify(requests, rows, max(since / 2, since - replays))
            self._known.add(ahead)

    def made(self, now: float, requests: int, rows: int, replays: float) -> None:
        """The round's guesses were made, for a pass of so many rows; the device takes so many seconds for it from now on."""
        self._guess = now, requests, rows, replays

    def pause(self) -> None:
        """A round without guesses."""
        self._last = self._guess = None

    @property
    def timed(self) -> bool:
        """Whether it is known what a pass takes."""
        return bool(self._known)

    def passes(self, number: int, ahead: bool, requests: int, rows: int) -> Floats:
        """Seconds of a pass by its rows, of which there may be so many, and of what else is done in its time, in round `number`;
        nothing before one was timed."""
        kind = ahead if ahead in self._known else not ahead
        return self._passes[kind].passes(number, requests, rows) if self._known else np.zeros(rows + 1)

    @property
    def ratio(self) -> float:
        """Times longer that waiting rounds take."""
        ahead, waiting = self._clocks[True], self._clocks[False]
        if not (ahead.sure and waiting.sure):
            return HOPED
        return min(MOST, max(1.0, waiting.seconds / max(1e-9, ahead.seconds)))
