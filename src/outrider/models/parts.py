"""Parts of a decoder: which layers run, and which halves of them (Zhang et al. 2024, "Draft & Verify")."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModel
from ..types import Part

Layers = Sequence[int | Part]

_ATTENTION = ("self_attn", "self_attention", "attention", "attn")
_MLP = ("mlp", "feed_forward", "ffn")
_KEPT = 32
"""Cut decoders that are remembered; a search tries very many."""
_SAMPLE = 16


def parts_of(layers: Layers, count: int) -> tuple[Part, ...]:
    """`layers` as parts, those without a half left out. `ValueError` unless they are distinct, in order and below `count`."""
    parts = [part if isinstance(part, Part) else Part(part) for part in layers]
    order = [part.layer for part in parts]
    if order != sorted(set(order)) or (order and not 0 <= order[0] <= order[-1] < count):
        raise ValueError(f"layers must be distinct and in order, below {count}, got {tuple(order)}")
    return tuple(part for part in parts if part.attention or part.mlp)


class Skip(nn.Module):
    """Stands in for a decoder layer that does not run: the residual stream passes through."""

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        return hidden_states


class Silent(nn.Module):
    """Stands in for half a decoder layer: it adds nothing to the residual stream. `paired`: attention gives its weights, too."""

    def __init__(self, paired: bool) -> None:
        super().__init__()
        self.paired = paired

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, None]:
        nothing = hidden_states.new_zeros(()).expand_as(hidden_states)
        return (nothing, None) if self.paired else nothing


class Cut:
    """Decoder layers with some left out, made when they are first asked for. Weights are shared, not copied."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        self.blocks = blocks
        self._made: dict[tuple[Part, ...], nn.ModuleList] = {}

    def __call__(self, parts: tuple[Part, ...]) -> nn.ModuleList:
        """As many modules as there are layers. Raises `UnsupportedModel` where a layer has no halves that are known."""
        if parts not in self._made:
            if len(self._made) >= _KEPT:
                self._made.pop(next(iter(self._made)))
            wanted = {part.layer: part for part in parts}
            made = [self._block(wanted[i]) if i in wanted else Skip() for i in range(len(self.blocks))]
            self._made[parts] = nn.ModuleList(made)
        return self._made[parts]

    def _block(self, part: Part) -> nn.Module:
        block = self.blocks[part.layer]
        if part.attention and part.mlp:
            return block
        names, paired = (_MLP, False) if part.attention else (_ATTENTION, True)
        name = next((n for n in names if n in dict(block.named_children())), None)
        if name is None:
            what = "MLP" if part.attention else "attention"
            raise UnsupportedModel(f"no {what} was found in {type(block).__name__}, so it cannot be left out")
        twin = object.__new__(type(block))
        twin.__dict__ = {k: v.copy() if isinstance(v, dict) else v for k, v in vars(block).items()}
        setattr(twin, name, Silent(paired))
        return twin


def signature(model: PreTrainedModel) -> str:
    """16 hexadecimal digits that tell weights, dtypes and kinds of device apart, by samples of every plain tensor."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} {weight.device.type};".encode())
        if type(weight) in (nn.Parameter, Tensor) and weight.numel():
            few = weight.detach().flatten()[:: max(1, weight.numel() // _SAMPLE)][:_SAMPLE]
            digest.update(few.double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
