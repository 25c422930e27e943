"""What a controller learned, for the next one: what passes and guesses cost on a target, and how often guesses come true.

A drafter that was switched off and on again, or is compared with others in turns, does not begin from nothing. No text depends on
it, and where it is wrong it fades like all that is learned.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TypeVar

from ..protocols import Drafter
from .costs import CROWD, Costs
from .fees import Fees
from .judge import Judge
from .pace import Pace
from .probes import Prices, Purse
from .rates import Rates
from .stalls import Stalls
from .streaks import Streaks
from .tally import Tally
from .thought import Thought
from .trees import Trees

T = TypeVar("T")
PRIORS = (0.6, 0.9, 0.9)
"""Chances that are believed before anything was seen: that a guess comes true, that one is offered, and that one is offered where
those before it came true."""


class Chances:
    """How often guesses were accepted, offered, and offered where those before them were accepted, at `positions` positions."""

    def __init__(self, positions: int) -> None:
        self.accept, self.offer, self.reach = (Rates(positions, prior) for prior in PRIORS)

    def rest(self) -> None:
        """A round that told nothing about anybody."""
        for rates in (self.accept, self.offer, self.reach):
            rates.rest()


def apart(known: dict[bool, T], many: bool) -> T:
    """What is known of many requests, or of few; at first what is known of the others."""
    if many not in known:
        known[many] = copy.deepcopy(known[not many])
    return known[many]


@dataclass(slots=True)
class Known:
    """Costs, chances of `positions` positions and of rows of right lookups, what foreseen guesses cost beside their parts and
    what was `kept` of their promises by size class of the batch, verdicts, and what was seen of plain rounds: sizes of batches
    `plain`, and those that were tried on purpose (`referenced`). `trees`: how wide guesses are; `rows`: levels and nodes
    of guesses lately, in crowds and else; `trials`: what trying took, and the `purse` for it; `thought`: when the next plan is
    due."""

    positions: int
    costs: Costs = field(default_factory=Costs)
    stalls: Stalls = field(default_factory=Stalls)
    streaks: Streaks = field(default_factory=Streaks)
    pace: Pace = field(default_factory=Pace)
    fees: Fees = field(default_factory=Fees)
    kept: dict[int, Tally] = field(default_factory=dict)
    judge: Judge = field(default_factory=Judge)
    plain: set[int] = field(default_factory=set)
    referenced: set[int] = field(default_factory=set)
    trees: Trees | None = None
    trials: Prices = field(default_factory=dict)
    purse: Purse = field(default_factory=lambda: Purse(float))
    thought: Thought = field(default_factory=Thought)
    rows: dict[bool, tuple[float, float]] = field(default_factory=dict)
    _chances: dict[bool, Chances] = field(default_factory=dict)

    def nodes(self, crowd: bool) -> tuple[float, float]:
        """Levels of guesses lately, and their nodes, in crowds or else; as long as none were seen those of the others."""
        return self.rows.get(crowd, self.rows.get(not crowd, (0.0, 0.0)))

    def chances(self, batch: int) -> Chances:
        """Those in batches like one of this size. Few requests are given other guesses than many, wider ones or other drafters',
        and the last ones of many are those that wrote most slowly. What is known of the other kind is believed at first."""
        crowd = batch > CROWD
        if not self._chances:
            self._chances[crowd] = Chances(self.positions)
        return apart(self._chances, crowd)


@dataclass(slots=True)
class Shelf:
    """What is known of the drafters that one target has had, by who they are."""

    _known: dict[str, Known] = field(default_factory=dict)

    def of(self, drafter: Drafter) -> Known:
        """What is known of a drafter with these options."""
        return self._known.setdefault(title(drafter), Known(drafter.depth))


def title(drafter: Drafter) -> str:
    """Who a drafter is: its name, options and members."""
    members = [title(m.drafter) for m in getattr(drafter, "members", ())]
    options = getattr(drafter, "config", None)
    return f"{getattr(drafter, 'name', '')} {options} {drafter.depth} {drafter.nodes} {members}"
