"""EAGLE's network: one decoder layer over pairs of a token and the target's state one token before it (Li et al. 2024 and 2025,
arXiv 2401.15077 and 2503.01840).

Draft index t reads feature t and token t + 1, so what is drawn is known, and guesses token t + 2. In version 1 a linear map joins
the two, and the state that comes out is scored by the target's own head. In version 3 several of the target's states are fused,
embedding and state are normed side by side as the input of attention, and the head, over a reduced vocabulary, has a norm before
it. Version 3.1 may norm every fused state (`fc_norm`) and feed the normed state back (`norm_output`).

Attention is the caller's: `project` gives queries, keys and values, `leave` takes what was mixed. [...] is any leading shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .medusa_heads import hidden_head


@dataclass(frozen=True, slots=True)
class Plan:
    """The network's shape. `version` 1 or 3; `hidden` d, `target` the width of the target's states, `states` how many of them
    are fused (version 3); `heads`, `pairs` (KV heads), `dim` of a head, `inner` of the MLP; `vocab` n tokens are guessed.
    `rope`: what transformers calls `rope_parameters`. The switches are those of version 3.1 and of the checkpoint layouts."""

    version: int
    hidden: int
    target: int
    heads: int
    pairs: int
    dim: int
    inner: int
    vocab: int
    states: int = 3
    eps: float = 1e-6
    act: str = "silu"
    longest: int = 2048
    rope: Mapping[str, Any] = field(default_factory=dict)
    fc_bias: bool = False
    attention_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def rotary(self) -> LlamaRotaryEmbedding:
        """RoPE as transformers has it."""
        theta = {"rope_type": "default", "rope_theta": 10000.0}
        config = LlamaConfig(
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            head_dim=self.dim,
            max_position_embeddings=self.longest,
            rope_parameters=theta | dict(self.rope),
        )
        return LlamaRotaryEmbedding(config)


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """The four products."""

    def __init__(self, plan: Plan, width: int) -> None:
        super().__init__()
        bias = plan.attention_bias
        self.q_proj = nn.Linear(width, plan.heads * plan.dim, bias=bias)
        self.k_proj = nn.Linear(width, plan.pairs * plan.dim, bias=bias)
        self.v_proj = nn.Linear(width, plan.pairs * plan.dim, bias=bias)
        self.o_proj = nn.Linear(plan.heads * plan.dim, plan.hidden, bias=bias)


class Mlp(nn.Module):
    """Gated, as in Llama."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(plan.hidden, plan.inner, bias=False)
        self.up_proj = nn.Linear(plan.hidden, plan.inner, bias=False)
        self.down_proj = nn.Linear(plan.inner, plan.hidden, bias=False)
        self.act = ACT2FN[plan.act]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """The decoder layer's weights, named as in the checkpoints."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        third = plan.version == 3
        if third:
            self.input_layernorm, self.hidden_norm = Norm(plan.hidden, plan.eps), Norm(plan.hidden, plan.eps)
        self.self_attn = Attention(plan, 2 * plan.hidden if third else plan.hidden)
        self.post_attention_layernorm = Norm(plan.hidden, plan.eps)
        self.mlp = Mlp(plan)


class EagleNet(nn.Module):
    """`embeddings [V, d]` of the target, or of the drafter's own, are neither trained nor part of its state. `head [n, d]`: rows
    of the target's head, borrowed; without them the network has a head of its own (version 1 always borrows)."""

    def __init__(self, plan: Plan, embeddings: Tensor, head: Tensor | None) -> None:
        super().__init__()
        self.plan, self.borrows = plan, head is not None
        self.embeddings: Tensor
        self.register_buffer("embeddings", embeddings, persistent=False)
        third = plan.version == 3
        width = plan.states * plan.target if third else 2 * plan.hidden
        self.fc = nn.Linear(width, plan.hidden, bias=plan.fc_bias)
        self.midlayer = Layer(plan)
        if third:
            self.norm = Norm(plan.hidden, plan.eps)
        if plan.norm_before_fc:
            self.input_norm = Norm(width, plan.eps)
        if plan.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(plan.target, plan.eps) for _ in range(plan.states))
        self.lm_head = nn.Linear(plan.hidden, plan.vocab, bias=False) if head is None else hidden_head(head)
        self.rotary = plan.rotary()
        self.scale = plan.dim**-0.5

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states `[..., width]` as the layer's `[..., d]`."""
        if self.plan.version == 1:
            return features
        if self.plan.fc_norm:
            parts = torch.split(features, self.plan.target, -1)
            features = torch.cat([norm(x) for norm, x in zip(self.fc_norm, parts, strict=True)], -1)
        if self.plan.norm_before_fc:
            features = self.input_norm(features)
        out: Tensor = self.fc(features)
        return out

    def enter(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual, from states `[..., d]` and the tokens `[...]` one further on."""
        embedded, layer = self.embeddings[tokens].to(hidden.dtype), self.midlayer
        if self.plan.version == 1:
            joined = self.fc(torch.cat([embedded, hidden], -1))
            return joined, joined
        normed = layer.hidden_norm(hidden)
        return torch.cat([layer.input_layernorm(embedded), normed], -1), normed if self.plan.norm_before_residual else hidden

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, n, H, D]`, keys and values `[B, n, KV, D]` of `x [B, n, .]` at `positions [B, n]`, rotated."""
        attention, dim = self.midlayer.self_attn, self.plan.dim
        query, key, value = (p(x).unflatten(-1, (-1, dim)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        cos, sin = (part[:, :, None].to(x.dtype) for part in self.rotary(x, positions))
        return query * cos + _turned(query) * sin, key * cos + _turned(key) * sin, value

    def leave(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """States `[B, n, d]` after the layer, before any norm; `mixed [B, n, H, D]`."""
        layer = self.midlayer
        hidden = residual + layer.self_attn.o_proj(mixed.flatten(-2))
        out: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return out

    def back(self, hidden: Tensor) -> Tensor:
        """What the next step reads in place of the target's state."""
        out: Tensor = self.norm(hidden) if self.plan.norm_output else hidden
        return out

    def scores(self, hidden: Tensor) -> Tensor:
        """Logits `[..., n]`."""
        out: Tensor = self.lm_head(self.norm(hidden) if self.plan.version == 3 else hidden)
        return out


def attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """`[B, n, H, D]` of queries over keys and values `[B, S, KV, D]`, of which row i may see `seen [B, n, S]`."""
    grouped = query.shape[2] != keys.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, keys, values))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], scale=scale, enable_gqa=grouped).transpose(1, 2)


def _turned(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([-high, low], -1)
