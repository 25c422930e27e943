"""Trees of guesses as tensors: depths, ancestors, paths, merging, checking. Pure functions, vectorised, without host syncs.

B requests, N columns, S = N + 1 slots (slot 0 is the last committed token, slot j + 1 is node j). Everything follows
parent links by pointer doubling: after k steps a link spans 2**k generations, so log2(N) steps reach every root.
Out-of-range links, as in columns that are not in use, are clamped and can do no harm.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from .types import NONE, PROBE, ROOT, Proposal

FEW = 8
"""Requests up to which lists are quicker than arrays."""


def used(sizes: Tensor, columns: int) -> Tensor:
    """Which of `columns` columns are in use: `[B, N]` bool, from `sizes [B]`."""
    return torch.arange(columns, device=sizes.device) < sizes[:, None]


def depths(parents: Tensor, sizes: Tensor) -> Tensor:
    """Tokens from the root to each node, the node included: `[B, N]` int64, 1 for children of the root, 0 for columns
    not in use. `parents [B, N]`, `sizes [B]`."""
    live = used(sizes, parents.shape[1])
    up = _links(parents.where(live, ROOT))
    depth = (torch.arange(up.shape[1], device=up.device) > 0).long().expand_as(up)
    for _ in range(_doublings(parents.shape[1])):
        depth = depth + depth.gather(1, up)
        up = up.gather(1, up)
    return depth[:, 1:] * live


def ancestors(parents: Tensor) -> Tensor:
    """`[B, N, N]` bool: `[b, i, j]` says that node j is node i or above it. This is the mask of tree attention
    (Miao et al. 2024, SpecInfer). `parents [B, N]`."""
    batch, columns = parents.shape
    up = _links(parents)
    own = torch.eye(columns, dtype=torch.bool, device=parents.device)
    reach = pad(own, (0, 0, 1, 0)).expand(batch, -1, -1)
    for _ in range(_doublings(columns)):
        reach = reach | reach.gather(1, up[:, :, None].expand_as(reach))
        up = up.gather(1, up)
    return reach[:, 1:]


def paths(parents: Tensor, max_depth: int | None = None) -> Tensor:
    """Columns on the way from the root to each node, root first, the node last, padded with NONE: `[B, N, D]` int64.

    D is `max_depth` (default N), a bound the caller knows; of a deeper path only the last D columns are given."""
    limit = parents.shape[1] if max_depth is None else max_depth
    up = _links(parents)
    line = torch.arange(up.shape[1], device=up.device).expand_as(up)[:, :, None]
    while line.shape[2] < limit:
        line = torch.cat([line, line.gather(1, up[:, :, None].expand_as(line))], 2)
        up = up.gather(1, up)
    line = line[:, 1:, :limit]  # slots, the node first; 0 past the root
    order = (line > 0).sum(2, keepdim=True) - 1 - torch.arange(limit, device=up.device)
    return (line.gather(2, order.clamp(min=0)) - 1).where(order >= 0, NONE)


def path_tokens(proposal: Proposal, max_depth: int | None = None) -> tuple[Tensor, Tensor]:
    """Drafted tokens that lead to each slot: `([B, N + 1, D], depth [B, N + 1])`, root first, padded with NONE; empty for
    slot 0 and for columns not in use. D as in `paths`."""
    columns = proposal.columns
    live = used(proposal.sizes, columns)
    path = paths(proposal.parents.where(live, ROOT), max_depth).where(live[:, :, None], NONE)
    tokens = proposal.tokens[:, None, :].expand(-1, columns, -1).gather(2, path.clamp(min=0)).where(path >= 0, NONE)
    return pad(tokens, (0, 0, 1, 0), value=NONE), pad((path >= 0).sum(2), (1, 0))


def is_chain(parents: Tensor, sizes: Tensor) -> Tensor:
    """Whether a request's nodes form one chain, each column hanging under the one before: `[B]` bool. Empty is a chain."""
    columns = parents.shape[1]
    under_previous = parents == torch.arange(-1, columns - 1, device=parents.device)
    return (under_previous | ~used(sizes, columns)).all(1)


def validate(proposal: Proposal, vocab_size: int) -> Tensor:
    """Which requests' guesses are sound: `[B]` bool, with B the number of `widths`.

    Sound means: sizes within widths and columns, parents before children, tokens within the vocabulary, siblings
    distinct, sources known, and one chain if `linear` promises it. Wrong dtypes or shapes make all of them unsound, and so does a
    `q` with a row that is neither a law nor zero (that it is the law that drew, nobody can check)."""
    batch, columns = len(proposal.widths), proposal.tokens.shape[-1] if proposal.tokens.dim() else 0
    device = proposal.tokens.device
    if not well_formed(proposal):
        return torch.zeros(batch, dtype=torch.bool, device=device)
    if device.type == "cpu" and proposal.linear and proposal.q is None:
        return (_sound_few if batch <= FEW else _sound_many)(proposal, vocab_size)
    tokens, parents, sizes = proposal.tokens, proposal.parents, proposal.sizes
    idle = ~used(sizes, columns)
    column = torch.arange(columns, device=device)
    if proposal.q is not None and not _laws(proposal.q, vocab_size):
        return torch.zeros(batch, dtype=torch.bool, device=device)
    node = (tokens >= 0) & (tokens < vocab_size) & (proposal.source >= PROBE)
    widths = torch.tensor(proposal.widths, dtype=torch.int64).to(device, non_blocking=True)
    fits = (sizes >= 0) & (sizes <= widths)
    if proposal.linear:
        return fits & (node & (parents == column - 1) | idle).all(1)
    node &= (parents >= ROOT) & (parents < column)
    sibling = ((parents + 1) * vocab_size + tokens).where(~idle, -1 - column).sort(1).values
    return fits & (node | idle).all(1) & (sibling[:, 1:] != sibling[:, :-1]).all(1)


def merge(proposals: Sequence[Proposal]) -> tuple[Proposal, list[Tensor]]:
    """Several proposals for one batch as one, and per input a map `[B, N_i]` from its columns to the result's (NONE for
    columns not in use).

    Nodes with the same path of tokens become one, at the place of the first; nodes keep their order, first input first. A
    node is a guess if any input guessed it; its `source` is then that of the first one to guess. Widths are exact on CPU;
    elsewhere sums of the inputs' widths, so that nothing waits for the device. Inputs must be sound (`validate`). If only
    one input has columns, it comes back as it is; else `resume` is dropped, as its states do not cover the merged nodes.

    Raises `ValueError` for no input, unequal batches, or a `q` where two inputs have columns: which distribution drew a merged
    node cannot be told, and the classical rules would be biased."""
    if not proposals or len({len(p.widths) for p in proposals}) != 1:
        raise ValueError("merge needs at least one proposal, all for the same batch")
    offering = [p for p in proposals if p.columns]
    if len(offering) <= 1:
        columns = [torch.arange(p.columns, device=p.sizes.device).expand_as(p.tokens) for p in proposals]
        own = [c.where(used(p.sizes, p.columns), NONE) for c, p in zip(columns, proposals, strict=True)]
        return (offering or proposals)[0], own
    if any(p.q is not None for p in offering):
        raise ValueError("proposals with draft probabilities (q) cannot be merged")
    tokens, parents, source, live = _side_by_side(proposals)
    same = _same_path(tokens, parents, live)
    first = same.long().argmax(2)  # [B, M] the first column with the same path; itself where not in use
    column = torch.arange(tokens.shape[1], device=tokens.device)
    kept = live & (first == column)
    new = (kept.cumsum(1) - 1).gather(1, first).where(live, NONE)
    above = pad(new, (1, 0), value=ROOT).gather(1, _links(parents)[:, 1:])
    guess = same & (source != PROBE)[:, None, :]
    source = source.gather(1, guess.long().argmax(2)).where(guess.any(2), PROBE)
    merged = _gathered(proposals, kept, (tokens, above, source))
    return merged, list(torch.split(new, [p.columns for p in proposals], dim=1))


def _sound_few(proposal: Proposal, vocab_size: int) -> Tensor:
    """`validate` for chains on the host, where lists are several times as quick as tensors."""
    column = list(range(-1, proposal.columns - 1))
    tokens, parents, source, sizes = (t.tolist() for t in (proposal.tokens, proposal.parents, proposal.source, proposal.sizes))

    def sound(tokens: list[int], parents: list[int], source: list[int], size: int, width: int) -> bool:
        if not 0 < size <= width:
            return size == 0
        guesses = tokens[:size]
        known = min(guesses) >= 0 and max(guesses) < vocab_size and min(source[:size]) >= PROBE
        return known and parents[:size] == column[:size]

    rows = zip(tokens, parents, source, sizes, proposal.widths, strict=True)
    return torch.tensor([sound(*row) for row in rows], dtype=torch.bool)


def _sound_many(proposal: Proposal, vocab_size: int) -> Tensor:
    """The same for many, where arrays are."""
    tokens, parents, source, sizes = (t.numpy() for t in (proposal.tokens, proposal.parents, proposal.source, proposal.sizes))
    column = np.arange(proposal.columns)
    wrong = (tokens < 0) | (tokens >= vocab_size) | (source < PROBE) | (parents != column - 1)
    wrong &= column < sizes[:, None]
    return torch.from_numpy(~wrong.any(1) & (sizes >= 0) & (sizes <= np.array(proposal.widths)))


def _links(parents: Tensor) -> Tensor:
    """`[B, S]`: the slot above each slot. Slot 0, the root, is above itself."""
    return pad(parents.clamp(ROOT, parents.shape[1] - 1) + 1, (1, 0))


def _doublings(steps: int) -> int:
    """How often a link of one generation must double to span `steps` generations."""
    return max(steps - 1, 0).bit_length()


def well_formed(proposal: Proposal) -> bool:
    """The part of `validate` that the host knows."""
    batch, columns = len(proposal.widths), proposal.tokens.shape[-1] if proposal.tokens.dim() else 0
    matrices = (proposal.tokens, proposal.parents, proposal.source)
    q = proposal.q
    return (
        all(m.shape == (batch, columns) and m.dtype == torch.int64 for m in matrices)
        and proposal.sizes.shape == (batch,)
        and proposal.sizes.dtype == torch.int64
        and len({m.device for m in (*matrices, proposal.sizes)}) == 1
        and all(0 <= width <= columns for width in proposal.widths)
        and (q is None or (q.dim() == 3 and q.shape[:2] == (batch, columns + 1) and q.is_floating_point()))
    )


def _laws(q: Tensor, vocab_size: int) -> bool:
    """Whether every row of `q [B, N + 1, V]` sums to 1 or 0 and has no negative entry."""
    total = q.sum(2, dtype=torch.float64)
    sums = ((total - 1).abs() < 1e-3) | (total == 0)
    return q.shape[2] == vocab_size and bool((sums & (q >= 0).all(2)).all())


def _side_by_side(proposals: Sequence[Proposal]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, parents, sources and use of all inputs, `[B, M]` with M the sum of their columns."""
    live = [used(p.sizes, p.columns) for p in proposals]
    parents, offset = [], 0
    for proposal, mine in zip(proposals, live, strict=True):
        hanging = mine & (proposal.parents > ROOT)
        parents.append((proposal.parents + offset).where(hanging, ROOT))
        offset += proposal.columns
    tokens, source = torch.cat([p.tokens for p in proposals], 1), torch.cat([p.source for p in proposals], 1)
    return tokens, torch.cat(parents, 1), source, torch.cat(live, 1)


def _same_path(tokens: Tensor, parents: Tensor, live: Tensor) -> Tensor:
    """`[B, M, M]` bool: two columns in use whose tokens agree all the way to the root (exact; a column not in use is
    like itself only). Doubling again: paths agree over 2k generations if they do over k, and again from there on."""
    columns = tokens.shape[1]
    up = _links(parents)
    # Labels that nothing shares: -1 for the root, less for columns not in use.
    label = tokens.where(live, -2 - torch.arange(columns, device=tokens.device))
    label = pad(label, (1, 0), value=-1)
    same = label[:, :, None] == label[:, None, :]
    for _ in range(_doublings(columns + 1)):
        rows = same.gather(1, up[:, :, None].expand_as(same))
        same = same & rows.gather(2, up[:, None, :].expand_as(same))
        up = up.gather(1, up)
    return same[:, 1:, 1:]


def _gathered(proposals: Sequence[Proposal], kept: Tensor, fields: tuple[Tensor, Tensor, Tensor]) -> Proposal:
    """The proposal made of the `kept [B, M]` columns of tokens, parents (already renumbered) and sources."""
    sizes = kept.sum(1)
    sums = tuple(map(sum, zip(*(p.widths for p in proposals), strict=True)))
    widths = tuple(sizes.tolist()) if sizes.device.type == "cpu" else sums
    order = kept.long().argsort(stable=True, dim=1, descending=True)[:, : max(widths, default=0)]
    tokens, parents, source = (f.gather(1, order) for f in fields)
    live = used(sizes, order.shape[1])
    tokens, parents, source = tokens.where(live, 0), parents.where(live, ROOT), source.where(live, PROBE)
    if sizes.device.type == "cpu":
        linear = bool(is_chain(parents, sizes).all())
    else:  # known without asking the device: every request hears from at most one input, and those are chains
        offering = [[p for p in proposals if p.widths[b]] for b in range(len(widths))]
        linear = all(len(some) <= 1 and all(p.linear for p in some) for some in offering)
    return Proposal(tokens, parents, sizes, source, widths, linear)
