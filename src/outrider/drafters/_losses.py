"""What a drafter is trained for: to give the target's distribution, or to be accepted.

Forward KL learns fast from far away; total variation is one minus the chance of acceptance (Leviathan et al. 2023), but hardly
moves a draft that knows nothing; the hybrid goes from one to the other as acceptance rises ("LK losses", arXiv 2602.23881).

Scores over a vocabulary are most of a small drafter's work. So the target's are computed once per batch, whatever number of steps
or heads guess the same tokens, and kept for those tokens alone that the draft can say; and a distance is taken, forward and back,
without keeping anything of that size beside the two sides' scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..errors import BadInput
from ..kernels import there

LOSSES = ("kl", "tv", "hybrid")
_ENTRIES = 2**28
"""Scores held at once; beyond, rows are worked off in parts, and computed again on the way back."""


def check_loss(kind: str) -> None:
    if kind not in LOSSES:
        raise BadInput(f"loss must be one of {', '.join(LOSSES)}, got {kind!r}")


@dataclass(frozen=True, slots=True)
class Truth:
    """What the target says in N places: `scores [N, n]` of the tokens that a draft can say, in the type of the target's states;
    `total [N]`, fp32, the logarithm of the sum over all of its tokens; `best [N]`, which of the n it prefers, -1 for none."""

    scores: Tensor
    total: Tensor
    best: Tensor


@torch.no_grad()
def truth(states: Tensor, logits: Callable[[Tensor], Tensor], width: int, ids: Tensor | None = None) -> Truth:
    """From states `[N, H]` that enter the target's head, which scores `width` tokens. `ids [n]`, sorted: what a draft can say
    (None: all)."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for some in torch.split(states, max(1, _ENTRIES // max(1, width))):
        scores = logits(some)
        best = scores.argmax(-1)
        if ids is not None:
            place = torch.searchsorted(ids, best).clamp(max=len(ids) - 1)
            best = torch.where(ids[place] == best, place, -1)
        kept = scores if ids is None else scores.index_select(1, ids)
        parts.append((kept.to(states.dtype), scores.logsumexp(-1), best))
    return Truth(*(x[0] if len(x) == 1 else torch.cat(x) for x in zip(*parts, strict=True)))


class _Distance(torch.autograd.Function):
    """Rows of `distance` with their gradients by hand. The fast twin runs on a card (`kernels/distances.py`)."""

    @staticmethod
    def forward(ctx: Any, guess: Tensor, scores: Tensor, total: Tensor, best: Tensor) -> Tensor:
        rows: Tensor
        rows, sums = _twin(guess).rows(guess, scores, total, best)
        ctx.save_for_backward(guess, scores, total, sums)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        guess, scores, total, sums = ctx.saved_tensors
        return _twin(guess).slope(grad, guess, scores, total, sums), None, None, None


class Plain:
    """What `_Distance` computes, in words of torch."""

    @staticmethod
    def rows(guess: Tensor, scores: Tensor, total: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
        """The rows `[N, 4]`, and what the way back needs of each: `[N, 3]` logarithm of the draft's sum, the target's share in
        what the draft can say, and the draft's share in what it says too seldom."""
        norm = guess.float().logsumexp(-1)
        log_q, log_p = guess.float() - norm[:, None], scores.float() - total[:, None]
        p, q = log_p.exp(), log_q.exp()
        overlap = torch.minimum(p, q).sum(-1)
        same = (guess.argmax(-1) == best).float()
        rows = torch.stack([(p * (log_p - log_q)).sum(-1), 1 - overlap, overlap, same], -1)
        return rows, torch.stack([norm, p.sum(-1), (q * (q < p)).sum(-1)], -1)

    @staticmethod
    def slope(grad: Tensor, guess: Tensor, scores: Tensor, total: Tensor, sums: Tensor) -> Tensor:
        """The gradient of `guess` from that of the rows, `grad [N, 4]`."""
        norm, share, below = sums[:, :, None].unbind(1)
        kl, overlap = grad[:, :1].float(), (grad[:, 2:3] - grad[:, 1:2]).float()
        p, q = (scores.float() - total[:, None]).exp(), (guess.float() - norm).exp()
        return (q * (kl * share + overlap * ((q < p).float() - below)) - kl * p).to(guess.dtype)


def _twin(guess: Tensor) -> Any:
    if not there(guess.device.type):
        return Plain
    from ..kernels import distances

    return distances


def distance(guess: Tensor, true: Truth) -> Tensor:
    """`[N, 4]`: KL(target || draft), total variation, overlap (the chance of acceptance at T = 1) and whether both prefer one
    token, row by row. `guess [N, n]` are draft logits of the tokens that `true` is about. What the draft cannot say counts as
    zero for it in the last three, and is left out of KL."""
    rows: Tensor = _Distance.apply(guess, true.scores, true.total, true.best)  # type: ignore[no-untyped-call]
    return rows


def picked(states: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """`[N, H]` of states `[B, T, H]`; columns before a text's beginning are its first."""
    return states.flatten(0, 1).index_select(0, row * states.shape[1] + column.clamp(min=0))


def mean(rows: Tensor, counts: Tensor) -> Tensor:
    """The mean `[4]` of the rows `[N, 4]` that count (bool `[N]`); zeros where none does."""
    return (rows * counts[:, None]).sum(0) / counts.sum().clamp(min=1)


def mixed(rows: Tensor, kind: str) -> Tensor:
    """The loss from `distance`'s means `[4]`."""
    kl, tv = rows[0], rows[1]
    if kind == "hybrid":
        share = (-3 * rows[2].detach()).exp()
        return share * kl + (1 - share) * tv
    return kl if kind == "kl" else tv


def in_parts(work: Callable[..., Tensor], rows: int, width: int, *inputs: Tensor) -> Tensor:
    """`work` of all rows of the inputs, one under the other, in parts that fit memory. `width`: scores per row."""
    size = max(1, _ENTRIES // max(1, width))
    if rows <= size:
        return work(*inputs)
    parts = zip(*(torch.split(x, size) for x in inputs), strict=True)
    return torch.cat([checkpoint(work, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])
