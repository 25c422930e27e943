"""Matrix products on CPU: fp32 weights packed once for oneDNN.

For the few rows of a decoding pass this is two to three times as fast as `torch.nn.Linear` (whose fp32 products run at half
the memory bandwidth for one row and slower still for two or three), costs the same for 1 to 16 rows, and, unlike it, gives a row
the same bits whatever rows stand beside it. Where the library splits the inner dimension for a single row (seen for
K = 1,536), that row is computed twice in a pair, which it does not split; a check at load finds out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` for fp32 on CPU, `x [..., in]` to `[..., out]`, rows independent of each other to the bit."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.paired = self._splits_single_row()

    def _splits_single_row(self) -> bool:
        generator = torch.Generator().manual_seed(0)
        pair = torch.randn(2, self.in_features, generator=generator)
        both = _product(pair, self.packed, self.bias)
        alone = torch.cat([_product(row[None], self.packed, self.bias) for row in pair])
        return not torch.equal(both, alone)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if rows.shape[0] == 1 and self.paired:
            out = _product(rows.expand(2, -1).contiguous(), self.packed, self.bias)[:1]
        else:
            out = _product(rows, self.packed, self.bias)
        return out.view(*x.shape[:-1], self.out_features)


def packable(model: nn.Module) -> str | None:
    """Why `pack` would leave this model alone, or None if it can be packed."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch was built without oneDNN"
    weights = next(model.parameters())
    if weights.device.type != "cpu" or weights.dtype != torch.float32:
        return f"weights are {weights.dtype} on {weights.device.type}; only float32 on cpu is packed"
    return None


@torch.inference_mode()
def pack(model: nn.Module) -> int:
    """Replace every `nn.Linear` of an fp32 model on CPU by a `PackedLinear`, freeing the unpacked weights that nothing else
    uses. Returns how many were replaced (0 if `packable` gives a reason)."""
    if packable(model) is not None:
        return 0
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child))
                count += 1
    return count
