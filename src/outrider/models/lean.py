"""A small decoder that may borrow its vocabulary: its embeddings and its vocabulary head are then rows of the target's, each
multiplied into its own width, so that its directory holds layers and two narrow matrices. The head may answer for some tokens
only (FR-Spec, Zhao et al. 2025), while every token can be read.

The directory: `config.json`, transformers' own with the key `outrider` beside it, and `model.safetensors` with transformers'
names, plus `project_in [H, width]`, `project_out [H, width]` where rows are borrowed, `ids [n]` where the head is reduced.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..errors import BadWeights, DrafterMismatch, OutriderWarning
from .directory import check_directory, finite, read_json

KEY = "outrider"
WEIGHTS = "model.safetensors"
_PLAIN_HEAD = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0, "tie_word_embeddings": False}
"""A draft's scores are compared with nobody's, so the family's extras on its head are left out."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a lean decoder was made for: the target's `fingerprint`, `hidden` size and `vocabulary`; `borrows` its rows or not."""

    target: str
    fingerprint: str
    hidden: int
    vocabulary: int
    borrows: bool

    def check(self, fingerprint: str, name: str) -> None:
        """Warn where the target's weights are others than those it learned from."""
        if fingerprint and self.fingerprint and fingerprint != self.fingerprint:
            text = f"the draft was trained for other weights than those of {name}: it may guess badly; the text is unharmed"
            warnings.warn(text, OutriderWarning, stacklevel=2)


class Borrowed(nn.Module):
    """Somebody's rows `[n, H]` in another width: `rows @ project`. The rows are neither trained nor stored."""

    def __init__(self, rows: Tensor, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.rows: Tensor
        self.register_buffer("rows", rows, persistent=False)
        self.project, self.scale = nn.Parameter(_axes(rows, width)), scale

    @property
    def weight(self) -> Tensor:
        """`[n, width]`."""
        return self.rows.to(self.project.dtype) @ self.project

    def forward(self, tokens: Tensor) -> Tensor:
        return self.rows[tokens].to(self.project.dtype) @ self.project * self.scale

    def scores(self, hidden: Tensor) -> Tensor:
        """`[..., n]` from states `[..., width]`."""
        return nn.functional.linear(hidden @ self.project.T, self.rows.to(hidden.dtype))


class Lean(nn.Module):
    """The decoder while it is trained. `rows`: the target's `(embeddings [V, H], head [V, H])` to borrow, or None for rows of its
    own; `ids [n]`: the tokens that its head answers for, None for all."""

    def __init__(self, causal: PreTrainedModel, rows: tuple[Tensor, Tensor] | None, ids: Tensor | None) -> None:
        super().__init__()
        self.causal, self.ids = causal, ids
        width, own = int(causal.config.get_text_config().hidden_size), causal.get_input_embeddings()
        if rows is not None:
            head = rows[1] if ids is None else rows[1][ids]
            causal.set_input_embeddings(Borrowed(rows[0], width, _scale(own)))
            causal.set_output_embeddings(Borrowed(head, width))
        elif ids is not None:
            causal.set_output_embeddings(_linear(causal.get_output_embeddings().weight.detach()[ids]))

    def forward(self, tokens: Tensor) -> Tensor:
        """States `[B, T, width]` after the last norm, of tokens `[B, T]` padded on the right."""
        states: Tensor = self.causal.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return states

    def scores(self, states: Tensor) -> Tensor:
        """Logits `[..., n]`."""
        head: Any = self.causal.get_output_embeddings()
        out: Tensor = head.scores(states) if isinstance(head, Borrowed) else head(states)
        return out

    def save(self, directory: Path, origin: Origin, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the directory, which must exist."""
        tensors = {k: v.detach().to("cpu", dtype).contiguous() for k, v in self.causal.state_dict().items()}
        if origin.borrows:
            ends: tuple[Any, Any] = (self.causal.get_input_embeddings(), self.causal.get_output_embeddings())
            tensors = {k: v for k, v in tensors.items() if not k.endswith(".project")}
            for name, end in zip(("project_in", "project_out"), ends, strict=True):
                tensors[name] = end.project.detach().to("cpu", dtype).contiguous()
        if self.ids is not None:
            tensors["ids"] = self.ids.to("cpu", torch.int32)
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
        config = self.causal.config.to_dict() | {KEY: asdict(origin)}
        (directory / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n", encoding="utf-8")


def small(config: Mapping[str, Any], **changes: Any) -> PreTrainedModel:
    """A random decoder of the family that `config` tells of, with changes, in fp32."""
    plain = {k: v for k, v in _PLAIN_HEAD.items() if k in config}
    values = dict(config) | plain | changes | {"tie_word_embeddings": False}
    values.pop("dtype", None)
    if values.get("layer_types"):
        values["layer_types"] = list(values["layer_types"])[: values["num_hidden_layers"]]
    made = AutoConfig.for_model(str(values.pop("model_type")), **{k: v for k, v in values.items() if k != KEY})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    return model


def origin(path: Path) -> Origin | None:
    """What the directory's decoder was made for; None for one that is not lean. `BadWeights` for a damaged config."""
    if not (path / "config.json").is_file():
        return None
    found = read_json(path / "config.json").get(KEY)
    if not isinstance(found, dict) or "borrows" not in found:
        return None
    try:
        return Origin(**found)
    except TypeError as error:
        raise BadWeights(f"{path / 'config.json'}: its key {KEY!r} is damaged ({error}); save the drafter again") from error


def numbers(path: Path, made: Origin) -> int:
    """How many weights the directory's decoder has once its rows are there. Raises `BadWeights` for a damaged config."""
    if not made.borrows:
        return 0
    width = read_json(path / "config.json").get("hidden_size")
    if not isinstance(width, int):
        raise BadWeights(f"{path / 'config.json'} tells no hidden_size; train or download the drafter again")
    return 2 * made.vocabulary * width


def load(path: Path, rows: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[PreTrainedModel, Tensor | None]:
    """The decoder with all its rows on `rows`' device, and the ids that its head answers for (None: all). `rows` are the target's
    `(embeddings, head)`, `[V, H]` each. Raises `BadWeights` for a damaged directory, `DrafterMismatch` for another target's."""
    made = origin(path)
    check_directory(path)
    tensors = load_file(path / WEIGHTS)
    for name, values in tensors.items():
        if values.is_floating_point() and not finite(values):
            raise BadWeights(f"{path}: the tensor {name} holds NaN or infinity; train or download the drafter again")
    if made is None:
        raise BadWeights(f"{path} is no lean drafter: its config.json lacks the key {KEY!r}")
    if made.borrows and (made.vocabulary, made.hidden) != tuple(rows[0].shape):
        raise DrafterMismatch(
            f"the draft {path.name} borrows rows [{made.vocabulary}, {made.hidden}] of {made.target}, but this target's are "
            f"{list(rows[0].shape)}; use the model it was trained for, or train one for this model: outrider train draft_model"
        )
    ids = tensors.pop("ids", None)
    ids = None if ids is None else ids.long().to(rows[0].device)
    config = {k: v for k, v in read_json(path / "config.json").items() if k != KEY}
    try:
        with torch.device("meta"):
            model = small(config)
    except Exception as error:  # a dozen kinds, from transformers
        why = f"{type(error).__name__}: {error!s:.120}"
        raise BadWeights(f"{path / 'config.json'} describes no decoder ({why}); train or download the drafter again") from error
    _fill(model, _whole(model, tensors, rows, ids), path, dtype)
    return model.eval().requires_grad_(False), ids


def _whole(
    model: PreTrainedModel, tensors: dict[str, Tensor], rows: tuple[Tensor, Tensor], ids: Tensor | None
) -> dict[str, Tensor]:
    """The tensors, with what was borrowed multiplied out."""
    device = rows[0].device
    tensors = {k: v.to(device) for k, v in tensors.items()}
    names = {id(m): n for n, m in model.named_modules()}
    first, last = names[id(model.get_input_embeddings())], names[id(model.get_output_embeddings())]
    for name, key, some in ((first, "project_in", rows[0]), (last, "project_out", rows[1] if ids is None else rows[1][ids])):
        if key in tensors:
            tensors[f"{name}.weight"] = some.float() @ tensors.pop(key).float()
    count = tensors[f"{last}.weight"].shape[0] if f"{last}.weight" in tensors else 0
    with torch.device("meta"):
        model.set_output_embeddings(nn.Linear(int(model.config.get_text_config().hidden_size), count, bias=False))
    return tensors


def _fill(model: PreTrainedModel, tensors: dict[str, Tensor], path: Path, dtype: torch.dtype) -> None:
    """Put the weights where the empty model has places for them; buffers (RoPE) are made anew."""
    device = next(iter(tensors.values())).device
    wanted = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    wrong = sorted(k for k in wanted.keys() | tensors.keys() if k not in tensors or tuple(tensors[k].shape) != wanted.get(k))
    if wrong:
        raise BadWeights(
            f"{path}: {len(wrong)} tensors are missing or of the wrong shape, first {wrong[0]}; save the drafter again"
        )
    with torch.device(device):
        fresh = small(model.config.to_dict(), vocab_size=8, pad_token_id=None)
    buffers = dict(fresh.named_buffers())
    model.load_state_dict({k: v.to(dtype) for k, v in tensors.items()}, assign=True)
    for name, values in buffers.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_buffer(leaf, values, persistent=False)


def _linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight.clone())
    return made


def _scale(embedding: nn.Module) -> float:
    """What a family multiplies its embeddings by when it looks them up."""
    return float(getattr(embedding, "scalar_embed_scale", 1.0))


def _axes(rows: Tensor, width: int) -> Tensor:
    """`[H, width]` to begin with: the rows' principal axes, or nothing changed where the width is the same."""
    hidden = rows.shape[1]
    if width == hidden:
        return torch.eye(hidden, device=rows.device)
    part = rows.float()
    axes: Tensor = torch.linalg.eigh(part.T @ part).eigenvectors.flip(1)[:, :width]
    if width > hidden:
        axes = torch.cat([axes, axes.new_zeros(hidden, width - hidden)], 1)
    return axes.contiguous()
