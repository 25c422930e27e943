"""Is a difference of two texts a fault, or did rounding decide a near-tie?

At the first divergence the history of both texts is the same, so the model's logits there can be computed once more, by one
plain pass over that history. If a change of no logit by more than the tolerance makes the other token win, the divergence is
a near-tie; otherwise nothing but a fault explains it. This asks through the request's own processors, noise and filters, so that
the edge of a top-p set counts as well as a tie of the two best scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..models.target import ModelTarget
from ..protocols import Needs
from ..scheduler import CHUNK
from ..types import Batch, Proposal, Request, Slots

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.5}
"""By how much rounding may move one logit, per dtype of the weights. fp16 and bf16: about four units in the last place of a logit
of 16. fp32: ten times the largest difference measured; see `audit.py`."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """`near_tie`: rounding explains the difference. `gap`: between the two best final scores (perturbed by noise) in the plain
    pass, infinite where only one token may be chosen."""

    near_tie: bool
    gap: float


def divergence(want: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs, or at which one text has ended; None for equal texts."""
    for i, (a, b) in enumerate(zip(want, got, strict=False)):
        if a != b:
            return i
    return None if len(want) == len(got) else min(len(want), len(got))


def judge(target: ModelTarget, request: Request, want: int | None, got: int | None) -> Judgement:
    """Weigh the choice that follows `request.tokens`: `want` in the plain text, `got` in the other (None: it had ended).

    `request` must not be queued anywhere; it is released."""
    try:
        logits = plain_logits(target, request)
        slots = _slots(request, target.device)
        best = target.sampler.scores(logits, slots)[0].topk(2).values.tolist()
        gap = best[0] - best[1] if math.isfinite(best[1]) else math.inf
        if want is None or got is None:  # the same tokens, but only one text ended: no rounding does that
            return Judgement(False, gap)
        tolerance = TOLERANCE.get(target.decoder.dtype, TOLERANCE[torch.bfloat16])
        tie = any(int(target.sampler.choose(z, slots)) == got for z in _shaken(logits, want, got, tolerance))
        return Judgement(tie, gap)
    finally:
        target.release(request)


def _shaken(logits: Tensor, want: int, got: int, tolerance: float) -> list[Tensor]:
    """The logits as they are, and changed by at most the tolerance in favour of `got`."""
    out = []
    for up, down in ((0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):
        z = logits.clone()
        z[0, got] += up * tolerance
        z[0, want] -= down * tolerance
        out.append(z)
    return out


def plain_logits(target: ModelTarget, request: Request) -> Tensor:
    """Raw logits `[1, V]` of what follows `request.tokens`, by a pass over all of them and nothing else."""
    needs, target.needs = target.needs, replace(Needs(), logits=True)
    request.computed, total = 0, len(request.tokens)
    try:
        if not target.cache.reserve(request, total):
            raise RuntimeError("no KV memory for the plain pass")
        while True:
            fed = min(CHUNK, total - request.computed)
            ready = request.computed + fed == total
            batch = Batch((request,), (fed,), (ready,), (0,))
            scores = target.score(batch, Proposal.empty(1, target.device))
            request.computed += fed
            if ready:
                assert scores.logits is not None
                return scores.logits
    finally:
        target.needs = needs


def _slots(request: Request, device: torch.device) -> Slots:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return Slots((request,), zero, zero + len(request.tokens), zero.new_zeros(1, 0), zero)
