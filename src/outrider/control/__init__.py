"""How far to look ahead: `fixed`, `adaptive` (by acceptance) and `goodput` (by acceptance and measured time, the default)."""

from __future__ import annotations

from ..errors import BadInput
from ..protocols import Controller, Drafter
from .adaptive import Adaptive
from .calibrate import calibrate
from .fixed import Fixed
from .foresight import Foresight
from .goodput import Goodput
from .shelf import Shelf

__all__ = ["CONTROLLERS", "DEFAULT", "Adaptive", "Fixed", "Foresight", "Goodput", "Shelf", "calibrate", "check", "make"]

CONTROLLERS: dict[str, type[Fixed] | type[Adaptive] | type[Foresight]] = {
    "fixed": Fixed,
    "adaptive": Adaptive,
    "goodput": Foresight,
}
DEFAULT = "goodput"


def check(name: str) -> None:
    """Raises `BadInput` for a controller that does not exist."""
    if name not in CONTROLLERS:
        raise BadInput(f"unknown controller {name!r}; use {', '.join(CONTROLLERS)}")


def make(name: str, drafter: Drafter, shelf: Shelf | None = None) -> Controller:
    """The controller called `name` for `drafter`; a drafter that never guesses has nothing to control. `goodput` goes on with
    what is on the `shelf`. Raises `BadInput`."""
    check(name)
    if drafter.depth < 1:
        return Fixed(drafter)
    made = CONTROLLERS[name]
    return Foresight(drafter, known=shelf.of(drafter)) if made is Foresight and shelf is not None else made(drafter)
