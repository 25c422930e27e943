"""Attention of training-time test (`_eagle.py`): index t sees step 0 up to t, and of each later step its own index alone.

In torch's words it makes a square of scores per step. On a card a fused kernel does the square (Dao 2023, arXiv 2307.08691), and
the few own scores join through the logarithm of the sum, as the parts of a row that lie on several devices do in ring attention
(Liu et al. 2023, arXiv 2310.01889): given the whole row's output and sum, the kernel's way back gives the square's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_SCORES = 2**26
"""Scores of one step beyond which they are computed again on the way back instead of being kept."""
Pair = tuple[Tensor, Tensor]


def unrolled(query: Tensor, past: Sequence[Pair], scale: float) -> Tensor:
    """`[B, n, H, D]` of the newest step's queries. `past` are the keys and values `[B, n, KV, D]` of all steps so far, the newest
    included."""
    flat = [part for pair in past for part in pair]
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] % 8 == 0:
        out: Tensor = Joined.apply(scale, query, *flat)  # type: ignore[no-untyped-call]
        return out
    if query.shape[0] * query.shape[2] * query.shape[1] ** 2 > _SCORES and torch.is_grad_enabled():
        again: Any = checkpoint(
            lambda q, *parts: plain(q, _pairs(parts), scale), query, *flat, use_reentrant=False, preserve_rng_state=False
        )
        return torch.as_tensor(again)
    return plain(query, past, scale)


def plain(query: Tensor, past: Sequence[Pair], scale: float) -> Tensor:
    """The definition."""
    first_key, first_value = past[0]
    count, pairs = query.shape[1], first_key.shape[2]
    q = query.reshape(*query.shape[:2], pairs, -1, query.shape[3])  # [B, n, KV, G, D]
    block = torch.einsum("bnkgd,bmkd->bkgnm", q, first_key).float() * scale
    later = torch.ones(count, count, dtype=torch.bool, device=query.device).triu(1)
    block = block.masked_fill(later, float("-inf"))
    own = [torch.einsum("bnkgd,bnkd->bkgn", q, key).float()[..., None] * scale for key, _ in past[1:]]
    weights = torch.cat([block, *own], -1).softmax(-1).to(query.dtype)
    out = torch.einsum("bkgnm,bmkd->bnkgd", weights[..., :count], first_value)
    for j, (_, value) in enumerate(past[1:]):
        out = out + weights[..., count + j].permute(0, 3, 1, 2)[..., None] * value[:, :, :, None]
    return out.flatten(2, 3)


class Joined(torch.autograd.Function):
    """The same by a fused kernel; `apply(scale, query, key, value, key, value, ...)`."""

    @staticmethod
    def forward(ctx: Any, scale: float, query: Tensor, *flat: Tensor) -> Tensor:
        past, groups = _pairs(flat), query.shape[2] // flat[0].shape[2]
        found, square, ctx.rest = _square(query, _wide(past[0], groups), scale)
        own = [_own(query, key, groups, scale) for key, _ in past[1:]]
        total = torch.logsumexp(torch.stack([square, *own]), 0)
        out = (square - total).exp()[..., None] * found
        for score, (_, value) in zip(own, past[1:], strict=True):
            out = out + (score - total).exp()[..., None] * _by_heads(value, groups)
        out = out.to(query.dtype)
        ctx.scale = scale
        ctx.save_for_backward(out, total, query, *flat)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, total, query, *flat = ctx.saved_tensors
        past, scale, groups = _pairs(flat), ctx.scale, query.shape[2] // flat[0].shape[2]
        grad = grad.transpose(1, 2).contiguous()  # [B, H, n, D]
        kept = (out, total.contiguous(), *ctx.rest)
        dq, dk, dv = _square_slope(grad, query, _wide(past[0], groups), kept, scale)
        slopes = [_narrow(dk, groups), _narrow(dv, groups)]
        steady, asked = (grad * out).float().sum(-1), query.transpose(1, 2)
        for key, value in past[1:]:
            weight = (_own(query, key, groups, scale) - total).exp()
            said = (grad * _by_heads(value, groups)).float().sum(-1)
            slope = (weight * (said - steady) * scale)[..., None].to(query.dtype)
            dq = dq + slope * _by_heads(key, groups)
            slopes += [_narrow(slope * asked, groups), _narrow(weight[..., None].to(grad.dtype) * grad, groups)]
        return None, dq.transpose(1, 2), *slopes


def _square(query: Tensor, pair: Pair, scale: float) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Causal attention `[B, H, n, D]`, the logarithm of each row's sum `[B, H, n]`, and what the way back asks for beside."""
    if query.is_cuda:
        made = torch.ops.aten._scaled_dot_product_flash_attention.default(
            query.transpose(1, 2), *pair, 0.0, True, False, scale=scale
        )
        return made[0], made[1].float(), tuple(made[2:8])
    made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        query.transpose(1, 2), *pair, 0.0, True, scale=scale
    )
    return made[0], made[1].float(), ()


def _square_slope(grad: Tensor, query: Tensor, pair: Pair, kept: tuple[Any, ...], scale: float) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values, `[B, H, n, D]`, as far as they come from the square."""
    out, total, *rest = kept
    asked = (grad, query.transpose(1, 2), *pair, out, total)
    if query.is_cuda:
        aten = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
        return tuple(aten(*asked, *rest[:4], 0.0, True, *rest[4:], scale=scale))
    return tuple(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(*asked, 0.0, True, scale=scale))


def _own(query: Tensor, key: Tensor, groups: int, scale: float) -> Tensor:
    """`[B, H, n]`, fp32: scores of each index with its own key."""
    return (query.transpose(1, 2) * _by_heads(key, groups)).float().sum(-1) * scale


def _by_heads(x: Tensor, groups: int) -> Tensor:
    """`[B, H, n, D]` of keys or values `[B, n, KV, D]`."""
    return x.transpose(1, 2).repeat_interleave(groups, 1)


def _wide(pair: Pair, groups: int) -> Pair:
    return _by_heads(pair[0], groups), _by_heads(pair[1], groups)


def _narrow(x: Tensor, groups: int) -> Tensor:
    """Gradients `[B, n, KV, D]` of `_by_heads`'s input."""
    return x.reshape(x.shape[0], -1, groups, *x.shape[2:]).sum(2).transpose(1, 2)


def _pairs(parts: Sequence[Tensor]) -> list[Pair]:
    return list(zip(parts[::2], parts[1::2], strict=True))
