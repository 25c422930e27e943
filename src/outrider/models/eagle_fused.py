"""EAGLE's network (`eagle_net.py`) by the fused kernels of the native decoder, over paged KV: for captured graphs.

The same weights; those of queries, keys and values (and of gate and up) lie in one tensor, of which the network's own parameters
become views. Numbers are rounded where the network rounds them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from .eagle_net import EagleNet, Norm
from .native import joint
from .rows import Rows

ACTIVATIONS = {"silu": False, "swish": False, "gelu_pytorch_tanh": True, "gelu_new": True}
"""Those that the gate kernel has, and whether it is the one with tanh."""


def supports(net: EagleNet) -> bool:
    """Whether the kernels can run this network."""
    kind = next(net.midlayer.parameters()).dtype
    return net.plan.act in ACTIVATIONS and kind in (torch.bfloat16, torch.float16, torch.float32) and net.plan.dim % 2 == 0


class FusedEagle:
    """One layer, its way in and its scores. `pool` `[slots, KV, D]` keys and values. `reads`: width of the target's states, which
    are called `feature`."""

    def __init__(self, net: EagleNet, pool: tuple[Tensor, Tensor], feature: str) -> None:
        attention, mlp = net.midlayer.self_attn, net.midlayer.mlp
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.net, self.plan, self.pool, self.feature = net, net.plan, pool, feature
        self.bias = None if parts[0].bias is None else torch.cat([p.bias.detach() for p in parts])
        self.qkv: Any = joint(parts)
        self.gate_up: Any = joint([mlp.gate_proj, mlp.up_proj])
        self.tanh = ACTIVATIONS[net.plan.act]
        self.dtype, self.device = pool[0].dtype, pool[0].device
        self.reads = net.fc.in_features if net.plan.version == 3 else net.plan.hidden
        self._angles: dict[int, tuple[Tensor, Tensor]] = {}

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        """`cos` and `sin` `[length, D]` fp32, of the network's precision."""
        if length not in self._angles:
            like = torch.zeros(1, dtype=self.dtype, device=self.device)
            cos, sin = self.net.rotary(like, torch.arange(length, device=self.device)[None])
            self._angles[length] = cos[0].float().contiguous(), sin[0].float().contiguous()
        return self._angles[length]

    def enter(self, states: Tensor, token: Tensor, source: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual `[R, d]`; see `kernels.climb.enter`."""
        from ..kernels import climb

        net, plan = self.net, self.plan
        if plan.version == 1:
            x, _ = climb.enter(net.embeddings, token, states, source, None, (plan.eps, False))
            out = net.fc(x)
            return out, out
        norms = (net.midlayer.input_layernorm.weight, net.midlayer.hidden_norm.weight)
        return climb.enter(net.embeddings, token, states, source, norms, (plan.eps, plan.norm_before_residual))

    def project(self, x: Tensor, rows: Rows) -> Tensor:
        """Queries `[R, H, D]`; keys and values go to `rows.write`."""
        from ..kernels.layers import rope_write

        return rope_write(F.linear(x, self.qkv, self.bias), self.angles(rows.longest), rows, self.pool)

    def store(self, states: Tensor, token: Tensor, place: tuple[Tensor, Tensor], longest: int) -> None:
        """Keys and values of known tokens, from states `[N, W]`, at positions and slots `[N]` int64; `longest` bounds those."""
        x, _ = self.enter(self.net.fuse(states), token)
        position, write = place
        self.project(x, Rows(token, position.int(), write, cast(Any, None), False, False, longest))

    def leave(self, query: Tensor, rows: Rows, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What the next step reads `[R, d]`, and the scores `[R, n]`. `residual` is used up."""
        from ..kernels.attention import Form, attention
        from ..kernels.layers import gate

        layer = self.net.midlayer
        mixed = attention(query, self.pool, rows.where, self.net.scale, Form(tree=rows.tree)).flatten(1)
        normed = self._norm(layer.self_attn.o_proj(mixed), residual, layer.post_attention_layernorm)
        out = layer.mlp.down_proj(gate(F.linear(normed, self.gate_up), tanh=self.tanh))
        if self.plan.version == 1:
            residual = residual.add_(out)
            return residual, self.net.lm_head(residual)
        normed = self._norm(out, residual, self.net.norm)
        return normed if self.plan.norm_output else residual, self.net.lm_head(normed)

    def _norm(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        from ..kernels.layers import add_rms_norm

        return add_rms_norm(x, residual, norm.weight, norm.eps, once=True)
