"""From what a user names to a target that runs: device, dtype, weights, KV memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from .cache.paged import PagedCache
from .cache.slots import SlotCache
from .draws import Drawer
from .errors import BadInput, DrafterMismatch, OutOfMemory
from .kernels import BLOCK
from .models import weights
from .models.fast import FastTarget
from .models.footprint import Form, check_room, footprint
from .models.footprint import free_memory as free_memory
from .models.hf import Decoder, resolved
from .models.native import Native, fitting, supports
from .models.quantize import check_scheme
from .models.rows import anchors
from .models.target import ModelTarget, View
from .protocols import Cache, Drafter, KVNeed, Start
from .sampling import TextSampler
from .scheduler import CHUNK, Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .models.tokenizer import TextTokenizer

CACHES = ("paged", "slots")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
KV_SHARE = {"cpu": 0.25, "cuda": 0.9}
"""Share of what is free, beside weights, drafter and workspace, that the KV pool may take."""
_KV_MOST = {"cpu": 65536, "cuda": 2_000_000}
"""Tokens of KV memory that are never exceeded unless asked for."""
_WORKSPACE = 1536 * 2**20
_WORKSPACE_SHARE = 0.06
"""A GPU's memory that is left to activations and captured rounds: the smaller of the two."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What the user asked for; see `LLM`."""

    model: str
    device: str
    dtype: str
    max_model_len: int | None
    kv_tokens: int | None
    cache: str
    invariant: bool
    prefix_cache: bool = True
    quantize: str = "none"


@dataclass(frozen=True, slots=True)
class Parts:
    """What was put together."""

    target: ModelTarget
    tokenizer: TextTokenizer
    name: str


def assemble(setup: Setup, drafter: Drafter, progress: Callable[[str], None]) -> Parts:
    """Load the model, and size its KV memory beside what the drafter needs."""
    check(setup)
    device = pick_device(setup.device)
    dtype = pick_dtype(setup.dtype, device)
    check_scheme(setup.quantize, dtype)
    source = weights.fetch(weights.resolve(setup.model), progress)
    check_room(source.name, footprint(source), Form(dtype, setup.quantize), device, drafter.memory(dtype)[0])
    loaded = weights.load(source, dtype=dtype, device=str(device), progress=progress, quantize=setup.quantize)
    decoder = make_decoder(loaded.model, loaded.name, setup.invariant, progress)
    max_len = pick_length(setup.max_model_len, decoder)
    cache = make_cache(setup, decoder, max_len, drafter)
    sampler = TextSampler(decoder.vocab_size, loaded.tokenizer.vocab_size)
    target = make_target(decoder, cache, sampler, max_len, setup.invariant)
    target.fingerprint = loaded.fingerprint.partition(" ")[0]  # of the weights before they were rounded: the same drafters fit
    return Parts(target, loaded.tokenizer, loaded.name)


def make_decoder(model: PreTrainedModel, name: str, invariant: bool, progress: Callable[[str], None]) -> Decoder:
    """The fused decoder where it knows the model, else transformers' own layers."""
    if supports(model):
        progress("checking matrix products and building kernels")
    decoder = fitting(model, name)
    if isinstance(decoder, Native):
        decoder.products.invariant = invariant
    return decoder


def make_target(decoder: Decoder, cache: Cache, sampler: TextSampler, max_len: int, invariant: bool) -> ModelTarget:
    """Rounds as captured graphs where the card and the cache allow it, else pass by pass."""
    if anchors(cache):
        return FastTarget(decoder, cache, sampler, max_len)
    return ModelTarget(decoder, cache, sampler, max_len, invariant)


def check(setup: Setup) -> None:
    """Raise `BadInput` for what cannot be right whatever the model, before it is loaded."""
    if setup.cache not in CACHES:
        raise BadInput(f"unknown cache {setup.cache!r}; use {' or '.join(CACHES)}")
    if setup.kv_tokens is not None and setup.kv_tokens < 2 * BLOCK:
        raise BadInput(f"kv_tokens must be at least {2 * BLOCK}, got {setup.kv_tokens}; leave it unset to have it sized")


def start_for(target: ModelTarget, drafter: Drafter, name: str, tokenizer: TextTokenizer | None) -> Start:
    """What `drafter` is given, with just what it declared it needs."""
    features = tuple(resolved(name, target.decoder.num_layers) for name in drafter.needs.features)
    needs = replace(drafter.needs, features=features)
    _check_features(features, target, drafter.name)
    target.needs = needs
    sampler = Drawer(target.sampler)
    return Start(
        name,
        target.vocab_size,
        target.max_len,
        target.device,
        target.decoder.dtype,
        sampler,
        None if tokenizer is None else tokenizer.vocab,
        View(target, sampler) if needs.target else None,
        target.cache.attach(needs.kv) if needs.kv is not None else None,
        target.cache.capacity,
        target.cache.block_size,
        getattr(target.sampler, "usable", 0),
        tokenizer,
        target.fingerprint,
    )


def _check_features(names: tuple[str, ...], target: ModelTarget, drafter: str) -> None:
    layers = {str(i) for i in range(target.decoder.num_layers)} | {"last"}
    for name in names:
        kind, _, parts = name.partition(":")
        if kind != "hidden" or not set(parts.split(",")) <= layers:
            raise DrafterMismatch(
                f"drafter {drafter!r} asks for feature {name!r}; this target has hidden:last and hidden:i for its "
                f"{target.decoder.num_layers} layers (several as in hidden:0,2)"
            )


def pick_device(name: str) -> torch.device:
    """A device that exists. `BadInput` if it does not."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise BadInput(f"device {name!r} cannot be used here ({str(error).splitlines()[0]}); try --device cpu") from error
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The weights' dtype: bfloat16 on a GPU, float32 on CPU, unless asked otherwise."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise BadInput(f"unknown dtype {name!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def pick_length(asked: int | None, decoder: Decoder) -> int:
    """Longest sequence to support: the model's own limit, or less if asked."""
    if asked is None:
        return decoder.max_len
    if not 2 <= asked <= decoder.max_len:
        raise BadInput(
            f"max_model_len must be between 2 and {decoder.max_len} (the context {decoder.name} was trained for), got {asked}"
        )
    return asked


def make_scheduler(target: ModelTarget, drafter: Drafter, prefix_cache: bool) -> Scheduler:
    """A queue for `target`. Beginnings of prompts are computed once, unless the drafter wants to see every prompt row."""
    grain = BLOCK if target.anchored else CHUNK
    reuse = prefix_cache and not drafter.needs.every
    return Scheduler(target.cache, drafter.nodes, separate=target.anchored, grain=grain if reuse else 0)


def make_cache(setup: Setup, decoder: Decoder, max_len: int, drafter: Drafter) -> Cache:
    """KV memory: as much as asked, else one share of what is free beside the drafter's. `OutOfMemory` shows the arithmetic."""
    own, kind = _token_bytes(decoder), decoder.device.type
    once, each = drafter.memory(decoder.dtype)
    each += _attached(drafter.needs.kv, decoder)
    free = free_memory(decoder.device) - once
    fit = int((free - workspace(decoder.device)) * KV_SHARE.get(kind, 0.25)) // (own + each)
    most = _KV_MOST.get(kind, _KV_MOST["cpu"])
    tokens = setup.kv_tokens or min(fit, max(most, max_len + drafter.nodes + BLOCK))
    if tokens * (own + each) > free or tokens < 2 * BLOCK:
        taken = f", after {once / 2**20:.0f} MiB for the drafter" if once else ""
        raise OutOfMemory(
            f"KV memory for {tokens} tokens takes {tokens * (own + each) / 2**20:.0f} MiB ({(own + each) / 1024:.0f} KiB each), "
            f"{free / 2**20:.0f} MiB are free{taken}; lower kv_tokens or max_model_len, or use a smaller model or drafter"
        )
    if setup.cache == "paged":
        return PagedCache(decoder.layers, -(-tokens // BLOCK) + 1, BLOCK, decoder.dtype, decoder.device)
    length = min(max_len + drafter.nodes, tokens)
    return SlotCache(decoder.layers, max(1, tokens // length), length, decoder.dtype, decoder.device)


def workspace(device: torch.device) -> int:
    """Bytes that the KV pool leaves alone."""
    return aside(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else 0


def aside(total: int) -> int:
    """The same on a card of `total` bytes."""
    return min(int(_WORKSPACE_SHARE * total), _WORKSPACE)


def _token_bytes(decoder: Decoder) -> int:
    return 2 * decoder.dtype.itemsize * sum(heads * dim for heads, dim in decoder.layers)


def _attached(need: KVNeed | None, decoder: Decoder) -> int:
    return 0 if need is None else 2 * decoder.dtype.itemsize * need.layers * need.heads * need.dim
