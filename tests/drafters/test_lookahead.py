"""Lookahead decoding: the window against its definition, the pool, and what it brings."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import registry, tree
from outrider.config import SamplingParams
from outrider.drafters import lookahead
from outrider.drafters.hybrid import Hybrid
from outrider.drafters.lookahead import Lookahead, Pool
from outrider.errors import BadInput
from outrider.protocols import Start
from outrider.sampling import TextSampler
from outrider.types import NONE, PROBE, Batch, Budget, PassRows, Proposal, Request, Scores, Verdict

from .. import tiny

Next = Callable[[list[int]], int]


def drafter(spec: str = "lookahead") -> Lookahead:
    made = registry.parse(spec)
    made.start(Start("tiny", tiny.VOCAB, 256, torch.device("cpu"), torch.float64, TextSampler(tiny.VOCAB)))
    assert isinstance(made, Lookahead)
    return made


def paths(proposal: Proposal, b: int) -> list[list[int]]:
    tokens, depth = tree.path_tokens(proposal)
    return [tokens[b, s, : depth[b, s]].tolist() for s in range(int(proposal.sizes[b]) + 1)]


def play(own: Lookahead, request: Request, following: Next, rounds: int, depth: int | None = None) -> list[Proposal]:
    """Rounds against a target that writes `following(text)`; the request moves on as the engine would move it."""
    out = []
    for _ in range(rounds):
        made = own.propose(Batch((request,), (1,), (True,), (99,)), Budget((depth or own.depth,), (own.nodes,)))
        assert bool(tree.validate(made, tiny.VOCAB).all())
        out.append(made)
        lines = paths(made, 0)
        choice = torch.tensor([[following(request.tokens + line) for line in lines]])
        at, written = 0, list[int]()
        while True:
            token = int(choice[0, at])
            written.append(token)
            line = [*lines[at], token]
            if line not in lines:
                break
            at = lines.index(line)
        none = torch.zeros(0, dtype=torch.int64)
        fixed = torch.zeros(1, made.columns + 1, dtype=torch.int64)
        verdict = Verdict(fixed[:, 1:], none, fixed, none, none)
        scores = Scores(choice if made.columns else choice[:, :1], PassRows(none, none, none, none), {})
        own.observe(Batch((request,), (1,), (True,), (99,)), made, verdict, scores)
        request.tokens.extend(written)
    return out


def hashed(text: list[int]) -> int:
    """A target that depends on its last three tokens."""
    return 2 + random.Random(str(text[-3:])).randrange(40)


@settings(max_examples=25, deadline=None)
@given(w=st.integers(1, 6), n=st.integers(2, 5), seed=st.integers(0, 99))
def test_the_window_is_the_papers(w: int, n: int, seed: int) -> None:
    """Level l, column i stands l + i ahead of the last token, under level 0 up to column i and its own column; the target's
    choices after the deepest level are the next deepest level; the columns' n-grams enter the pool."""
    own = drafter(f"lookahead:window={w},ngram={n},guesses=3")
    request = tiny.request([random.Random(seed + i).randrange(2, 40) for i in range(6)], limit=500)
    for step in range(n + 5):
        before = own._windows[request.id].levels if step else None
        base = list(request.tokens)
        [made] = play(own, request, hashed, 1)
        window, lines = own._windows[request.id], paths(made, 0)
        levels = before if before is not None else [[base[-1], *_first(own, request)]]
        levels = [[base[-1], *levels[0][1:]], *levels[1:]]
        expected = []
        for i in range(len(levels[0])):
            trunk = levels[0][1 : i + 1]
            column = [level[i] for level in levels[1:]]
            for deep in range(len(levels)):
                assert [*trunk, *column[:deep]] in lines, "a node of the window is missing"
                assert len([*trunk, *column[:deep]]) == deep + i
            expected.append(hashed(base + trunk + column))
        if len(levels) < n - 1:
            assert window.levels == [*(level[1:] for level in levels), expected[1:]]
        else:
            assert len(levels) == n - 1 and all(len(level) == w for level in levels)
            assert window.levels == [*levels[1:], expected]
            grams = {levels[0][i]: (*(level[i] for level in levels[1:]), new) for i, new in enumerate(expected)}
            assert all(window.pool.guesses(first)[0] == rest for first, rest in grams.items())


def _first(own: Lookahead, request: Request) -> list[int]:
    """The first level as it is drawn: a fresh drafter with the same request makes the same."""
    other = drafter(f"lookahead:window={own.config.window},ngram={own.config.ngram}")
    return other._open(request).levels[0][1:]


def test_the_budget_is_what_it_says() -> None:
    for w, n, g in ((5, 4, 5), (1, 2, 1), (2, 6, 3), (7, 5, 7)):
        own = drafter(f"lookahead:window={w},ngram={n},guesses={g}")
        widest = max(p.columns for p in play(own, tiny.request([3, 4, 5, 6, 3, 9]), hashed, n + 6))
        assert widest <= own.nodes
        assert own.nodes <= max((n - 1) * w - 1, (w + n - 2) ** 2) + g * (n - 1)
    assert drafter().nodes == 4 * 5 - 1 - 5 + 15 and drafter().depth == 6


def test_guesses_are_counted_and_probes_are_not() -> None:
    """Level 0 and the last column are a chain of guesses, so that every depth a text can reach has one; the rest are probes."""
    own = drafter("lookahead:window=4,ngram=4,guesses=2")
    request = tiny.request([3, 4, 5, 6, 7, 9])
    for made in play(own, request, hashed, 12)[4:]:
        depth = tree.depths(made.parents, made.sizes)[0]
        source = made.source[0, : made.widths[0]]
        assert int((source == PROBE).sum()) > 0
        assert set(depth[: made.widths[0]].tolist()) == set(depth[: made.widths[0]][source == 0].tolist())


def test_it_finds_what_the_target_writes() -> None:
    """A text without repeats that no lookup could guess: the window's n-grams come true."""
    step = {t: 2 + (t * 7 + 3) % 44 for t in range(tiny.VOCAB)}
    request = tiny.request([2, 30, 11])
    own = drafter()
    made = play(own, request, lambda text: step[text[-1]], 40)
    written = len(request.tokens) - 3
    assert written > 2 * len(made), "a chain in which each token decides the next is foreseen"
    assert own._windows[request.id].pool.guesses(request.tokens[-1])


def test_the_window_waits_where_it_has_no_room_or_was_not_scored() -> None:
    own, request = drafter(), tiny.request([3, 4, 5, 6, 3, 4, 5])
    play(own, request, hashed, 6)
    window = own._windows[request.id]
    levels = window.levels
    for made in play(own, request, hashed, 3, depth=2):
        assert all(s == 0 for s in made.source[0, : made.widths[0]].tolist()), "guesses only"
        assert made.columns == 0 or int(tree.depths(made.parents, made.sizes).max()) <= 2
    assert [level[1:] for level in window.levels] == [level[1:] for level in levels]
    batch = Batch((request,), (1,), (True,), (99,))
    made = own.propose(batch, Budget((own.depth,), (own.nodes,)))
    none = torch.zeros(0, dtype=torch.int64)
    unscored = Scores(torch.full((1, made.columns + 1), NONE), PassRows(none, none, none, none), {})
    own.observe(batch, made, Verdict(none, none, none, none, none), unscored)
    assert [level[1:] for level in window.levels] == [level[1:] for level in levels] and not window.ends


def test_no_end_freezes_the_window() -> None:
    own, request = drafter(), tiny.request([3, 4, 5, 6, 3, 4, 5])
    play(own, request, lambda text: tiny.EOS, 10)
    assert all(tiny.EOS not in level[1:] for level in own._windows[request.id].levels)


# Pool


def brute(tokens: list[int], size: int, most: int, first: int) -> list[tuple[int, ...]]:
    found = [tuple(tokens[i + 1 : i + size]) for i in range(len(tokens) - size + 1) if tokens[i] == first]
    latest = list(dict.fromkeys(reversed(found)))
    return latest[:most]


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    cuts=st.lists(st.integers(1, 40), max_size=4),
    size=st.integers(2, 5),
    most=st.integers(1, 4),
)
def test_the_pool_has_the_latest_grams(tokens: list[int], cuts: list[int], size: int, most: int) -> None:
    pool = Pool(size, most)
    for length in sorted({*(c for c in cuts if c < len(tokens)), len(tokens)}):
        pool.extend(tokens[:length])
        for first in range(4):
            assert pool.guesses(first) == brute(tokens[:length], size, most, first)


def test_the_pool_is_bounded_and_forgets_what_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "_KEYS", 3)
    pool = Pool(2, 2)
    for first in (1, 2, 3, 1, 4):
        pool.put(first, (first,))
    assert list(pool.grams) == [3, 1, 4]


def test_an_update_does_not_depend_on_the_length() -> None:
    pool, tokens = Pool(4, 5), list(range(100_000))
    pool.extend(tokens)
    started = time.perf_counter()
    for i in range(1000):
        tokens.append(i)
        pool.extend(tokens)
    assert time.perf_counter() - started < 0.5


# Whole runs


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_it_pays_on_a_peaked_model(temperature: float) -> None:
    """Only two tokens may be written, so the text runs in circles: the window and the pool foresee it."""
    params = SamplingParams(temperature=temperature, max_tokens=80, allowed_token_ids=(5, 9), ignore_eos=True, seed=1)
    runs = {}
    for spec in ("none", "lookahead"):
        request = tiny.request([2, 3, 4, 8], params)
        runs[spec] = (tiny.World().run(registry.parse(spec), [request])[0], request.stats)
    assert runs["none"][0] == runs["lookahead"][0]
    assert runs["lookahead"][1].rounds < runs["none"][1].rounds * 0.6


@pytest.mark.parametrize("merge", [False, True])
def test_it_works_inside_a_hybrid(merge: bool) -> None:
    """Its choices reach it through the hybrid's view: the window moves, and its guesses come true there as well. A
    depth that is named is kept, whatever time it takes."""
    own = drafter()
    made = Hybrid.of([registry.parse("none"), own] if not merge else [registry.parse("ngram:depth=3"), own], merge)
    params = SamplingParams(temperature=0.3, max_tokens=60, depth=made.depth, allowed_token_ids=(5, 9), ignore_eos=True, seed=1)
    request = tiny.request([2, 3, 4, 8], params)
    engine = tiny.World().engine(made)
    engine.add(request)
    sizes = set()
    while engine.step() is not None:
        sizes |= {len(w.levels) for w in own._windows.values()}
    assert sizes == {2, 3} and [m.reason for m in made.members] == [None, None]
    again = tiny.request([2, 3, 4, 8], params)
    assert tiny.World().run(registry.parse("none"), [again])[0] == request.output
    assert sum(o == 1 for o in request.origins) > 10


@pytest.mark.parametrize("spec", ["window=0", "ngram=1", "guesses=0"])
def test_options_that_make_no_sense(spec: str) -> None:
    with pytest.raises(BadInput, match=f"lookahead needs {spec.partition('=')[0]}"):
        registry.parse(f"lookahead:{spec}")


def test_release_forgets() -> None:
    own, request = drafter(), tiny.request([3, 4, 5])
    play(own, request, hashed, 3)
    own.release(request)
    own.release(request)
    assert not own._windows
