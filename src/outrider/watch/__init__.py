"""Watching rounds: traces of them, acceptance by label of the work, and whether speculation pays."""

from __future__ import annotations

import logging

from ..types import StepEvent
from .gain import Gain
from .labels import Labels

__all__ = ["Watch"]

logging.getLogger("outrider.watch").addHandler(logging.NullHandler())


class Watch:
    """What an engine knows about its own speculation: `gain` over plain decoding, acceptance by `labels`."""

    def __init__(self) -> None:
        self.gain = Gain()
        self.labels = Labels()

    def observe(self, event: StepEvent) -> None:
        """Learn from a round."""
        self.gain.observe(event)
        self.labels.observe(event)
