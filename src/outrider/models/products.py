"""Matrix products whose rows do not care who shares the pass: packed fp32 weights on CPU, checked libraries on a GPU.

On CPU weights are packed once for oneDNN. For the few rows of a decoding pass this is two to three times as fast as
`torch.nn.Linear` (whose fp32 products run at half the memory bandwidth for one row and slower still for two or three), costs the
same for 1 to 16 rows, and, unlike it, gives a row the same bits whatever rows stand beside it. Where the library splits the inner
dimension for a single row (seen for K = 1,536), that row is computed twice in a pair, which it does not split; a check at load
finds out. oneDNN keeps a plan, workspace included, for every product of other sizes that it has met, and so does torch: 1,024
each by default, a gigabyte where many requests share a pass, since every number of rows is a size. `few_plans` bounds both.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .quantize import Quantized

Weight = Tensor | Quantized
PLANS = 160
"""Plans that are kept: those of all sizes that one request brings about. Making one anew takes less than a millisecond."""
_BOUNDS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def few_plans() -> None:
    """Bound the plans that are kept, unless the environment says how many. Read by the libraries once, at the first product."""
    for name in _BOUNDS:
        os.environ.setdefault(name, str(PLANS))


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

    @property
    def weight(self) -> Tensor:
        """The weights as they were, in a copy."""
        out: Tensor = self.packed.to_dense()
        return out

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


NARROW = 48
"""Rows up to which a row's bits must not depend on what shares its pass, whatever was asked for."""
TRIED = (*range(1, NARROW + 1), 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Row counts at which every weight shape is tried at load: all of those of narrow passes, and the sizes of captured ones."""
_TILED = 256
"""Rows at which our own product is tried, of its wide tiles."""
_SAME = 16
"""Rows of the passes whose bits are the standard."""
_MOST = 2**26
"""Products of more numbers than this are not tried: the vocabulary head never has so many rows."""
Key = tuple[int, int, torch.dtype]


@dataclass(frozen=True, slots=True)
class Trust:
    """For one weight shape: at which row counts the library's rows have the bits that they have among 16, and whether the rows of
    `kernels.product`, at whatever count, have them, too."""

    rows: frozenset[int]
    kernel: bool


class Products:
    """Matrix products on a GPU. The vendor's library is used where its rows are independent of each other; elsewhere, where that
    matters (always up to `NARROW` rows, everywhere under `invariant`), a product that never splits the inner dimension, or the
    library's at a row count that is known to be good.

    `trust` holds what was found out per weight shape and output type; `check` fills it. A shape that was never checked is
    trusted. Quantised weights have one kernel, in tiles of few rows or many; `tiles` holds, per shape and bits, whether both give
    the same bits."""

    def __init__(self, invariant: bool = False) -> None:
        self.invariant = invariant
        self.trust: dict[Key, Trust] = {}
        self.tiles: dict[tuple[int, int, int], bool] = {}

    def __call__(self, x: Tensor, weight: Weight, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """`x [R, K] @ weight [N, K].T + bias`, `[R, N]` in `dtype` (default: that of `x`)."""
        out = dtype or x.dtype
        if isinstance(weight, Quantized):
            return self._quantized(x, weight, bias, out)
        rows, trust = x.shape[0], self.trust.get((*weight.shape, out))
        if trust is None or rows in trust.rows or (rows > NARROW and not self.invariant):
            return _vendor(x, weight, bias, out)
        if trust.kernel:
            from ..kernels.product import linear

            return linear(x, weight, bias, out)
        size = min((r for r in trust.rows if r >= rows), default=max(trust.rows))
        padded = nn.functional.pad(x, (0, 0, 0, -rows % size))
        return torch.cat([_vendor(part, weight, bias, out) for part in torch.split(padded, size)])[:rows]

    @torch.inference_mode()
    def check(self, weights: Sequence[tuple[Weight, Tensor | None, torch.dtype]]) -> dict[Key, Trust]:
        """Try every distinct shape of (weight, bias, output type), and remember what may be trusted."""
        for weight, bias, dtype in weights:
            if isinstance(weight, Quantized):
                self.tiles[(*weight.shape, weight.bits)] = _tiles_agree(weight, dtype)
                continue
            key = (weight.shape[0], weight.shape[1], dtype)
            if key not in self.trust:
                self.trust[key] = _trust(weight, bias, dtype)
        return self.trust

    def _quantized(self, x: Tensor, weight: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        from ..kernels.quantized import FEW, MANY, linear

        few = x.shape[0] <= NARROW or (self.invariant and not self.tiles.get((*weight.shape, weight.bits), False))
        return linear(x, (weight.values, weight.scale), bias, dtype, FEW if few else MANY)


def _tiles_agree(weight: Quantized, dtype: torch.dtype) -> bool:
    """Whether the product of many rows gives them the bits that a few rows have."""
    from ..kernels.quantized import FEW, MANY, linear

    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(256, weight.shape[1], generator=generator, device=weight.device).to(dtype)
    few, many = (linear(x, (weight.values, weight.scale), None, dtype, tile) for tile in (FEW, MANY))
    return torch.equal(few, many)


def _vendor(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if dtype is x.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    out: Tensor = torch.mm(x, weight.t(), out_dtype=dtype)
    return out if bias is None else out + bias.to(dtype)


def _trust(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Trust:
    """Compare rows of all counts with the same rows among 16."""
    generator = torch.Generator(weight.device).manual_seed(0)
    counts = [rows for rows in TRIED if rows * weight.shape[0] <= _MOST or rows <= NARROW]
    x = torch.randn(max(counts), weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    right = torch.cat([_vendor(part, weight, bias, dtype) for part in torch.split(x, _SAME)])
    same = torch.stack([_agree(x, rows, right, (weight, bias, dtype)) for rows in counts]).tolist()
    good = frozenset(rows for rows, fine in zip(counts, same, strict=True) if fine) | {_SAME}
    return Trust(good, weight.device.type == "cuda" and _kernel_agrees(x, right, (weight, bias, dtype)))


def _agree(x: Tensor, rows: int, right: Tensor, how: tuple[Tensor, Tensor | None, torch.dtype]) -> Tensor:
    """Whether rows come out as in `right` among so many, all of them: the first ones, and as many others if there are."""
    starts = (0, rows) if 2 * rows <= len(x) else (0,)
    return torch.stack([(_vendor(x[s : s + rows], *how) == right[s : s + rows]).all() for s in starts]).all()


def _kernel_agrees(x: Tensor, right: Tensor, how: tuple[Tensor, Tensor | None, torch.dtype]) -> bool:
    from ..kernels.product import linear

    return all(torch.equal(linear(x[:rows], *how), right[:rows]) for rows in (1, _SAME, NARROW, _TILED))
