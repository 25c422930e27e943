"""Growing guesses level by level with EAGLE's network, on the device, in shapes the host knows beforehand.

Two forms. `branching` is EAGLE-2's dynamic tree (Li et al. 2024, arXiv 2406.16858): every level feeds the `width` best nodes,
each offers `width` children, and at the end the best of all that were offered are kept. A node is worth the sum of the
log-probabilities along its path, those of the *perturbed* scores: the target adds the same noise, so what leads after the noise
is what it will write. `strands` lets the root have `width` children and every other node one: chains, and what is drawn under
the classical rules, where a tree's shape must not depend on what was drawn.

C requests, k = width, F nodes fed, S committed tokens and fed nodes, d the network's width, n its vocabulary, V the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.chain import spread
from ..models.eagle_net import EagleNet, attend
from ..protocols import DraftSampler
from ..types import ROOT, Request, Slots
from ._grown import gathered, prefix


@dataclass(frozen=True, slots=True)
class Ground:
    """Where guessing starts. `hidden [C, 1, d]`: the network's state at the last known token; `keys`, `values [C, S, KV, D]`: its
    committed KV, with room for F nodes at the end; `seen [C, S - F]` which of it counts; `length [C]` known tokens."""

    requests: tuple[Request, ...]
    hidden: Tensor
    keys: Tensor
    values: Tensor
    seen: Tensor
    length: Tensor


@dataclass(frozen=True, slots=True)
class Limits:
    """Host bounds of each request's guesses: levels and nodes."""

    depths: tuple[int, ...]
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Frontier:
    """The newest nodes: `tokens`, `column` (their number among all that were offered), summed scores `total`, all `[C, k]`;
    `path [C, k, l]` the tokens that lead there, themselves included; `above [C, k, F]` which fed nodes they see; `hidden
    [C, k, d]` what the network reads with them."""

    tokens: Tensor
    column: Tensor
    total: Tensor
    path: Tensor
    above: Tensor
    hidden: Tensor


class Climber:
    """Grows guesses for one network. `ids [n]`: the target's tokens that it scores, None: all `vocab`."""

    def __init__(self, net: EagleNet, sampler: DraftSampler, vocab: int, ids: Tensor | None, width: int) -> None:
        self.net, self.sampler, self.vocab, self.ids, self.width = net, sampler, vocab, ids, width
        self.hope: Tensor | None = None
        """Tokens `[C]` that the network itself expects of what it grew last; None where it was `strands`."""

    def fed(self, depth: int) -> int:
        """F: nodes fed for `depth` levels."""
        return self.width * max(0, depth - 1)

    def branching(self, ground: Ground, limits: Limits) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and parents `[C, N]`, and sizes `[C]`."""
        k, depth, device = self.width, max(limits.depths), ground.hidden.device
        count = len(ground.requests)
        hidden = self.net.back(ground.hidden)
        tokens, total = (x[:, 0] for x in self._children(*self._rows(ground, ground.hidden, None, 0, 0)))
        all_tokens, all_totals = [tokens], [total]
        all_parents = [torch.full((count, k), ROOT, dtype=torch.int64, device=device)]
        own = torch.eye(k, dtype=torch.bool, device=device)
        above = torch.zeros(count, k, self.fed(depth), dtype=torch.bool, device=device)
        column = torch.arange(k, device=device).expand(count, k)
        front = Frontier(tokens, column, total, tokens[:, :, None], above, hidden.expand(-1, k, -1))
        allowed = torch.tensor(limits.depths).to(device, non_blocking=True)
        for level in range(1, depth):
            front.above[:, :, (level - 1) * k : level * k] = own
            out = self._feed(ground, front, level)
            tokens, gain = self._children(*self._rows(ground, out, front.path, level, 0))
            total = (front.total[:, :, None] + gain).masked_fill((level >= allowed)[:, None, None], float("-inf"))
            first = k + (level - 1) * k * k
            all_tokens.append(tokens.flatten(1))
            all_totals.append(total.flatten(1))
            all_parents.append(front.column.repeat_interleave(k, 1))
            front = _best(front, tokens, total, self.net.back(out), first)
        totals = torch.cat(all_totals, 1)
        chosen = _chosen(totals, limits.nodes)
        self.hope = totals.exp().where(chosen, 0).sum(1)  # a path's chance adds to what is accepted once for each of its nodes
        return _kept(torch.cat(all_tokens, 1), torch.cat(all_parents, 1), chosen, limits.nodes)

    def strands(self, ground: Ground, limits: Limits) -> tuple[Tensor, Tensor, Tensor]:
        """As `branching`; column `level * k + i` is the node of strand i."""
        k, depth, device = self.width, max(limits.depths), ground.hidden.device
        count = len(ground.requests)
        above = torch.zeros(count, k, self.fed(depth), dtype=torch.bool, device=device)
        own = torch.eye(k, dtype=torch.bool, device=device)
        self.hope = None
        tokens, live = self._draws(*self._rows(ground, ground.hidden, None, 0, 0), k)
        tokens, live = tokens.view(count, k), live.view(count, k)
        hidden = self.net.back(ground.hidden).expand(-1, k, -1)
        column, path = torch.arange(k, device=device).expand(count, k), tokens[:, :, None]
        all_tokens, all_live = [tokens], [live]
        for level in range(1, depth):
            above[:, :, (level - 1) * k : level * k] = own
            out = self._feed(ground, Frontier(tokens, column, hidden, path, above, hidden), level)
            tokens, found = self._draws(*self._rows(ground, out, path, level, (level - 1) * k + 1), 1)
            tokens, live = tokens.view(count, k), live & found.view(count, k)
            hidden, path = self.net.back(out), torch.cat([path, tokens[:, :, None]], 2)
            all_tokens.append(tokens)
            all_live.append(live)
        most = torch.tensor([min(n, k * d) for n, d in zip(limits.nodes, limits.depths, strict=True)])
        sizes = torch.minimum(prefix(torch.cat(all_live, 1)), most.to(device, non_blocking=True))
        parents = torch.arange(-k, (depth - 1) * k, device=device).clamp(min=ROOT).expand(count, -1)
        there = torch.arange(depth * k, device=device) < sizes[:, None]
        return torch.cat(all_tokens, 1).where(there, 0), parents, sizes

    def _feed(self, ground: Ground, front: Frontier, level: int) -> Tensor:
        """Run the nodes of one level: states `[C, k, d]`. Their KV goes behind the committed one."""
        net, k = self.net, self.width
        x, residual = net.enter(front.hidden, front.tokens)
        position = ground.length[:, None] - 2 + level
        query, key, value = net.project(x, position.expand(-1, k))
        at = ground.seen.shape[1] + (level - 1) * k
        ground.keys[:, at : at + k], ground.values[:, at : at + k] = key, value
        seen = torch.cat([ground.seen[:, None].expand(-1, k, -1), front.above], 2)[:, :, : at + k]
        return net.leave(residual, attend(query, ground.keys[:, : at + k], ground.values[:, : at + k], seen, net.scale))

    def _rows(self, ground: Ground, hidden: Tensor, path: Tensor | None, level: int, slot: int) -> tuple[Tensor, Slots]:
        """Logits `[C m, V]` of states `[C, m, d]` behind `path [C, m, level]`, and where they stand; `slot` is the number of the
        first one of each request, by which draws are keyed."""
        count, many = hidden.shape[:2]
        logits, device = self.net.scores(hidden).flatten(0, 1), hidden.device
        logits = logits if logits.dtype == torch.float64 else logits.float()
        whole = _fit(logits, self.vocab) if self.ids is None else spread(logits, self.vocab, self.ids)
        request = torch.arange(count, device=device).repeat_interleave(many)
        tokens = path.flatten(0, 1) if path is not None else torch.zeros(count * many, 0, dtype=torch.int64, device=device)
        slots = (slot + torch.arange(many, device=device)).repeat(count)
        depth = torch.full_like(request, level)
        return whole, Slots(ground.requests, request, ground.length[request] + level, tokens, depth, slots)

    def _children(self, logits: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """The best k tokens of each row and their log-probabilities, `[C, m, k]`."""
        scores = self.sampler.scores(logits, slots)
        if self.ids is not None:  # the others are impossible
            scores = scores.index_select(1, self.ids)
        best = scores.view(len(slots.requests), -1, scores.shape[1]).topk(self.width, dim=-1)
        gain = best.values - scores.logsumexp(1).view(best.values.shape[:2])[:, :, None]
        tokens = best.indices if self.ids is None else self.ids[best.indices]
        return tokens, gain.nan_to_num(nan=float("-inf"), posinf=float("-inf"), neginf=float("-inf"))

    def _draws(self, logits: Tensor, slots: Slots, many: int) -> tuple[Tensor, Tensor]:
        """The best `many` tokens of each row, and whether they can be: `[C m, many]`."""
        if many == 1:
            chosen = self.sampler.choose(logits, slots)[:, None]
            return chosen.clamp(min=0), chosen >= 0
        best = self.sampler.scores(logits, slots).topk(many, dim=-1)
        return best.indices, best.values.isfinite()


def _best(front: Frontier, tokens: Tensor, total: Tensor, hidden: Tensor, first: int) -> Frontier:
    """The best k of the children `[C, k, k]` as the next level, numbered from `first` on."""
    k = tokens.shape[1]
    chosen = total.flatten(1).topk(k, dim=1)
    parent, token = chosen.indices // k, tokens.flatten(1).gather(1, chosen.indices)

    def of_parent(x: Tensor) -> Tensor:
        return x.gather(1, parent[:, :, None].expand(-1, -1, x.shape[2]))

    path = torch.cat([of_parent(front.path), token[:, :, None]], 2)
    return Frontier(token, first + chosen.indices, chosen.values, path, of_parent(front.above), of_parent(hidden))


def _chosen(totals: Tensor, nodes: Sequence[int]) -> Tensor:
    """Which of all nodes `[C, M]` are the best, at most `nodes[c]` of them. What leads to a chosen node is chosen: it is worth no
    less, and came before."""
    most = torch.tensor(nodes).to(totals.device, non_blocking=True)
    order = totals.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    return (rank < most[:, None]) & (totals > float("-inf"))


def _kept(tokens: Tensor, parents: Tensor, chosen: Tensor, nodes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The `chosen` nodes, at most `nodes[c]`, in the order in which they were offered."""
    kept = gathered(tokens, parents, chosen)
    widest = min(max(nodes), tokens.shape[1])
    return kept[0][:, :widest], kept[1][:, :widest], kept[2]


def _fit(logits: Tensor, vocab: int) -> Tensor:
    """Logits cut or padded to the target's vocabulary."""
    missing = max(0, vocab - logits.shape[1])
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))[:, :vocab]
