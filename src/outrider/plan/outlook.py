"""The whole plan of one drafter: what each depth brings at each batch, which is best, and what the formulas would have said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import formulas
from .acceptance import Chances, Record
from .costs import Costs
from .predict import Prediction, best, break_even, grid, plain_round, predict, share

SAFE = 1.03
"""A smaller gain that is foretold counts as none: the figures are not that good."""


QUICK = 0.95
"""Rounds with guesses take at least as long as plain ones; what was measured to be less than this part of them is noise."""
OFTEN = 0.95
"""Share of rounds with guesses below which silence is worth a word."""


@dataclass(frozen=True, slots=True)
class Formula:
    """What the formulas say at one depth of the first batch, beside what is foretold from chances and costs (and what was
    measured, where it was)."""

    depth: int
    foretold: float
    textbook: float
    all_or_nothing: float
    measured: float | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """For one batch: the depth to use, 0 for none, and why; `needed`: chance of a guess at which it breaks even."""

    batch: int
    depth: int
    speedup: float
    tokens_per_second: float
    plain_tokens_per_second: float
    needed: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Outlook:
    """One drafter on one kind of text. `rate`: chance of a guess, as one number; `cost`: of a guess, in plain rounds, at the
    first batch; `basis`: conditions under which its guesses were measured, where there were several; `synthetic`: no real
    drafter."""

    draft: str
    workload: str
    rate: float
    cost: float
    measured_costs: bool
    grid: tuple[Prediction, ...]
    advice: tuple[Advice, ...]
    formulas: tuple[Formula, ...]
    basis: str = ""
    synthetic: bool = False

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        rows = [asdict(p) | {"speedup": p.speedup} for p in self.grid]
        return asdict(self) | {"grid": rows}


@dataclass(frozen=True, slots=True)
class Case:
    """What is known: whose guesses, on what, how good they are, what steps cost; `seen`: a depth, a batch and the speed-up
    measured there; `depths`: those that the drafter has, where that is known; `basis` and `synthetic` as in `Outlook`."""

    draft: str
    workload: str
    acceptance: Record | Chances
    costs: Costs
    seen: tuple[int, int, float] | None = None
    depths: tuple[int, ...] | None = None
    basis: str = ""
    synthetic: bool = False


def outlook(case: Case, depths: Sequence[int], batches: Sequence[int]) -> Outlook:
    """Every depth at every batch, and what follows."""
    depths = case.depths or depths
    found = grid(case.acceptance, case.costs, depths, batches)
    rate = case.acceptance.rate
    advice = tuple(_advise(case, found, depths, batch) for batch in batches)
    rows = tuple(_formula(case, rate, depth, batches[0]) for depth in depths)
    cost = share(case.costs, batches[0], depths[0])
    told = (case.costs.measured, tuple(found), advice, rows, case.basis, case.synthetic)
    return Outlook(case.draft, case.workload, rate, cost, *told)


def offered(acceptance: Record | Chances) -> tuple[float, ...]:
    """How often there is a guess, by position."""
    return acceptance.chances.offer if isinstance(acceptance, Record) else acceptance.offer


def _advise(case: Case, found: Sequence[Prediction], depths: Sequence[int], batch: int) -> Advice:
    needed = break_even(case.costs, depths, batch, offered(case.acceptance))
    top = best(found, batch)
    if top is not None and top.speedup >= SAFE:
        known = "" if top.known or not case.costs.measured else "; passes of this batch were not measured"
        longer = top.round_seconds / plain_round(case.costs, batch)
        noisy = "; a round with guesses cannot be quicker than a plain one: measure on a quiet machine" if longer < QUICK else ""
        why = f"{top.tau:.2f} tokens per round of {longer:.2f} plain ones{known}{noisy}"
        return Advice(batch, top.depth, top.speedup, top.tokens_per_second, top.plain_tokens_per_second, needed, why)
    least = predict(case.acceptance, case.costs, min(depths), batch)
    plain = least.plain_tokens_per_second
    why = _against(case, least, needed, batch)
    if top is not None:
        why = (
            f"do not speculate: {top.speedup - 1:.1%} at most is foretold, at depth {top.depth}, which is too little to count on"
        )
    return Advice(batch, 0, 1.0, plain, plain, needed, why)


def _against(case: Case, least: Prediction, needed: float | None, batch: int) -> str:
    """Why not to speculate."""
    plain = plain_round(case.costs, batch)
    parts = {
        "drafting": case.costs.draft(batch, least.depth) / plain,
        "a wider pass": (case.costs.verify(batch, least.rows) - case.costs.plain(batch)) / plain,
        "the host": (case.costs.other(batch, least.depth) - case.costs.other(batch, 0)) / plain,
    }
    worst = max(parts, key=lambda name: parts[name])
    more = sum(parts.values())
    took = f"a look-ahead of {least.depth} adds {more:.0%} to a round, most of it {worst}, and brings {least.tau - 1:.0%}"
    made = offered(case.acceptance)[0]
    seldom = f" as seldom as they are made (in {made:.0%} of the rounds)" if made < OFTEN else ""
    if needed is None:
        return f"do not speculate: {took}; even right guesses would not pay{seldom}"
    return f"do not speculate: {took}; {needed:.0%} of the guesses must be right{seldom}, and {case.acceptance.rate:.0%} are"


def _formula(case: Case, rate: float, depth: int, batch: int) -> Formula:
    cost = share(case.costs, batch, depth)
    measured = case.seen[2] if case.seen is not None and case.seen[:2] == (depth, batch) else None
    foretold = predict(case.acceptance, case.costs, depth, batch).speedup
    return Formula(depth, foretold, formulas.textbook(rate, depth, cost), formulas.all_or_nothing(rate, depth), measured)
