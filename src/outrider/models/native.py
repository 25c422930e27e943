"""A fused decoder for the Llama family on a GPU: the same weights, fewer and larger kernels.

Llama, Mistral, Qwen2, Qwen3, SmolLM and Gemma differ in five switches: biases of the QKV product, a norm of every query and key
head, the activation of the gate, a norm weight that counts from one, a scale of the embeddings. Query, key and value weights lie
in one tensor (so do gate and up), of which the model's own parameters become views: no weight exists twice, and transformers'
own forward still runs. Every kernel works on rows that do not care who shares the pass (`kernels/`), so a token's states have
the same bits whether prefill, decoding or recomputation made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..protocols import Cache
from ..types import PassOutput
from .hf import Decoder, gather, layers_read
from .layout import Layout
from .parts import Layers, parts_of
from .products import Products, Weight
from .quantize import QuantizedLinear, joined
from .rows import Rows, rows_of

if TYPE_CHECKING:
    from .passes import Passes

FAMILIES = frozenset(("llama", "mistral", "qwen2", "qwen3", "gemma"))
"""`model_type`s whose layers are exactly what `Native` runs. SmolLM2 is a llama."""


@dataclass(frozen=True, slots=True)
class Block:
    """One layer's weights: `qkv [(H + 2 KV) D, width]`, `out [width, H D]`, `gate_up [2 F, width]`, `down [width, F]`, norms."""

    first_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Weight
    out_bias: Tensor | None
    second_norm: Tensor
    gate_up: Weight
    down: Weight
    window: int | None


def supports(model: PreTrainedModel) -> bool:
    """Whether `Native` can run this model: a known family, on CUDA, in a dtype its kernels have, with nothing unusual."""
    config: Any = model.config.get_text_config()
    parameter = next(model.parameters())
    if parameter.device.type != "cuda" or parameter.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    plain = all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear))
    active = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    known = active in ("silu", "gelu_pytorch_tanh", "gelu_new") or config.model_type == "gemma"
    return plain and known and config.model_type in FAMILIES and not getattr(config, "mlp_bias", False)


def fitting(model: PreTrainedModel, name: str) -> Decoder:
    """The fused decoder where it knows the model, else transformers' own layers."""
    return Native(model, name) if supports(model) else Decoder(model, name)


class Native(Decoder):
    """`Decoder` by fused kernels. Raises what `Decoder` raises; `supports` says which models it takes."""

    def ready(self) -> None:
        """Join weights and make tables. Called once, before the load-time comparison."""
        config: Any = self.config
        gemma = config.model_type == "gemma"
        self.eps = float(config.rms_norm_eps)
        self.gemma = gemma
        self.tanh = gemma or "gelu" in str(getattr(config, "hidden_act", ""))
        attention: Any = self.blocks[0].self_attn
        self.head_dim = int(attention.head_dim)
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads)
        self.scale = float(attention.scaling)
        self.stack = [_join(block) for block in self.blocks]
        self.final = self.base.norm.weight.detach()
        head: Any = self.model.get_output_embeddings()
        self.head, self.head_bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        self.products = Products()
        self._check_products()
        self._angles: tuple[Tensor, Tensor] | None = None
        self._tables: list[tuple[Tensor, Tensor]] = []
        self.passes: Passes | None = None

    def _check_products(self) -> None:
        """Find out which products have rows that do not care who shares the pass (all layers have the same shapes)."""
        block, same = self.stack[0], self.dtype
        some = ((block.qkv, block.qkv_bias), (block.out, block.out_bias), (block.gate_up, None), (block.down, None))
        self.products.check([*((w, b, same) for w, b in some), (self.head, None, torch.float32)])

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        """`cos` and `sin` `[at least length, D]`, fp32, by the model's own rotary module."""
        if self._angles is None or self._angles[0].shape[0] < length:
            size = min(max(2 * length, 4096), max(self.max_len, length))
            positions = torch.arange(size, device=self.device)[None]
            like = torch.zeros(1, dtype=torch.float32, device=self.device)
            cos, sin = self.base.rotary_emb(like, position_ids=positions)
            self._angles = cos[0].contiguous(), sin[0].contiguous()
            self._tables.append(self._angles)  # captured graphs go on reading the smaller ones
        return self._angles

    @torch.inference_mode()
    def forward(
        self,
        layout: Layout,
        cache: Cache,
        features: Sequence[str] = (),
        layers: Layers | None = None,
        hidden: Tensor | None = None,
        by_rows: bool = False,
    ) -> PassOutput:
        """See `Decoder.forward`."""
        rows = rows_of(layout, cache, self.heads // self.kv_heads, self.max_len)
        names = set(map(str, layers_read(features)))
        done = self.passes.run(rows, names) if self.passes is not None and layers is None and self.passes.cache is cache else None
        if done is None:
            taps = dict.fromkeys(names, rows.token)
            normed, last = self.states(rows, cache, range(self.num_layers) if layers is None else layers, hidden, taps)
        else:
            normed, taps = done
            last = normed
        taps["last"] = normed
        out = {name: gather(taps, name) for name in features}
        logits, prompt = self._heads(normed, layout)
        return PassOutput(layout.rows, None if layers is None else last, logits, out, prompt=prompt)

    @torch.inference_mode()
    def scored(self, rows: Rows, cache: Cache, wanted: Tensor | None = None, features: dict[str, Tensor] | None = None) -> Tensor:
        """See `Decoder.scored`."""
        features = {} if features is None else features
        taps = dict.fromkeys(map(str, layers_read(features)), rows.token)
        taps["last"], _ = self.states(rows, cache, range(self.num_layers), taps=taps)
        features.update((name, gather(taps, name)) for name in tuple(features))
        normed = taps["last"]
        return self.logits(normed if wanted is None else normed[wanted])

    def _heads(self, normed: Tensor, layout: Layout) -> tuple[Tensor | None, Tensor | None]:
        wanted, scored = layout.scored, layout.scored.shape[0]
        if layout.prompt:
            wanted = torch.cat([wanted, torch.tensor([row for row, _, _ in layout.prompt], device=wanted.device)])
        if wanted.shape[0] == 0:
            return None, None
        logits = self.logits(normed if wanted.shape[0] == normed.shape[0] and not layout.prompt else normed[wanted])
        return logits[:scored] if scored else None, logits[scored:] if layout.prompt else None

    def logits(self, normed: Tensor) -> Tensor:
        """fp32 scores `[R, V]` of states that passed the final norm."""
        out = self.products(normed, self.head, None, torch.float32)
        return out if self.head_bias is None else out + self.head_bias.float()

    def states(
        self,
        rows: Rows,
        cache: Cache,
        layers: Layers,
        hidden: Tensor | None = None,
        taps: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run `layers` over a pass: states `[R, width]` after the final norm, and before it. `taps` takes the inputs of the
        layers whose numbers it has as keys."""
        from ..kernels import layers as fused

        cos, sin = self.angles(rows.longest)
        residual = self.base.embed_tokens(rows.token) if hidden is None else hidden.clone()
        parts = parts_of(layers, self.num_layers)
        steps = [(part.layer, mlp) for part in parts for mlp in (False, True) if (part.mlp if mlp else part.attention)]
        norms = [self.stack[i].second_norm if mlp else self.stack[i].first_norm for i, mlp in steps] + [self.final]
        normed = self._norm(None, residual, norms[0])
        for (i, mlp), following in zip(steps, norms[1:], strict=True):
            block = self.stack[i]
            if mlp:
                inner = fused.gate(self.products(normed, block.gate_up), tanh=self.tanh)
                normed = self._norm(self.products(inner, block.down), residual, following)
                continue
            if taps and str(i) in taps:
                taps[str(i)] = residual.clone()
            qkv = self.products(normed, block.qkv, block.qkv_bias)
            mixed = self._attend(qkv, (cos, sin), rows, cache, i)
            normed = self._norm(self.products(mixed, block.out, block.out_bias), residual, following)
        return normed, residual

    def _norm(self, x: Tensor | None, residual: Tensor, weight: Tensor) -> Tensor:
        from ..kernels import layers as fused

        return fused.add_rms_norm(x, residual, weight, self.eps, gemma=self.gemma)

    def _attend(self, qkv: Tensor, angles: tuple[Tensor, Tensor], rows: Rows, cache: Cache, layer: int) -> Tensor:
        from ..kernels.attention import Form, attention
        from ..kernels.layers import rope_write

        block = self.stack[layer]
        norms = (block.query_norm, block.key_norm)
        pool = (cache.keys(layer), cache.values(layer))  # type: ignore[attr-defined]
        query = rope_write(qkv, angles, rows, pool, norms, self.eps)
        out = attention(query, pool, rows.where, self.scale, Form(block.window, None, rows.tree, rows.serial))
        return out.view(out.shape[0], -1)


def _join(block: Any) -> Block:
    attention, mlp = block.self_attn, block.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    bias = None if parts[0].bias is None else torch.cat([m.bias.detach() for m in parts])
    out_bias = attention.o_proj.bias
    window = getattr(attention, "sliding_window", None)
    return Block(
        block.input_layernorm.weight.detach(),
        joint(parts),
        bias,
        _weight(attention, "q_norm"),
        _weight(attention, "k_norm"),
        _own(attention.o_proj),
        None if out_bias is None else out_bias.detach(),
        block.post_attention_layernorm.weight.detach(),
        joint([mlp.gate_proj, mlp.up_proj]),
        _own(mlp.down_proj),
        int(window) if isinstance(window, int) and window > 0 else None,
    )


def _weight(module: Any, name: str) -> Tensor | None:
    found = getattr(module, name, None)
    return None if found is None else found.weight.detach()


def _own(linear: Any) -> Weight:
    weight: Weight = linear.weight
    return weight.detach() if isinstance(weight, Tensor) else weight


def joint(linears: Sequence[Any]) -> Weight:
    """Their weights one below the other in one tensor, which they then share."""
    whole: Weight
    if isinstance(linears[0], QuantizedLinear):
        whole = joined([m.weight for m in linears])
    else:
        whole = torch.cat([m.weight.detach() for m in linears])
    start = 0
    for linear in linears:
        end = start + linear.weight.shape[0]
        part = whole[start:end]
        linear.weight = nn.Parameter(part, requires_grad=False) if isinstance(part, Tensor) else part
        start = end
    return whole
