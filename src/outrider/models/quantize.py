"""Weight-only quantisation: whole numbers with fp32 scales in place of the weights of a model's linear layers.

torchao rounds the weights; the products are ours, since a row's bits must not depend on what shares its pass. int8 has one
symmetric scale per output, int4 one per output and group of 32 to 128 inputs. Activations keep their type, and the vocabulary
head, embeddings and norms keep theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadInput

SCHEMES = ("none", "int8", "int4")
INSTALL = "pip install outrider[quantize]"
_GROUPS = (128, 64, 32)
_TILE = 2**20
"""Weights that are turned back to fp32 at a time on CPU: 4 MiB, which stay in its cache."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight `[N, K]`. int8: `values` int8 `[N, K]`, `scale` fp32 `[N, 1]`. int4: `values` uint8 `[N, K / 2]`, `scale` fp32
    `[N, K / group]`; the low halves of a group's bytes are its first half of inputs, the high halves its second, eight added."""

    values: Tensor
    scale: Tensor

    @property
    def bits(self) -> int:
        """8 or 4."""
        return 4 if self.values.dtype is torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.values.shape[0], self.values.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // self.scale.shape[1]

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.values.device

    def __getitem__(self, rows: slice) -> Quantized:
        """Some outputs, as a view."""
        return Quantized(self.values[rows], self.scale[rows])

    def whole_numbers(self) -> Tensor:
        """fp32 `[N, K]`, before scaling."""
        if self.bits == 8:
            return self.values.float()
        bytes_ = self.values.view(self.shape[0], -1, self.group // 2)
        both = torch.empty(*bytes_.shape[:2], 2, bytes_.shape[2], device=self.device)
        both[:, :, 0], both[:, :, 1] = bytes_ & 15, bytes_ >> 4
        return both.sub_(8).view(self.shape)

    def dequantized(self) -> Tensor:
        """fp32 `[N, K]`."""
        whole = self.whole_numbers()
        whole.view(*self.scale.shape, -1).mul_(self.scale[..., None])
        return whole


def joined(weights: Sequence[Quantized]) -> Quantized:
    """Weights of the same inputs, one below the other."""
    return Quantized(torch.cat([w.values for w in weights]), torch.cat([w.scale for w in weights]))


class QuantizedLinear(nn.Module):
    """`x @ weight.T + bias`, `x [..., K]` to `[..., N]` in the type of `x`, summed in fp32, rows independent to the bit."""

    values: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Quantized, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("values", weight.values)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("bias", bias)

    @property
    def weight(self) -> Quantized:
        """The weight as it is kept; it may be set to one of the same numbers that lies elsewhere."""
        return Quantized(self.values, self.scale)

    @weight.setter
    def weight(self, weight: Quantized) -> None:
        self.values, self.scale = weight.values, weight.scale

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if x.device.type == "cuda":
            from ..kernels.quantized import linear

            out = linear(rows, (self.values, self.scale), self.bias)
        else:
            out = _on_cpu(rows, self.weight, self.bias)
        return out.view(*x.shape[:-1], self.out_features)


def check_scheme(scheme: str, dtype: torch.dtype) -> None:
    """Raise `BadInput` for an unknown scheme, a type that is not for it, or without torchao."""
    if scheme not in SCHEMES:
        raise BadInput(f"unknown quantize {scheme!r}; use {', '.join(SCHEMES)}")
    if scheme == "none":
        return
    if dtype is torch.float64:
        raise BadInput(f"quantize={scheme} sums in float32: use dtype float32, bfloat16 or float16, not float64")
    _torchao()


@torch.inference_mode()
def quantize(model: nn.Module, scheme: str, device: str | torch.device) -> int:
    """Replace every `nn.Linear` but the vocabulary head by a `QuantizedLinear` on `device`, one at a time. Returns how many were.
    Raises `BadInput` for a model without such layers or, under int4, with inputs that no group divides."""
    if scheme == "none":
        return 0
    head = getattr(model, "get_output_embeddings", lambda: None)()
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child is not head:
                bias = None if child.bias is None else child.bias.detach().to(device)
                setattr(module, name, QuantizedLinear(_rounded(child.weight.detach().to(device), scheme), bias))
                count += 1
    if not count:
        raise BadInput(f"quantize={scheme} found no linear layers in {type(model).__name__}; use quantize=none")
    return count


def layers_of(model: nn.Module) -> list[QuantizedLinear]:
    """The quantised layers of a model."""
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


def scheme_of(model: nn.Module) -> str:
    """How a model's weights were rounded."""
    return next((f"int{layer.weight.bits}" for layer in layers_of(model)), "none")


def group_of(inner: int, scheme: str) -> int:
    """Inputs that share a scale. Raises `BadInput` where int4 has no group that divides them."""
    if scheme == "int8":
        return inner
    fitting = [group for group in _GROUPS if inner % group == 0]
    if not fitting:
        raise BadInput(f"quantize=int4 needs layers whose inputs are a multiple of {_GROUPS[-1]}, not {inner}; use int8")
    return fitting[0]


def quantized_bytes(shape: tuple[int, int], scheme: str) -> int:
    """Bytes of a weight `(N, K)` under int8 or int4, scales included."""
    wide, inner = shape
    return wide * inner * (8 if scheme == "int8" else 4) // 8 + 4 * wide * (inner // group_of(inner, scheme))


def _rounded(weight: Tensor, scheme: str) -> Quantized:
    """A weight `[N, K]` as torchao rounds it: symmetric, each scale the largest magnitude over half the range."""
    wide, inner = weight.shape
    group = group_of(inner, scheme)
    library = _torchao()
    layer = nn.Linear(inner, wide, bias=False, device="meta")
    layer.weight = nn.Parameter(weight.float(), requires_grad=False)
    kind, grain = (torch.int8, library.PerAxis(0)) if scheme == "int8" else (vars(torch)["int4"], library.PerGroup(group))
    library.quantize_(layer, library.IntxWeightOnlyConfig(weight_dtype=kind, granularity=grain))
    found: Any = layer.weight
    values, scale = found.qdata.contiguous(), found.scale.float().reshape(wide, -1).contiguous()
    return Quantized(values if scheme == "int8" else _packed(values, group), scale)


def _packed(values: Tensor, group: int) -> Tensor:
    """int8 `[N, K]` of -8 to 7 as uint8 `[N, K / 2]`; see `Quantized`."""
    halves = (values + 8).to(torch.uint8).view(values.shape[0], -1, 2, group // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(values.shape[0], -1).contiguous()


def _torchao() -> Any:
    """torchao's quantisation. Raises `BadInput` where it is missing."""
    try:
        import torchao.quantization as library
    except ImportError as error:
        raise BadInput(f"quantize needs torchao, which cannot be imported ({error}); run: {INSTALL}") from error
    return library


def _on_cpu(x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
    """A tile of weights at a time, by oneDNN, which splits the inner dimension for a single row only: that one runs as a pair."""
    rows = x.float()
    if rows.shape[0] == 1:
        rows = rows.expand(2, -1)
    rows, (wide, inner) = rows.contiguous(), weight.shape
    step = max(16, _TILE // inner)
    out = torch.cat([_tile(rows, weight[start : start + step]) for start in range(0, wide, step)], dim=1)[: x.shape[0]]
    return (out if bias is None else out + bias.float()).to(x.dtype)


def _tile(rows: Tensor, weight: Quantized) -> Tensor:
    if weight.bits == 4:
        return _product(rows, weight.dequantized())
    return _product(rows, weight.whole_numbers()) * weight.scale[:, 0]


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return nn.functional.linear(rows, weight)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
    return out
