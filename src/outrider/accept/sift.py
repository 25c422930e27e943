"""What the classical rules share, for all requests of a batch at once and without a host sync.

A rule decides for every node whether its parent keeps it (`keep [B, N]`, larger is better, 0 is no) and what a slot draws its
token from if it keeps no child (`rest [B, N + 1, V]`, unnormalised). `settle` makes a token of every slot out of these, and the
coupled rule's walk does the rest: follow the child that carries the slot's token. A draw cannot lead to a child that was turned
down, since nothing of `rest` is left on its token. Probabilities are fp64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from .. import tree
from ..noise import ACCEPT, RESIDUAL, key_tensor, uniforms
from ..types import NONE, ROOT, Batch, Proposal, Scores, Verdict
from . import coupled


@dataclass(frozen=True, slots=True)
class Round:
    """One round in tensors. `p [B, S, V]` is the target's law at every slot, `q` the draft's (zeros where it is unknown), `above
    [B, N]` the slot each node hangs under, `live [B, N]` whether the column is in use, `tokens [B, N]` (0 where it is not)."""

    proposal: Proposal
    p: Tensor
    q: Tensor
    above: Tensor
    live: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, proposal: Proposal, scores: Scores) -> Round:
        """Raises `ValueError` if the target was not asked for processed scores: `Request.rule` must name the rule."""
        if scores.processed is None:
            raise ValueError("this acceptance rule needs Scores.processed; set Request.rule to its name")
        p = scores.processed.double().softmax(2)
        q = torch.zeros_like(p) if proposal.q is None else proposal.q.double()
        live = tree.used(proposal.sizes, proposal.columns)
        above = proposal.parents.where(live, ROOT) + 1
        return cls(proposal, p, q, above, live, proposal.tokens.where(live, 0))

    def at(self, table: Tensor) -> Tensor:
        """Values of the nodes' tokens in their parents' rows of `table [B, S, V]` -> `[B, N]`."""
        batch = torch.arange(len(table), device=table.device)[:, None]
        return table[batch, self.above, self.tokens]


@dataclass(frozen=True, slots=True)
class Sifted:
    """Per node: its parent keeps it if u * `whole` < `share`, both `[B, N]`; per slot: `rest [B, S, V]`, what remains of the
    target's law once no child was kept; `level [B, S]`: how much of its probability the path to a slot has (1 top-down)."""

    share: Tensor
    whole: Tensor
    rest: Tensor
    level: Tensor


def sift(given: Round, bottom_up: bool) -> Sifted:
    """Go through the columns; each child takes its share of what its parent's row has left.

    Top-down: recursive rejection without replacement (Jeon et al. 2024; Chen et al. 2024, Sequoia); for one child, Leviathan et
    al. 2023 and Chen et al. 2023. Bottom-up: traversal verification (Weng et al. 2025, arXiv 2505.12398), where a node's level is
    min(level of parent * r / s, 1) and sinks as its children's subtrees are turned down. A child without q is a point mass.
    """
    rest, draft = given.p.clone(), given.q.clone()
    rows, vocab = torch.arange(len(rest), device=rest.device), rest.shape[2]
    sure = draft.sum(2) <= 0
    level = torch.ones(rest.shape[:2], dtype=rest.dtype, device=rest.device)
    share, whole = torch.zeros_like(level[:, 1:]), torch.ones_like(level[:, 1:])
    for j in range(given.proposal.columns):
        above, token = given.above[:, j], given.tokens[:, j, None]
        r, g = rest[rows, above], level[rows, above]
        s = torch.where(sure[rows, above][:, None], one_hot(token[:, 0], vocab), draft[rows, above])
        r_x, s_x = r.gather(1, token)[:, 0], s.gather(1, token)[:, 0]
        live = given.live[:, j] & (s_x > 0)
        share[:, j], whole[:, j] = r_x.where(live, 0), s_x.where(live, 1)
        left = (g[:, None] * r - s).clamp(min=0)
        mass = left.sum(1)
        left = torch.where(mass[:, None] > 0, left / mass[:, None], given.p[rows, above])
        rest[rows, above] = torch.where(live[:, None], left, r)
        draft[rows, above] = torch.where(live[:, None], _without(s, token), draft[rows, above])
        if bottom_up:
            level[:, j + 1] = (g * r_x / s_x).clamp(max=1).nan_to_num(0.0).where(live, 0)
            level[rows, above] = torch.where(live, _sunk(g, mass), g)
    return Sifted(share, whole, rest, level)


def _without(s: Tensor, token: Tensor) -> Tensor:
    """`s [B, V]` without `token [B, 1]`, normalised; zeros where nothing is left."""
    s = s.scatter(1, token, 0.0)
    total = s.sum(1, keepdim=True)
    return torch.where(total > 0, s / total, 0.0)


def _sunk(g: Tensor, mass: Tensor) -> Tensor:
    """A node's level after a child's subtree was turned down. `mass` left over `mass + 1 - g`; 1 where both are nothing."""
    whole = mass + 1 - g
    return torch.where(whole > 0, mass / whole, torch.where(mass.isnan(), g, 1.0))


def luck(batch: Batch, purpose: int, columns: int, device: torch.device) -> Tensor:
    """The uniforms of slots 0..`columns` -> `[B, columns + 1]`, keyed by (request key, purpose, known tokens, slot)."""
    keys = key_tensor([r.key for r in batch.requests], device)[:, None]
    starts = torch.tensor([len(r.tokens) for r in batch.requests], dtype=torch.int64).to(device, non_blocking=True)[:, None]
    return uniforms(keys, purpose, torch.arange(columns + 1, device=device)[None], starts)


def tests(batch: Batch, given: Round) -> Tensor:
    """The uniforms of the nodes' acceptance tests, `[B, N]`."""
    return luck(batch, ACCEPT, given.proposal.columns, given.p.device)[:, 1:]


def first(given: Round, kept: Tensor) -> Tensor:
    """Of several kept siblings the first counts: `kept [B, N]` bool -> `keep [B, N]` for `settle`."""
    columns = given.proposal.columns
    return (columns - torch.arange(columns, device=kept.device)) * (kept & given.live)


def upward(given: Round, kept: Tensor) -> Tensor:
    """`[B, N]` bool: nodes in whose subtree, themselves included, a node is kept. `kept [B, N]`."""
    rows = torch.arange(len(kept), device=kept.device)
    found = torch.nn.functional.pad(kept & given.live, (1, 0))
    for j in reversed(range(given.proposal.columns)):
        found[rows, given.above[:, j]] |= found[:, j + 1]
    return found[:, 1:]


def settle(given: Round, keep: Tensor, rest: Tensor, batch: Batch) -> Verdict:
    """A token for every slot (its best kept child's, else a draw from `rest`), and the verdict that follows from them."""
    columns = given.proposal.columns
    choice = pick(rest, luck(batch, RESIDUAL, columns, rest.device))
    if columns:
        best = torch.zeros_like(choice).scatter_reduce(1, given.above, keep, "amax")
        child = columns - best % (columns + 1)
        child = given.tokens.gather(1, child.clamp(max=columns - 1))
        choice = torch.where(best > 0, child, choice)
    return coupled.follow(given.proposal, choice, batch)


def pick(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse transform: the first index whose cumulated weight exceeds `u` times the total; NONE where there is no weight, or
    no number. `weights [..., V]` unnormalised, `u [...]` in [0, 1)."""
    mass = weights.cumsum(-1)
    total = mass[..., -1]
    index = (mass <= (u * total)[..., None]).sum(-1).clamp(max=weights.shape[-1] - 1)
    weighty = weights.gather(-1, index[..., None])[..., 0] > 0  # a parallel sum may not rise where it should
    index = torch.where(weighty, index, weights.argmax(-1))
    return torch.where((total > 0) & total.isfinite(), index, NONE)
