"""From logits to tokens: token = argmax_v (score_v + T * gumbel(key, position, v)).

`score` is the logit after the request's processors, untempered; top-k, top-p and min-p, in this order, decide on tempered
scores (score - max) / T which tokens take part. Adding Gumbel noise and taking the maximum draws from softmax(score / T) over
those (Gumbel-max; Gumbel 1954, Maddison et al. 2014); T = 0 is greedy and uses no filter. Ties go to the lowest id.

Rows do not care who shares the call. On the CPU every row is worked on alone, with numpy: filters come first, from few
candidates, and only survivors get noise. Other devices work on all rows at once without a host sync; what is summed across
a row there is summed in integers, so that no kernel's order of work can change a bit. `oracle.choose` is the definition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .config import SamplingParams
from .errors import BadInput
from .noise import NoiseCache, gumbel_rows, signed, to_gumbel
from .processors import Ids, Processors, Row, column, process_rows
from .types import NONE, Request, Slots

_MASS_BITS = 2.0**40
"""Resolution of probability mass on devices: V * 2**40 fits an int64 for any vocabulary below 2**23."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """One row on the host: processed scores `row [usable]`, their first maximum, and what the noise needs."""

    index: int
    row: Row
    best: int
    top: float
    params: SamplingParams
    key: int
    position: int

    @property
    def valid(self) -> bool:
        """Numpy's argmax finds the first NaN before anything else, so the top tells of every invalid score."""
        return math.isfinite(self.top)


class TextSampler:
    """The `protocols.Sampler` of a target with `vocab_size` ids, of which the tokenizer knows those below `usable`.

    Logits may be wider or narrower than that (padded heads, smaller drafts): what is missing cannot be chosen. They may be
    fp32 or fp64, and are computed with as such. A row whose allowed scores include NaN or +inf, or that allows no token, has
    choice NONE and no finite score. Keeps state per request until `release`; one thread at a time.
    """

    def __init__(self, vocab_size: int, usable: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.usable = vocab_size if usable is None else min(usable, vocab_size)
        self._processors: dict[int, Processors] = {}
        self._noise = NoiseCache()

    def check(self, params: SamplingParams, bad_words: Iterable[Iterable[int]] = ()) -> None:
        """Raise `BadInput`, naming the field, for token ids that do not exist. `bad_words` as token ids."""
        fields: dict[str, Iterable[int]] = {
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids or (),
            "stop_token_ids": params.stop_token_ids,
            "bad_words": (token for word in bad_words for token in word),
        }
        for name, ids in fields.items():
            for token in ids:
                if not 0 <= token < self.usable:
                    raise BadInput(f"{name}: token id {token} does not exist; the vocabulary has ids 0 to {self.usable - 1}")

    def release(self, request: Request) -> None:
        """Forget what was counted for `request`."""
        self._processors.pop(request.id, None)

    def scores(self, logits: Tensor, slots: Slots) -> Tensor:
        """Perturbed scores `[S, V]` of `logits [S, V]`, in their dtype: -inf where no token may be chosen."""
        z = self._admit(logits)
        full = self._host_scores(z, slots) if z.device.type == "cpu" else self._device_scores(z, slots)
        width = logits.shape[1]
        return F.pad(full, (0, max(width - full.shape[1], 0)), value=-math.inf)[:, :width]

    def choose(self, logits: Tensor, slots: Slots) -> Tensor:
        """The token of every slot, `[S]` int64 for `logits [S, V]`; NONE where there is no valid choice."""
        z = self._admit(logits)
        if z.device.type == "cpu":
            chosen = np.full(len(z), NONE, dtype=np.int64)
            with np.errstate(over="ignore", invalid="ignore"):
                for slot in self._host_slots(z, slots):
                    if slot.valid:
                        chosen[slot.index] = self._host_choice(slot)
            return torch.from_numpy(chosen)
        return first_argmax(self._device_scores(z, slots))

    def law(self, logits: Tensor, slots: Slots) -> Tensor:
        """`[S, usable]` unnormalised log-probabilities of every slot's token: processed, tempered, filtered, -inf where a token
        cannot be chosen, NaN in rows without a valid choice. At T = 0 the processed scores, untempered and unfiltered."""
        z = self._admit(logits)
        if z.device.type != "cpu":
            return self._device_law(z, slots)
        out = np.full(tuple(z.shape), -math.inf, dtype=z.numpy().dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            for slot in self._host_slots(z, slots):
                heat, row = slot.params.temperature, out[slot.index]
                kept = survivors(slot.row, slot.top, slot.params) if heat and slot.valid else None
                if not slot.valid:
                    row.fill(math.nan)
                elif kept is None:
                    row[:] = (slot.row - slot.top) / heat if heat else slot.row
                else:
                    row[kept] = (slot.row[kept] - slot.top) / heat
        return torch.from_numpy(out)

    def _device_law(self, z: Tensor, slots: Slots) -> Tensor:
        processors = [self._of(r) for r in slots.requests]
        params = [p.params for p in processors]
        z = process_rows(z, slots, processors)
        top = z.amax(1, keepdim=True)
        heat = column([p.temperature for p in params], slots, z.dtype)
        if any(p.temperature and filtered(p) for p in params):
            z = z.masked_fill(~_kept(z, heat, params, slots), -math.inf)
        z = torch.where(heat > 0, (z - top) / torch.where(heat > 0, heat, 1), z)
        return torch.where(top.isfinite(), z, math.nan)

    def _admit(self, logits: Tensor) -> Tensor:
        """`[S, usable]` fp32 or fp64 view of the logits (a copy where they are narrower or of another type)."""
        z = logits.detach()
        if z.dtype not in (torch.float32, torch.float64):
            z = z.float()
        missing = self.usable - z.shape[1]
        return F.pad(z, (0, missing), value=-math.inf) if missing > 0 else z[:, : self.usable]

    def _of(self, request: Request) -> Processors:
        """The request's processors, made at first sight; an id that came back with another request starts afresh."""
        found = self._processors.get(request.id)
        if found is None or found.request is not request:
            found = self._processors[request.id] = Processors(request, self.usable)
        return found

    # ---- CPU: one row at a time ----

    def _host_slots(self, z: Tensor, slots: Slots) -> Iterator[_Slot]:
        processors = [self._of(r) for r in slots.requests]
        paths: list[list[int]] | None = slots.path.tolist() if any(p.reads_path for p in processors) else None
        depths: list[int] = slots.depth.tolist()
        where = zip(slots.request.tolist(), slots.position.tolist(), strict=True)
        for s, ((which, position), row) in enumerate(zip(where, z.numpy(), strict=True)):
            p = processors[which]
            written = position - p.request.prompt_len
            if p.active(written):
                row = row.copy()
                p.edit(row, paths[s][: depths[s]] if paths else (), written)
            best = int(row.argmax())
            yield _Slot(s, row, best, float(row[best]), p.params, p.request.key, position)

    def _host_choice(self, slot: _Slot) -> int:
        heat = slot.params.temperature
        if heat == 0:
            return slot.best
        kept = survivors(slot.row, slot.top, slot.params)
        if kept is None:
            kept = self._contenders(slot)
        if len(kept) == 1:
            return int(kept[0])
        words = self._noise.at(slot.key, slot.position, kept, len(slot.row))
        return int(kept[(slot.row[kept] + to_gumbel(words).astype(slot.row.dtype) * heat).argmax()])

    def _contenders(self, slot: _Slot) -> Ids:
        """Without filters every token gets noise, but few can win: those that the row's largest noise would lift above
        what the best score already has. Saves most of the logarithms; the raw words are needed anyway."""
        heat, words = slot.params.temperature, self._noise.row(slot.key, slot.position, len(slot.row))
        mine, most = (float(g) for g in to_gumbel(words[[slot.best, int(words.argmax())]]))
        slack = 1e-5 * (abs(slot.top) + 40 * heat)
        return np.flatnonzero(slot.row >= slot.top - heat * (most - mine) - slack)

    def _host_scores(self, z: Tensor, slots: Slots) -> Tensor:
        out = np.full(tuple(z.shape), -math.inf, dtype=z.numpy().dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            for slot in self._host_slots(z, slots):
                if slot.valid:
                    self._fill(out[slot.index], slot)
                elif slot.top != -math.inf:
                    out[slot.index] = math.nan
        return torch.from_numpy(out)

    def _fill(self, out: Row, slot: _Slot) -> None:
        heat = slot.params.temperature
        kept = survivors(slot.row, slot.top, slot.params) if heat else None
        if heat == 0:
            out[:] = slot.row
        elif kept is None:
            words = self._noise.row(slot.key, slot.position, len(out))
            out[:] = slot.row + to_gumbel(words).astype(out.dtype) * heat
        else:
            words = self._noise.at(slot.key, slot.position, kept, len(out))
            out[kept] = slot.row[kept] + to_gumbel(words).astype(out.dtype) * heat

    # ---- other devices: all rows at once ----

    def _device_scores(self, z: Tensor, slots: Slots) -> Tensor:
        processors = [self._of(r) for r in slots.requests]
        params = [p.params for p in processors]
        z = process_rows(z, slots, processors)
        broken = (z.isnan() | (z == math.inf)).any(1, keepdim=True)
        heat = column([p.temperature for p in params], slots, z.dtype)
        if any(p.temperature and filtered(p) for p in params):
            z = z.masked_fill(~_kept(z, heat, params, slots), -math.inf)
        if any(p.temperature for p in params):
            keys = torch.tensor([signed(r.key) for r in slots.requests], dtype=torch.int64)
            keys = keys.to(z.device, non_blocking=True)[slots.request]
            z = z + gumbel_rows(keys, slots.position, z.shape[1], z.device, z.dtype) * heat
        return torch.where(broken, math.nan, z)


def survivors(row: Row, top: float, params: SamplingParams) -> Ids | None:
    """Ids that the filters leave of one row of scores with maximum `top`, ascending; None where no filter is on."""
    top_k = params.top_k if params.top_k < len(row) else 0
    if not (top_k > 0 or params.top_p < 1 or params.min_p > 0):
        return None
    tempered = row - top
    tempered /= max(params.temperature, float(np.finfo(row.dtype).tiny))
    if top_k > 0:
        ids = _best_k(tempered, top_k)
        if params.top_p < 1:
            ids = _prefix(tempered, ids, params.top_p * float(np.exp(tempered[ids]).sum()))
    elif params.top_p < 1:
        ids = _nucleus(tempered, params.top_p)
    else:
        ids = np.flatnonzero(tempered >= math.log(params.min_p) - 1e-3)
    return ids[np.exp(tempered[ids]) >= params.min_p] if params.min_p > 0 else ids


def filtered(params: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p is on."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _best_k(tempered: Row, k: int) -> Ids:
    """The k best of the tokens that are allowed."""
    kth = np.partition(tempered, len(tempered) - k)[len(tempered) - k]
    if kth == -math.inf:
        return np.flatnonzero(tempered > -math.inf)
    return _cut(tempered, np.flatnonzero(tempered >= kth), k, kth)


def _nucleus(tempered: Row, top_p: float) -> Ids:
    """Top-p without a full sort: candidates within `reach` of the best score, further out until they hold the mass."""
    weights = np.exp(tempered)
    need, reach = top_p * float(weights.sum()), 8.0
    while True:
        ids = np.flatnonzero(weights >= math.exp(-reach))
        if float(weights[ids].sum()) >= need or reach > 100:
            return _prefix(tempered, ids, need)
        reach *= 2


def _prefix(tempered: Row, ids: Ids, need: float) -> Ids:
    """Of the ascending `ids`, the fewest best ones whose weights reach `need` (all, should rounding leave them short)."""
    ranked = np.sort(tempered[ids])[::-1]
    size = int(np.searchsorted(np.cumsum(np.exp(ranked), dtype=np.float64), need)) + 1
    return ids if size >= len(ids) else _cut(tempered, ids, size, ranked[size - 1])


def _cut(tempered: Row, ids: Ids, size: int, last: float) -> Ids:
    """The best `size` of the ascending `ids`, where `last` is the least score among them: ties at it, lowest ids first."""
    values = tempered[ids]
    keep = values > last
    keep[np.flatnonzero(values == last)[: size - int(keep.sum())]] = True
    return ids[keep]


def _kept(z: Tensor, heat: Tensor, params: list[SamplingParams], slots: Slots) -> Tensor:
    """`[S, V]` bool: what top-k, top-p and min-p leave; everything at T = 0."""
    size = z.shape[1]
    hot = [p.temperature > 0 for p in params]
    top_k = column([p.top_k if h and p.top_k > 0 else size for p, h in zip(params, hot, strict=True)], slots, torch.int64)
    top_p = column([p.top_p if h else 1.0 for p, h in zip(params, hot, strict=True)], slots, torch.float64)
    min_p = column([p.min_p if h else 0.0 for p, h in zip(params, hot, strict=True)], slots, z.dtype)
    heat = torch.where(heat > 0, heat, 1).clamp_min(torch.finfo(z.dtype).tiny)
    tempered = (z - z.amax(1, keepdim=True)) / heat
    tempered, ids = tempered.sort(dim=1, descending=True, stable=True)
    weights = tempered.exp()
    keep = (torch.arange(size, device=z.device) < top_k) & (tempered > -math.inf)
    mass = torch.where(keep, weights.double() * _MASS_BITS, 0).long()
    before = mass.cumsum(1) - mass
    need = mass.sum(1, keepdim=True).double() * top_p
    keep &= ((before.double() < need) | (top_p >= 1)) & (weights >= min_p)
    return torch.zeros_like(keep).scatter(1, ids, keep)


def first_argmax(scores: Tensor) -> Tensor:
    """Lowest id of the maximum of each row `[S, V]` -> `[S]`, or NONE for rows with NaN or nothing above -inf.

    `torch.argmax` and `max` leave it open which of equal values they return."""
    top = scores.amax(1, keepdim=True)
    ids = torch.arange(scores.shape[1], device=scores.device)
    first = torch.where(scores == top, ids, scores.shape[1]).amin(1)
    return torch.where(top[:, 0].isfinite(), first, NONE)
