"""Models of named shapes with random weights, and an engine around one, for timing on a GPU."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from outrider.accept import PerRequest
from outrider.cache.paged import PagedCache
from outrider.config import SamplingParams
from outrider.control import Fixed
from outrider.engine import Engine
from outrider.guard import Guard
from outrider.loading import make_decoder, make_target, start_for
from outrider.noise import request_key
from outrider.protocols import Drafter
from outrider.sampling import TextSampler
from outrider.scheduler import Scheduler
from outrider.types import Request

SHAPES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "8B": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "rope_theta": 500000.0,
        },
    ),
    "1.5B": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "tiny": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        },
    ),
    "SmolLM2-135M": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        },
    ),
}


def model(name: str, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Any:
    """A model of that shape with random weights, on the card."""
    config_class, model_class, options = SHAPES[name]
    config = config_class(**options, max_position_embeddings=16384)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            made = model_class(config)
    finally:
        torch.set_default_dtype(before)
    return made.eval().requires_grad_(False)


class World:
    """A target around a model, and engines on it."""

    def __init__(self, made: Any, name: str, tokens: int = 65536, max_len: int = 16384, invariant: bool = False) -> None:
        self.decoder = make_decoder(made, name, invariant, lambda line: None)
        self.cache = PagedCache(self.decoder.layers, tokens // 64, 64, self.decoder.dtype, self.decoder.device)
        self.sampler = TextSampler(self.decoder.vocab_size)
        self.target: Any = make_target(self.decoder, self.cache, self.sampler, max_len, invariant)

    def engine(self, drafter: Drafter, **scheduling: Any) -> Engine:
        guard = Guard(drafter, self.decoder.vocab_size)
        guard.start(start_for(self.target, drafter, "shape", None))
        scheduling = {"separate": True, "grain": 64, **scheduling}
        scheduler = Scheduler(self.cache, drafter.nodes, **scheduling)
        return Engine(self.target, guard, scheduler, PerRequest(), Fixed(drafter))

    def run(self, engine: Engine, requests: list[Request]) -> list[list[int]]:
        for request in requests:
            engine.add(request)
        while engine.step() is not None:
            pass
        return [r.output for r in requests]


@cache
def _counter() -> Iterator[int]:
    return itertools.count(1)


def request(prompt: list[int], tokens: int, temperature: float = 0.0, seed: int = 0, **extra: Any) -> Request:
    """A request that writes just so many tokens."""
    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=seed, **extra)
    return Request(next(_counter()), list(prompt), len(prompt), params, request_key(seed, prompt), seed, limit=2**30)


def prompt(length: int, seed: int, vocab: int = 40000) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocab, (length,), generator=generator).tolist()


def milliseconds(function: Callable[[], object], repeats: int = 20, warm: int = 3) -> dict[str, float]:
    """Median, least and most of so many runs, by device events."""
    for _ in range(warm):
        function()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        function()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b))
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


def graphed(function: Callable[[], object]) -> Callable[[], None]:
    """The function as a CUDA graph's replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
