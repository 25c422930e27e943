"""Draft KV that is owed: made before it is needed, and never for a request that gave its memory back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from outrider.bench import tiny
from outrider.drafters import _known
from outrider.drafters._known import WIDE, KnownKV
from outrider.drafters._past import Chunk, Past
from outrider.types import Request

nothing: Any = None


class Noting(KnownKV):
    """Notes whose KV was made, up to where."""

    def __init__(self) -> None:
        super().__init__(nothing, nothing, None)
        self.made_for: list[list[tuple[int, int]]] = []

    def _store(self, chunks: Sequence[Chunk]) -> None:
        self.made_for.append([(request.id, end) for request, _, end in chunks])


def owing(kv: KnownKV, count: int, length: int) -> tuple[list[Request], list[Past]]:
    requests, pasts = [tiny.request([1] * (length + 1)) for _ in range(count)], list[Past]()
    for request in requests:
        request.computed = length
        past = Past()
        past.add(0, torch.zeros(length, 2))
        pasts.append(past)
    kv.owe([(request, past, length) for request, past in zip(requests, pasts, strict=True)])
    return requests, pasts


def test_what_is_owed_is_made_once_and_told_as_missing_until_then() -> None:
    kv = Noting()
    requests, pasts = owing(kv, 3, 5)
    assert [past.computed for past in pasts] == [5] * 3 and [kv.made(r, 5) for r in requests] == [0] * 3
    kv.pay(requests[1:2])
    assert kv.made_for == [[(requests[1].id, 5)]] and [kv.made(r, 5) for r in requests] == [0, 5, 0]
    kv.drop(requests[0])
    kv.pay(requests)
    kv.pay(requests)
    assert kv.made_for[1:] == [[(requests[2].id, 5)]]


def test_where_much_memory_waits_as_much_is_made_as_is_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, each = Noting(), WIDE // 4 * 8
    requests, _ = owing(kv, 10, WIDE // 4)
    assert not kv.made_for, "nobody needs it"
    monkeypatch.setattr(_known, "KEPT", 11 * each)
    owing(kv, 2, WIDE // 4)
    assert [[i for i, _ in some] for some in kv.made_for] == [[r.id for r in requests[:4]]]
    monkeypatch.setattr(_known, "KEPT", each)
    owing(kv, 1, WIDE // 4)
    assert [len(some) for some in kv.made_for] == [4, 4, 4]


def test_whoever_gave_way_has_no_memory_to_write_to() -> None:
    kv = Noting()
    requests, _ = owing(kv, 2, 5)
    requests[0].computed = 0
    kv.pay(requests)
    assert kv.made_for == [[(requests[1].id, 5)]]
    kv.pay(requests)
    assert len(kv.made_for) == 1


def test_with_one_that_is_asked_for_all_others_whose_round_is_read_are_made() -> None:
    kv = Noting()
    requests, _ = owing(kv, 4, 5)
    kv.pay_for(tiny.request([1, 1]))
    assert not kv.made_for, "nothing is owed for it"
    requests[0].computed, requests[1].computed = 0, 4
    kv.pay_for(requests[3])
    assert kv.made_for == [[(requests[3].id, 5), (requests[2].id, 5)]]
    requests[1].computed = 5
    kv.pay_for(requests[1])
    assert kv.made_for[1:] == [[(requests[1].id, 5)]], "its round had not been read, so that it was owed still"


def test_what_could_not_be_made_is_owed_still() -> None:
    kv = Noting()
    requests, _ = owing(kv, 2, 5)
    store, kv._store = kv._store, no_memory  # type: ignore[method-assign]
    for pay in (kv.pay_for, lambda r: kv.pay([r])):
        with pytest.raises(torch.OutOfMemoryError):
            pay(requests[0])
    assert [kv.made(r, 5) for r in requests] == [0, 0], "nobody may begin with it"
    kv._store = store  # type: ignore[method-assign]
    kv.pay_for(requests[0])
    assert [kv.made(r, 5) for r in requests] == [5, 5]


def no_memory(chunks: Sequence[Chunk]) -> None:
    raise torch.OutOfMemoryError("no memory")
