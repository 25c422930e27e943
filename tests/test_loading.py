"""Memory: what a model takes, told from its files; how the KV pool is sized; who is refused, and with what numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider import LLM, loading, registry
from outrider.cache import PagedCache
from outrider.drafters.draft_model import DraftModel
from outrider.errors import BadInput, OutOfMemory
from outrider.models import footprint as footprints
from outrider.models import weights
from outrider.models.footprint import footprint
from outrider.protocols import Drafter, KVNeed, Needs

from . import tiny
from .models.tiny_gguf import Tiny

MIB = 2**20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A GGUF file, and the directory that it is dequantised into."""
    folder = tmp_path_factory.mktemp("models")
    Tiny().write(folder / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
        weights.load(weights.resolve(folder / "tiny.gguf"))
        [entry] = weights.entries()
        yield {"gguf": str(folder / "tiny.gguf"), "directory": str(entry.path)}


@pytest.mark.parametrize("kind", ["gguf", "directory"])
def test_a_footprint_is_what_the_loaded_model_has(kind: str, models: dict[str, str]) -> None:
    told = footprint(weights.resolve(models[kind]))
    loaded = weights.load(weights.resolve(models[kind]))
    assert told.parameters == sum(p.numel() for p in loaded.model.parameters())
    decoder = loading.Decoder(loaded.model, "tiny")
    assert told.kv == 2 * sum(h * d for h, d in decoder.layers) and told.layers == decoder.num_layers
    assert told.bytes(torch.bfloat16) == 2 * told.parameters


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_footprints_of_families(family: str, tmp_path: Path) -> None:
    model = tiny.model(family)
    model.save_pretrained(tmp_path)
    told = footprint(weights.resolve(tmp_path))
    layers = tiny.decoder(family).layers
    assert told.parameters == sum(p.numel() for p in model.parameters())
    assert told.kv == 2 * sum(h * d for h, d in layers)


def test_weights_that_cannot_fit_are_refused_unread(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("loaded all the same")

    monkeypatch.setattr(weights, "load", never)
    monkeypatch.setattr(footprints, "free_memory", lambda device: 1000)
    count = footprint(weights.resolve(models["gguf"])).parameters
    with pytest.raises(OutOfMemory, match=rf"{count:,} numbers of 8 bytes\), and 0.00 GiB are free on cpu; use a smaller model"):
        LLM(models["gguf"], dtype="float64")
    size = 8 * count
    monkeypatch.setattr(footprints, "free_memory", lambda device: size + 100)
    with pytest.raises(OutOfMemory, match=r"its drafter 0\.00 GiB"):
        LLM(models["gguf"], dtype="float64", draft=f"draft_model:path={models['gguf']}")
    with pytest.raises(AssertionError, match="loaded all the same"):
        LLM(models["gguf"], dtype="float64")


class Plain(Drafter):
    name, depth, nodes = "plain", 4, 4

    def propose(self, batch: Any, budget: Any) -> Any: ...


class Owner(Plain):
    needs = Needs(kv=KVNeed(2, 3, 4))


class Heavy(Plain):
    def memory(self, dtype: torch.dtype) -> tuple[int, int]:
        return 100 * MIB, 1000 * dtype.itemsize


def cache_for(drafter: Drafter, free: int, patch: pytest.MonkeyPatch, kind: str = "cpu", **options: Any) -> int:
    """Tokens of the pool that would be made for a model of 1,000 bytes a token."""
    made: list[int] = []
    patch.setattr(loading, "free_memory", lambda device: free)
    patch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * 2**30))
    patch.setattr(loading, "PagedCache", lambda layers, blocks, block, dtype, device: made.append((blocks - 1) * block))
    decoder: Any = SimpleNamespace(
        layers=[(5, 10), (5, 15)], dtype=torch.float32, device=SimpleNamespace(type=kind), name="model", max_len=4096
    )
    setup = loading.Setup("m", "auto", "auto", None, options.get("kv_tokens"), "paged", False)
    loading.make_cache(setup, decoder, 4096, drafter)
    return made[0]


def test_the_pool_is_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_for(Plain(), 40 * 10**6, monkeypatch) == math.ceil(10_000 / 64) * 64
    assert cache_for(Plain(), 10**12, monkeypatch) == 65536, "no more than anybody needs"


def test_a_gpus_pool_leaves_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 3 * 2**30
    tokens = int((free - 1536 * MIB) * 0.9) // 1000
    assert cache_for(Plain(), free, monkeypatch, "cuda") == math.ceil(tokens / 64) * 64
    assert cache_for(Plain(), 10**13, monkeypatch, "cuda") == 2_000_000
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 10 * 2**30))
    assert loading.workspace(torch.device("cuda")) == int(0.06 * 10 * 2**30), "of a small card, a share"
    assert loading.workspace(torch.device("cpu")) == 0


def test_what_a_drafter_takes_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cache_for(Plain(), 40 * 10**6, monkeypatch)
    assert cache_for(Owner(), 40 * 10**6, monkeypatch) == math.ceil(10_000_000 // (1000 + 2 * 4 * 24) / 64) * 64 < plain
    heavy = cache_for(Heavy(), 40 * 10**6 + 100 * MIB, monkeypatch)
    assert heavy == math.ceil(10_000_000 // 5000 / 64) * 64
    with pytest.raises(OutOfMemory, match=r"after 100 MiB for the drafter; lower kv_tokens"):
        cache_for(Heavy(), 100 * MIB, monkeypatch)
    with pytest.raises(OutOfMemory, match=r"KV memory for 50000 tokens takes 48 MiB \(1 KiB each\), 38 MiB are free; lower"):
        cache_for(Plain(), 40 * 10**6, monkeypatch, kv_tokens=50_000)


# The draft's own pool


def test_a_draft_tells_what_it_takes(models: dict[str, str]) -> None:
    told = footprint(weights.resolve(models["gguf"]))
    spec = f"draft_model:path={models['gguf']}"
    assert registry.parse(spec).memory(torch.float32) == (told.bytes(torch.float32), 4 * told.kv)
    half = registry.parse(f"{spec},layers=1").memory(torch.float32)
    assert half == (told.bytes(torch.float32), 4 * told.kv // told.layers)
    fixed = registry.parse(f"{spec},tokens=640").memory(torch.bfloat16)
    assert fixed == (told.bytes(torch.bfloat16) + 640 * 2 * told.kv, 0)
    with pytest.raises(BadInput, match="tokens >= 64, or 0 for as many as the target's, got 63"):
        registry.parse(f"{spec},tokens=63")


@pytest.mark.parametrize(("asked", "free", "tokens"), [(0, 10**12, 4104), (320, 10**12, 320), (0, 2_048_000, 2000)])
def test_a_drafts_pool_is_as_large_as_the_targets(asked: int, free: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.drafters.draft_model.free_memory", lambda device: free)
    drafter: DraftModel = tiny.draft_model(2, depth=2, tokens=asked)
    world = tiny.World(tokens=4096)
    world.engine(drafter)
    each = 2 * 8 * 2 * 16  # keys and values, fp64, two layers of two heads of eight
    assert tokens <= max(int(free * 0.5) // each, asked) and isinstance(drafter.cache, PagedCache)
    assert drafter.cache.capacity == (tokens // 8 + 1) * 8
