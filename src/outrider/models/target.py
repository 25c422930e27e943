"""The target: one pass over pending tokens and guesses, and the path that is kept.

It composes a decoder, a KV cache and a sampler; it knows nothing of how guesses were made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from .. import logprobs
from ..draws import Drawer, processed
from ..protocols import Cache, DraftSampler, Needs, Sampler
from ..types import NONE, Batch, PassOutput, Proposal, Request, Scores, Slots, Verdict
from .hf import Decoder, layers_read
from .layout import Layout
from .loans import Loans
from .parts import Layers
from .replay import Stage


class ModelTarget:
    """`protocols.Target` for a transformers decoder. `by_rows=True` makes a row's bits independent of what shares its pass
    (see `attention.py`), at some cost for wide passes."""

    def __init__(self, decoder: Decoder, cache: Cache, sampler: Sampler, max_len: int, by_rows: bool = False) -> None:
        self.decoder, self.cache, self.sampler, self.by_rows = decoder, cache, sampler, by_rows
        self.vocab_size, self.device, self.max_len = decoder.vocab_size, decoder.device, max_len
        self.needs = Needs()
        self.loans = Loans()

    fingerprint = ""
    """Tells the weights apart, where they came from files."""

    anchored = False
    """Whether a token's KV has the same bits whichever pass computed it."""

    watched = True
    """Whether the drafter observes rounds; if not, a captured round need not show what only it would read."""

    stage: Stage | None = None
    """Where a drafter's work can be captured, if anywhere."""

    def admits(self, batch: Batch, proposal: Proposal) -> bool:
        """Whether this round puts right guesses on the device that could not be."""
        return False

    def place(self, batch: Batch, proposal: Proposal) -> Proposal:
        """Guesses on the device that will judge them."""
        return proposal if proposal.tokens.device.type == self.device.type else proposal.to(self.device)

    def score(self, batch: Batch, proposal: Proposal) -> Scores:
        """The target's token after every slot; see `types.Scores`."""
        layout = Layout.build(batch, proposal, self.cache)
        if any(map(logprobs.asks_prompt, batch.requests)):
            layout = layout.reading(logprobs.asks_prompt)
        features = self.needs.features
        out = self._resumed(batch, proposal, layout)
        self.loans.clear()
        if out is None:
            out = self.decoder.forward(layout, self.cache, features, by_rows=self.by_rows)
        slots = layout.slots(batch) if out.logits is not None else None
        choice = self._choices(batch, layout, out.logits, slots)
        raw = out.logits if out.logits is not None else torch.zeros(0, self.vocab_size, device=self.device)
        told = self._processed(layout, out.logits, choice, slots) if any(r.classical for r in batch.requests) else None
        asked = self.needs.logits or any(map(logprobs.asks, batch.requests))
        at = tuple((index, position) for _, index, position in layout.prompt)
        return Scores(choice, layout.rows, out.features, raw if asked else None, slots, out.prompt, at, told)

    def _resumed(self, batch: Batch, proposal: Proposal, layout: Layout) -> PassOutput | None:
        """The pass from the states where a drafter left off; None where there are none, or where it skips what was asked for."""
        resume, decoder, features = proposal.resume, self.decoder, self.needs.features
        if resume is None or any(layer < resume.layer for layer in layers_read(features)):
            return None

        def complete(slots: list[int]) -> Tensor:
            rest = Layout.build(batch, proposal, self.cache, slots)
            rest = replace(rest, scored=rest.scored[:0])
            hidden = decoder.forward(rest, self.cache, (), range(resume.layer), by_rows=self.by_rows).hidden
            assert hidden is not None
            return hidden

        states = self.loans.states(resume, layout, complete)
        if states is None:
            return None
        layers = range(resume.layer, decoder.num_layers)
        return decoder.forward(layout, self.cache, features, layers, states, self.by_rows)

    def _processed(self, layout: Layout, logits: Tensor | None, choice: Tensor, slots: Slots | None) -> Tensor:
        """`[B, N + 1, V]`; see `types.Scores.processed`. NaN where no row was scored."""
        kind = torch.float32 if logits is None else logits.dtype
        table = torch.full((*choice.shape, self.vocab_size), torch.nan, dtype=kind, device=self.device)
        if logits is not None and slots is not None:
            at = (slots.request, layout.rows.slot[layout.scored])
            table[at] = processed(self.sampler, logits, slots, choice[at])
        return table

    def _choices(self, batch: Batch, layout: Layout, logits: Tensor | None, slots: Slots | None) -> Tensor:
        """`[B, N + 1]` tokens by request and slot, NONE where no row was scored."""
        shape = (len(batch), layout.proposal.columns + 1)
        if logits is None or slots is None:
            return torch.full(shape, NONE, dtype=torch.int64, device=self.device)
        chosen = self.sampler.choose(logits, slots)
        if len(chosen) == shape[0] * shape[1]:  # rows go by request and slot, so nothing is missing
            return chosen.view(shape)
        choice = torch.full(shape, NONE, dtype=torch.int64, device=self.device)
        choice[slots.request, layout.rows.slot[layout.scored]] = chosen
        return choice

    def keep(self, batch: Batch, proposal: Proposal, verdict: Verdict) -> None:
        """Move the accepted path's KV to where the sequence continues. A chain is already there."""
        if proposal.linear or proposal.columns == 0:
            return
        for b, request in enumerate(batch.requests):
            if proposal.widths[b]:
                known = request.computed + batch.pending[b]
                self.cache.move(request, moves(verdict.path[b, : proposal.widths[b]], known), known)

    def captured(self, batch: int, depth: int) -> bool:
        """Whether a round of so many requests with chains of so many guesses needs no preparation. Without graphs, none does."""
        return True

    def prepare(self, most: int, tried: int) -> None:
        """Make ready what plain rounds of up to so many requests need, and those of many in which so few as are `tried` have a
        guess. Without graphs, nothing."""

    def release(self, request: Request) -> None:
        """Forget a request: its KV and its sampling state. What it wrote is zeroed if its scores had gone bad, since a
        NaN in freed memory would poison the next owner."""
        if request.error is not None:
            self.cache.scrub(request)
        self.cache.release(request)
        self.sampler.release(request)


def moves(path: Tensor, known: int) -> Tensor:
    """Virtual sources of the path's KV; padded entries stay where they are."""
    own = torch.arange(path.shape[0], device=path.device)
    return known + torch.where(path == NONE, own, path)


class View:
    """`protocols.TargetView`: the target lent to a drafter."""

    def __init__(self, target: ModelTarget, sampler: DraftSampler | None = None) -> None:
        self._target = target
        decoder = target.decoder
        self.vocab_size, self.num_layers, self.hidden_size = target.vocab_size, decoder.num_layers, decoder.hidden_size
        self.max_len, self.device, self.sampler = target.max_len, target.device, sampler or Drawer(target.sampler)
        self.signature: str = decoder.signature
        self.stage = target.stage

    def run(
        self,
        batch: Batch,
        nodes: Proposal,
        layers: Layers,
        start: int = 0,
        hidden: Tensor | None = None,
        kv: Literal["scratch", "shared"] = "scratch",
    ) -> PassOutput:
        """See `protocols.TargetView`. Raises `ValueError` for `"shared"` with layers that are no prefix of the model, or with
        slots before `start` that were not run."""
        target, lends = self._target, kv == "shared" and hidden is None
        if kv == "shared" and list(layers) != list(range(len(layers))):
            raise ValueError(f'kv="shared" needs the first layers of the model, got {tuple(layers)}')
        layout = Layout.build(batch, nodes, target.cache, start)
        if lends:
            target.loans.check(layout, start, len(layers))
        else:
            target.loans.spoil(batch)
        out = target.decoder.forward(layout, target.cache, (), layers, hidden, target.by_rows)
        out = replace(out, slots=layout.slots(batch))
        if lends and out.hidden is not None:
            target.loans.lend(out, out.hidden, len(layers), layout)
        return out

    def rows(self) -> tuple[Tensor, Tensor]:
        """Weights `[V, H]` of embeddings and vocabulary head."""
        model = self._target.decoder.model
        return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()

    def recall(self, request: Request, layers: Layers, count: int) -> Tensor | None:
        """See `protocols.TargetView`. `ValueError` unless all but the last token have KV and `count` of them are there."""
        cache, length = self._target.cache, len(request.tokens)
        if not 0 < count <= length or request.computed < length - 1:
            raise ValueError(f"cannot read {count} of {length} tokens again, of which {request.computed} have KV")
        start = length - count
        twin = replace(request, id=-2 - request.id, tokens=list(request.tokens), computed=start)
        blocks = cache.head(request, start)
        shared = len(blocks) * cache.block_size
        if cache.price(twin, length, blocks) > cache.free() // 2:
            return None
        try:
            cache.adopt(twin, blocks)
            if not cache.reserve(twin, length):
                return None
            if shared < start:
                cache.copy(cache.slots(request, shared, start), cache.slots(twin, shared, start))
            layout = Layout.build(Batch((twin,), (count,), (True,), (0,)), Proposal.empty(1, self.device), cache)
            layout = replace(layout, scored=torch.arange(count, device=self.device))
            return self._target.decoder.forward(layout, cache, (), layers, None, self._target.by_rows).logits
        finally:
            cache.release(twin)
