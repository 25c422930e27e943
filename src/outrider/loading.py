"""From what a user names to a target that runs: device, dtype, weights, KV memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .cache.paged import PagedCache
from .cache.slots import SlotCache
from .draws import Drawer
from .errors import BadInput, DrafterMismatch, OutOfMemory
from .models import weights
from .models.hf import Decoder
from .models.target import ModelTarget, View
from .protocols import Cache, Drafter, Start
from .sampling import TextSampler

if TYPE_CHECKING:
    from .models.tokenizer import TextTokenizer

BLOCK = 64
CACHES = ("paged", "slots")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_KV_SHARE = {"cpu": 0.25, "cuda": 0.8}
"""Share of free memory the KV pool may take."""
_KV_MOST = 65536
"""Tokens of KV memory that are never exceeded unless asked for."""


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


@dataclass(frozen=True, slots=True)
class Parts:
    """What was put together."""

    target: ModelTarget
    tokenizer: TextTokenizer
    name: str
    start: Start


def assemble(setup: Setup, drafter: Drafter, progress: Callable[[str], None]) -> Parts:
    """Load the model, size its KV memory, and prepare what the drafter needs."""
    check(setup)
    device = pick_device(setup.device)
    dtype = pick_dtype(setup.dtype, device)
    loaded = weights.load(weights.resolve(setup.model), dtype=dtype, device=str(device), progress=progress)
    decoder = Decoder(loaded.model, loaded.name)
    max_len = pick_length(setup.max_model_len, decoder)
    cache = make_cache(setup, decoder, max_len, drafter.nodes)
    sampler = TextSampler(decoder.vocab_size, loaded.tokenizer.vocab_size)
    target = ModelTarget(decoder, cache, sampler, max_len, setup.invariant)
    return Parts(target, loaded.tokenizer, loaded.name, start_for(target, drafter, loaded.name, loaded.tokenizer))


def check(setup: Setup) -> None:
    """Raise `BadInput` for what cannot be right whatever the model, before it is loaded."""
    if setup.cache not in CACHES:
        raise BadInput(f"unknown cache {setup.cache!r}; use {' or '.join(CACHES)}")
    if setup.kv_tokens is not None and setup.kv_tokens < 2 * BLOCK:
        raise BadInput(f"kv_tokens must be at least {2 * BLOCK}, got {setup.kv_tokens}; leave it unset to have it sized")


def start_for(target: ModelTarget, drafter: Drafter, name: str, tokenizer: TextTokenizer | None) -> Start:
    """What `drafter` is given, with just what it declared it needs."""
    needs = drafter.needs
    _check_features(needs.features, target, drafter.name)
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
        tokenizer,
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


def make_cache(setup: Setup, decoder: Decoder, max_len: int, lookahead: int) -> Cache:
    """KV memory: as much as asked, else one share of what is free. `OutOfMemory` shows the arithmetic."""
    size = torch.empty(0, dtype=decoder.dtype).element_size()
    per_token = 2 * size * sum(h * d for h, d in decoder.layers)
    free = free_memory(decoder.device)
    fit = int(free * _KV_SHARE.get(decoder.device.type, 0.25)) // per_token
    tokens = setup.kv_tokens or min(fit, max(_KV_MOST, max_len + lookahead + BLOCK))
    if tokens > free // per_token or tokens < 2 * BLOCK:
        raise OutOfMemory(
            f"KV memory for {tokens} tokens takes {tokens * per_token / 2**20:.0f} MiB ({per_token / 1024:.0f} KiB each), "
            f"{free / 2**20:.0f} MiB are free; lower kv_tokens or max_model_len, or use a smaller model"
        )
    if setup.cache == "paged":
        return PagedCache(decoder.layers, -(-tokens // BLOCK) + 1, BLOCK, decoder.dtype, decoder.device)
    length = min(max_len + lookahead, tokens)
    return SlotCache(decoder.layers, max(1, tokens // length), length, decoder.dtype, decoder.device)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as file:
            line = next(row for row in file if row.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return 4 * 2**30
