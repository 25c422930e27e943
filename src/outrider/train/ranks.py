"""Several processes that train one pupil, as `torchrun` starts them: every rank has the weights, its share of the batches, and
the mean of all gradients (data parallelism). Rank 0 alone writes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

_PART = 2**26
"""Numbers that travel together."""
_PATIENCE = timedelta(hours=24)
"""How long ranks wait for each other: one may be writing texts."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which of how many this process is."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def broadcast(self, module: nn.Module) -> None:
        """Rank 0's weights for all."""
        if self.world > 1:
            for values in (*module.parameters(), *module.buffers()):
                dist.broadcast(values.detach(), 0)

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """The mean of all ranks' gradients, in place."""
        if self.world == 1:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        while grads:
            part = [grads.pop(0)]
            while grads and grads[0].dtype == part[0].dtype and sum(g.numel() for g in part) + grads[0].numel() <= _PART:
                part.append(grads.pop(0))
            joined = torch.cat([g.reshape(-1) for g in part])
            dist.all_reduce(joined)
            for grad, mean in zip(part, torch.split(joined / self.world, [g.numel() for g in part]), strict=True):
                grad.copy_(mean.view_as(grad))

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all ranks."""
        if self.world > 1:
            values = values.clone()
            dist.all_reduce(values)
            values /= self.world
        return values

    def shard(self, layers: Iterable[nn.Module], device: torch.device) -> None:
        """Leave every rank its share of the layers' weights, on its device; a layer is whole only while it runs (FSDP2)."""
        mesh = init_device_mesh(device.type, (self.world,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)

    def leave(self) -> None:
        """The others are not needed any more."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is up anywhere: all ranks must stop at the same step."""
        return flag if self.world == 1 else bool(self.mean(torch.tensor(float(flag), device=device)) > 0)


def join(device: torch.device) -> Ranks:
    """This process's place, by `torchrun`'s environment; alone without one."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Ranks()
    if not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    return Ranks(dist.get_rank(), dist.get_world_size())


def local_device(device: torch.device) -> torch.device:
    """The GPU that is this process's among those of its machine."""
    local = os.environ.get("LOCAL_RANK")
    if device.type != "cuda" or device.index or local is None:
        return device
    return torch.device("cuda", int(local))
