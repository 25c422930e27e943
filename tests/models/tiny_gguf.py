"""Writes tiny GGUF models for tests, with the reference model that they were made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<s>{{ m.role }} {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant {% endif %}"
)
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    table = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    return [table[b] for b in range(256)]


@dataclass
class Tiny:
    """What to write. `extra` are further metadata (uint32, bool, str or float by type), `tensors` replace or add."""

    arch: str = "llama"
    kind: str = "F32"
    hidden: int = 32
    tied: bool = True
    bias: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    raw: dict[str, tuple[np.ndarray[Any, Any], str]] = field(default_factory=dict)

    def write(self, path: Path) -> torch.nn.Module:
        """Writes the file; returns the model it should load as (weights as the quantised file holds them)."""
        model = self.reference()
        out = gguf.GGUFWriter(path, self.arch)
        self._metadata(out)
        for name, values in model.named_parameters():
            target = gguf_name(name)
            if target in self.drop or target in self.raw:
                continue
            array = self.tensors.get(target, values.detach().numpy())
            self._add(out, target, array, values)
        for name, array in self.tensors.items():
            if name not in {gguf_name(n) for n, _ in model.named_parameters()}:
                out.add_tensor(name, array)
        for name, (data, kind) in self.raw.items():
            out.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()
        return model

    def reference(self) -> torch.nn.Module:
        torch.manual_seed(7)
        options = {"attention_bias": self.bias} if self.arch == "llama" else {}
        config = AutoConfig.for_model(
            self.arch, vocab_size=len(self.vocabulary()[0]), hidden_size=self.hidden, num_hidden_layers=2,
            intermediate_size=2 * self.hidden, num_attention_heads=4, num_key_value_heads=2, head_dim=self.hidden // 4,
            rms_norm_eps=1e-5, max_position_embeddings=128, tie_word_embeddings=self.tied,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, bos_token_id=1, eos_token_id=2, **options,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        for values in model.parameters():
            torch.nn.init.normal_(values, std=0.3)
        return model

    def vocabulary(self) -> tuple[list[str], list[int], list[str]]:
        """Tokens, types, merges: specials, a user-defined one, bytes, a few merges, an unused one at the end."""
        specials = ["<unk>", "<s>", "</s>"]
        merges = ["h e", "l l", "he ll", "hell o", "Ġ Ġ"]
        merged = [m.replace(" ", "") for m in merges]
        tokens = [*specials, "<tool>", *byte_alphabet(), *merged, "[PAD]"]
        return tokens, [3, 3, 3, 4, *[1] * (256 + len(merges)), 5], merges

    def _metadata(self, out: Any) -> None:
        tokens, types, merges = self.vocabulary()
        out.add_block_count(2)
        out.add_context_length(128)
        out.add_embedding_length(self.hidden)
        out.add_feed_forward_length(2 * self.hidden)
        out.add_head_count(4)
        out.add_head_count_kv(2)
        out.add_layer_norm_rms_eps(1e-5)
        out.add_rope_freq_base(5000.0)
        if self.arch != "llama":
            out.add_key_length(self.hidden // 4)
        out.add_tokenizer_model("gpt2")
        out.add_tokenizer_pre("smollm")
        out.add_token_list(tokens)
        out.add_token_types(types)
        out.add_token_merges(merges)
        out.add_bos_token_id(1)
        out.add_eos_token_id(2)
        out.add_chat_template(TEMPLATE)
        for key, value in self.extra.items():
            add = {bool: out.add_bool, int: out.add_uint32, str: out.add_string, float: out.add_float32}[type(value)]
            add(key, value)

    def _add(self, out: Any, name: str, array: np.ndarray[Any, Any], values: torch.Tensor) -> None:
        """Adds one tensor, and puts what the file holds of it into the reference."""
        heads = {"attn_q": 4, "attn_k": 2}.get(name.split(".")[-2] if "." in name else "", 0)
        turn = self.arch == "llama" and heads and name not in self.tensors
        stored = _interleaved(array, heads) if turn else array
        kind = gguf.GGMLQuantizationType[self.kind if array.ndim == 2 else "F32"]
        data = gguf.quants.quantize(np.ascontiguousarray(stored), kind)
        out.add_tensor(name, data, raw_dtype=kind)
        held = gguf.quants.dequantize(data, kind).reshape(stored.shape)
        if held.shape == tuple(values.shape):
            back = _interleaved(held, heads, undo=True) if turn else held
            values.data = torch.from_numpy(np.array(back, dtype=np.float32))


def gguf_name(name: str) -> str:
    """GGUF's name of a transformers parameter."""
    stem, end = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[inner]}.{end}"
    return f"{_NAMES[stem]}.{end}"


def _interleaved(array: np.ndarray[Any, Any], heads: int, undo: bool = False) -> np.ndarray[Any, Any]:
    """llama.cpp's row order of queries and keys, element by element: row j of the first half of a head goes to 2j, of the
    second half to 2j + 1."""
    rows = array.shape[0]
    width = rows // heads
    order = [h * width + half * (width // 2) + j for h in range(heads) for j in range(width // 2) for half in (0, 1)]
    result = np.empty_like(array)
    if undo:
        result[order] = array
        return result
    return np.ascontiguousarray(array[order])
