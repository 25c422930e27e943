"""Attention over our own KV, registered with transformers by name.

Two forms with one meaning. `rows` is the definition: every row walks its absolute positions 0..p, reading committed tokens from
the sequence and the rest through the row's own path, in position order; a row's bits depend on nothing else in the pass.
`blocks` does a request's rows in one product under a mask over virtual slots: faster, and equal up to rounding. Prompt
chunks always go by blocks: their bounds are fixed multiples, so a prompt token's KV never depends on what shares the pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedModel
from ..protocols import Cache
from .layout import Layout, Span
from .rows import Rows

NAME = "outrider"
"""The name under which `attend` is registered."""

_HARMLESS = frozenset(
    (
        "position_ids",
        "use_cache",
        "cache",
        "past_key_values",
        "output_attentions",
        "is_causal",
        "logits_to_keep",
        "cache_position",
    )
)


@dataclass(slots=True)
class Pass:
    """What a registered attention call needs to know: the layout, the cache, and the form to use. `heads` collects
    `(heads, dim)` per layer during the load-time probe, when there is no cache yet."""

    layout: Layout | None = None
    cache: Cache | None = None
    by_rows: bool = False
    heads: dict[int, tuple[int, int]] = field(default_factory=dict)
    rows: Rows | None = None
    masks: dict[tuple[int, int | None], Tensor | None] = field(default_factory=dict)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention of one layer for a packed pass: `query [1, H, R, D]`, `key`/`value [1, KV, R, D]` to `[1, R, H, D]`.

    Raises `UnsupportedModel` for arguments whose effect is not implemented (softcap, sinks, biases): never approximate.
    """
    state, window, scale = _options(module, options)
    if attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} brings a mask of its own, which this engine does not apply")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if state.rows is not None and state.cache is not None:
        state.cache.write(layer, state.rows.write, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return _anchored(state, state.rows, layer, query, (window, scale)), None
    if state.cache is None or state.layout is None:
        state.heads[layer] = (key.shape[1], key.shape[3])
        return torch.zeros_like(query).transpose(1, 2), None
    state.cache.write(layer, state.layout.write, key[0].transpose(0, 1), value[0].transpose(0, 1))
    spans = state.layout.spans
    if len(spans) == 1:
        return _span(state, spans[0], layer, query, (window, scale)).transpose(1, 2), None
    parts = [_span(state, s, layer, query[:, :, s.lo : s.hi], (window, scale)) for s in spans]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _anchored(state: Pass, rows: Rows, layer: int, query: Tensor, how: tuple[int | None, float | None]) -> Tensor:
    """On a GPU: the kernel for which chains, trees and single rows do the same arithmetic."""
    from ..kernels.attention import Form, attention

    pool: Any = state.cache
    window, scale = how
    scale = query.shape[3] ** -0.5 if scale is None else scale
    keys, values = pool.keys(layer), pool.values(layer)
    q = query[0].transpose(0, 1)
    return attention(q, (keys, values), rows.where, scale, Form(window, None, rows.tree, rows.serial))[None]


def _options(module: nn.Module, options: dict[str, object]) -> tuple[Pass, int | None, float | None]:
    state = options.pop("outrider_pass", None)
    if not isinstance(state, Pass):
        raise UnsupportedModel(f"{type(module).__name__} does not hand its extra arguments to the attention function")
    scale, window = options.pop("scaling", None), options.pop("sliding_window", None)
    options.pop("dropout", None)
    strange = [k for k, v in options.items() if v is not None and k not in _HARMLESS]
    strange += ["is_causal"] if options.get("is_causal") is False else []
    if strange:
        raise UnsupportedModel(
            f"{type(module).__name__} asks attention for {', '.join(sorted(strange))}, which this engine does not implement "
            "exactly; use a model without it"
        )
    if getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{type(module).__name__} is not causal; only decoder-only models can be drafted for")
    return state, _window(window), None if scale is None else float(scale)  # type: ignore[arg-type]


def _window(value: object) -> int | None:
    return int(value) if isinstance(value, int) and value > 0 else None


def _span(state: Pass, span: Span, layer: int, query: Tensor, how: tuple[int | None, float | None]) -> Tensor:
    assert state.cache is not None and state.layout is not None
    window, scale = how
    keys, values = state.cache.view(layer, span.request, span.length)
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    if state.by_rows and not span.prompt:
        return _by_rows(state, span, (query, keys, values), window, scale)
    where = (span.index, window)
    if where not in state.masks:
        visible = state.layout.visible(span, window)
        bias = None if visible is None else torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
        state.masks[where] = None if bias is None else bias.masked_fill_(~visible, float("-inf"))  # type: ignore[operator]
    mask = state.masks[where]
    grouped = query.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _by_rows(state: Pass, span: Span, qkv: tuple[Tensor, Tensor, Tensor], window: int | None, scale: float | None) -> Tensor:
    """Row by row, in position order: the shape of every product depends on the row's own position alone."""
    query, keys, values = qkv
    assert state.layout is not None
    grouped, out = query.shape[1] != keys.shape[1], []
    for r in range(span.hi - span.lo):
        end = span.start + r + 1
        k, v = keys[:, :, :end], values[:, :, :end]
        if state.layout.ancestors is not None and end > span.known:
            path = state.layout.ancestors[span.index, end - span.known - 1, : span.nodes].nonzero()[:, 0] + span.known
            k, v = (torch.cat([x[:, :, : span.known], x[:, :, path]], dim=2) for x in (keys, values))
        if window is not None:
            k, v = k[:, :, -window:], v[:, :, -window:]
        out.append(F.scaled_dot_product_attention(query[:, :, r : r + 1], k, v, scale=scale, enable_gqa=grouped))
    return torch.cat(out, dim=2)
