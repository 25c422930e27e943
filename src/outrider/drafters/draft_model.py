"""A small causal LM drafts for a large one (Leviathan et al. 2023; Chen et al. 2023), chains or trees.

Any model will do; vocabularies may be padded to different sizes, and another tokenizer's are translated (`translate.py`). It runs
over its own KV cache, and its choices use the target's processors and noise (Gumbel coupling), so that acceptance stays high at
any temperature; under the classical rules they are draws from its own processed distribution, which the proposal then carries.
The cache's rule is one line: before drafting, feed every known token that has no KV yet. That closes the hole left by full
acceptance (the last guess was never fed), and catches up after any number of idle rounds.

A model can be trained for a target (`_distil.py`); it may then borrow the target's rows and guess some tokens only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cache.paged import PagedCache
from ..errors import BadInput, DrafterMismatch
from ..models import lean, weights
from ..models.chain import Chains, spread
from ..models.footprint import footprint, free_memory
from ..models.hf import Decoder, truncate
from ..models.layout import Layout
from ..models.native import fitting
from ..models.rows import anchors
from ..protocols import Drafter, Needs, Start, Teacher
from ..registry import register
from ..types import NONE, ROOT, Batch, Budget, PassOutput, Proposal, Request, Scores, Verdict
from . import translate
from ._distil import Distilled
from ._distil import Training as Distillation

_CHUNK = 512
_LEAST = 64
_SHARE = 0.5
"""Of the free memory, what the cache may take where its size is not given."""


@dataclass(slots=True)
class Memory:
    """One request in the draft's cache: `computed` known tokens have KV; after a round, `ran[d]` are the tokens of the path that
    was fed at depth d + 1, whose KV follows them."""

    computed: int = 0
    ran: list[int] = field(default_factory=list)


@register("draft_model")
class DraftModel(Drafter):
    """Speculative decoding with a separate draft model."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`path`: directory, GGUF file, hub id or embedded name. `layers`: keep only the first so many decoder layers (0: all).
        `depth`: levels guessed; `width`: guesses kept per level (1: a chain). `tokens`: KV memory, in all (0: for as many as the
        target has, if there is room). `match`: how a draft of another tokenizer is understood: `ids` (tokens that both have),
        `text`, `auto` (what fits), `same` (not at all)."""

        path: str
        layers: int = 0
        depth: int = 5
        width: int = 1
        tokens: int = 0
        match: str = "auto"

    Training = Distillation

    @classmethod
    def pupil(cls, teacher: Teacher, options: Mapping[str, Any]) -> Distilled:
        """A draft model to be trained; see `protocols.Pupil`."""
        return Distilled(teacher, Distillation(**options))

    def __init__(self, config: Config) -> None:
        for name, low in (("layers", 0), ("depth", 1), ("width", 1)):
            if getattr(config, name) < low:
                raise BadInput(f"draft_model needs {name} >= {low}, got {getattr(config, name)}")
        if config.tokens and config.tokens < _LEAST:
            raise BadInput(f"draft_model needs tokens >= {_LEAST}, or 0 for as many as the target's, got {config.tokens}")
        self.config, self.depth, self.nodes = config, config.depth, config.depth * config.width
        self._memory: dict[int, Memory] = {}
        self.bridge: translate.Bridge | None = None
        self.chains: Chains | None = None
        self.path = Path(os.path.expanduser(config.path))
        self.origin = lean.origin(self.path)
        self.needs = Needs(target=self.origin is not None)

    def start(self, start: Start) -> None:
        """Load the draft and make its cache. Raises `DrafterMismatch` when it cannot be understood."""
        if self.origin is not None and start.view is not None:
            self.origin.check(start.fingerprint, start.name)
            own, ids = lean.load(self.path, start.view.rows(), start.dtype)
            own = truncate(own.to(start.device), self.config.layers, self.path.name)  # type: ignore[arg-type]
            self.bind(fitting(own, self.path.name), start, None, ids)
            return
        loaded = weights.load(weights.resolve(self.config.path), dtype=start.dtype, device=str(start.device))
        model = truncate(loaded.model, self.config.layers, loaded.name)
        self.bind(fitting(model, loaded.name), start, loaded.tokenizer)

    def bind(self, decoder: Decoder, start: Start, tokenizer: object = None, ids: Tensor | None = None) -> None:
        """Use an already loaded decoder, whose scores are those of the target's tokens `ids` (None: of all, in order)."""
        self.ids, self.known = ids, int(decoder.model.get_input_embeddings().weight.shape[0])
        self.bridge = check_vocabulary(decoder, tokenizer, start, self.config.match) if ids is None else None
        self.decoder, self.sampler, self.vocab, self.width = decoder, start.sampler, start.vocab_size, self.config.width
        if self.bridge is not None:
            self.sampler, self.vocab = self.bridge.sampler, decoder.vocab_size
            self.width = 1 if self.bridge.chains else self.width
        block = start.kv_block
        blocks = self._tokens(decoder, start) // block + 1
        self.cache = PagedCache(decoder.layers, blocks, block, dtype=decoder.dtype, device=decoder.device)
        answers = self.vocab if ids is not None else decoder.vocab_size
        plain = self.bridge is None and self.width == 1 and answers >= start.usable > 0
        self.chains = Chains(decoder, self.cache, start.usable, ids) if plain and anchors(self.cache) else None

    def renew(self) -> bool:
        """What requests leave behind is KV of beginnings."""
        self.cache.forget()
        return True

    def memory(self, dtype: torch.dtype) -> tuple[int, int]:
        """Weights, and KV for as many tokens as the target has, or for `tokens`. A hub id not fetched yet is fetched."""
        size = footprint(weights.resolve(self.config.path))
        if self.origin is not None:
            size = replace(size, parameters=size.parameters + lean.numbers(self.path, self.origin))
        each = size.kv * dtype.itemsize
        if self.config.layers and size.layers:
            each = each * min(self.config.layers, size.layers) // size.layers
        tokens = self.config.tokens
        return size.bytes(dtype) + each * tokens, 0 if tokens else each

    def _tokens(self, decoder: Decoder, start: Start) -> int:
        each = 2 * decoder.dtype.itemsize * sum(heads * dim for heads, dim in decoder.layers)
        return self.config.tokens or min(start.kv_tokens, int(free_memory(decoder.device) * _SHARE) // each)

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        """Guesses, if need be in translation."""
        if self.bridge is None:
            return self._draft(batch, budget)
        shadows = self.bridge.shadow(batch, budget)
        for request, nodes in zip(shadows.requests, budget.nodes, strict=True):
            memory = self._memory.get(request.id)
            if memory is not None and nodes and self.bridge.kept(request) < memory.computed:
                memory.computed, memory.ran = self.bridge.kept(request), []
        return self.bridge.back(batch, self._draft(shadows, budget), budget)

    def _draft(self, batch: Batch, budget: Budget) -> Proposal:
        """Level by level: each pass feeds the newest nodes, the first one also all known tokens without KV."""
        chosen = [b for b in range(len(batch)) if budget.nodes[b] and self._ready(batch.requests[b], budget.nodes[b])]
        device = self.decoder.device
        if not chosen:
            return Proposal.empty(len(batch), device)
        guesses = max(budget.depth[b] for b in chosen)
        if self.chains is not None and self.chains.serves([batch.requests[b] for b in chosen], guesses):
            return self._replay(self.chains, batch, budget, chosen)
        sub, computed = self._catch_up(batch, chosen)
        forest = Forest(len(sub), self.width, [r.sampled for r in sub.requests])
        limits = [min(budget.nodes[b], self.width * budget.depth[b]) for b in chosen]
        for level in range(max(budget.depth[b] for b in chosen)):
            nodes, fed = forest.proposal(device), [len(t) for t in forest.trees]
            out = self._run(sub, nodes, [f + 1 for f in forest.fed] if level else 0, computed)
            for request in sub.requests:
                self._memory[request.id].computed = len(request.tokens)
            forest.fed = fed
            rooms = [limit if budget.depth[b] > level else 0 for b, limit in zip(chosen, limits, strict=True)]
            if not self._grow(forest, out, rooms):
                break
        for request, tree_, count in zip(sub.requests, forest.trees, forest.fed, strict=True):
            self._memory[request.id].ran = [token for token, _ in tree_[:count]]
        return self.sampler.attach(batch, forest.proposal(device, chosen, len(batch)))

    def _replay(self, chains: Chains, batch: Batch, budget: Budget, chosen: list[int]) -> Proposal:
        """Chains that the host never reads."""
        guesses = max(budget.depth[b] for b in chosen)
        requests = tuple(batch.requests[b] for b in chosen)
        memories = [self._memory[r.id] for r in requests]
        while any(len(r.tokens) - m.computed > guesses + 1 for r, m in zip(requests, memories, strict=True)):
            feed = tuple(min(_CHUNK, max(len(r.tokens) - 1 - m.computed, 0)) for r, m in zip(requests, memories, strict=True))
            self._run(
                self._batch(requests, feed, False), Proposal.empty(len(requests), self.decoder.device), 0, _computed(memories)
            )
            for memory, count in zip(memories, feed, strict=True):
                memory.computed += count
        written = chains.write(requests, guesses)
        for memory, request in zip(memories, requests, strict=True):
            memory.computed, memory.ran = len(request.tokens), []
        depths = dict(zip(chosen, (budget.depth[b] for b in chosen), strict=True))
        widths = tuple(depths.get(b, 0) for b in range(len(batch)))
        return on_device(written, chosen, widths)

    def observe(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        """Bring a tree's accepted path into line, as far as its nodes were fed."""
        known = batch if self.bridge is None else self.bridge.seen(batch)
        if known is None:
            return
        if not any((found := self._memory.get(r.id)) is not None and found.ran for r in known.requests):
            return
        paths = verdict.path.tolist()
        for b, request in enumerate(known.requests):
            memory = self._memory.get(request.id)
            if memory is None or not memory.ran or memory.computed != len(request.tokens):
                continue
            path = [c for c in paths[b] if c != NONE and c < len(memory.ran)]
            if not proposal.linear and path:
                at = memory.computed + torch.tensor(path, device=self.decoder.device)
                self.cache.move(request, at, memory.computed)
            memory.ran = [memory.ran[c] for c in path]

    def release(self, request: Request) -> None:
        """Forget a request; what its tokens' KV is stays for those that begin alike."""
        memory = self._memory.pop(request.id, None)
        if memory is not None:
            self.cache.publish(request, min(memory.computed, len(request.tokens)))
            self.cache.release(request)
        if self.chains is not None:
            self.chains.release(request)
        if self.bridge is not None:
            self.bridge.release(request)

    def _ready(self, request: Request, nodes: int) -> bool:
        """Whether the request fits the draft: its context and its cache. If not, it gets no guesses, and nothing else happens."""
        length = len(request.tokens) + nodes
        if length > self.decoder.max_len:
            self.cache.release(request)
            self._memory.pop(request.id, None)
            return False
        new = request.id not in self._memory
        if new:
            self._begin(request)
        if not self.cache.reserve(request, length):
            if new:
                self.release(request)
            return False
        memory = self._memory[request.id]
        fresh = request.tokens[memory.computed :]
        same = next(
            (i for i, (a, b) in enumerate(zip(memory.ran, fresh, strict=False)) if a != b), min(len(memory.ran), len(fresh))
        )
        memory.computed = min(memory.computed + same, len(request.tokens) - 1)
        memory.ran = []
        return True

    def _begin(self, request: Request) -> None:
        """Take over the KV of earlier requests that began alike; the last known token is always fed."""
        size = self.cache.block_size
        blocks = self.cache.find(request.tokens, len(request.tokens) - 1, size, request.group)
        self.cache.adopt(request, blocks)
        self._memory[request.id] = Memory(len(blocks) * size)

    def _catch_up(self, batch: Batch, chosen: list[int]) -> tuple[Batch, list[int]]:
        """The sub-batch to draft for, after feeding all but the last stretch of what the cache lacks, and how many tokens of
        each request have KV."""
        requests = tuple(batch.requests[b] for b in chosen)
        memories = [self._memory[r.id] for r in requests]
        while True:
            missing = [len(r.tokens) - m.computed for r, m in zip(requests, memories, strict=True)]
            if max(missing) <= _CHUNK:
                break
            feed = tuple(min(_CHUNK, m - 1) for m in missing)
            self._run(
                self._batch(requests, feed, False), Proposal.empty(len(requests), self.decoder.device), 0, _computed(memories)
            )
            for memory, count in zip(memories, feed, strict=True):
                memory.computed += count
        return self._batch(requests, tuple(missing), True), _computed(memories)

    @staticmethod
    def _batch(requests: tuple[Request, ...], pending: tuple[int, ...], ready: bool) -> Batch:
        return Batch(requests, pending, (ready,) * len(requests), (0,) * len(requests))

    def _run(self, batch: Batch, nodes: Proposal, start: int | list[int], computed: list[int]) -> PassOutput:
        layout = Layout.build(batch, nodes, self.cache, start, computed)
        known = layout.tokens.clamp(max=self.known - 1)  # ids past the draft's vocabulary are padding nobody writes
        out = self.decoder.forward(replace(layout, tokens=known), self.cache)
        logits = None if out.logits is None else _fit(out.logits, self.vocab, self.ids)
        return PassOutput(out.rows, None, logits, {}, layout.slots(batch))

    def _grow(self, forest: Forest, out: PassOutput, rooms: list[int]) -> bool:
        """Add one level from the scores of the frontier's rows; False when nothing could be added."""
        if out.logits is None or out.slots is None:
            return False
        slot = out.rows.slot[out.rows.slot >= 0]
        if self.width == 1:
            tokens = self.sampler.choose(out.logits, out.slots)[:, None]
            gain = torch.zeros(tokens.shape, device=tokens.device)
        else:
            best = self.sampler.scores(out.logits, out.slots).topk(self.width)
            tokens, gain = best.indices, best.values - best.values[:, :1]
        return forest.grow(out.slots.request.tolist(), (slot - 1).tolist(), tokens.tolist(), gain.tolist(), rooms)


def on_device(written: Tensor, chosen: list[int], widths: tuple[int, ...]) -> Proposal:
    """Chains `[len(chosen), K]` as a proposal for a batch with `widths`, without a look at them."""
    count, columns, device = len(widths), written.shape[1], written.device
    tokens = written if len(chosen) == count else written.new_zeros(count, columns)
    if len(chosen) != count:
        tokens.index_copy_(0, torch.tensor(chosen).to(device, non_blocking=True), written)
    parents = torch.arange(-1, columns - 1, device=device).expand(count, columns)
    sizes = torch.tensor(widths).to(device, non_blocking=True)
    return Proposal(tokens, parents, sizes, torch.zeros_like(tokens), widths, linear=True)


def _computed(memories: list[Memory]) -> list[int]:
    return [m.computed for m in memories]


class Forest:
    """Trees under construction, one per request: `trees[b]` lists `(token, parent)`, `totals[b]` a node's summed score, `fed[b]`
    counts the nodes the draft has run. Where `drawn[b]`, the shape must not depend on what was drawn: the root has `width`
    children, every other node one, in the order in which they were drawn."""

    def __init__(self, count: int, width: int, drawn: list[bool] | None = None) -> None:
        self.width, self.drawn = width, drawn or [False] * count
        self.trees: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        self.totals: list[list[float]] = [[] for _ in range(count)]
        self.fed = [0] * count

    def grow(
        self, request: list[int], parent: list[int], tokens: list[list[int]], gain: list[list[float]], rooms: list[int]
    ) -> bool:
        """Append to each tree the best `width` of its frontier's candidates, by summed score (drawn trees: see above), as far as
        there is room."""
        found: list[list[tuple[float, int, int]]] = [[] for _ in self.trees]
        for r, p, row, gains in zip(request, parent, tokens, gain, strict=True):
            base = self.totals[r][p] if p != ROOT else 0.0
            some = [(base + g, p, t) for t, g in zip(row, gains, strict=True) if g > float("-inf") and t != NONE]
            found[r] += some[:1] if self.drawn[r] and p != ROOT else some
        grown = False
        for tree_, totals, candidates, room, drawn in zip(self.trees, self.totals, found, rooms, self.drawn, strict=True):
            ranked = candidates if drawn else sorted(candidates, key=lambda c: -c[0])
            best = ranked[: max(0, min(self.width, room - len(tree_)))]
            tree_ += [(t, p) for _, p, t in best]
            totals += [g for g, _, _ in best]
            grown = grown or bool(best)
        return grown

    def proposal(self, device: torch.device, chosen: list[int] | None = None, batch: int = 0) -> Proposal:
        """The trees as a proposal, spread over a batch of which only the `chosen` requests were drafted for."""
        trees = self.trees
        if chosen is not None:
            trees = [[] for _ in range(batch)]
            for b, tree_ in zip(chosen, self.trees, strict=True):
                trees[b] = tree_
        if self.width == 1:
            return Proposal.chains([[t for t, _ in tree_] for tree_ in trees], device)
        return Proposal.trees(trees, device)


def _fit(logits: Tensor, vocab: int, ids: Tensor | None = None) -> Tensor:
    """Draft logits, of all tokens or of `ids`, over the target's vocabulary: cut padding, forbid what the draft lacks."""
    have = logits.shape[1]
    if ids is not None:
        return spread(logits, vocab, ids)
    if have >= vocab:
        return logits[:, :vocab]
    return torch.nn.functional.pad(logits, (0, vocab - have), value=float("-inf"))


def check_vocabulary(decoder: Decoder, tokenizer: object, start: Start, match: str = "same") -> translate.Bridge | None:
    """None if ids mean the same in both models (padding at the end may differ), else what translates, as `match` says. Raises
    `DrafterMismatch` if nothing does."""
    theirs, ours = getattr(tokenizer, "vocab", None), start.vocab
    if match == "text":
        return translate.bridge(match, decoder.name, decoder.vocab_size, tokenizer, start)
    if match not in ("same", *translate.MATCHES):
        raise BadInput(f"draft_model: match must be auto, ids, text or same, got {match!r}")
    if theirs is None or ours is None:
        return None
    differing = [t for t, i in ours.items() if theirs.get(t, i) != i]
    shared = sum(1 for t, i in ours.items() if theirs.get(t) == i)
    if not differing and shared >= 0.9 * min(len(ours), len(theirs)):
        return None
    if match != "same":
        return translate.bridge(match, decoder.name, decoder.vocab_size, tokenizer, start)
    raise DrafterMismatch(
        f"the draft model {decoder.name} (vocabulary {len(theirs)}) and the target {start.name} (vocabulary {len(ours)}) "
        "do not share a tokenizer; use a draft of the same family, or --draft ngram, which needs no model"
    )
