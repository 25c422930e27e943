"""Tiny random models in fp64, and engines around them: what the contract tests and the audit's self-test run on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache as memo
from typing import Any

import torch
import transformers

from ..accept import rule
from ..cache.paged import PagedCache
from ..cache.slots import SlotCache
from ..config import SamplingParams
from ..control import Fixed
from ..drafters.draft_model import DraftModel
from ..engine import Engine
from ..guard import Guard
from ..loading import start_for
from ..models.hf import Decoder, truncate
from ..models.target import ModelTarget
from ..noise import request_key
from ..protocols import Controller, Drafter
from ..sampling import TextSampler
from ..scheduler import Scheduler
from ..types import Finish, Request

VOCAB = 48
EOS = 1
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.35,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 16}),
    "gemma3": ("Gemma3Text", {"sliding_window": 12, "query_pre_attn_scalar": 8, "layer_types": None}),
}


def model(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A random model with peaked, varied predictions, the same for the same arguments."""
    kind, extra = FAMILIES[family]
    config_class = getattr(transformers, f"{kind}Config")
    model_class = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")
    options = {k: v for k, v in {**_SHAPE, **extra, **changes}.items() if v is not None}
    torch.manual_seed(seed)
    made = model_class(config_class(**options)).to(dtype).eval()
    return made.requires_grad_(False)


@memo
def decoder(family: str = "llama", layers: int = 3, vocab: int = VOCAB) -> Decoder:
    """The decoder of such a model, made once."""
    return Decoder(model(family, num_hidden_layers=layers, vocab_size=vocab), family)


class World:
    """A target with its cache, ready to run requests with any drafter."""

    def __init__(
        self,
        family: str = "llama",
        cache: str = "paged",
        tokens: int = 4096,
        max_len: int = 256,
        by_rows: bool = False,
        own: Decoder | None = None,
    ) -> None:
        self.decoder = own or decoder(family)
        layers, dtype = self.decoder.layers, self.decoder.dtype
        if cache == "paged":
            self.cache: Any = PagedCache(layers, tokens // 8 + 1, 8, dtype, torch.device("cpu"))
        else:
            self.cache = SlotCache(layers, max(1, tokens // (max_len + 64)), max_len + 64, dtype, torch.device("cpu"))
        self.control: Callable[[Drafter], Controller] = Fixed
        self.sampler = TextSampler(self.decoder.vocab_size, None)
        self.target = ModelTarget(self.decoder, self.cache, self.sampler, max_len, by_rows)

    def engine(self, drafter: Drafter, accept: str = "coupled", **scheduling: Any) -> Engine:
        guard = Guard(drafter, self.decoder.vocab_size)
        guard.start(start_for(self.target, drafter, "tiny", None))
        return Engine(self.target, guard, Scheduler(self.cache, drafter.nodes, **scheduling), rule(accept), self.control(drafter))

    def run(
        self, drafter: Drafter, requests: Sequence[Request], accept: str = "coupled", may_fail: bool = False, **scheduling: Any
    ) -> list[list[int]]:
        """Token lists of all requests, run together. The drafter must not be switched off, unless it `may_fail`."""
        engine = self.engine(drafter, accept, **scheduling)
        for request in requests:
            engine.add(request)
        for _ in range(10_000):
            if engine.step() is None:
                break
        if any(r.finish is Finish.RUNNING for r in requests):
            raise AssertionError("a request never ended")
        if self.cache.free() != self.cache.capacity:
            raise AssertionError("KV memory leaked")
        if not (may_fail or engine.drafter.working):
            raise AssertionError(engine.drafter.reason)
        return [r.output for r in requests]


@memo
def _counter() -> Iterator[int]:
    return itertools.count(1)


def request(
    prompt: Sequence[int], params: SamplingParams | None = None, limit: int = 2**31, seed: int = 0, **extra: Any
) -> Request:
    """A request that was never queued, with a fresh id; the tiny model's end token ends it, unless ignored."""
    params = params or SamplingParams(temperature=0.0, max_tokens=24, seed=seed)
    ids = list(prompt)
    seed = params.seed or seed
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset({EOS}))
    return Request(next(_counter()), ids, len(ids), params, request_key(seed, ids), seed, stop_ids=stops, limit=limit, **extra)


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 30) -> list[list[int]]:
    """Random prompts of ragged lengths, with repeats so that lookup has something to find."""
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        length = rng.randint(low, high)
        words = [rng.randrange(2, VOCAB) for _ in range(max(1, length // 2))]
        out.append([rng.choice(words) for _ in range(length)])
    return out


def draft_model(layers: int = 2, family: str = "llama", vocab: int = VOCAB, **config: Any) -> DraftModel:
    """The target's first layers as a draft model."""
    made = DraftModel(DraftModel.Config(path="tiny", layers=layers, **config))  # type: ignore[abstract]
    own = decoder_first(family, layers, vocab)
    made.start = lambda start: made.bind(own, start)  # type: ignore[method-assign]
    return made


@memo
def decoder_first(family: str, layers: int, vocab: int = VOCAB) -> Decoder:
    """The first layers of the tiny target, with the target's own weights (vocabulary padded or cut to `vocab`)."""
    whole = model(family)
    if vocab != VOCAB:
        whole.resize_token_embeddings(vocab, mean_resizing=False)
    return Decoder(truncate(whole, layers), f"{family}-first-{layers}")
