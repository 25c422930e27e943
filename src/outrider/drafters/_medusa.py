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
from ._losses import Truth, check_loss, distance, in_parts, mean, mixed, picked, truth

RANKS = 8
"""Candidates per head whose accuracy is measured."""
_SAMPLE = 1024
"""Places per batch that are enough to measure it in."""
_MEMORY = 0.98
"""Weight of the past in the running accuracies."""


@dataclass(frozen=True, slots=True)
class MedusaTraining:
    """`heads`: how many, `layers`: residual blocks in each. `vocab`: they answer for so many of the tokens that the target writes
    most often (0: all). `rows`: `target` borrows its vocabulary head (small files), `own` trains one per head. `loss`: kl, tv,
    hybrid (distances from the target's distribution), or ce (the tokens that were written). Head k counts `decay`^k. `lora`: rank
    of changes to the target itself, which make it ANOTHER MODEL (Medusa-2; 0: it stays as it is), after `warm` passes in which
    the heads learn alone."""

    heads: int = 4
    layers: int = 1
    vocab: int = 0
    rows: str = "target"
    loss: str = "kl"
    decay: float = 0.8
    lora: int = 0
    warm: int = 200

    @property
    def changes_target(self) -> bool:
        return self.lora > 0

    def __post_init__(self) -> None:
        for name, low in (("heads", 1), ("layers", 1), ("vocab", 0), ("lora", 0), ("warm", 0)):
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
        return self.taught(lesson, lesson.features["hidden:last"])

    def taught(self, lesson: Lesson, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The same from the target's last states `[B, T, H]`."""
        row, column = lesson.where()
        if hidden.shape[1] <= self.heads.count + 1:
            raise BadInput(f"texts of {hidden.shape[1]} tokens are too short for {self.heads.count} heads; train on longer ones")
        true = truth(picked(hidden.detach(), row, column - 1), lesson.logits, len(self.teacher.head), self.ids)
        written = lesson.tokens[row, column]
        total, means, rights = hidden.new_zeros((), dtype=torch.float32), [], []
        for k in range(self.heads.count):
            counts = column >= k + 2
            own = self.heads.state(picked(hidden, row, column - k - 2).to(self._kind), k)
            rows = self._rows(own, k, true, written)
            figures = mean(rows[:, :4], counts)
            if self.training.loss == "ce":
                total = total + self.training.decay**k * mean(rows[:, 4:5], counts & (rows[:, 5] > 0))[0]
            else:
                total = total + self.training.decay**k * mixed(figures, self.training.loss)
            means.append(figures.detach())
            rights.append(self._right(own, k, true, counts))
        self._measure(torch.stack(rights))
        table = torch.stack(means)
        return total, {"acceptance": table[:, 3], "overlap": table[:, 2], "kl": table[:, 0]}

    def _rows(self, states: Tensor, k: int, true: Truth, written: Tensor) -> Tensor:
        """`_losses.distance` of head k's states `[N, H]`; for the loss ce also the cross-entropy and whether it counts."""

        def work(own: Tensor, tokens: Tensor, *parts: Tensor) -> Tensor:
            logits = self.heads.scores(own, k)
            far = distance(logits, Truth(*parts))
            if self.training.loss != "ce":
                return far
            place = tokens if self.ids is None else torch.searchsorted(self.ids, tokens).clamp(max=len(self.ids) - 1)
            known = torch.ones_like(tokens, dtype=torch.bool) if self.ids is None else self.ids[place] == tokens
            entropy = torch.nn.functional.cross_entropy(logits.float(), place, reduction="none")
            return torch.cat([far, entropy[:, None], known.float()[:, None]], 1)

        return in_parts(work, len(states), true.scores.shape[1], states, written, true.scores, true.total, true.best)

    @torch.no_grad()
    def _right(self, states: Tensor, k: int, true: Truth, counts: Tensor) -> Tensor:
        """`[RANKS]`: how often each of head k's candidates is what the target prefers, in some of the places."""
        some = slice(None, None, max(1, len(states) // _SAMPLE))
        order = self.heads.scores(states[some], k)
        order = order.topk(min(RANKS, order.shape[-1])).indices
        right = torch.nn.functional.pad((order == true.best[some, None]).float(), (0, RANKS - order.shape[1]))
        return mean(right, counts[some])

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
