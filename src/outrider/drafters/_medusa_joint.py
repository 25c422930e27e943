"""The pupil of `medusa` where the target learns along (Medusa-2; Cai et al. 2024, section 2.2.2): low-rank changes make states
that are easier to guess from, while its distribution is held to that of the model as it was (self-distillation).

What comes out is another model, whose texts are not those of the first, and heads that guess for it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import BadInput, UnsupportedModel
from ..protocols import Lesson, Teacher
from ._lora import Lora
from ._losses import Truth, distance, in_parts, mean, picked, truth
from ._medusa import MedusaPupil, MedusaTraining

_WEIGHT = 0.2
"""What the heads' loss counts beside the distance from the model as it was (lambda_0 in the paper)."""
_EXTRAS: Mapping[str, Any] = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}


class JointPupil(MedusaPupil):
    """`protocols.Pupil` and `protocols.Renewal` for Medusa heads and their target. Figures beside the heads' own: `target_kl` and
    `target_overlap`, how far the new target is from the model as it was."""

    def __init__(self, teacher: Teacher, training: MedusaTraining) -> None:
        super().__init__(teacher, training)
        if not isinstance(teacher.model, PreTrainedModel):
            raise BadInput("lora changes the target, which is not at hand here; drop it, or train with outrider train")
        config = teacher.model.config.get_text_config()
        found = {name: getattr(config, name, None) for name in _EXTRAS}
        if any(value not in (None, _EXTRAS[name]) for name, value in found.items()):
            raise UnsupportedModel(
                f"{teacher.name} does more to its scores than its head: lora cannot hold it to them; drop lora"
            )
        self.model: Any = teacher.model.requires_grad_(False)
        self.lora = Lora(teacher.model, training.lora)
        self.lora.register_buffer("passes", torch.zeros((), device=teacher.head.device))
        self.module: nn.Module = nn.ModuleDict({"heads": self.heads, "lora": self.lora})

    def loss(self, lesson: Lesson) -> tuple[Tensor, dict[str, Tensor]]:
        """The distance of the changed target from the model as it was, and the heads' loss on the changed one's states, which
        reaches the target only after `warm` passes."""
        with self.lora.applied():
            hidden = self.model.base_model(input_ids=lesson.tokens, use_cache=False).last_hidden_state
        row, column = lesson.where()
        before = picked(lesson.features["hidden:last"], row, column - 1)
        kept = mean(self._kept(picked(hidden, row, column - 1), truth(before, lesson.logits, len(self.teacher.head))), column > 0)
        passes = self.lora.get_buffer("passes")
        warmed = (passes >= self.training.warm).to(hidden.dtype)
        if self.lora.training and torch.is_grad_enabled():
            passes.add_(1)
        heads, figures = self.taught(lesson, hidden.detach() + warmed * (hidden - hidden.detach()))
        return kept[0] + _WEIGHT * heads, figures | {"target_kl": kept[0].detach(), "target_overlap": kept[2].detach()}

    def _kept(self, states: Tensor, true: Truth) -> Tensor:
        def work(own: Tensor, *parts: Tensor) -> Tensor:
            head = self.model.get_output_embeddings()
            return distance(head(own.to(head.weight.dtype)), Truth(*parts))

        return in_parts(work, len(states), true.scores.shape[1], states, true.scores, true.total, true.best)

    def save_target(self, directory: Path) -> None:
        """Write the new target's weights and config."""
        self.model.save_pretrained(directory, state_dict=self.lora.merged(self.model))

    def rename(self, name: str, fingerprint: str) -> None:
        """What the new target is called, and the hash of its weights, which the heads belong to."""
        self.teacher = replace(self.teacher, name=name, fingerprint=fingerprint)
