"""The pupil of `medusa`: heads that learn what the target writes some tokens on, the target itself left as it is (Medusa-1)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BadInput
from ..models import medusa_heads
from ..models.medusa_heads import Heads
from ..protocols import Lesson, Teacher
from ._distil import frequent
from ._losses import check_loss, distance, in_parts, mixed

RANKS = 8
"""Candidates per head whose accuracy is measured."""
_MEMORY = 0.98
"""Weight of the past in the running accuracies."""


@dataclass(frozen=True, slots=True)
class MedusaTraining:
    """`heads`: how many, `layers`: residual blocks in each. `vocab`: they answer for so many of the tokens that the target writes
    most often (0: all). `rows`: `target` borrows its vocabulary head (small files), `own` trains one per head. `loss`: kl, tv,
    hybrid (distances from the target's distribution), or ce (the tokens that were written). Head k counts `decay`^k."""

    heads: int = 4
    layers: int = 1
    vocab: int = 0
    rows: str = "target"
    loss: str = "kl"
    decay: float = 0.8

    def __post_init__(self) -> None:
        for name, low in (("heads", 1), ("layers", 1), ("vocab", 0)):
            if getattr(self, name) < low:
                raise BadInput(f"medusa training needs {name} >= {low}, got {getattr(self, name)}")
        if self.rows not in ("target", "own"):
            raise BadInput(f"rows must be target (borrowed) or own (trained and stored), got {self.rows!r}")
        if not 0 < self.decay <= 1:
            raise BadInput(f"decay must be above 0 and at most 1, got {self.decay}")
        if self.loss != "ce":
            check_loss(self.loss)


class MedusaPupil:
    """`protocols.Pupil` for Medusa heads."""

    features = ("hidden:last",)

    def __init__(self, teacher: Teacher, training: MedusaTraining) -> None:
        self.teacher, self.training = teacher, training
        self.ids = frequent(teacher, training.vocab) if training.vocab else None
        rows = (teacher.head if self.ids is None else teacher.head[self.ids]).float()
        size, hidden = rows.shape
        self.heads = Heads(training.heads, training.layers, hidden, rows if training.rows == "target" else None, size)
        self.heads.to(rows.device)
        if training.rows == "own":
            for head in self.heads.heads:
                head.weight.data.copy_(rows)
        self.heads.register_buffer("hits", torch.zeros(training.heads, RANKS, device=rows.device))
        self.heads.register_buffer("seen", torch.zeros((), device=rows.device))
        self.module: torch.nn.Module = self.heads

    def loss(self, lesson: Lesson) -> tuple[Tensor, dict[str, Tensor]]:
        """The heads' losses, weighed and summed. Figures: `acceptance [K]`, the share of places where head k prefers the token
        that the target prefers there, and `overlap [K]`, the chance of acceptance at T = 1."""
        seen = lesson.features["hidden:last"]
        total, means, rights = seen.new_zeros((), dtype=torch.float32), [], []
        for k in range(self.heads.count):
            ahead = k + 2
            if seen.shape[1] <= ahead:
                raise BadInput(
                    f"texts of {seen.shape[1]} tokens are too short for {self.heads.count} heads; train on longer ones"
                )
            rows = self._head(k, lesson, seen[:, :-ahead], seen[:, ahead - 1 : -1])
            if not len(rows):
                rows = rows.new_zeros(1, 6 + RANKS)
            mean = rows.mean(0)
            own = (rows[:, 4] * rows[:, 5]).sum() / rows[:, 5].sum().clamp(min=1) if self.training.loss == "ce" else None
            total = total + self.training.decay**k * (mixed(mean, self.training.loss) if own is None else own)
            means.append(mean.detach())
            rights.append(mean[6:].detach())
        self._measure(torch.stack(rights))
        table = torch.stack(means)
        return total, {"acceptance": table[:, 3], "overlap": table[:, 2], "kl": table[:, 0]}

    def _head(self, k: int, lesson: Lesson, before: Tensor, there: Tensor) -> Tensor:
        """`[N, 6 + RANKS]` per place where head k is taught: `_losses.distance`, cross-entropy and whether it counts, and which
        rank the target's own choice has. `before` are the states it reads, `there` those that wrote what it guesses."""
        wanted = lesson.taught[:, k + 2 :]
        written = lesson.tokens[:, k + 2 :][wanted]
        states = self.heads.states(before[wanted].to(self._kind))[..., k, :]

        def work(own: Tensor, theirs: Tensor, token: Tensor) -> Tensor:
            logits, truth = self.heads.scores(own, k).float(), lesson.logits(theirs)
            far = distance(logits, truth, self.ids)
            best = truth.argmax(-1)
            order = logits.topk(min(RANKS, logits.shape[-1])).indices
            right = (order if self.ids is None else self.ids[order]) == best[:, None]
            right = torch.nn.functional.pad(right, (0, RANKS - right.shape[1]))
            place = token if self.ids is None else torch.searchsorted(self.ids, token).clamp(max=len(self.ids) - 1)
            counts = torch.ones_like(token, dtype=torch.bool) if self.ids is None else self.ids[place] == token
            entropy = torch.nn.functional.cross_entropy(logits, place, reduction="none")
            return torch.cat([far, entropy[:, None], counts.float()[:, None], right.float()], 1)

        return in_parts(work, len(states), len(self.teacher.head), states, there[wanted], written)

    @property
    def _kind(self) -> torch.dtype:
        kind: torch.dtype = next(self.heads.blocks.parameters()).dtype
        return kind

    @torch.no_grad()
    def _measure(self, rights: Tensor) -> None:
        """Running accuracies by head and rank."""
        self.heads.get_buffer("hits").mul_(_MEMORY).add_(rights)
        self.heads.get_buffer("seen").mul_(_MEMORY).add_(1)

    @property
    def accuracies(self) -> list[list[float]]:
        """How often each head's candidates were right lately, by rank."""
        hits, seen = self.heads.get_buffer("hits"), self.heads.get_buffer("seen")
        table: list[list[float]] = (hits / seen.clamp(min=1)).tolist()
        return [[round(x, 4) for x in row] for row in table]

    def save(self, directory: Path) -> None:
        """Write the directory that `medusa:path=` loads."""
        facts: dict[str, Any] = {
            "target": self.teacher.name,
            "fingerprint": self.teacher.fingerprint,
            "vocabulary": len(self.teacher.head),
        } | ({"accuracies": self.accuracies} if float(self.heads.get_buffer("seen")) else {})
        medusa_heads.save(directory, self.heads, self.ids, facts)
