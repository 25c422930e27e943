"""What an EAGLE layer may begin as, other than at random: another drafter's layer, or the target's last one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import trained
from ..errors import BadInput, DrafterMismatch
from ..models import checkpoint as files
from ..models import eagle_files
from ..models.eagle_net import EagleNet
from ..models.hf import find_blocks
from ..protocols import Teacher

TARGET, SHIPPED = "target", "ship/"


@torch.no_grad()
def begin(net: EagleNet, teacher: Teacher, init: str) -> None:
    """Give `net` the weights that `init` names, all but rows that it borrows. Raises `BadInput` for a target whose layers are not
    Llama's, `DrafterMismatch` for a drafter of another shape."""
    start = _of_target(net, teacher) if init == TARGET else _of_drafter(teacher, init)
    for name, own in net.named_parameters():
        if own.requires_grad and not (net.borrows and name.startswith("lm_head")):
            found = start.get(name)
            if found is not None and found.shape == own.shape:
                own.copy_(found)
            elif init != TARGET or (found is not None and ".mlp." not in name):
                what = "is missing" if found is None else f"is {tuple(found.shape)}, not {tuple(own.shape)}"
                raise DrafterMismatch(f"training cannot start from {init}: its {name} {what}")


def _of_drafter(teacher: Teacher, init: str) -> dict[str, Tensor]:
    path = trained.SHIPPED / init.removeprefix(SHIPPED) if init.startswith(SHIPPED) else Path(init).expanduser()
    made = files.read(files.folder("eagle", str(path)))
    files.same_target(made, teacher.fingerprint, teacher.name)
    rows = eagle_files.Rows(teacher.embeddings, teacher.head)
    return dict(eagle_files.build(made, rows, torch.float32, teacher.name)[0].named_parameters())


def _of_target(net: EagleNet, teacher: Teacher) -> dict[str, Tensor]:
    """The target's last layer, which reads the last of the fused states and, to begin with, nothing of the token. An MLP of
    another width begins at random."""
    if net.plan.version != 3 or teacher.model is None:
        raise BadInput("init=target is for version 3; name a drafter to start from, or nothing")
    model: Any = teacher.model
    last = {name: weights.float() for name, weights in find_blocks(model, teacher.name)[-1].named_parameters()}
    found = {f"midlayer.{name}": weights for name, weights in last.items() if not name.startswith("input_layernorm")}
    width = net.plan.hidden
    for name in ("q_proj", "k_proj", "v_proj"):
        own = last.get(f"self_attn.{name}.weight")
        if own is None or own.shape[1] != width:
            raise BadInput(
                f"{teacher.name}'s layers are not those of a Llama, so an EAGLE layer cannot start from one: drop init=target"
            )
        found[f"midlayer.self_attn.{name}.weight"] = torch.cat([torch.zeros_like(own), own], 1)
    found["midlayer.hidden_norm.weight"] = last["input_layernorm.weight"]
    norm = getattr(model.base_model, "norm", None)
    if norm is not None:
        found["norm.weight"] = norm.weight.float()
    states = torch.zeros(width, net.plan.states * width, device=teacher.head.device)
    states[:, -width:] = torch.eye(width)
    found["fc.weight"] = states
    return found
