"""The target: one pass over pending tokens and guesses, and the path that is kept.

It composes a decoder, a KV cache and a sampler; it knows nothing of how guesses were made.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from .. import logprobs
from ..draws import Drawer, processed
from ..errors import OutriderWarning
from ..protocols import Cache, DraftSampler, Needs, Sampler
from ..types import NONE, Batch, PassOutput, Proposal, Request, Resume, Scores, Slots, Verdict
from .hf import Decoder
from .layout import Layout


class ModelTarget:
    """`protocols.Target` for a transformers decoder. `by_rows=True` makes a row's bits independent of what shares its pass
    (see `attention.py`), at some cost for wide passes."""

    def __init__(self, decoder: Decoder, cache: Cache, sampler: Sampler, max_len: int, by_rows: bool = False) -> None:
        self.decoder, self.cache, self.sampler, self.by_rows = decoder, cache, sampler, by_rows
        self.vocab_size, self.device, self.max_len = decoder.vocab_size, decoder.device, max_len
        self.needs = Needs()
        self.lent: dict[int, Lent] = {}

    fingerprint = ""
    """Tells the weights apart, where they came from files."""

    anchored = False
    """Whether a token's KV has the same bits whichever pass computed it."""

    watched = True
    """Whether the drafter observes rounds; if not, a captured round need not show what only it would read."""

    def place(self, batch: Batch, proposal: Proposal) -> Proposal:
        """Guesses on the device that will judge them."""
        return proposal if proposal.tokens.device.type == self.device.type else proposal.to(self.device)

    def score(self, batch: Batch, proposal: Proposal) -> Scores:
        """The target's token after every slot; see `types.Scores`."""
        layout = Layout.build(batch, proposal, self.cache)
        if any(map(logprobs.asks_prompt, batch.requests)):
            layout = layout.reading(logprobs.asks_prompt)
        features = self.needs.features
        resume = proposal.resume
        states = None if resume is None else _states(resume, layout, self.lent)
        self.lent.clear()
        if resume is None or states is None:
            out = self.decoder.forward(layout, self.cache, features, by_rows=self.by_rows)
        else:
            layers = range(resume.layer, self.decoder.num_layers)
            out = self.decoder.forward(layout, self.cache, features, layers, states, self.by_rows)
        slots = layout.slots(batch) if out.logits is not None else None
        choice = self._choices(batch, layout, out.logits, slots)
        raw = out.logits if out.logits is not None else torch.zeros(0, self.vocab_size, device=self.device)
        told = self._processed(layout, out.logits, choice, slots) if any(r.classical for r in batch.requests) else None
        asked = self.needs.logits or any(map(logprobs.asks, batch.requests))
        at = tuple((index, position) for _, index, position in layout.prompt)
        return Scores(choice, layout.rows, out.features, raw if asked else None, slots, out.prompt, at, told)

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


def _states(resume: Resume, layout: Layout, lent: Mapping[int, Lent]) -> Tensor | None:
    """Exit states in the order of the pass's rows, from however many partial runs made them. None, with a warning, if they are
    not just what the target itself made this round, for these tokens at these places: the pass then starts from the beginning."""
    runs = [lent.get(id(part)) for part in resume.parts]
    if runs and all(run is not None and run.layers == resume.layer for run in runs):
        hidden, have, content = (torch.cat(x) for x in zip(*((r.hidden, r.place, r.content) for r in runs if r), strict=True))
        order = have.argsort()
        same = hidden.shape[0] == len(layout.tokens) and torch.equal(have[order], _place(layout))
        if same and torch.equal(content[order], _content(layout)):
            return hidden[order]
    what = f"a drafter's states after layer {resume.layer} do not cover the {len(layout.tokens)} rows of the pass"
    warnings.warn(f"{what}; all layers are run, the text is unaffected", OutriderWarning, stacklevel=2)
    return None


def _place(layout: Layout) -> Tensor:
    """One number per row for request, position and place in the KV: rows sort by it as a pass does."""
    rows = layout.rows
    return (rows.request * 2**24 + rows.virtual) * 2**24 + rows.position


def _content(layout: Layout) -> Tensor:
    """One number per row for its token and, of a node, its parent."""
    rows, parents = layout.rows, layout.proposal.parents
    if parents.shape[1] == 0:
        return layout.tokens * 2**12
    parent = parents[rows.request, rows.slot.clamp(min=1) - 1] + 2
    return layout.tokens * 2**12 + torch.where(rows.slot > 0, parent, 0)


@dataclass(frozen=True, slots=True)
class Lent:
    """What a run with `kv="shared"` computed: the states after `layers` layers, and which rows they belong to. `out` keeps the
    drafter's copy alive, so that its identity stays its own."""

    out: PassOutput
    layers: int
    hidden: Tensor
    place: Tensor
    content: Tensor


class View:
    """`protocols.TargetView`: the target lent to a drafter."""

    def __init__(self, target: ModelTarget, sampler: DraftSampler | None = None) -> None:
        self._target = target
        decoder = target.decoder
        self.vocab_size, self.num_layers, self.hidden_size = target.vocab_size, decoder.num_layers, decoder.hidden_size
        self.max_len, self.device, self.sampler = target.max_len, target.device, sampler or Drawer(target.sampler)

    def run(
        self,
        batch: Batch,
        nodes: Proposal,
        layers: Sequence[int],
        start: int = 0,
        hidden: Tensor | None = None,
        kv: Literal["scratch", "shared"] = "scratch",
    ) -> PassOutput:
        """See `protocols.TargetView`. Raises `ValueError` for `"shared"` with layers that are no prefix of the model."""
        if kv == "shared" and list(layers) != list(range(len(layers))):
            raise ValueError(f'kv="shared" needs the first layers of the model, got {tuple(layers)}')
        target = self._target
        layout = Layout.build(batch, nodes, target.cache, start)
        out = target.decoder.forward(layout, target.cache, (), layers, hidden, target.by_rows)
        out = replace(out, slots=layout.slots(batch))
        if kv == "shared" and hidden is None and out.hidden is not None:
            run = Lent(out, len(layers), out.hidden.clone(), _place(layout), _content(layout))
            target.lent[id(out)] = run
        return out

    def rows(self) -> tuple[Tensor, Tensor]:
        """Weights `[V, H]` of embeddings and vocabulary head."""
        model = self._target.decoder.model
        return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
