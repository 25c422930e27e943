"""Low-rank changes to a model's layers (LoRA; Hu et al. 2022, arXiv 2106.09685), in force only while asked for, so that the model
as it was stays at hand to be learned from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..models.hf import find_blocks

_STRENGTH = 2.0
"""What a change counts: alpha over rank."""


class Lora(nn.Module):
    """Changes `B A` of `rank` to every linear map in the layers of `model`, in fp32; none to begin with, since B is zero."""

    def __init__(self, model: PreTrainedModel, rank: int) -> None:
        super().__init__()
        self.maps: dict[str, nn.Linear] = {}
        names = {id(m): n for n, m in model.named_modules()}
        for block in find_blocks(model):
            self.maps |= {names[id(m)]: m for m in block.modules() if isinstance(m, nn.Linear)}
        self.down, self.up = nn.ParameterList(), nn.ParameterList()
        for linear in self.maps.values():
            device, (out, inner) = linear.weight.device, linear.weight.shape
            self.down.append(nn.Parameter(torch.empty(rank, inner, device=device)))
            self.up.append(nn.Parameter(torch.zeros(out, rank, device=device)))
            nn.init.kaiming_uniform_(self.down[-1], a=math.sqrt(5))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with its changes."""
        hooks = [
            linear.register_forward_hook(_added(down, up))
            for linear, down, up in zip(self.maps.values(), self.down, self.up, strict=True)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def merged(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """The changed model's weights, by name."""
        found: dict[str, Tensor] = dict(model.state_dict())
        for name, down, up in zip(self.maps, self.down, self.up, strict=True):
            weight = found[f"{name}.weight"]
            found[f"{name}.weight"] = (weight.float() + _STRENGTH * (up.float() @ down.float())).to(weight.dtype)
        return found


def _added(down: Tensor, up: Tensor) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        x = args[0].to(down.dtype)
        return out + (_STRENGTH * ((x @ down.T) @ up.T)).to(out.dtype)

    return hook
