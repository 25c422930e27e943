"""GGUF files: what is read equals what was written; what cannot be read is refused with a reason."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from outrider.errors import BadWeights, OutriderError, UnsupportedModel
from outrider.models.gguf_convert import convert
from outrider.models.gguf_file import dequantised, read_header
from tests.models.tiny_gguf import Tiny

IDS = torch.tensor([[1, 70, 71, 99, 5, 5, 263, 8]])


def run(path: Path) -> torch.Tensor:
    """Logits of the model that the file holds."""
    got = convert(read_header(path))
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(got.config)]
    model = kind.from_pretrained(None, config=got.config, state_dict=got.state, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(
    "tiny",
    [
        Tiny(),
        Tiny(tied=False),
        Tiny(bias=True),
        Tiny(kind="F16"),
        Tiny(kind="Q4_1"),
        Tiny(kind="Q8_0"),
        Tiny(kind="Q5_0"),
        Tiny(arch="qwen2"),
        Tiny(arch="qwen3", tied=False),
    ],
    ids=lambda t: f"{t.arch}-{t.kind}-{'tied' if t.tied else 'untied'}{'-bias' if t.bias else ''}",
)
def test_logits_of_the_file_are_those_of_the_model_it_was_made_from(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "m.gguf")
    with torch.no_grad():
        assert torch.equal(run(tmp_path / "m.gguf"), model(IDS).logits)


def test_query_rows_left_in_the_order_of_the_file_would_be_noticed(tmp_path: Path) -> None:
    model = Tiny().write(tmp_path / "m.gguf")
    header = read_header(tmp_path / "m.gguf")
    raw = torch.from_numpy(dequantised(header.path, header.tensors["blk.0.attn_q.weight"]))
    wanted = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert not torch.equal(raw, wanted)
    assert torch.equal(convert(header).state["model.layers.0.self_attn.q_proj.weight"], wanted)


@pytest.mark.parametrize(
    ("kind", "scales"), [("Q4_K", [0, 2]), ("Q6_K", [208]), ("Q5_K", [0, 2]), ("Q2_K", [80, 82]), ("Q3_K", [108])]
)
def test_k_quants_of_random_blocks(kind: str, scales: list[int], tmp_path: Path) -> None:
    quant = gguf.GGMLQuantizationType[kind]
    width = gguf.GGML_QUANT_SIZES[quant][1]
    blocks = np.random.default_rng(3).integers(0, 256, (512, width), dtype=np.uint8)
    for at in scales:  # the block's fp16 scales: small and finite
        blocks[:, at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    name = "blk.1.ffn_up.weight"
    Tiny(hidden=256, raw={name: (blocks, kind)}).write(tmp_path / "m.gguf")
    got = convert(read_header(tmp_path / "m.gguf")).state["model.layers.1.mlp.up_proj.weight"]
    assert got.shape == (512, 256)
    assert got.std() > 0
    assert torch.equal(got, torch.from_numpy(gguf.quants.dequantize(blocks, quant)))


def test_one_q4_k_block_by_hand() -> None:
    """The first 32 values of a Q4_K block are d * scale0 * low nibble - dmin * min0."""
    block = np.zeros(144, np.uint8)
    block[0:2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    block[2:4] = np.frombuffer(np.float16(0.25).tobytes(), np.uint8)
    block[4], block[8] = 3, 2
    block[16:48] = np.arange(32) % 16
    values = gguf.quants.dequantize(block[None], gguf.GGMLQuantizationType.Q4_K)[0]
    assert values[:32].tolist() == [0.5 * 3 * (i % 16) - 0.25 * 2 for i in range(32)]


def test_truncation_anywhere_is_named(tmp_path: Path) -> None:
    path, cut = tmp_path / "m.gguf", tmp_path / "cut.gguf"
    Tiny().write(path)
    data = path.read_bytes()
    end = max(t.offset + t.size for t in read_header(path).tensors.values())
    for size in [0, 3, 4, 7, 8, 20, 24, 25, *range(26, end, end // 60), end - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(BadWeights, match=r"GGUF|truncated") as caught:
            read_header(cut)
        assert str(cut) in str(caught.value)
    assert f"{end:,}" in str(caught.value)
    assert f"{end - 1:,}" in str(caught.value)
    cut.write_bytes(data[:end])
    read_header(cut)


def test_damaged_headers_never_end_in_another_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    Tiny().write(path)
    data = path.read_bytes()
    start = min(t.offset for t in read_header(path).tensors.values())
    dice, refused = random.Random(5), 0
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(dice.choice([1, 1, 4])):
            at = dice.choice([dice.randrange(4, 300), dice.randrange(4, start)])
            damaged[at] = dice.randrange(256)
        path.write_bytes(damaged)
        try:
            header = read_header(path)
            if header.meta.get("llama.block_count") == 2:
                convert(header)
        except OutriderError:
            refused += 1
    assert refused > 30


def test_wrong_magic_version_and_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    Tiny().write(path)
    data = bytearray(path.read_bytes())
    for at, value, error, words in [
        (0, b"GGML", BadWeights, "not a GGUF file"),
        (4, b"\x01\0\0\0", UnsupportedModel, "version 1"),
        (4, b"\0\0\0\x03", UnsupportedModel, "big-endian"),
    ]:
        path.write_bytes(data[:at] + value + data[at + 4 :])
        with pytest.raises(error, match=words):
            read_header(path)


@pytest.mark.parametrize(
    ("tiny", "error", "words"),
    [
        (Tiny(tensors={"blk.0.strange.weight": np.zeros((2, 2), np.float32)}), UnsupportedModel, "blk.0.strange.weight"),
        (Tiny(tensors={"blk.2.ffn_up.weight": np.zeros((64, 32), np.float32)}), UnsupportedModel, "blk.2.ffn_up.weight"),
        (Tiny(drop=("blk.1.ffn_up.weight",)), BadWeights, "lacks 1 tensors.*layers.1.mlp.up_proj"),
        (Tiny(tensors={"blk.0.ffn_up.weight": np.ones((64, 16), np.float32)}), BadWeights, r"ffn_up.weight has shape \[64, 16\]"),
        (Tiny(tensors={"blk.0.ffn_up.weight": np.full((64, 32), np.nan, np.float32)}), BadWeights, "0.ffn_up.weight holds NaN"),
        (Tiny(extra={"llama.expert_count": 8}), UnsupportedModel, "expert_count"),
        (Tiny(extra={"llama.attention.sliding_window": 64}), UnsupportedModel, "sliding_window"),
        (Tiny(extra={"llama.rope.scaling.type": "yarn"}), UnsupportedModel, "yarn"),
        (Tiny(extra={"llama.rope.dimension_count": 4, "llama.attention.key_length": 8}), UnsupportedModel, "4 of 8"),
        (Tiny(extra={"split.count": 3}), UnsupportedModel, "one of 3 parts"),
        (Tiny(tensors={"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)}), UnsupportedModel, "RoPE factors"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_exact_is_refused(tiny: Tiny, error: type[Exception], words: str, tmp_path: Path) -> None:
    tiny.write(tmp_path / "m.gguf")
    with pytest.raises(error, match=words):
        convert(read_header(tmp_path / "m.gguf"))


def test_unknown_architecture_and_quant_types(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    out = gguf.GGUFWriter(path, "mamba")
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    with pytest.raises(UnsupportedModel, match="'mamba'; llama, qwen2, qwen3"):
        convert(read_header(path))
    for kind in ("IQ2_XXS", "TQ1_0"):
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert block == 256
        Tiny(hidden=256, raw={"blk.0.ffn_up.weight": (np.zeros((512, size), np.uint8), kind)}).write(path)
        with pytest.raises(UnsupportedModel, match=f"blk.0.ffn_up.weight is {kind}.*Q4_1"):
            read_header(path)


def test_linear_and_llama3_rope(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    Tiny(extra={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}).write(path)
    config: Any = convert(read_header(path)).config
    assert config.rope_parameters == {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}

    base, factors = 500_000.0, []
    frequencies = [base ** (-2 * i / 32) for i in range(16)]
    for frequency in frequencies:  # llama.cpp's own branches
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / 32 + smooth))
    assert any(1 < f < 32 for f in factors)
    stored = np.array(factors, np.float32)
    Tiny(hidden=128, extra={"llama.rope.freq_base": base}, tensors={"rope_freqs.weight": stored}).write(path)
    config = convert(read_header(path)).config
    rotary = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).model.rotary_emb  # type: ignore[attr-defined]
    wanted = torch.tensor(frequencies) / torch.from_numpy(stored)
    torch.testing.assert_close(rotary.inv_freq, wanted.float(), rtol=1e-5, atol=0)
