"""Halves of layers left out, in every family, against transformers' own model whose halves give zero."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.errors import UnsupportedModel
from outrider.models.layout import Layout
from outrider.models.parts import Cut, parts_of
from outrider.types import Batch, Part, Proposal

from .. import tiny
from .test_hf import FAMILIES, TEXT, make, ours

CUTS = {
    "attention": [Part(0, attention=False), Part(1), Part(2, attention=False)],
    "mlp": [Part(0), Part(1, mlp=False), Part(2, mlp=False)],
    "both": [Part(0, mlp=False), Part(1, attention=False, mlp=False), Part(2, attention=False)],
}


def silenced(kind: str, parts: list[Part]) -> nn.Module:
    """Transformers' model, in which the halves are computed, and their results replaced by zeros."""
    model = make(kind)
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 3)
    for part in parts:
        children = [(n, m) for n, m in layers[part.layer].named_children() if "norm" not in n]
        halves = {"attn": next(m for n, m in children if "att" in n), "mlp": next(m for n, m in children if "mlp" in n)}
        for name, kept in (("attn", part.attention), ("mlp", part.mlp)):
            if not kept:
                halves[name].register_forward_hook(zeros)
    return model


def zeros(module: nn.Module, args: object, out: torch.Tensor | tuple[torch.Tensor, ...]) -> object:
    return torch.zeros_like(out) if isinstance(out, torch.Tensor) else (torch.zeros_like(out[0]), *out[1:])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_halves_left_out(kind: str, cut: str) -> None:
    world, request = tiny.World(own=ours(kind)), tiny.request(TEXT)
    world.cache.reserve(request, len(TEXT))
    layout = Layout.build(Batch((request,), (len(TEXT),), (True,), (0,)), Proposal.empty(1), world.cache)
    whole = world.decoder.forward(layout, world.cache).logits
    got = world.decoder.forward(layout, world.cache, layers=CUTS[cut]).logits
    if cut == "both":  # a layer without either half is left out, norms and all
        [without] = [p for p in CUTS[cut] if not (p.attention or p.mlp)]
        same = [p for p in CUTS[cut] if p is not without]
        assert torch.equal(got, world.decoder.forward(layout, world.cache, layers=same).logits)
    want = silenced(kind, CUTS[cut])(input_ids=torch.tensor([TEXT])).logits[0, -1]
    assert (got[0] - want).abs().max() < 1e-9
    assert (got - whole).abs().max() > 1e-6
    assert torch.equal(world.decoder.forward(layout, world.cache).logits, whole), "the decoder itself stays whole"


def test_parts_of() -> None:
    assert parts_of([0, Part(1, mlp=False), Part(2, False, False)], 3) == (Part(0), Part(1, mlp=False))
    for wrong in ([1, 0], [Part(1), 1], [3], [-1]):
        with pytest.raises(ValueError, match="distinct and in order, below 3"):
            parts_of(wrong, 3)


def test_layers_whose_halves_are_unknown() -> None:
    cut = Cut(nn.ModuleList([nn.Linear(2, 2)]))
    assert cut((Part(0),))[0] is cut.blocks[0]
    with pytest.raises(UnsupportedModel, match="no attention was found in Linear"):
        cut((Part(0, attention=False),))
    with pytest.raises(UnsupportedModel, match="no MLP was found in Linear"):
        cut((Part(0, mlp=False),))


def test_a_search_does_not_fill_the_memory() -> None:
    cut = Cut(ours("Llama").blocks)
    for i in range(100):
        cut(tuple(Part(j, attention=bool(i >> j & 1), mlp=True) for j in range(3)))
        cut((Part(i % 3, mlp=False), *()))
    assert len(cut._made) <= 32
