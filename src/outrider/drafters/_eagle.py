"""The pupil of `eagle`: the layer learns to guess from its own guesses (training-time test; Li et al. 2025, section 3.2).

K steps are unrolled over texts whose tokens are given. At step 0 index t reads the target's state t and token t + 1; at step k
what the layer itself gave at index t one step before, and token t + 1 + k. Attention then is that of drafting: true states up to
index t, and after them the k newest ones, which are index t's own of the steps so far.

Version 1 is also taught the target's next state itself (smooth L1), with noise on what it reads, as in its paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, smooth_l1_loss

from ..errors import BadInput, DrafterMismatch
from ..models import eagle_files
from ..models.eagle_net import EagleNet, Plan
from ..models.hf import resolved
from ..protocols import Lesson, Teacher
from ._distil import frequent
from ._eagle_start import begin
from ._losses import Truth, check_loss, distance, in_parts, mean, mixed, picked, truth
from ._unrolled import unrolled


@dataclass(frozen=True, slots=True)
class EagleTraining:
    """`version`: 1 or 3. `vocab`: guess only so many of the tokens that the target writes most often (0: all). `rows`: `target`
    borrows its head (small files), `own` trains one. `states`: the target's layers whose inputs are fused, as 2+15+27 (`mid` is
    the middle one, -3 the last but two). `inner`: the MLP's width (0: the target's). `steps` guesses in a row are taught, the
    k-th counts `decay`^k. `loss`: kl, tv or hybrid. `init`: start from this drafter (a directory, or ship/eagle) or, as `target`,
    from the target's last layer. `fc_norm` and `norm_output` are version 3.1's switches."""

    version: int = 3
    vocab: int = 0
    rows: str = "target"
    states: str = "2+mid+-3"
    inner: int = 0
    steps: int = 6
    decay: float = 0.8
    loss: str = "kl"
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    init: str = ""

    def __post_init__(self) -> None:
        if self.version not in (1, 3):
            raise BadInput(f"version must be 1 or 3 (2 drafts with 1's weights), got {self.version}")
        for name, low in (("vocab", 0), ("inner", 0), ("steps", 1)):
            if getattr(self, name) < low:
                raise BadInput(f"eagle training needs {name} >= {low}, got {getattr(self, name)}")
        if self.rows not in ("target", "own"):
            raise BadInput(f"rows must be target (borrowed) or own (trained and stored), got {self.rows!r}")
        if self.version == 1 and (self.rows == "own" or self.fc_norm or self.norm_output or self.norm_before_residual):
            raise BadInput("version 1 borrows the target's head and has no switches; drop rows and norms, or use version 3")
        if not 0 < self.decay <= 1:
            raise BadInput(f"decay must be above 0 and at most 1, got {self.decay}")
        check_loss(self.loss)


class EaglePupil:
    """`protocols.Pupil` for an EAGLE drafter."""

    def __init__(self, teacher: Teacher, training: EagleTraining) -> None:
        self.teacher, self.training = teacher, training
        layers = int(_text(teacher.config)["num_hidden_layers"])
        self.feature = _feature(training, layers, teacher.name)
        self.features: tuple[str, ...] = tuple(dict.fromkeys((self.feature, "hidden:last")))
        self.ids = frequent(teacher, training.vocab) if training.vocab else None
        rows = teacher.head if self.ids is None else teacher.head[self.ids]
        self.net = EagleNet(_plan(teacher, training, len(rows)), teacher.embeddings, rows if training.rows == "target" else None)
        if training.rows == "own":
            self.net.lm_head.weight.data.copy_(rows)
        if training.init:
            begin(self.net, teacher, training.init)
        self.module: torch.nn.Module = self.net.to(teacher.head.device)
        self.facts = {
            "target": teacher.name,
            "fingerprint": teacher.fingerprint,
            "vocabulary": len(teacher.head),
            "feature": self.feature,
            "layers": layers,
            "architectures": list(teacher.config.get("architectures") or []),
            "steps": training.steps,
        }

    def loss(self, lesson: Lesson) -> tuple[Tensor, dict[str, Tensor]]:
        """The steps' losses, weighed and summed. Figures: `acceptance [K]`, the share of places where the k-th guess in a row is
        what the target prefers there, and `overlap [K]`, its chance of acceptance at T = 1, all before it being right."""
        count = lesson.tokens.shape[1] - 1
        if count < self.training.steps + 1:
            raise BadInput(f"texts of {count + 1} tokens are too short for {self.training.steps} steps; train on longer ones")
        row, column = lesson.where()
        seen = picked(lesson.features["hidden:last"], row, column - 1)  # of what wrote the taught tokens
        true = truth(seen, lesson.logits, len(self.teacher.head), self.ids)
        hidden, past = self._first(lesson, count), list[tuple[Tensor, Tensor]]()
        total, means = torch.zeros((), device=hidden.device), []
        for k in range(self.training.steps):
            tokens = pad(lesson.tokens[:, 1 + k :], (0, k))
            out = self._step(hidden, tokens, past)
            mine = picked(out, row, column - 2 - k)  # index t guesses token t + 2 + k at step k
            counts = column >= 2 + k
            figures = mean(self._rows(mine, true), counts)
            own = mixed(figures, self.training.loss)
            if self.training.version == 1:
                far = smooth_l1_loss(mine.float(), seen.float(), reduction="none").mean(-1)
                own = 0.1 * own + mean(far[:, None], counts)[0]
            total = total + self.training.decay**k * own
            means.append(figures.detach())
            hidden = self.net.back(out)
        table = torch.stack(means)
        return total, {"acceptance": table[:, 3], "overlap": table[:, 2], "kl": table[:, 0]}

    def _first(self, lesson: Lesson, count: int) -> Tensor:
        """What the layer reads at step 0."""
        states = lesson.features[self.feature][:, :count].to(self.net.fc.weight.dtype)
        if self.training.version == 1 and self.net.training:
            states = states + (torch.rand_like(states) - 0.5) * 0.2 * 512 / count
        return self.net.fuse(states)

    def _rows(self, mine: Tensor, true: Truth) -> Tensor:
        """`_losses.distance` of states `[N, d]` from what the target says there."""

        def work(own: Tensor, *parts: Tensor) -> Tensor:
            return distance(self.net.scores(own), Truth(*parts))

        return in_parts(work, len(mine), self.net.plan.vocab, mine, true.scores, true.total, true.best)

    def _step(self, hidden: Tensor, tokens: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """States `[B, n, d]` of one step more, whose keys and values join `past`."""
        net = self.net
        x, residual = net.enter(hidden, tokens)
        position = torch.arange(len(past), len(past) + x.shape[1], device=x.device).expand(x.shape[0], -1)
        query, key, value = net.project(x, position)
        past.append((key, value))
        return net.leave(residual, unrolled(query, past, net.scale))

    def save(self, directory: Path) -> None:
        """Write the directory that `eagle:path=` loads."""
        eagle_files.save(directory, self.net, self.ids, self.facts)


def _feature(training: EagleTraining, layers: int, name: str) -> str:
    """The states that are read, layers by number. Raises `BadInput` for layers that the target does not have."""
    if training.version == 1:
        return "hidden:last"
    wanted = resolved("hidden:" + training.states.replace("+", ","), layers)
    numbers = wanted.removeprefix("hidden:").split(",")
    if not all(n.isdecimal() and int(n) < layers for n in numbers):
        known = f"0 to {layers - 1}"
        raise BadInput(f"states={training.states} names layers that {name} does not have ({known}); give e.g. states=2+mid+-3")
    return wanted


def _plan(teacher: Teacher, training: EagleTraining, vocab: int) -> Plan:
    """A layer shaped like the target's."""
    config = _text(teacher.config)
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or any(isinstance(v, Mapping) for v in rope.values()):
        rope = {}
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        raise DrafterMismatch(f"{teacher.name} has RoPE of type {rope['rope_type']}, which an EAGLE layer cannot share")
    theta = {"rope_type": "default", "rope_theta": float(config.get("rope_theta") or 10000.0)}
    return Plan(
        training.version,
        hidden,
        hidden,
        heads,
        int(config.get("num_key_value_heads") or heads),
        int(config.get("head_dim") or hidden // heads),
        training.inner or int(config["intermediate_size"]),
        vocab,
        len(training.states.split("+")) if training.version == 3 else 1,
        float(config.get("rms_norm_eps") or 1e-6),
        "silu",
        int(config.get("max_position_embeddings") or 2048),
        theta | dict(rope),
        training.version == 1,
        norm_before_residual=training.norm_before_residual,
        fc_norm=training.fc_norm,
        norm_output=training.norm_output,
    )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config
