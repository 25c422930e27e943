"""From a GGUF file to what transformers loads: configuration, tokenizer, fp32 weights under transformers' names.

Only architectures whose every detail is known here are converted; a key or tensor that this file does not understand is
an `UnsupportedModel`, never silently dropped (a dropped RoPE factor or bias gives a model that is almost right).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from ..errors import BadWeights, UnsupportedModel
from .directory import finite
from .gguf_file import GGUF, dequantised
from .gguf_tokenizer import build_tokenizer, eos_ids

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""What can be converted, with the class that runs it. SmolLM2 and Mistral files are `llama`."""

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_HARMLESS = {"expert_count": 0, "expert_used_count": 0, "attention.sliding_window": 0, "attention.causal": True}
_USE_SAFETENSORS = "use the model's safetensors instead (a directory or a hub id)"


@dataclass(frozen=True, slots=True)
class Converted:
    """All of a model, in memory; `state` is fp32 and finite."""

    config: PreTrainedConfig
    generation: GenerationConfig
    tokenizer: PreTrainedTokenizerFast
    state: dict[str, Tensor]


def convert(file: GGUF) -> Converted:
    """Dequantises the whole file. Raises `UnsupportedModel` for what cannot be run exactly, `BadWeights` for missing,
    misshapen or non-finite tensors, both naming the tensor or key."""
    config = build_config(file)
    names = {info.name: _rename(file, info.name) for info in file.tensors.values() if info.name != _ROPE_FACTORS}
    _check_shapes(file, config, names)
    tokenizer = build_tokenizer(file)
    ends = eos_ids(file)
    generation = GenerationConfig(eos_token_id=ends or None, bos_token_id=config.bos_token_id)
    state = {name: _weights(file, config, source) for source, name in names.items()}
    return Converted(config, generation, tokenizer, state)


def build_config(file: GGUF) -> PreTrainedConfig:
    """The transformers configuration that the metadata describe."""
    arch = file.need("general.architecture", str)
    if arch not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(f"{file.path}: GGUF of architecture {arch!r}; {known} can be read; {_USE_SAFETENSORS}")
    _refuse(file, arch)
    hidden, heads = file.need(f"{arch}.embedding_length", int), file.need(f"{arch}.attention.head_count", int)
    if heads < 1 or hidden < 1:
        raise BadWeights(f"{file.path}: {heads} heads over {hidden} hidden units; the file is corrupt, download it again")
    rotated = file.get(f"{arch}.rope.dimension_count", int)
    width = file.get(f"{arch}.attention.key_length", int, rotated or hidden // heads)
    if rotated not in (None, width):
        raise UnsupportedModel(f"{file.path}: RoPE turns {rotated} of {width} dimensions; {_USE_SAFETENSORS}")
    biases = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"} if arch == "llama" else {}
    embedding = file.tensors.get("token_embd.weight")
    config: PreTrainedConfig = AutoConfig.for_model(
        arch,
        architectures=[ARCHITECTURES[arch]],
        vocab_size=embedding.shape[0] if embedding else len(file.need("tokenizer.ggml.tokens", list)),
        hidden_size=hidden,
        num_hidden_layers=file.need(f"{arch}.block_count", int),
        intermediate_size=file.need(f"{arch}.feed_forward_length", int),
        num_attention_heads=heads,
        num_key_value_heads=file.get(f"{arch}.attention.head_count_kv", int, heads),
        head_dim=width,
        rms_norm_eps=file.need(f"{arch}.attention.layer_norm_rms_epsilon", float),
        max_position_embeddings=file.need(f"{arch}.context_length", int),
        rope_parameters=_rope(file, arch, width),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", int),
        eos_token_id=file.get("tokenizer.ggml.eos_token_id", int),
        **{key: f"blk.0.{tensor}" in file.tensors for key, tensor in biases.items()},
    )
    return config


def _refuse(file: GGUF, arch: str) -> None:
    """Stops at features that change the arithmetic and that the configuration would lose."""
    for key, harmless in _HARMLESS.items():
        value = file.meta.get(f"{arch}.{key}", harmless)
        if value != harmless:
            raise UnsupportedModel(f"{file.path}: {arch}.{key} = {value!r:.60} is not supported; {_USE_SAFETENSORS}")
    for key in ("logit_scale", "residual_scale", "embedding_scale", "attention.scale", "attn_logit_softcapping"):
        if f"{arch}.{key}" in file.meta:
            raise UnsupportedModel(f"{file.path}: {arch}.{key} is not supported; {_USE_SAFETENSORS}")


def _rope(file: GGUF, arch: str, width: int) -> dict[str, Any]:
    """RoPE as transformers names it: default, linear, or Llama 3's, recognised by its table of factors."""
    theta = file.get(f"{arch}.rope.freq_base", float, 10_000.0)
    kind = file.get(f"{arch}.rope.scaling.type", str, "none")
    factor = file.get(f"{arch}.rope.scaling.factor", float, file.get(f"{arch}.rope.scale_linear", float, 1.0))
    if _ROPE_FACTORS in file.tensors:
        return _llama3_rope(file, theta, width)
    if kind == "linear" or (kind == "none" and factor not in (0.0, 1.0)):
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "none":
        raise UnsupportedModel(f"{file.path}: RoPE scaling {kind!r} is not supported; {_USE_SAFETENSORS}")
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_rope(file: GGUF, theta: float, width: int) -> dict[str, Any]:
    """Llama 3.1 and later: the file holds one factor per frequency, transformers wants the rule that gave them."""
    stored = torch.from_numpy(dequantised(file.path, file.tensors[_ROPE_FACTORS])).double().flatten()
    factor, low, high, original = round(float(stored.max())), 1.0, 4.0, 8192
    wavelength = 2 * math.pi * theta ** (torch.arange(0, width, 2).double() / width)
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    ruled = 1 / ((1 - smooth) / max(factor, 1) + smooth)
    if stored.shape != ruled.shape or not torch.allclose(stored, ruled, rtol=1e-4):
        raise UnsupportedModel(f"{file.path}: its RoPE factors follow no known rule; {_USE_SAFETENSORS}")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _rename(file: GGUF, name: str) -> str:
    """transformers' name of a GGUF tensor."""
    if name in _OUTER:
        return _OUTER[name]
    found = _BLOCK.fullmatch(name)
    if found and found[2] in _INNER:
        return f"model.layers.{found[1]}.{_INNER[found[2]]}.{found[3]}"
    raise UnsupportedModel(f"{file.path}: the tensor {name} has no place in this architecture; {_USE_SAFETENSORS}")


def _check_shapes(file: GGUF, config: PreTrainedConfig, names: dict[str, str]) -> None:
    """Every parameter has its tensor, every tensor its parameter, of one shape; nothing is read yet."""
    with torch.device("meta"):
        wanted = {name: tuple(p.shape) for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    for source, name in names.items():
        if name not in wanted:
            raise UnsupportedModel(f"{file.path}: the tensor {source} has no place in this model; {_USE_SAFETENSORS}")
        if file.tensors[source].shape != wanted[name]:
            has, should = list(file.tensors[source].shape), list(wanted[name])
            raise BadWeights(f"{file.path}: {source} has shape {has}, it should be {should}; download or convert it again")
    missing = sorted(wanted.keys() - names.values())
    if missing:
        raise BadWeights(f"{file.path} lacks {len(missing)} tensors, among them {missing[0]}; download or convert it again")


def _weights(file: GGUF, config: PreTrainedConfig, source: str) -> Tensor:
    """One tensor, in transformers' row order, finite."""
    values = torch.from_numpy(dequantised(file.path, file.tensors[source]))
    if not finite(values):
        raise BadWeights(f"{file.path}: the tensor {source} holds NaN or infinity; download or convert the file again")
    if config.model_type == "llama" and (".attn_q." in source or ".attn_k." in source):
        heads = config.num_attention_heads if ".attn_q." in source else config.num_key_value_heads
        return _unpermuted(values, heads)
    return values


def _unpermuted(values: Tensor, heads: int) -> Tensor:
    """llama.cpp turns neighbouring rows of `llama` queries and keys, transformers rows half a head apart."""
    rows = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return rows.transpose(1, 2).reshape(values.shape).contiguous()
