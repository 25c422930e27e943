"""The core on a GPU: noise and choices against the CPU's, the rule without a host sync, and the contract in fp64 and bf16.

    PYTHONPATH=src:. python benchmarks/gpu/check_core.py --json benchmarks/results/core_gpu.json

Needs a CUDA card, but no weights: models are tiny and random.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tests import probes, tiny

from outrider import noise, registry
from outrider.accept import coupled
from outrider.accept.coupled import vectorised, walk
from outrider.cache.paged import PagedCache
from outrider.config import SamplingParams
from outrider.models.hf import Decoder
from outrider.models.target import ModelTarget
from outrider.sampling import TextSampler
from outrider.types import Batch, Proposal, Slots

CUDA = torch.device("cuda")
OPTIONS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40),
    "sampled": SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True),
    "filtered": SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.02, max_tokens=40, ignore_eos=True),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.3, max_tokens=40, ignore_eos=True),
}


def noise_bits() -> dict[str, Any]:
    """Noise on the card against the CPU, value by value."""
    keys, positions, vocab = [random.Random(i).getrandbits(64) for i in range(48)], torch.arange(48) * 977, 49152
    here = noise.gumbel_rows(keys, positions, vocab)
    there = noise.gumbel_rows(keys, positions.to(CUDA), vocab, device=CUDA).cpu()
    return {"values": here.numel(), "different": int((here != there).sum())}


def choices() -> dict[str, Any]:
    """Tokens chosen by the device path on the card against the host path on CPU, fp32 rows of a realistic shape."""
    out: dict[str, Any] = {}
    vocab, rows = 49152, 64
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, vocab, generator=generator) * 2
    logits.scatter_add_(
        1, torch.randint(0, vocab, (rows, 200), generator=generator), torch.rand(rows, 200, generator=generator) * 14
    )
    for name, params in OPTIONS.items():
        requests = tuple(tiny.request(list(range(5, 25)), replace(params, seed=i)) for i in range(8))
        at = torch.arange(rows)
        slots = Slots(requests, at % 8, 20 + at // 8, torch.full((rows, 0), -1), torch.zeros(rows, dtype=torch.int64))
        there = Slots(requests, *(t.to(CUDA) for t in (slots.request, slots.position, slots.path, slots.depth)))
        mine = TextSampler(vocab).choose(logits, slots)
        card = TextSampler(vocab).choose(logits.to(CUDA), there).cpu()
        out[name] = {"rows": rows, "different": int((mine != card).sum())}
    return out


def rule_without_sync() -> dict[str, Any]:
    """The vectorised rule on the card equals the plain walk, and asks the host for nothing."""
    rng, different = random.Random(0), 0
    for _ in range(200):
        trees = []
        for _ in range(16):
            nodes: list[tuple[int, int]] = []
            for _ in range(rng.randrange(12)):
                fresh = (rng.randrange(4), rng.randrange(-1, len(nodes)))
                if fresh not in nodes:
                    nodes.append(fresh)
            trees.append(nodes)
        proposal = Proposal.trees(trees)
        choice = torch.randint(-1, 4, (16, proposal.columns + 1), generator=torch.Generator().manual_seed(rng.randrange(10**6)))
        params = SamplingParams(max_tokens=5, stop_token_ids=(3,))
        requests = tuple(tiny.request([7], params) for _ in range(16))
        batch = Batch(requests, (1,) * 16, tuple(rng.random() < 0.9 for _ in range(16)), (16,) * 16)
        fields = (proposal.tokens, proposal.parents, proposal.sizes, proposal.source)
        there = replace(
            proposal, **dict(zip(("tokens", "parents", "sizes", "source"), (f.to(CUDA) for f in fields), strict=True))
        )
        card = choice.to(CUDA)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        got = coupled.agreeing(there, card)
        torch.cuda.set_sync_debug_mode("default")
        verdict, plain = vectorised(there, card, batch), walk(proposal, choice, batch)
        assert torch.equal(got.cpu(), coupled.agreeing(proposal, choice))
        different += any(
            not torch.equal(getattr(verdict, n).cpu(), getattr(plain, n))
            for n in ("path", "accepted", "tokens", "counts", "finish")
        )
    return {"forests": 200 * 16, "different_batches": different}


class GpuWorld(tiny.World):
    """The tests' world on the card."""

    def __init__(self, own: Decoder, by_rows: bool = False) -> None:
        self.decoder = own
        self.cache = PagedCache(own.layers, 513, 8, own.dtype, CUDA)
        self.sampler = TextSampler(own.vocab_size, None)
        self.target = ModelTarget(own, self.cache, self.sampler, 256, by_rows)


def contract(dtype: torch.dtype) -> dict[str, Any]:
    """Texts with every drafter against plain decoding, in a ragged batch on the card."""
    out: dict[str, Any] = {}
    prompts = tiny.prompts(6, seed=3)
    for family in tiny.FAMILIES:
        own = Decoder(tiny.model(family, dtype=dtype).to(CUDA), family)
        for params in OPTIONS.values():

            def made(params: SamplingParams = params) -> list[Any]:
                return [tiny.request(p, replace(params, seed=11 + i)) for i, p in enumerate(prompts)]

            plain = GpuWorld(own).run(registry.parse("none"), made())
            answers = {tuple(p): tuple(a) for p, a in zip(prompts, plain, strict=True)}
            drafters = [
                registry.parse("ngram"),
                registry.parse("self"),
                probes.Replay(answers, depth=5, spoil=0.2),
                probes.Bushy(answers),
                probes.Exiter(),
            ]
            for drafter in drafters:
                got = GpuWorld(own).run(drafter, made())
                equal = sum(a == b for a, b in zip(plain, got, strict=True))
                key = f"{family}, {drafter.name}"
                done = out.setdefault(key, {"texts": 0, "equal": 0})
                done["texts"] += len(plain)
                done["equal"] += equal
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    report: dict[str, Any] = {
        "provenance": {
            "date": time.strftime("%Y-%m-%d"),
            "card": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "commit": given.commit,
            "command": "python benchmarks/gpu/check_core.py",
        }
    }
    parts = {
        "noise": noise_bits,
        "choices": choices,
        "rule": rule_without_sync,
        "contract_fp64": lambda: contract(torch.float64),
        "contract_bf16": lambda: contract(torch.bfloat16),
    }
    for name, part in parts.items():
        begin = time.time()
        report[name] = part()
        print(f"{name} ({time.time() - begin:.0f} s)", json.dumps(report[name]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
