"""The classical rules on a GPU: verdicts equal to the CPU's, streams equal bit for bit, and a million rounds against the law.

Run from the repository's root: `PYTHONPATH=src:. python benchmarks/gpu/check_rules.py`.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace

import torch

from outrider import noise
from outrider.accept import RULES, rule
from outrider.bench.chance import chi_squared
from outrider.config import SamplingParams
from outrider.noise import request_key
from outrider.types import NONE, Batch, PassRows, Proposal, Request, Scores

CUDA, VOCAB = torch.device("cuda"), 8


def batch_of(count: int, start: int) -> Batch:
    params = SamplingParams(max_tokens=99)
    requests = [Request(i, [1, 2], 2, params, request_key(start + i, [1, 2]), 0) for i in range(count)]
    return Batch(tuple(requests), (1,) * count, (True,) * count, (99,) * count)


def scores_of(p: torch.Tensor, count: int) -> Scores:
    empty = torch.zeros(0, dtype=torch.int64)
    choice = torch.full((count, p.shape[1]), NONE, device=p.device)
    return Scores(choice, PassRows(empty, empty, empty, empty), {}, processed=p.log())


def drawn(p_q: torch.Tensor, batch: Batch, shape: tuple[int, int]) -> Proposal:
    """Two levels, breadth first, children by the draft stream: `shape` children of the root and of each of those. q is one law
    per token before (row VOCAB for the root)."""
    keys = noise.key_tensor([r.key for r in batch.requests], CUDA)
    one = torch.ones_like(keys)

    def children(law: torch.Tensor, slot: int, count: int) -> torch.Tensor:
        return (law.log() + noise.stream_gumbel(keys, one * slot, one * 2, VOCAB)).topk(count).indices

    top = children(p_q[VOCAB].expand(len(batch), -1), 0, shape[0])
    below = [children(p_q[top[:, i]], i + 1, shape[1]) for i in range(shape[0])]
    tokens = torch.cat([top, *below], 1)
    parents = [-1] * shape[0] + [i for i in range(shape[0]) for _ in range(shape[1])]
    n, count = len(parents), len(batch)
    q = torch.zeros(count, n + 1, VOCAB, dtype=torch.float64, device=CUDA)
    q[:, 0] = p_q[VOCAB]
    q[:, 1 : shape[0] + 1] = p_q[top]
    sizes = torch.full((count,), n, device=CUDA)
    table = torch.tensor(parents, device=CUDA).expand(count, n)
    return Proposal(tokens, table, sizes, torch.zeros_like(tokens), (n,) * count, linear=shape == (1, 1), q=q)


def main() -> None:
    rng = torch.Generator().manual_seed(1)
    laws = [torch.rand(VOCAB + 1, VOCAB, generator=rng, dtype=torch.float64) ** 3 + 1e-3 for _ in range(2)]
    p, q = ((t / t.sum(1, keepdim=True)).to(CUDA) for t in laws)
    keys = [random.Random(0).getrandbits(64) for _ in range(64)]
    where = [(noise.key_tensor(keys, d), torch.arange(64, device=d), torch.arange(64, device=d) * 7) for d in ("cpu", CUDA)]
    for draw in (lambda a: noise.uniforms(a[0], 2, *a[1:]), lambda a: noise.stream_gumbel(*a, 50_000)):
        here, there = (draw(a).cpu() for a in where)
        print("streams: differing values", int((here != there).sum()), "of", here.numel())
    truth = {(a, b): float(p[VOCAB, a] * p[a, b]) for a in range(VOCAB) for b in range(VOCAB)}
    for name in RULES:
        if name == "coupled":
            continue
        for shape in ((1, 1), (3, 2)):
            report(name, shape, p, q, truth)


def report(name: str, shape: tuple[int, int], p: torch.Tensor, q: torch.Tensor, truth: dict[tuple[int, ...], float]) -> None:
    counts: Counter[tuple[int, ...]] = Counter()
    total, accepted, differing, seconds = 1_000_000, 0, 0, 0.0
    step = 50_000
    for start in range(0, total, step):
        batch = batch_of(step, start)
        made = drawn(q, batch, shape)
        slots = torch.cat([torch.full((step, 1), VOCAB, device=CUDA), made.tokens], 1)
        scores = scores_of(p[slots], step)
        torch.cuda.synchronize()
        began = time.perf_counter()
        verdict = rule(name)(made, scores, batch)
        torch.cuda.synchronize()
        seconds += time.perf_counter() - began
        accepted += int(verdict.accepted.sum())
        # a round that wrote one token is continued by the target
        more = p[verdict.tokens[:, 0].clamp(min=0)].multinomial(1)[:, 0]
        pair = torch.stack([verdict.tokens[:, 0], torch.where(verdict.counts > 1, verdict.tokens[:, 1], more)], 1)
        for code, n in zip(*(t.tolist() for t in (pair[:, 0] * VOCAB + pair[:, 1]).unique(return_counts=True)), strict=True):
            counts[code // VOCAB, code % VOCAB] += n
        if start == 0:
            host = replace(scores, choice=scores.choice.cpu(), processed=scores.processed.cpu())
            own = rule(name)(made.to("cpu"), host, batch)
            differing = int((own.tokens != verdict.tokens.cpu()).any(1).sum())
    value = chi_squared(counts, truth)
    print(
        f"{name} {shape}: p-value {value:.3g}, accepted {accepted / total:.4f}, "
        f"CPU differs in {differing} of {step}, {seconds:.2f} s"
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
