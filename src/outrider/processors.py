"""What a request does to its scores before temperature: penalties, bias, masks, custom processors, in this order.

Every slot sees the history of its own path: known tokens, then the drafted tokens above it. `Processors` holds what one
request needs, in compact arrays that follow `request.tokens` as it grows. `Processors.edit` works on one row on the host;
`process_rows` does the same to many rows by tensor operations, without a host sync. `oracle.process` is the definition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .types import NONE, Request, Slots

Ids = npt.NDArray[np.int64]
Row = npt.NDArray[Any]
"""Scores of one slot, fp32 or fp64."""


class History:
    """Distinct tokens of a request, and how often its output holds each; cost follows the new tokens only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._index: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.int64)
        self._read = 0

    def follow(self, request: Request) -> None:
        """Count the tokens that were committed since the last call. Calling twice changes nothing."""
        for i in range(self._read, len(request.tokens)):
            self._add(request.tokens[i], int(i >= request.prompt_len))
        self._read = len(request.tokens)

    def _add(self, token: int, count: int) -> None:
        at = self._index.get(token)
        if at is None:
            if not 0 <= token < self._limit:
                return
            at = self._index[token] = len(self._index)
            if at == len(self._ids):
                self._ids, self._counts = np.resize(self._ids, 2 * at), np.resize(self._counts, 2 * at)
            self._ids[at], self._counts[at] = token, 0
        self._counts[at] += count

    def known(self) -> tuple[Ids, Ids]:
        """Distinct ids `[n]` and their counts in the output `[n]`; views, not to be written."""
        n = len(self._index)
        return self._ids[:n], self._counts[:n]

    def along(self, path: Sequence[int]) -> tuple[Ids, Ids]:
        """Like `known`, for the history that `path` continues."""
        ids, counts = self.known()
        if not path:
            return ids, counts
        counts, extra = counts.copy(), dict[int, int]()
        for token in path:
            at = self._index.get(token)
            if at is not None:
                counts[at] += 1
            elif 0 <= token < self._limit:
                extra[token] = extra.get(token, 0) + 1
        if not extra:
            return ids, counts
        return np.concatenate([ids, np.array([*extra])]), np.concatenate([counts, np.array([*extra.values()])])


class Processors:
    """One request's processors. Ids at or above `limit` do not exist."""

    def __init__(self, request: Request, limit: int) -> None:
        params = request.params
        self.request, self.params, self.limit = request, params, limit
        self.history = History(limit)
        bias = {v: b for v, b in params.logit_bias.items() if 0 <= v < limit}
        self.bias_ids, self.bias = _ids(list(bias), limit), np.array([*bias.values()], dtype=np.float64)
        self.allowed = None if params.allowed_token_ids is None else _ids(params.allowed_token_ids, limit)
        self.banned = _ids([w[0] for w in request.bad_words if len(w) == 1], limit)
        self.phrases = [w for w in request.bad_words if len(w) > 1 and 0 <= w[-1] < limit]
        self.stops = _ids(sorted(request.stop_ids), limit)
        self.masked = self.allowed is not None or len(self.banned) > 0
        self.custom = params.processors
        self.always = params.penalised or bool(bias) or self.masked or bool(self.phrases) or bool(self.custom)
        self.reads_path = params.penalised or bool(self.phrases) or bool(self.custom)

    def active(self, written: int) -> bool:
        """Whether a slot with `written` output tokens before it needs `edit` at all."""
        return self.always or written < self.params.min_tokens

    def edit(self, row: Row, path: Sequence[int], written: int) -> None:
        """Process `row [limit]` in place."""
        if self.params.penalised:
            self._penalise(row, path)
        if len(self.bias):
            row[self.bias_ids] += self.bias.astype(row.dtype)
        if self.allowed is not None:
            kept = row[self.allowed]
            row.fill(-math.inf)
            row[self.allowed] = kept
        row[self.banned] = -math.inf
        for phrase in self.phrases:
            if self._tail(path, len(phrase) - 1) == phrase[:-1]:
                row[phrase[-1]] = -math.inf
        if written < self.params.min_tokens:
            row[self.stops] = -math.inf
        if self.custom:
            row[:] = self.customise(torch.from_numpy(row), path).numpy()

    def customise(self, row: Tensor, path: Sequence[int]) -> Tensor:
        """`row [limit]` after the request's own functions; all NaN, with a note in `request.failures`, if one of them fails."""
        tokens = (*self.request.tokens, *path)
        valid = not bool((row.isnan() | (row == math.inf)).any())
        for function in self.custom:
            complaint = None
            try:
                made = function(tokens, row)
                complaint = _complaint(made, row, valid)
            except Exception as error:
                complaint = f"raised {type(error).__name__}: {error}"
            if complaint is not None:
                self.request.failures[tokens] = f"the logits processor {_name(function)} {complaint}"
                return torch.full_like(row, math.nan)
            row = made.detach().to(row)
        return row

    def _penalise(self, row: Row, path: Sequence[int]) -> None:
        params = self.params
        self.history.follow(self.request)
        ids, counts = self.history.along(path)
        z = row[ids]
        if params.repetition_penalty != 1:
            z = np.where(z > 0, z / params.repetition_penalty, z * params.repetition_penalty)
        if params.frequency_penalty:
            z -= counts.astype(row.dtype) * params.frequency_penalty
        if params.presence_penalty:
            z -= (counts > 0) * row.dtype.type(params.presence_penalty)
        row[ids] = z

    def _tail(self, path: Sequence[int], size: int) -> tuple[int, ...]:
        """The last `size` tokens of known tokens and path (fewer at the start of a sequence)."""
        below = max(size - len(path), 0)
        known = self.request.tokens[-below:] if below else []
        return (*known, *path[max(len(path) - size, 0) :])


def _complaint(made: object, row: Tensor, valid: bool) -> str | None:
    """What is wrong with what a custom processor returned for `row`, if anything."""
    if not isinstance(made, Tensor) or made.shape != row.shape:
        got = f"shape {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        return f"returned {got}, not a tensor of shape {tuple(row.shape)}"
    if valid and bool((made.isnan() | (made == math.inf)).any()):
        return "returned NaN or +inf"
    return None


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _ids(ids: Sequence[int], limit: int) -> Ids:
    return np.array([v for v in ids if 0 <= v < limit], dtype=np.int64)


def process_rows(z: Tensor, slots: Slots, processors: Sequence[Processors]) -> Tensor:
    """`z [S, limit]` processed (a new tensor where anything changes), `processors[i]` belonging to `slots.requests[i]`."""
    if any(p.params.penalised for p in processors):
        z = _penalise_rows(z, slots, processors)
    if any(len(p.bias) for p in processors):
        z = z + _spread([(p.bias_ids, p.bias) for p in processors], z)[slots.request]
    forbidden = _forbidden(z, slots, processors)
    z = z if forbidden is None else z.masked_fill(forbidden, -math.inf)
    return _custom_rows(z, slots, processors) if any(p.custom for p in processors) else z


def _custom_rows(z: Tensor, slots: Slots, processors: Sequence[Processors]) -> Tensor:
    """Custom processors are called from the host, so this waits for the device."""
    z = z.clone()
    for s, (which, path, depth) in enumerate(zip(slots.request.tolist(), slots.path.tolist(), slots.depth.tolist(), strict=True)):
        if processors[which].custom:
            z[s] = processors[which].customise(z[s], path[:depth])
    return z


def column(values: Sequence[float], slots: Slots, dtype: torch.dtype) -> Tensor:
    """One host value per request -> `[S, 1]` on the device, the value of each row's request."""
    return torch.tensor(values, dtype=dtype).to(slots.request.device, non_blocking=True)[slots.request, None]


def _spread(sparse: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]], like: Tensor) -> Tensor:
    """(ids, values) per request -> dense `[requests, V]`, zero elsewhere."""
    dense = torch.zeros(len(sparse), like.shape[1], dtype=like.dtype, device=like.device)
    for row, (ids, values) in zip(dense, sparse, strict=True):
        at = torch.tensor(ids).to(like.device, non_blocking=True)
        row[at] = torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)
    return dense


def _penalise_rows(z: Tensor, slots: Slots, processors: Sequence[Processors]) -> Tensor:
    for p in processors:
        if p.params.penalised:
            p.history.follow(p.request)
    none = np.empty(0, dtype=np.int64)
    known = [p.history.known() if p.params.penalised else (none, none) for p in processors]
    counts = _spread(known, z)[slots.request]
    seen = _spread([(ids, np.ones(len(ids))) for ids, _ in known], z)[slots.request]
    drafted = (slots.path >= 0) & (slots.path < z.shape[1])  # padding is NONE
    token, once = torch.where(drafted, slots.path, 0), drafted.to(z.dtype)
    counts, seen = counts.scatter_add(1, token, once), seen.scatter_add(1, token, once)
    repetition = column([p.params.repetition_penalty for p in processors], slots, z.dtype)
    frequency = column([p.params.frequency_penalty for p in processors], slots, z.dtype)
    presence = column([p.params.presence_penalty for p in processors], slots, z.dtype)
    z = torch.where(seen > 0, torch.where(z > 0, z / repetition, z * repetition), z)
    return z - counts * frequency - (counts > 0) * presence


def _forbidden(z: Tensor, slots: Slots, processors: Sequence[Processors]) -> Tensor | None:
    """`[S, V]` bool, or None where no request forbids anything."""
    parts = []
    if any(p.masked for p in processors):
        masks = np.zeros((len(processors), z.shape[1]), dtype=np.bool_)
        for mask, p in zip(masks, processors, strict=True):
            if p.allowed is not None:
                mask[:] = True
                mask[p.allowed] = False
            mask[p.banned] = True
        parts.append(torch.from_numpy(masks).to(z.device, non_blocking=True)[slots.request])
    if any(p.phrases for p in processors):
        parts.append(_ends_phrase(z, slots, processors))
    if any(p.params.min_tokens for p in processors):
        stops = _spread([(p.stops, np.ones(len(p.stops))) for p in processors], z)[slots.request] > 0
        first = column([p.request.prompt_len + p.params.min_tokens for p in processors], slots, torch.int64)
        parts.append(stops & (slots.position[:, None] < first))
    return torch.stack(parts).any(0) if parts else None


def _ends_phrase(z: Tensor, slots: Slots, processors: Sequence[Processors]) -> Tensor:
    """`[S, V]`: tokens that would complete a bad word of several tokens, given each slot's own history."""
    size = max(len(w) for p in processors for w in p.phrases) - 1
    count = max(len(p.phrases) for p in processors)
    wanted = np.full((len(processors), count, size), NONE, dtype=np.int64)  # token before last, the one before it, ...
    last = np.full((len(processors), count), z.shape[1], dtype=np.int64)
    tails = np.full((len(processors), size), -2, dtype=np.int64)  # ends of the known tokens; -2 equals no token
    for b, p in enumerate(processors):
        known = p.request.tokens[-size:]
        tails[b, size - len(known) :] = known
        for w, phrase in enumerate(p.phrases):
            wanted[b, w, : len(phrase) - 1] = phrase[-2::-1]
            last[b, w] = phrase[-1]
    wanted_t, last_t, tails_t = (torch.from_numpy(a).to(z.device, non_blocking=True) for a in (wanted, last, tails))
    history = torch.cat([tails_t[slots.request], slots.path], dim=1)
    back = size + slots.depth[:, None] - 1 - torch.arange(size, device=z.device)
    recent = history.gather(1, back)[:, None]
    rows = wanted_t[slots.request]
    match = ((recent == rows) | (rows == NONE)).all(-1)
    hit = torch.zeros(len(z), z.shape[1] + 1, dtype=torch.bool, device=z.device)
    ends = torch.where(match, last_t[slots.request], z.shape[1])
    return hit.scatter(1, ends, True)[:, :-1]
