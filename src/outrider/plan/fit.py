"""Whether a model, its drafter and the texts of a load have room on a card; and what the load costs there in a day."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import BadInput
from ..loading import KV_SHARE, aside
from .cards import Card
from .sizes import Size

GIB = 2**30
USABLE = 0.98
"""Of the memory on a data sheet, what programs see."""


@dataclass(frozen=True, slots=True)
class Form:
    """How weights and KV are kept."""

    dtype: torch.dtype
    quantize: str = "none"


@dataclass(frozen=True, slots=True)
class Fit:
    """Bytes on a card: weights of target and drafter, KV of `requests` texts of `length` tokens in both, what is set aside for
    the work itself, and what there is. `most`: how many such texts have room."""

    card: str
    weights: int
    draft: int
    kv: int
    work: int
    room: int
    requests: int
    length: int
    most: int

    @property
    def total(self) -> int:
        return self.weights + self.draft + self.kv + self.work

    @property
    def fits(self) -> bool:
        return self.requests <= self.most


def fit(card: Card, target: Size, draft: Size | None, form: Form, load: tuple[int, int]) -> Fit:
    """For a load of `(requests, length)`. The target is kept as `form` says, a draft model in the same dtype, not rounded. The KV
    pool takes the engine's share of what is left."""
    requests, length = load
    if requests < 1 or length < 1:
        raise BadInput(f"a load needs at least one request of one token, got {requests} of {length}")
    room = int(card.memory * GIB * USABLE)
    weights, drafts = target.footprint.bytes(form.dtype, form.quantize), draft.footprint.bytes(form.dtype) if draft else 0
    each = (target.kv + (draft.kv if draft else 0)) * form.dtype.itemsize * length
    left = int(KV_SHARE["cuda"] * (room - weights - drafts - aside(room)))
    return Fit(card.name, weights, drafts, each * requests, aside(room), room, requests, length, max(0, left // max(1, each)))


@dataclass(frozen=True, slots=True)
class Day:
    """GPU hours that a day's tokens take, plain and with guesses, and what is saved; `money` is None without a price."""

    plain_hours: float
    hours: float
    saved_hours: float
    saved_money: float | None


def day(tokens: float, plain_speed: float, speed: float, price: float | None = None) -> Day:
    """From tokens a day and tokens per second of one card."""
    plain, drafted = (tokens / s / 3600.0 for s in (plain_speed, speed))
    return Day(plain, drafted, plain - drafted, None if price is None else (plain - drafted) * price)
