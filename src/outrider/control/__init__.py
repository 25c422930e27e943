"""How far to look ahead: `fixed`, `adaptive` (by acceptance) and `goodput` (by acceptance and measured time, the default)."""

from __future__ import annotations

from ..errors import BadInput
from ..protocols import Controller, Drafter
from .adaptive import Adaptive
from .calibrate import calibrate
from .fixed import Fixed
from .goodput import Goodput

__all__ = ["CONTROLLERS", "DEFAULT", "Adaptive", "Fixed", "Goodput", "calibrate", "check", "make"]

CONTROLLERS: dict[str, type[Fixed] | type[Adaptive] | type[Goodput]] = {
    "fixed": Fixed,
    "adaptive": Adaptive,
    "goodput": Goodput,
}
DEFAULT = "goodput"


def check(name: str) -> None:
    """Raises `BadInput` for a controller that does not exist."""
    if name not in CONTROLLERS:
        raise BadInput(f"unknown controller {name!r}; use {', '.join(CONTROLLERS)}")


def make(name: str, drafter: Drafter) -> Controller:
    """The controller called `name` for `drafter`; a drafter that never guesses has nothing to control. Raises `BadInput`."""
    check(name)
    return CONTROLLERS[name](drafter) if drafter.depth > 0 else Fixed(drafter)
