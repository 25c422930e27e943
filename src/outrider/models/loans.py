"""Exit states that a drafter computed with the target's own first layers, on loan until the round is verified.

The rules of LayerSkip's shared cache (Elhoushi et al. 2024): the first layers' KV and states of a guess are the target's own, so
verification may start from them; whatever was not run, or may since have been written over, is run again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import OutriderWarning
from ..types import NONE, Batch, PassOutput, Resume
from .layout import Layout, Span

Complete = Callable[[list[int]], Tensor]
"""From slots already run, per request of the batch, to the states of all later ones, in the order of the pass."""


@dataclass(frozen=True, slots=True)
class Loan:
    """The states `[R, H]` of one run through the first `layers` layers. `out` keeps the drafter's copy alive, so that its
    identity stays its own."""

    out: PassOutput
    layers: int
    hidden: Tensor
    layout: Layout


class Loans:
    """One round's loans, in the order in which they were made, and how many slots of each request they cover."""

    def __init__(self) -> None:
        self._made: dict[int, Loan] = {}
        self._reach: dict[int, tuple[int, int]] = {}

    def clear(self) -> None:
        """The round is over."""
        self._made.clear()
        self._reach.clear()

    def spoil(self, batch: Batch) -> None:
        """Somebody writes other KV where these requests' loans have theirs."""
        for request in batch.requests:
            self._reach.pop(request.id, None)

    def check(self, layout: Layout, start: int, layers: int) -> None:
        """Raise `ValueError` if slots before those to be run, from `start` on, have no KV of this round in the first `layers`
        layers."""
        for span in layout.spans if start else ():
            have, slots = self._reach.get(span.request.id, (layers, 0))
            if have != layers or slots < start:
                raise ValueError(
                    f'kv="shared" from slot {start} on: those before it were not run through these layers this round'
                )

    def lend(self, out: PassOutput, hidden: Tensor, layers: int, layout: Layout) -> None:
        """Note a run: the states after its last layer."""
        self._made[id(out)] = Loan(out, layers, hidden.clone(), layout)
        for span in layout.spans:
            self._reach[span.request.id] = (layers, span.nodes + 1)

    def states(self, resume: Resume, layout: Layout, complete: Complete) -> Tensor | None:
        """`[R, H]` in the order of the pass's rows, what is missing by `complete`. None, with a warning, for parts that were not
        lent this round; the pass then starts from the beginning."""
        wanted = {id(part) for part in resume.parts}
        loans = [loan for key, loan in self._made.items() if key in wanted]
        if not loans or len(loans) < len(wanted) or any(loan.layers != resume.layer for loan in loans):
            what = f"a drafter's states after layer {resume.layer} do not cover the {len(layout.tokens)} rows of the pass"
            warnings.warn(f"{what}; all layers are run, the text is unaffected", OutriderWarning, stacklevel=2)
            return None
        rows = _table(loans)
        slots, order, count, fresh = [0] * len(layout.proposal.widths), list[int](), sum(len(x.hidden) for x in loans), 0
        contents = _contents(layout)
        for span in layout.spans:
            slots[span.index] = self._covered(span, contents[span.lo : span.hi], rows, resume.layer)
            own = span.pending + slots[span.index] - 1 if slots[span.index] else 0
            order += [rows[span.request.id, span.start + i][0] for i in range(own)]
            order += range(count + fresh, count + fresh + span.hi - span.lo - own)
            fresh += span.hi - span.lo - own
        known = [loan.hidden for loan in loans]
        return torch.cat(known + [complete(slots)] if fresh else known)[order]

    def _covered(self, span: Span, contents: list[tuple[int, int, int]], rows: Rows, layers: int) -> int:
        """How many slots of a request, from the first on, were run just as the pass has them."""
        have, reach = self._reach.get(span.request.id, (layers, 0))
        if have != layers:
            return 0
        most = min(len(contents), span.pending - 1 + reach)
        count = 0
        while count < most and rows.get((span.request.id, span.start + count), (0, ()))[1] == contents[count]:
            count += 1
        return max(0, count - span.pending + 1)


Rows = dict[tuple[int, int], tuple[int, tuple[int, int, int] | tuple[()]]]


def _table(loans: list[Loan]) -> Rows:
    """By request and place in its KV: the last row that was run there, and its content."""
    rows: Rows = {}
    at = 0
    for loan in loans:
        contents = _contents(loan.layout)
        for span in loan.layout.spans:
            for i in range(span.hi - span.lo):
                rows[span.request.id, span.start + i] = (at + span.lo + i, contents[span.lo + i])
        at += len(loan.hidden)
    return rows


def _contents(layout: Layout) -> list[tuple[int, int, int]]:
    """Each row's token, position and parent (NONE for known tokens and where no guesses branch)."""
    rows, parents = layout.rows, layout.proposal.parents
    parent = torch.full_like(layout.tokens, NONE)
    if parents.shape[1]:
        parent = torch.where(rows.slot > 0, parents[rows.request, rows.slot.clamp(min=1) - 1] + 1, NONE)
    return list(zip(layout.tokens.tolist(), rows.position.tolist(), parent.tolist(), strict=True))
