"""Packed products: a row has the same bits whatever stands beside it, and the right value."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.models.products import PackedLinear, pack, packable

SHAPES = [(576, 576), (576, 192), (576, 1536), (1536, 576), (64, 48), (33, 7), (1, 5), (5, 1), (2048, 64)]
WIDTHS = [*range(1, 20), 24, 31, 32, 33, 48, 63, 64]

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")


def linear(inner: int, outer: int, bias: bool = False, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inner, outer, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_rows_have_the_same_bits_at_every_width(shape: tuple[int, int], bias: bool) -> None:
    packed = PackedLinear(linear(*shape, bias))
    x = torch.randn(64, shape[0])
    alone = torch.cat([packed(x[i : i + 1]) for i in range(64)])
    for width in WIDTHS:
        assert torch.equal(packed(x[:width]), alone[:width]), width
        assert torch.equal(packed(x[64 - width :]), alone[64 - width :]), width


@torch.inference_mode()
def test_the_plain_product_would_fail() -> None:
    """Negative control: the bits of `nn.Linear` do depend on the width, for at least one of the shapes."""
    changed = 0
    for shape in SHAPES:
        plain, x = linear(*shape), torch.randn(64, shape[0])
        alone = torch.cat([plain(x[i : i + 1]) for i in range(64)])
        changed += any(not torch.equal(plain(x[:w]), alone[:w]) for w in WIDTHS)
    assert changed > 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_values(shape: tuple[int, int], bias: bool) -> None:
    plain = linear(*shape, bias)
    x = torch.randn(9, shape[0])
    exact = nn.functional.linear(x.double(), plain.weight.double(), None if plain.bias is None else plain.bias.double())
    error = (PackedLinear(plain)(x).double() - exact).abs().max()
    assert error < 2e-6 * shape[0] ** 0.5


@torch.inference_mode()
def test_shapes_and_strides_of_the_input() -> None:
    packed = PackedLinear(linear(1536, 24, True))
    x = torch.randn(3, 5, 1536)
    flat = packed(x.reshape(15, 1536))
    assert torch.equal(packed(x), flat.view(3, 5, 24))
    assert torch.equal(packed(x.transpose(0, 1)), flat.view(3, 5, 24).transpose(0, 1))
    wide = torch.randn(7, 3072)
    assert torch.equal(packed(wide[:, ::2]), packed(wide[:, ::2].contiguous()))
    assert torch.equal(packed(wide[:1, ::2])[0], packed(wide[:, ::2])[0]), "one strided row"
    assert torch.equal(packed(x[0, 0]), flat[0]) and packed(x[0, 0]).shape == (24,)
    assert packed(x[:0]).shape == (0, 5, 24)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 8), nn.ModuleList([nn.Linear(8, 8, bias=False)])).to(dtype)


@torch.inference_mode()
def test_pack_replaces_every_linear_of_an_fp32_model() -> None:
    made = model()
    before = made[1](torch.ones(2, 16))
    assert packable(made) is None and pack(made) == 2
    assert isinstance(made[1], PackedLinear) and isinstance(made[2][0], PackedLinear)
    assert torch.allclose(made[1](torch.ones(2, 16)), before, atol=1e-6)
    assert pack(made) == 0, "nothing is left to pack"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_alone(dtype: torch.dtype) -> None:
    made = model(dtype)
    assert str(dtype) in str(packable(made)) and pack(made) == 0 and type(made[1]) is nn.Linear


def test_subclasses_of_linear_are_left_alone() -> None:
    class Special(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    made = nn.Sequential(Special(4, 4), nn.Linear(4, 4))
    assert pack(made) == 1 and isinstance(made[0], Special)


@torch.inference_mode()
def test_tied_weights_stay_with_the_embedding() -> None:
    embedding, head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
    head.weight = embedding.weight
    made = nn.ModuleDict({"embedding": embedding, "head": head})
    pack(made)
    assert torch.allclose(made["head"](torch.eye(16)).T, embedding.weight, atol=1e-6)
