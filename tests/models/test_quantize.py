"""Quantised weights: how far they are from the layer's own, rows that do not care about the width, text on and off, refusals."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outrider import LLM, SamplingParams
from outrider.bench import tiny
from outrider.errors import BadInput, OutOfMemory
from outrider.models import footprint as footprints
from outrider.models import quantize as q
from outrider.models import weights
from outrider.models.footprint import footprint
from outrider.models.hf import Decoder
from outrider.registry import parse

pytest.importorskip("torchao")
SHAPES = [(576, 1536), (1536, 576), (64, 48), (4096, 300), (14336, 80)]
WIDTHS = [*range(1, 49), 64, 65, 200]
schemes = pytest.mark.parametrize("scheme", ["int8", "int4"])


def layer(inner: int, outer: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inner, outer, bias=bias).to(dtype).requires_grad_(False)


def quantised(plain: nn.Linear, scheme: str) -> q.QuantizedLinear:
    holder = nn.Sequential(plain)
    assert q.quantize(holder, scheme, "cpu") == 1
    return holder[0]  # type: ignore[return-value]


@schemes
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_off_by_half_a_step_at_most(scheme: str, shape: tuple[int, int]) -> None:
    plain = layer(*shape)
    kept = quantised(plain, scheme).weight
    assert kept.shape == (shape[1], shape[0]) and kept.bits == int(scheme[3:])
    off = (kept.dequantized() - plain.weight).abs().view(*kept.scale.shape, -1)
    assert (off <= kept.scale[..., None] * 0.5001).all()
    largest = plain.weight.abs().view(*kept.scale.shape, -1).amax(-1)
    torch.testing.assert_close(kept.scale, largest / (127.5 if scheme == "int8" else 7.5))
    assert sum(t.nbytes for t in (kept.values, kept.scale)) == q.quantized_bytes(kept.shape, scheme)


@schemes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_values(scheme: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    plain = layer(*shape, dtype=dtype)
    x, made = torch.randn(2, 5, shape[0], dtype=dtype), quantised(plain, scheme)
    exact = x.double() @ made.weight.dequantized().double().T + plain.bias.double()
    got = made(x)
    assert got.dtype is dtype and got.shape == exact.shape
    assert (got.double() - exact).norm() / exact.norm() < (2e-6 if dtype is torch.float32 else 4e-3)
    whole = plain(x).double()
    assert 1e-5 < (exact - whole).norm() / whole.norm() < (0.01 if scheme == "int8" else 0.15)


@schemes
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_rows_have_the_same_bits_at_every_width(scheme: str, shape: tuple[int, int]) -> None:
    made = quantised(layer(*shape), scheme)
    x = torch.randn(200, shape[0])
    alone = torch.cat([made(row[None]) for row in x])
    for width in WIDTHS:
        assert torch.equal(made(x[:width]), alone[:width]), width
        assert torch.equal(made(x[-width:]), alone[-width:]), width
    assert made(x[:0]).shape == (0, shape[1])


def test_joined_weights_are_those_of_the_parts() -> None:
    parts = [quantised(layer(64, n), scheme="int4") for n in (48, 16)]
    whole = q.joined([p.weight for p in parts])
    assert torch.equal(whole.dequantized(), torch.cat([p.weight.dequantized() for p in parts]))
    before = parts[1].weight.dequantized()
    parts[1].weight = whole[48:]
    assert torch.equal(parts[1].weight.dequantized(), before)
    assert parts[1].values.data_ptr() == whole.values[48:].data_ptr()


def small(scheme: str) -> Any:
    made = tiny.model(dtype=torch.float32, intermediate_size=64)
    q.quantize(made, scheme, "cpu")
    return made


@schemes
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("count", [1, 5])
def test_text_does_not_depend_on_guesses(scheme: str, temperature: float, count: int) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=3)
    texts = []
    for draft in ("none", "ngram", "self"):
        world = tiny.World(own=Decoder(small(scheme), "tiny"))
        requests = [tiny.request(p, params, seed=i, limit=200) for i, p in enumerate(tiny.prompts(count, 4))]
        texts.append(world.run(parse(draft), requests))
    assert texts[0] == texts[1] == texts[2]


def test_every_layer_but_the_head_is_quantised() -> None:
    made = small("int8")
    head = made.get_output_embeddings()
    assert type(head) is nn.Linear
    kinds = [type(m) for m in made.modules() if isinstance(m, nn.Linear | q.QuantizedLinear) and m is not head]
    assert kinds == [q.QuantizedLinear] * 21


@schemes
def test_from_a_directory(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.model(dtype=torch.float32, intermediate_size=64).save_pretrained(tmp_path)
    told = footprint(weights.resolve(tmp_path))
    made = small(scheme)
    held = [*made.parameters(), *(b for n, b in made.named_buffers() if "inv_freq" not in n)]
    assert told.bytes(torch.float32, scheme) == sum(t.nbytes for t in held)
    need = told.bytes(torch.float32, scheme)
    assert need < told.bytes(torch.float32)
    monkeypatch.setattr(footprints, "free_memory", lambda device: need - 1)
    with pytest.raises(OutOfMemory, match=f"of them as {scheme}"):
        footprints.check_room("tiny", told, footprints.Form(torch.float32, scheme), torch.device("cuda"))
    monkeypatch.setattr(footprints, "free_memory", lambda device: need)
    footprints.check_room("tiny", told, footprints.Form(torch.float32, scheme), torch.device("cuda"))
    with pytest.raises(OutOfMemory):
        footprints.check_room("tiny", told, footprints.Form(torch.float32, scheme), torch.device("cpu"))


@pytest.mark.slow
def test_the_embedded_model_under_int8() -> None:
    with closing(LLM(quantize="int8", draft="ngram", kv_tokens=2048)) as llm:
        prompts = ["One two three one two three one two", "The capital of France is"]
        both = [SamplingParams(max_tokens=24, temperature=t, seed=5) for t in (0.0, 1.0)]
        guessed = [[r.token_ids for r in llm.generate(prompts, params)] for params in both]
        assert "Paris" in llm.tokenizer.decode(guessed[0][1])
        llm.switch("none")
        assert [[r.token_ids for r in llm.generate(prompts, params)] for params in both] == guessed


# Refusals


def test_what_cannot_be_quantised() -> None:
    with pytest.raises(BadInput, match="unknown quantize 'int3'; use none, int8, int4"):
        LLM(quantize="int3")
    with pytest.raises(BadInput, match="use dtype float32, bfloat16 or float16, not float64"):
        LLM(quantize="int8", dtype="float64")
    with pytest.raises(BadInput, match="a multiple of 32, not 48; use int8"):
        q.quantize(nn.Sequential(layer(48, 32)), "int4", "cpu")
    with pytest.raises(BadInput, match="found no linear layers in Sequential; use quantize=none"):
        q.quantize(nn.Sequential(nn.Embedding(4, 4)), "int8", "cpu")


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(BadInput, match=r"needs torchao.*run: pip install outrider\[quantize\]"):
        LLM(quantize="int8")
    q.check_scheme("none", torch.float64)
