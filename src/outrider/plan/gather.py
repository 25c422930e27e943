"""Puts together what is known of each drafter: a benchmark's result, a table of tasks, a card's data sheet, or a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .. import registry
from ..choice import AUTO
from ..errors import BadInput, OutriderError
from ..models.footprint import Footprint
from ..protocols import Replayer
from .acceptance import Chances, Record
from .cards import Card, Estimate
from .costs import Costs
from .fit import Form
from .measure import Found
from .outlook import Case
from .read import Report
from .sizes import Size, size

TENTH = "a draft of a tenth of the size"
"""What is planned for on a card when no drafter is named."""


@dataclass(frozen=True, slots=True)
class Place:
    """A card, the model on it, and the texts there: `context` tokens each."""

    card: Card
    target: Size
    form: Form
    context: int

    def costs(self, draft: str) -> Estimate:
        """What steps will take there with a drafter. `BadInput` for one whose cost no data sheet tells."""
        form = self.form
        own = tenth(self.target) if draft == TENTH else draft_size(draft)
        read = self.target.read_bytes(form.dtype, form.quantize)
        there = Estimate(self.card, self.target, read, context=self.context, width=form.dtype.itemsize)
        return there if own is None else replace(there, draft_size=own, draft_bytes=own.read_bytes(form.dtype))


def tenth(target: Size) -> Size:
    """A draft model as one would look for: a tenth of the parameters, half of the layers, a quarter of the KV."""
    found = target.footprint
    small = Footprint(found.parameters // 10, found.kv // 4, max(1, found.layers // 2))
    return Size(TENTH, small, target.read // 10, target.family, target.vocab, 0, target.context)


def draft_size(draft: str) -> Size | None:
    """Of a drafter's model; None for one that has none. `BadInput` for one that runs the target's own layers."""
    if draft == AUTO:
        raise BadInput("what auto will pick is not known for another machine; name the drafter with --draft")
    name, values = registry.split(draft)
    if "path" in values:
        return size(values["path"])
    if registry.lacks(draft, "path"):
        raise BadInput(f"{draft!r} needs path, the directory of its model (its config.json is enough): {name}:path=...")
    needs = registry.parse(draft).needs
    if needs.target or needs.features or needs.logits:
        raise BadInput(
            f"what {name} costs depends on the target's own layers, and no data sheet tells; measure it on the machine"
        )
    return None


def model_of(draft: str) -> Size | None:
    """The size of the model that a drafter names by its path; None where it names none, or none whose size can be told."""
    if draft in (AUTO, TENTH):
        return None
    path = registry.split(draft)[1].get("path")
    try:
        return None if path is None else size(path)
    except OutriderError:
        return None


def from_report(report: Report, drafts: Sequence[str], depths: Sequence[int], place: Place | None) -> list[Case]:
    """Rows of a result, of the drafters named or of all, at depths that were reached; costs of a card where one is given, else
    those in the result. Temperatures are kept apart: guesses that are right at one say nothing of another."""
    rows = [r for r in report.rows if not drafts or r.draft in drafts]
    if not rows:
        there = ", ".join(dict.fromkeys(r.draft for r in report.rows))
        raise BadInput(f"{report.source} has no drafter {' or '.join(drafts)}; it has {there}")
    cases, several = [], len({r.temperature for r in rows}) > 1
    for row in rows:
        costs: Costs | None = row.costs if place is None else place.costs(row.draft)
        if costs is None:
            raise BadInput(f"{report.source} has no step costs (an older result): measure again, or plan for a --card")
        seen = (row.depth, row.batch, row.speedup) if row.depth is not None and place is None else None
        reached = tuple(k for k in depths if k <= len(row.chances.accept)) or (len(row.chances.accept),)
        name = f"{row.workload} (T = {row.temperature:g})" if several else row.workload
        cases.append(Case(row.draft, name, row.chances, costs, seen, reached, row.where, row.synthetic))
    return cases


def from_found(found: Found, sizes: Sequence[tuple[str, int]], place: Place | None) -> list[Case]:
    """A drafter that was measured just now, by workload; `sizes`: how many of the prompts, in order, are whose."""
    costs: Costs = found.costs if place is None else place.costs(found.draft)
    if not isinstance(found.acceptance, Record):
        return [Case(found.draft, "all", found.acceptance, costs, depths=found.depths, synthetic=found.synthetic)]
    cases, at = [], 0
    for name, count in sizes:
        record = Record(found.acceptance.answers[at : at + count])
        cases.append(Case(found.draft, name, record, costs, depths=found.depths, synthetic=found.synthetic))
        at += count
    return cases


def assumed(drafts: Sequence[str], rate: float, label: str, place: Place) -> list[Case]:
    """Drafters on a card with a given chance of guesses, the same at every position."""
    if not 0.0 <= rate <= 1.0:
        raise BadInput(f"--acceptance is a share between 0 and 1, got {rate:g}")
    return [Case(d, label, Chances((rate,)), place.costs(d), synthetic=replays(d)) for d in drafts or (TENTH,)]


def replays(draft: str) -> bool:
    """Whether a drafter plays known answers back, so that it is none to use."""
    return draft not in (AUTO, TENTH) and not registry.lacks(draft, "path") and isinstance(registry.parse(draft), Replayer)


def form(dtype: str, quantize: str) -> Form:
    """How weights will be kept on a card. Raises `BadInput` for names that do not exist."""
    from ..loading import pick_dtype
    from ..models.quantize import check_scheme

    kept = pick_dtype(dtype, torch.device("cuda"))
    check_scheme(quantize, kept)
    return Form(kept, quantize)
