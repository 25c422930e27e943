"""Several drafters' proposals as one, and one drafter's view of what became of the whole. Pure functions.

B requests, N columns of the whole, M columns of a part, S scored rows, R rows of the pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import tree
from ..types import NONE, PROBE, ROOT, PassRows, Proposal, Scores, Slots, Verdict


@cache
def constant(number: int, device: torch.device) -> Tensor:
    """One number, to be expanded."""
    return torch.full((), number, dtype=torch.int64, device=device)


def signed(part: Proposal, member: int) -> Proposal:
    """`part` with `source = member`; probes stay probes."""
    source, device = part.source, part.source.device
    if not any(source.stride()) and source.data_ptr() == constant(0, device).data_ptr():  # nothing but zeros, as all know
        return replace(part, source=constant(member, device).expand_as(source))
    return replace(part, source=torch.where(source == PROBE, PROBE, member))


def select(parts: Mapping[int, Proposal], chosen: Sequence[int]) -> tuple[Proposal, dict[int, Tensor]]:
    """One proposal in which request b has the guesses of `parts[chosen[b]]` (none where that is NONE), and per part a map `[B,
    M]` from its columns to the result's (NONE where they are not in it). `parts` must not be empty."""
    used = {i for i in chosen if i != NONE}
    maps = {i: _own(part, [c == i for c in chosen]) for i, part in parts.items()}
    if len(used) == 1:
        [only] = used
        if all(c == only or not w for c, w in zip(chosen, parts[only].widths, strict=True)):
            return parts[only], maps
    any_part = next(iter(parts.values()))
    device = any_part.tokens.device
    widths = tuple(parts[c].widths[b] if c != NONE else 0 for b, c in enumerate(chosen))
    batch, columns = len(chosen), max(widths, default=0)
    tokens = torch.zeros(batch, columns, dtype=torch.int64, device=device)
    parents, source = torch.full_like(tokens, ROOT), torch.full_like(tokens, PROBE)
    sizes = torch.zeros(batch, dtype=torch.int64, device=device)
    laws = [parts[i].q for i in used]
    law = next((q for q in laws if q is not None), None)
    joint = None if law is None else torch.zeros(batch, columns + 1, law.shape[2], dtype=law.dtype, device=device)
    for i in used:
        part, rows = parts[i], torch.tensor([b for b, c in enumerate(chosen) if c == i]).to(device)
        width = min(columns, part.columns)
        for whole, own in ((tokens, part.tokens), (parents, part.parents), (source, part.source)):
            whole[rows, :width] = own[rows, :width]
        sizes[rows] = part.sizes[rows]
        if joint is not None and part.q is not None:
            joint[rows, : width + 1] = part.q[rows, : width + 1].to(joint.dtype)
    linear = all(parts[i].linear for i in used)
    return Proposal(tokens, parents, sizes, source, widths, linear, joint), maps


def only(part: Proposal, there: Sequence[bool]) -> Proposal:
    """`part` with guesses for the requests where it is `there`, as certain ones and without states to resume from."""
    mask = torch.tensor(there, dtype=torch.bool).to(part.sizes.device)
    widths = tuple(w if t else 0 for w, t in zip(part.widths, there, strict=True))
    return replace(part, sizes=part.sizes.where(mask, 0), widths=widths, q=None, resume=None)


def _own(part: Proposal, there: Sequence[bool]) -> Tensor:
    """The map of a part whose columns keep their places, in the requests where it is `there`."""
    columns = torch.arange(part.columns, device=part.tokens.device).expand_as(part.tokens)
    mask = torch.tensor(there, dtype=torch.bool).to(part.tokens.device)
    return columns.where(tree.used(part.sizes, part.columns) & mask[:, None], NONE)


def inverse(renamed: Tensor, columns: int) -> Tensor:
    """`[B, columns]`: for each column of the whole the part's own, or NONE. `renamed [B, M]` maps the other way."""
    batch, own = renamed.shape
    table = torch.full((batch, columns + 1), NONE, dtype=torch.int64, device=renamed.device)
    table.scatter_(1, torch.where(renamed == NONE, columns, renamed), torch.arange(own, device=renamed.device).expand_as(renamed))
    return table[:, :columns]


def verdict_for(part: Proposal, back: Tensor, verdict: Verdict) -> Verdict:
    """`verdict` in a part's own columns: `path` goes as far as the accepted nodes are its own, `accepted` counts them. `tokens`
    and `counts` still tell the whole truth, and `tokens` may be wider than the part. `back` from `inverse`."""
    if back.shape[1] == 0:
        path = torch.full((len(part.widths), part.columns), NONE, dtype=torch.int64, device=back.device)
        return replace(verdict, path=path, accepted=torch.zeros_like(verdict.accepted))
    own = back.gather(1, verdict.path.clamp(min=0)).where(verdict.path != NONE, NONE)
    own = own.masked_fill((own == NONE).cumsum(1) > 0, NONE)
    path = pad(own, (0, max(0, part.columns - own.shape[1])), value=NONE)[:, : part.columns]
    return replace(verdict, path=path, accepted=(path != NONE).sum(1))


def scores_for(renamed: Tensor, back: Tensor, seen: Verdict, verdict: Verdict, scores: Scores) -> Scores:
    """`scores` in a part's own slots. Rows of accepted nodes that are not on its own path `seen.path` count as known tokens (slot
    -1), rows of the others' rejected nodes are left out."""
    at = pad(renamed.where(renamed != NONE, 0) + 1, (1, 0))
    there = pad(renamed != NONE, (1, 0), value=True)
    choice = scores.choice.gather(1, at).where(there, NONE)
    processed = scores.processed
    if processed is not None:
        processed = processed.gather(1, at[:, :, None].expand(-1, -1, processed.shape[2]))
        processed = processed.masked_fill(~there[:, :, None], torch.nan)
    rows = scores.rows
    slot = _slots(rows, back, seen, verdict)
    kept = slot > NONE - 1
    scored = rows.slot >= 0
    live = (slot >= 0)[scored]  # of the scored rows, those that still have a slot
    named = PassRows(rows.request[kept], rows.position[kept], rows.virtual[kept], slot[kept])
    features = {name: f[kept] for name, f in scores.features.items()}
    logits = scores.logits[live] if scores.logits is not None and len(scores.logits) == len(live) else scores.logits
    slots = None if scores.slots is None else _slots_for(scores.slots, live, slot[scored])
    return replace(scores, choice=choice, processed=processed, rows=named, features=features, logits=logits, slots=slots)


def _slots(rows: PassRows, back: Tensor, seen: Verdict, verdict: Verdict) -> Tensor:
    """`[R]`: each row's slot for the part; -1 for known tokens, -2 for rows it is not to see."""
    if back.shape[1] == 0:
        return rows.slot
    node = rows.slot > 0
    column = (rows.slot - 1).clamp(min=0)
    own = back[rows.request, column]
    accepted = (verdict.path[rows.request] == column[:, None]).any(1)
    mine = (seen.path[rows.request] == own[:, None]).any(1) & (own != NONE)
    named = torch.where(own != NONE, own + 1, NONE - 1)
    named = torch.where(accepted & ~mine, NONE, named)
    return torch.where(node, named, rows.slot)


def _slots_for(slots: Slots, live: Tensor, slot: Tensor) -> Slots:
    fields = {name: getattr(slots, name)[live] for name in ("request", "position", "path", "depth")}
    return replace(slots, **fields, slot=None if slots.slot is None else slot[live])
