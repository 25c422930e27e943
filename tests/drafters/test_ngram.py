"""Prompt lookup against its definition by brute force, and the cost of its index."""

from __future__ import annotations

import time

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import registry
from outrider.config import SamplingParams
from outrider.drafters.ngram import Index
from outrider.protocols import Start
from outrider.sampling import TextSampler
from outrider.types import Batch, Budget

from .. import tiny


def brute(tokens: list[int], smallest: int, largest: int, count: int) -> list[int]:
    """The longest suffix that occurred before, most recent occurrence first; what followed it, repeating past the end."""
    for n in range(min(largest, len(tokens)), smallest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                written = list(tokens)
                for i in range(count):
                    written.append(written[end + i])
                return written[len(tokens) :]
    return []


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    cuts=st.lists(st.integers(1, 40), max_size=5),
    smallest=st.integers(1, 3),
    more=st.integers(0, 3),
    count=st.integers(1, 12),
)
def test_equals_brute_force_however_it_grew(tokens: list[int], cuts: list[int], smallest: int, more: int, count: int) -> None:
    index = Index(smallest, smallest + more)
    for length in sorted({*(c for c in cuts if c < len(tokens)), len(tokens)}):
        index.extend(tokens[:length])
        assert index.follow(tokens[:length], count) == brute(tokens[:length], smallest, smallest + more, count)


def test_longest_first_then_most_recent() -> None:
    index = Index(2, 4)
    tokens = [1, 2, 3, 50, 2, 3, 60, 9, 1, 2, 3]
    index.extend(tokens)
    assert index.follow(tokens, 2) == [50, 2]
    tokens = [7, 2, 3, 50, 8, 2, 3, 60, 4, 2, 3]
    index = Index(2, 4)
    index.extend(tokens)
    assert index.follow(tokens, 2) == [60, 4]
    assert Index(2, 4).follow([5], 3) == []


def test_a_period_is_continued() -> None:
    index, tokens = Index(1, 3), [1, 2, 3, 1, 2, 3]
    index.extend(tokens)
    assert index.follow(tokens, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_an_update_does_not_depend_on_the_length() -> None:
    index, tokens = Index(2, 4), list(range(100_000))
    index.extend(tokens)
    started = time.perf_counter()
    for i in range(1000):
        tokens.append(i)
        index.extend(tokens)
        index.follow(tokens, 8)
    assert time.perf_counter() - started < 0.5


def drafter(spec: str = "ngram:min=1,depth=6"):
    made = registry.parse(spec)
    made.start(Start("tiny", tiny.VOCAB, 256, torch.device("cpu"), torch.float64, TextSampler(tiny.VOCAB)))
    return made


def batch(*prompts: list[int]) -> Batch:
    n = len(prompts)
    return Batch(tuple(tiny.request(p) for p in prompts), (1,) * n, (True,) * n, (9,) * n)


def test_budget_is_kept_per_request() -> None:
    own = drafter()
    made = own.propose(batch([1, 2, 1], [4, 4], [5, 6, 5], [1, 2]), Budget((2, 6, 0, 3), (2, 6, 0, 3)))
    assert made.widths == (2, 6, 0, 0) and made.linear
    assert made.tokens[0, :2].tolist() == [2, 1] and made.tokens[1].tolist() == [4] * 6


def test_release_forgets_and_ids_may_come_back() -> None:
    own = drafter()
    first = batch([1, 2, 1])
    assert own.propose(first, Budget((3,), (3,))).widths == (3,) and own._indexes
    own.release(first.requests[0])
    own.release(first.requests[0])
    assert not own._indexes
    again = batch([7, 8, 9, 7])
    again.requests[0].id = first.requests[0].id
    assert own.propose(again, Budget((2,), (2,))).tokens.tolist() == [[8, 9]]


def test_repetition_pays() -> None:
    """A text of one word over and over: lookup must find it, and the text must stay."""
    params = SamplingParams(temperature=1.0, max_tokens=80, allowed_token_ids=(5,))
    runs = {}
    for spec in ("none", "ngram"):
        request = tiny.request([2, 3, 4], params)
        runs[spec] = (tiny.World().run(registry.parse(spec), [request])[0], request.stats)
    assert runs["none"][0] == runs["ngram"][0]
    assert runs["ngram"][1].rounds < runs["none"][1].rounds / 5 and runs["ngram"][1].accepted > 30
