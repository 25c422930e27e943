"""What a drafter is trained for: to give the target's distribution, or to be accepted.

Forward KL learns fast from far away; total variation is one minus the chance of acceptance (Leviathan et al. 2023), but hardly
moves a draft that knows nothing; the hybrid goes from one to the other as acceptance rises ("LK losses", arXiv 2602.23881).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..errors import BadInput

LOSSES = ("kl", "tv", "hybrid")
_ENTRIES = 2**28
"""Scores held at once; beyond, rows are worked off in parts, and computed again on the way back."""


def check_loss(kind: str) -> None:
    if kind not in LOSSES:
        raise BadInput(f"loss must be one of {', '.join(LOSSES)}, got {kind!r}")


def distance(guess: Tensor, truth: Tensor, ids: Tensor | None = None) -> Tensor:
    """`[N, 4]`: KL(target || draft), total variation, overlap (the chance of acceptance at T = 1) and whether both prefer one
    token, row by row. `guess [N, n]` are draft logits of the tokens `ids [n]` (None: all), `truth [N, V]` the target's. What
    the draft cannot say counts as zero for it in the last three, and is left out of KL."""
    log_p = truth.float().log_softmax(-1)
    best = log_p.argmax(-1)
    some = log_p if ids is None else log_p[:, ids]
    log_q = guess.float().log_softmax(-1)
    p = some.exp()
    kl = (p * (some - log_q)).sum(-1)
    overlap = torch.minimum(p, log_q.exp()).sum(-1)
    said = log_q.argmax(-1)
    same = (said if ids is None else ids[said]) == best
    return torch.stack([kl, 1 - overlap, overlap, same.to(kl.dtype)], -1)


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
    return torch.cat([checkpoint(work, *part, use_reentrant=False) for part in parts])
