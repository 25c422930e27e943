"""Scores as distributions, and the sampler that drafters draw from under the classical rules.

Under the coupled rule drafters add the target's own noise. The classical rules compare distributions instead: a guess must be an
honest draw from a known q, by randomness that nothing else uses. `Drawer` gives drafters scores log q + Gumbel noise of the draft
stream: the largest is a draw from q, the m largest in falling order are m draws without replacement (Kool et al. 2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .config import SamplingParams
from .noise import key_tensor, stream_gumbel
from .processors import column
from .protocols import Sampler
from .sampling import first_argmax
from .types import NONE, Batch, Proposal, Request, Slots


def processed(sampler: Sampler, logits: Tensor, slots: Slots, choice: Tensor) -> Tensor:
    """`[S, V]` scores whose softmax is the law of every slot's token; at T = 0 all of it on `choice [S]`. NaN in rows without a
    valid choice, -inf where a token cannot be chosen. `logits [S, V]`."""
    law = sampler.law(logits, slots)
    law = pad(law, (0, logits.shape[1] - law.shape[1]), value=-math.inf) if law.shape[1] < logits.shape[1] else law
    if not any(r.params.greedy for r in slots.requests):
        return law
    greedy = column([float(r.params.greedy) for r in slots.requests], slots, law.dtype) > 0
    chosen = torch.arange(law.shape[1], device=law.device) == choice[:, None]
    certain = torch.zeros_like(law).masked_fill(~chosen, -math.inf).masked_fill((choice == NONE)[:, None], math.nan)
    return torch.where(greedy, certain, law)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What one call drew from: `q [S, V]`, zero in rows that drew nothing; `lengths` tells the round, per request."""

    slots: Slots
    q: Tensor
    lengths: tuple[int, ...]

    def stale(self) -> bool:
        """Whether a request has moved on since."""
        return any(n != len(r.tokens) for n, r in zip(self.lengths, self.slots.requests, strict=True))


class Drawer:
    """`protocols.DraftSampler` over the target's sampler. Keeps one round's distributions; one thread at a time."""

    def __init__(self, inner: Sampler) -> None:
        self.inner = inner
        self._drawn: list[_Drawn] = []

    def check(self, params: SamplingParams, bad_words: Sequence[Sequence[int]] = ()) -> None:
        self.inner.check(params, bad_words)

    def release(self, request: Request) -> None:
        """Forget what was drawn for `request`. The target's sampler is released by the target."""
        self._drawn = [d for d in self._drawn if not any(r is request for r in d.slots.requests)]

    def law(self, logits: Tensor, slots: Slots) -> Tensor:
        return self.inner.law(logits, slots)

    def choose(self, logits: Tensor, slots: Slots) -> Tensor:
        """One guess per slot, `[S]`: the coupled choice, or a draw."""
        if not any(r.sampled for r in slots.requests):
            return self.inner.choose(logits, slots)
        return first_argmax(self.scores(logits, slots))

    def scores(self, logits: Tensor, slots: Slots) -> Tensor:
        """`[S, V]`: the best m are a slot's children, in falling order."""
        if not any(r.sampled for r in slots.requests):
            return self.inner.scores(logits, slots)
        law = self.inner.law(logits, slots)
        law = pad(law, (0, logits.shape[1] - law.shape[1]), value=-math.inf) if law.shape[1] < logits.shape[1] else law
        law = law.double().log_softmax(1)
        drawing = column([float(r.sampled) for r in slots.requests], slots, law.dtype) > 0
        self._remember(law.exp().where(drawing & ~law.isnan(), 0), slots)
        drawn = law + self._noise(slots, law.shape[1])
        if all(r.sampled for r in slots.requests):
            return drawn
        return torch.where(drawing, drawn, self.inner.scores(logits, slots).double())

    def attach(self, batch: Batch, proposal: Proposal) -> Proposal:
        """`proposal` with `q [B, N + 1, V]` of what this round's calls drew; unchanged where they drew nothing."""
        fresh = [d for d in self._drawn if not d.stale()]
        self._drawn = []
        if not fresh or not proposal.columns:
            return proposal
        index = {r.id: b for b, r in enumerate(batch.requests)}
        vocab, rows = fresh[0].q.shape[1], proposal.columns + 1
        q = torch.zeros(len(batch) * rows, vocab, dtype=torch.float64, device=proposal.tokens.device)
        for drawn in fresh:
            assert drawn.slots.slot is not None
            to = torch.tensor([index[r.id] for r in drawn.slots.requests]).to(q.device, non_blocking=True)
            q[to[drawn.slots.request] * rows + drawn.slots.slot.clamp(max=rows - 1)] = drawn.q.to(q.device)
        return replace(proposal, q=q.view(len(batch), rows, vocab))

    def _remember(self, q: Tensor, slots: Slots) -> None:
        self._drawn = [d for d in self._drawn if not d.stale()]
        self._drawn.append(_Drawn(slots, q, tuple(len(r.tokens) for r in slots.requests)))

    def _noise(self, slots: Slots, vocab: int) -> Tensor:
        if slots.slot is None:
            raise ValueError("drawing guesses needs Slots.slot: streams are keyed by it")
        keys = key_tensor([r.key for r in slots.requests], slots.request.device)[slots.request]
        return stream_gumbel(keys, slots.slot, slots.position - slots.depth, vocab)
