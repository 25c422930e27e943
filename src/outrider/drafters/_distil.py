"""The pupil of `draft_model`: a small decoder of the target's family that learns the target's distribution (Hinton et al. 2015;
DistillSpec, Zhou et al. 2024), on texts that the target wrote itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import BadInput, DrafterMismatch
from ..models import lean, weights
from ..models.hf import keep_layers
from ..protocols import Lesson, Teacher
from ._losses import Truth, check_loss, distance, in_parts, mean, mixed, picked, truth

_WIDEST = 1024
"""Width that is not exceeded unless asked for."""
_GRAIN = 16
"""Inner widths are multiples of it, which matrix products like."""


@dataclass(frozen=True, slots=True)
class Training:
    """`layers`, `width`, `heads`, `inner`: the decoder's shape (0: as the target's, up to a width of 1,024). `vocab`: the head
    answers for so many of the tokens that the target writes most often (0: all). `rows`: `target` borrows the target's embeddings
    and head (small files), `own` trains and stores its own. `loss`: kl, tv or hybrid. `init`: start from this model, or from
    evenly spread `layers` of it (0: all); then width, heads and inner are that model's."""

    layers: int = 2
    width: int = 0
    heads: int = 0
    inner: int = 0
    vocab: int = 0
    rows: str = "target"
    loss: str = "hybrid"
    init: str = ""

    def __post_init__(self) -> None:
        for name, low in (("layers", 0 if self.init else 1), ("width", 0), ("heads", 0), ("inner", 0), ("vocab", 0)):
            if getattr(self, name) < low:
                raise BadInput(f"draft_model training needs {name} >= {low}, got {getattr(self, name)}")
        if self.rows not in ("target", "own"):
            raise BadInput(f"rows must be target (borrowed) or own (trained and stored), got {self.rows!r}")
        if self.init and (self.width or self.heads or self.inner):
            raise BadInput("width, heads and inner are those of init; drop them, or init")
        check_loss(self.loss)


class Distilled:
    """`protocols.Pupil` for a draft model."""

    features = ("hidden:last",)

    def __init__(self, teacher: Teacher, training: Training) -> None:
        self.training = training
        causal = _started(teacher, training) if training.init else _shaped(teacher, training)
        borrows = training.rows == "target"
        rows = (teacher.embeddings, teacher.head) if borrows else None
        ids = frequent(teacher, training.vocab) if training.vocab else None
        if not borrows and not training.init:
            _own(causal, teacher)
        made = lean.Lean(causal, rows, ids).to(teacher.embeddings.device)
        if not training.init:
            _soften(made)
        self.module: nn.Module = made.requires_grad_(True)
        self.lean = made
        size, hidden = teacher.embeddings.shape
        self.origin = lean.Origin(teacher.name, teacher.fingerprint, hidden, size, borrows)
        self.vocabulary = size

    def loss(self, lesson: Lesson) -> tuple[Tensor, dict[str, Tensor]]:
        """Distance from the target's distribution at every taught token. Figures: `acceptance`, the share of places where both
        prefer the same token (T = 0), and `overlap`, the chance of acceptance at T = 1."""
        row, column = lesson.where()
        states, seen = (picked(x, row, column - 1) for x in (self.lean(lesson.tokens), lesson.features["hidden:last"]))
        true = truth(seen, lesson.logits, self.vocabulary, self.lean.ids)

        def work(own: Tensor, *parts: Tensor) -> Tensor:
            return distance(self.lean.scores(own), Truth(*parts))

        found = in_parts(work, len(states), true.scores.shape[1], states, true.scores, true.total, true.best)
        rows = mean(found, column > 0)
        figures = {"acceptance": rows[3].detach(), "overlap": rows[2].detach(), "kl": rows[0].detach()}
        return mixed(rows, self.training.loss), figures

    def save(self, directory: Path) -> None:
        """Write the directory that `draft_model:path=` loads."""
        directory.mkdir(parents=True, exist_ok=True)
        self.lean.save(directory, self.origin)


def frequent(teacher: Teacher, count: int) -> Tensor:
    """Ids `[n]`, sorted, of the `count` tokens written most often; those that begin, pad and end a text are always among them."""
    counts = teacher.counts.clone()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = teacher.config.get(name)
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and 0 <= token < len(counts):
                counts[token] = counts.max() + 1
    best = counts.argsort(descending=True, stable=True)[: min(count, len(counts))]
    return best.sort().values.to(teacher.head.device)


def _shaped(teacher: Teacher, training: Training) -> PreTrainedModel:
    """A random decoder of the asked shape. Heads are as wide as the target's, as many as the width has room for."""
    config = _text(teacher.config)
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    dim = int(config.get("head_dim") or hidden // heads)
    width = training.width or min(hidden, _WIDEST)
    own = training.heads or (heads if width == hidden else max(1, width // dim))
    pairs = int(config.get("num_key_value_heads") or heads)
    pairs = own // (heads // pairs) if own % (heads // pairs) == 0 else own
    inner = training.inner or -(-int(config.get("intermediate_size") or 4 * hidden) * width // (hidden * _GRAIN)) * _GRAIN
    return lean.small(
        config,
        num_hidden_layers=training.layers,
        hidden_size=width,
        num_attention_heads=own,
        num_key_value_heads=pairs,
        head_dim=dim,
        intermediate_size=inner,
        vocab_size=len(teacher.embeddings),
    )


def _started(teacher: Teacher, training: Training) -> PreTrainedModel:
    """The model to go on from."""
    loaded = weights.load(weights.resolve(training.init), dtype=torch.float32)
    count = loaded.model.config.get_text_config().num_hidden_layers
    if training.layers:
        keep_layers(loaded.model, spread(training.layers, count), loaded.name)
    first: Any = loaded.model.get_input_embeddings()
    last: Any = loaded.model.get_output_embeddings()
    known = int(first.weight.shape[0])
    if training.rows == "own" and known != len(teacher.embeddings):
        raise DrafterMismatch(
            f"{loaded.name} has a vocabulary of {known}, {teacher.name} one of {len(teacher.embeddings)}: "
            "start from a model of the same tokenizer"
        )
    model = lean.small(loaded.model.config.get_text_config().to_dict(), vocab_size=len(teacher.embeddings))
    blocks = {k: v for k, v in loaded.model.state_dict().items() if "embed" not in k and "lm_head" not in k}
    model.load_state_dict(blocks, strict=False)
    if training.rows == "own":
        _copy_rows(model, first.weight, last.weight)
    return model


def _copy_rows(model: PreTrainedModel, embeddings: Tensor, head: Tensor) -> None:
    ends: tuple[Any, Any] = (model.get_input_embeddings(), model.get_output_embeddings())
    for end, rows in zip(ends, (embeddings, head), strict=True):
        end.weight.data.copy_(rows)


def spread(count: int, of: int) -> list[int]:
    """`count` layers of `of`, evenly spread, the first and the last among them."""
    if count > of:
        raise BadInput(f"init has {of} layers, so {count} cannot be kept")
    return sorted({round(i * (of - 1) / max(1, count - 1)) for i in range(count)})


def _own(causal: PreTrainedModel, teacher: Teacher) -> None:
    """Rows of its own, which begin as the target's."""
    width = int(causal.config.get_text_config().hidden_size)
    _copy_rows(causal, *(lean.Borrowed(rows, width).weight.detach() for rows in (teacher.embeddings, teacher.head)))


@torch.no_grad()
def _soften(made: lean.Lean) -> None:
    """Scores of about unit size to begin with: a draft that knows nothing should not be sure of it."""
    head: Any = made.causal.get_output_embeddings()
    size = head.weight.norm(dim=1).mean().clamp_min(1e-6)
    (head.project if isinstance(head, lean.Borrowed) else head.weight).div_(size)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model that sees and reads, the part that reads."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config
