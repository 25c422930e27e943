"""Suffix decoding against brute force; what the store of finished texts keeps, forgets and hides; cost and memory."""

from __future__ import annotations

import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import registry
from outrider.config import SamplingParams
from outrider.drafters import suffix
from outrider.drafters._blank import blank
from outrider.drafters._votes import chain, tree
from outrider.drafters.suffix import Matches, Own, Shared, voices
from outrider.errors import BadInput
from outrider.protocols import Start
from outrider.sampling import TextSampler
from outrider.tree import validate
from outrider.types import ROOT, Batch, Budget, Proposal, Request

from .. import tiny

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def common(before: list[int], tail: list[int]) -> int:
    """How many tokens two lists share at their ends."""
    n = 0
    while n < min(len(before), len(tail), 64) and before[-1 - n] == tail[-1 - n]:
        n += 1
    return n


def every_match(tokens: list[int]) -> dict[int, int]:
    """By definition: all earlier places with a successor, and how long the text's end matches before them."""
    found = {at: common(tokens[:at], tokens) for at in range(1, len(tokens))}
    return {at: n for at, n in found.items() if n}


@settings(max_examples=300, deadline=None)
@given(tokens=texts, cuts=st.lists(st.integers(1, 60), max_size=6), most=st.sampled_from([1, 2, 8, 1000]))
def test_matches_equal_brute_force_however_the_text_grew(tokens: list[int], cuts: list[int], most: int) -> None:
    own = Own(tokens[:1])
    matches, before = Matches(own), 0
    for length in sorted({*(c for c in cuts if c < len(tokens)), len(tokens)}):
        text = tokens[:length]
        own.extend(text)
        matches.advance(text, length - before, most)
        before = length
        want = every_match(text)
        ranked = matches.best(most)
        assert all(want[at] == n for n, at in ranked), "a match is not there, or of another length"
        assert ranked == sorted(ranked, reverse=True) and len(ranked) <= most
        assert bool(ranked) == bool(want)
        if most >= len(tokens) and matches.longest < suffix._LONG:
            assert {at: n for n, at in ranked} == want, "all are kept where there is room"
        if most > 1 and want and max(want.values()) >= suffix._MANY:
            assert ranked[0][0] >= suffix._MANY


@settings(max_examples=200, deadline=None)
@given(data=st.data(), size=st.integers(8, 50), kind=st.integers(1, 2))
def test_the_store_keeps_the_last_texts_of_each_group(data: st.DataObject, size: int, kind: int) -> None:
    """A ring of tokens against a plain list of all of them."""
    store, whole, owners = Shared(size), list[int](), list[int]()
    for text in data.draw(st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=6)):
        group = data.draw(st.integers(1, kind))
        store.add(text, group)
        kept = text[-(size - 1) :]
        whole += [*kept, -1]
        owners += [group] * (len(kept) + 1)
    assert store.end == len(whole)
    oldest = max(0, len(whole) - size)
    for at in range(oldest, len(whole)):
        assert store.read(at, 5) == whole[at : at + 5]
    tokens = data.draw(texts)
    matches = Matches(store, 1)
    matches.advance(tokens, len(tokens), 1000)
    want = {at: common(whole[oldest:at], tokens) for at in range(oldest, len(whole)) if owners[at] == 1 and whole[at] != -1}
    assert {at: n for at, n in matches.found.items() if n} == {at: n for at, n in want.items() if n}
    for length, guess in voices(matches, 6, 2.0, 1000):
        assert 1 <= len(guess) <= 2 * length and -1 not in guess


def test_a_period_is_continued() -> None:
    own = Own([1])
    own.extend([1, 2, 3, 1, 2, 3])
    matches = Matches(own)
    matches.advance([1, 2, 3, 1, 2, 3], 6, 8)
    assert voices(matches, 7, 9.0, 8) == [(3, [1, 2, 3, 1, 2, 3, 1])]


speech = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 2), min_size=1, max_size=5)), max_size=8).map(
    lambda voices: sorted(voices, key=lambda v: -v[0])
)


def share(speakers: suffix.Voices, path: list[int]) -> float:
    """Of all votes, those for a path."""
    return sum(w for w, t in speakers if t[: len(path)] == path) / max(1, sum(w for w, _ in speakers))


@settings(max_examples=300, deadline=None)
@given(speakers=speech, floor=st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0]))
def test_a_chain_follows_the_majority_down_to_the_floor(speakers: suffix.Voices, floor: float) -> None:
    path, hope = chain(speakers, floor)
    for i in range(len(path)):
        rivals = [share(speakers, [*path[:i], t]) for t in range(3)]
        assert share(speakers, path[: i + 1]) == pytest.approx(max(rivals)) and max(rivals) >= floor - 1e-9
    assert hope == pytest.approx(sum(share(speakers, path[: i + 1]) for i in range(len(path))))
    following = [share(speakers, [*path, t]) for t in range(3)]
    assert max(following) == 0 or max(following) < floor


@settings(max_examples=300, deadline=None)
@given(speakers=speech, width=st.integers(1, 3), nodes=st.integers(1, 9), floor=st.sampled_from([0.0, 0.2, 0.6]))
def test_a_tree_holds_the_likeliest_paths(speakers: suffix.Voices, width: int, nodes: int, floor: float) -> None:
    found, hope = tree(speakers, width, nodes, floor)
    made = Proposal.trees([found])
    assert len(found) <= nodes and bool(validate(made, 3).all())
    paths: list[list[int]] = []
    for token, parent in found:
        assert parent < len(paths)
        paths.append([*(paths[parent] if parent != ROOT else []), token])
    shares = [share(speakers, p) for p in paths]
    assert all(s >= floor - 1e-9 and s > 0 for s in shares) and shares == sorted(shares, reverse=True)
    assert hope == pytest.approx(sum(shares))
    assert all(sum(p == q for _, q in found) <= width for _, p in found)
    if width == 3 and len(found) < nodes:
        every = {tuple(t[: i + 1]) for _, t in speakers for i in range(len(t))}
        assert {tuple(p) for p in paths} == {p for p in every if share(speakers, list(p)) >= floor - 1e-9}


def drafter(spec: str = "suffix"):
    made = registry.parse(spec)
    made.start(Start("tiny", tiny.VOCAB, 256, torch.device("cpu"), torch.float64, TextSampler(tiny.VOCAB)))
    return made


def batch(*prompts: list[int]) -> Batch:
    n = len(prompts)
    return Batch(tuple(tiny.request(p) for p in prompts), (1,) * n, (True,) * n, (99,) * n)


def guess(own, tokens: list[int], depth: int = 6) -> list[int]:
    made = own.propose(batch(tokens), Budget((depth,), (depth,)))
    return made.tokens[0, : int(made.sizes[0])].tolist()


def finish(own, text: list[int], group: object = None, prompt: int = 1) -> None:
    """Run a request through the drafter and let it go, as the engine does."""
    request = grouped(tiny.request(text[:prompt]), group)
    own.propose(Batch((request,), (1,), (True,), (9,)), Budget((1,), (1,)))
    request.tokens.extend(text[prompt:])
    own.release(request)


def grouped(request: Request, group: str | None) -> Request:
    """A request as a server with keys would make it."""
    request.group = group
    return request


def test_longer_matches_get_longer_guesses() -> None:
    own, tail = drafter("suffix:factor=1,global_tokens=0"), list(range(20, 40))
    for n in (1, 3, 6):
        text = [*range(n), *tail, 45, *range(n)]
        assert guess(own, text, 9) == tail[:n]


def test_finished_texts_draft_for_others_without_their_prompts() -> None:
    for spec, whole in (("suffix", False), ("suffix:prompts=true", True), ("suffix:global_tokens=0", None)):
        own = drafter(spec)
        finish(own, [30, 31, 32, 33, 5, 6, 7, 8, 9], prompt=4)
        assert guess(own, [40, 5, 6, 7]) == ([] if whole is None else [8, 9])
        assert guess(own, [40, 30, 31]) == ([32, 33, 5] if whole else [])


def test_an_isolated_text_never_drafts_for_another_group() -> None:
    own, later = drafter("suffix:isolate=true"), drafter("suffix")
    later.isolate()
    assert later.config.isolate
    finish(own, [1, 5, 6, 7, 8, 9], group="mine")
    assert guess(own, [40, 5, 6, 7]) == []  # no group is a group of its own
    asked = [grouped(tiny.request([40, 5, 6, 7]), g) for g in ("mine", "yours")]
    made = own.propose(Batch(tuple(asked), (1, 1), (True,) * 2, (9,) * 2), Budget((4, 4), (4, 4)))
    assert made.widths == (2, 0)
    shared = drafter("suffix")
    finish(shared, [1, 5, 6, 7, 8, 9], group="mine")
    assert guess(shared, [40, 5, 6, 7]) == [8, 9]


def test_isolation_holds_where_hashes_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "hash", lambda value: 0, raising=False)
    monkeypatch.setattr(suffix, "_SPREAD", 0)
    store = Shared(64)
    store.add([5, 6, 7, 8, 9], 64)  # the same bucket as group 0
    matches = Matches(store, 0)
    matches.advance([5, 6, 7], 3, 8)
    assert not matches.found
    store.add([5, 6, 7, 4], 0)
    matches.advance([5, 6, 7], 3, 8)
    assert voices(matches, 3, 1.0, 8) == [(3, [4])]


def test_the_oldest_text_is_forgotten() -> None:
    own = drafter("suffix:global_tokens=64")
    finish(own, [1, 5, 6, 7, 8])
    assert guess(own, [40, 5, 6, 7]) == [8]
    finish(own, [1, *[30] * 70])
    assert guess(own, [40, 5, 6, 7]) == []


def test_release_twice_unknown_requests_and_ids_that_come_back() -> None:
    own = drafter()
    some = batch([1, 5, 6, 5])
    assert own.propose(some, Budget((3,), (3,))).widths == (1,) and own._readers
    own.release(some.requests[0])
    own.release(some.requests[0])
    own.release(tiny.request([1, 2]))
    assert not own._readers and own.expected(some.requests[0]) == 0
    again = batch([7, 8, 9, 7])
    again.requests[0].id = some.requests[0].id
    assert own.propose(again, Budget((2,), (2,))).tokens.tolist() == [[8]]


def test_a_text_that_got_shorter_is_read_afresh() -> None:
    own, some = drafter(), batch([1, 5, 6, 5, 6, 7, 5, 6])
    own.propose(some, Budget((3,), (3,)))
    some.requests[0].tokens[:] = [1, 9, 8, 9]
    assert own.propose(some, Budget((3,), (3,))).tokens.tolist() == [[8]]


@pytest.mark.parametrize(
    "spec", ["depth=0", "width=0", "factor=0", "floor=1.5", "global_tokens=-1", "global_tokens=7", "factor=nan"]
)
def test_options_that_make_no_sense(spec: str) -> None:
    with pytest.raises(BadInput, match=f"suffix needs {spec.partition('=')[0]}"):
        registry.parse(f"suffix:{spec}")


def test_budget_is_kept_per_request() -> None:
    for spec in ("suffix:factor=9", "suffix:factor=9,width=2"):
        made = drafter(spec).propose(batch([1, 2, 1], [4, 4, 5, 4, 4], [5, 6, 5], [1, 2]), Budget((2, 6, 0, 3), (2, 6, 0, 3)))
        assert all(w <= n for w, n in zip(made.widths, (2, 6, 0, 3), strict=True)) and made.widths[:2] != (0, 0)
        assert made.linear == ("width" not in spec)


def test_what_it_expects_is_about_what_is_accepted() -> None:
    """On a text whose next token is one of two, half of the time each, it expects about half of its guesses to be right."""
    rng, own = random.Random(3), drafter("suffix:factor=1,global_tokens=0")
    tokens, expected, right = [2, 3], 0.0, 0
    request = tiny.request(tokens)
    for _ in range(600):
        made = own.propose(Batch((request,), (1,), (True,), (9,)), Budget((1,), (1,)))
        token = rng.choice([7, 8]) if len(request.tokens) % 2 else 3
        if made.widths[0]:
            expected += own.expected(request)
            right += int(made.tokens[0, 0]) == token
        request.tokens.append(token)
    assert 0.7 < right / expected < 1.1


# Cost


@settings(deadline=None)
@given(texts, texts, st.integers(1, 16), st.integers(1, 16))
def test_a_look_beforehand_changes_no_guess(first: list[int], then: list[int], look: int, depth: int) -> None:
    looked, plain = drafter(), drafter()
    for tokens in (first, first + then):
        requests = batch(tokens).requests[0], batch(tokens).requests[0]
        looked.preview(requests[0], look)
        found = [own._chain(r, depth, suffix._MATCHES) for own, r in zip((looked, plain), requests, strict=True)]
        assert found[0] == found[1] and looked.expected(requests[0]) == plain.expected(requests[1])


@pytest.mark.parametrize("count", [1, 12, 40])
def test_a_crowd_is_given_the_guesses_that_were_previewed(count: int) -> None:
    """However few matches are kept of each."""
    rng, own = random.Random(2), drafter("suffix:floor=0,factor=9")
    crowd = batch(*[[rng.randrange(3) for _ in range(40)] for _ in range(count)])
    own.propose(crowd, Budget((4,) * count, (4,) * count))
    for request in crowd.requests:
        request.tokens.append(rng.randrange(3))
    seen = [own.preview(request, 4) for request in crowd.requests]
    made = own.propose(crowd, Budget((4,) * count, (4,) * count))
    assert [row[:n] for row, n in zip(made.tokens.tolist(), made.sizes.tolist(), strict=True)] == seen and any(seen)


@pytest.mark.parametrize("count", [1, 64, 1 << 20])
@pytest.mark.parametrize("kind", ["i", "q"])
def test_tables_begin_with_zeros_and_keep_what_is_written(count: int, kind: str) -> None:
    table = blank(count, kind)  # type: ignore[arg-type]
    assert len(table) == count and table.nbytes == count * {"i": 4, "q": 8}[kind] and not any(table[:1000])
    table[count - 1] = -7
    assert table[-1] == -7 and sum(table) == -7


def test_an_update_does_not_depend_on_the_length() -> None:
    own, tokens = Own([0]), list(range(100_000))
    own.extend(tokens)
    matches = Matches(own)
    started = time.perf_counter()
    for i in range(1000):
        tokens.append(i)
        own.extend(tokens)
        matches.advance(tokens, 1, 8)
    assert time.perf_counter() - started < 0.5


def test_ten_million_tokens_fit_into_two_gibibytes() -> None:
    store = Shared(1 << 20)
    per_token = store.bytes / store.size
    assert per_token <= 52
    worst = Shared((1 << 20) + 1)  # buckets are rounded up to a power of two
    assert worst.bytes / worst.size * 10_000_000 < 2 * 2**30
    store.add(list(range(50_000)), 0)
    assert store.bytes / store.size == per_token, "filling it takes no more"


def test_a_large_batch_gets_fewer_matches_each() -> None:
    own = drafter("suffix:global_tokens=0,floor=0,width=8")
    text = [5, 1, 5, 2, 5, 3, 5]
    alone = own.propose(batch(text), Budget((1,), (8,)))
    crowd = own.propose(batch(*[text] * 64), Budget((1,) * 64, (8,) * 64))
    assert alone.widths == (3,) and set(crowd.widths) == {1}


def test_repetition_pays() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=80, allowed_token_ids=(5,))
    runs = {}
    for spec in ("none", "suffix"):
        request = tiny.request([2, 3, 4], params)
        runs[spec] = (tiny.World().run(registry.parse(spec), [request])[0], request.stats)
    assert runs["none"][0] == runs["suffix"][0]
    assert runs["suffix"][1].rounds < runs["none"][1].rounds / 5 and runs["suffix"][1].accepted > 30
