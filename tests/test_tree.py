"""Trees as tensors, against plain recursion over random forests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import tree
from outrider.types import NONE, PROBE, ROOT, Proposal

Nodes = list[tuple[int, int]]  # (token, parent), parents first
VOCAB = 5
quick = settings(max_examples=120, deadline=None)


@st.composite
def forests(draw: st.DrawFn, most: int = 10) -> Nodes:
    nodes: Nodes = []
    for _ in range(draw(st.integers(0, most))):
        parent = draw(st.integers(ROOT, len(nodes) - 1))
        token = draw(st.integers(0, VOCAB - 1))
        if (token, parent) not in nodes:
            nodes.append((token, parent))
    return nodes


@st.composite
def proposals(draw: st.DrawFn, batch: int) -> Proposal:
    """Random forests with random sources, and junk in the columns that are not in use."""
    forest = [draw(forests()) for _ in range(batch)]
    plain = Proposal.trees(forest)
    junk = draw(st.integers(0, 2))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    shape = (batch, plain.columns + junk)
    tokens, parents, source = (torch.randint(-9, 99, shape, generator=noise) for _ in range(3))
    for b, nodes in enumerate(forest):
        tokens[b, : len(nodes)] = plain.tokens[b, : len(nodes)]
        parents[b, : len(nodes)] = plain.parents[b, : len(nodes)]
        source[b, : len(nodes)] = torch.tensor([draw(st.integers(PROBE, 2)) for _ in nodes], dtype=torch.int64)
    return replace(plain, tokens=tokens, parents=parents, source=source)


batches = st.integers(1, 3).flatmap(proposals)


def path(parents: list[int], node: int) -> list[int]:
    """Columns from the root to `node`, by recursion."""
    return [] if node == ROOT else [*path(parents, parents[node]), node]


def words(proposal: Proposal, b: int) -> list[tuple[int, ...]]:
    """The token path of each node of request b, in column order."""
    parents = proposal.parents[b].tolist()
    tokens = proposal.tokens[b].tolist()
    return [tuple(tokens[i] for i in path(parents, j)) for j in range(int(proposal.sizes[b]))]


def padded(row: list[int], length: int) -> list[int]:
    return row + [NONE] * (length - len(row))


@quick
@given(batches)
def test_depths_paths_and_ancestors(proposal: Proposal) -> None:
    depth = tree.depths(proposal.parents, proposal.sizes)
    route, reach = tree.paths(proposal.parents), tree.ancestors(proposal.parents)
    n = proposal.columns
    assert depth.shape == proposal.tokens.shape and route.shape == reach.shape == (*depth.shape, n)
    assert reach.dtype == torch.bool and depth.dtype == route.dtype == torch.int64
    for b in range(len(proposal.widths)):
        parents, size = proposal.parents[b].tolist(), int(proposal.sizes[b])
        way = [path(parents, j) for j in range(size)]
        assert depth[b].tolist() == [len(w) for w in way] + [0] * (n - size)
        assert route[b, :size].tolist() == [padded(w, n) for w in way]
        assert reach[b, :size].tolist() == [[i in w for i in range(n)] for w in way]


@quick
@given(batches)
def test_path_tokens(proposal: Proposal) -> None:
    tokens, depth = tree.path_tokens(proposal)
    n = proposal.columns
    assert tokens.shape == (len(proposal.widths), n + 1, n) and depth.shape == tokens.shape[:2]
    for b in range(len(proposal.widths)):
        expected = [(), *words(proposal, b)]
        expected += [()] * (n + 1 - len(expected))
        assert tokens[b].tolist() == [padded(list(w), n) for w in expected]
        assert depth[b].tolist() == [len(w) for w in expected]


@quick
@given(batches)
def test_a_depth_bound_only_shortens_tables(proposal: Proposal) -> None:
    bound = int(tree.depths(proposal.parents, proposal.sizes).max()) if proposal.columns else 0
    full, depth = tree.path_tokens(proposal)
    short, same = tree.path_tokens(proposal, bound)
    assert torch.equal(short, full[:, :, :bound]) and torch.equal(same, depth)


def test_a_long_chain_and_a_wide_batch() -> None:
    chain = Proposal.chains([list(range(128)), list(range(5))] * 128)
    depth = tree.depths(chain.parents, chain.sizes)
    assert depth[0].tolist() == list(range(1, 129)) and depth[1].tolist() == [1, 2, 3, 4, 5] + [0] * 123
    assert torch.equal(tree.ancestors(chain.parents)[0], torch.ones(128, 128).tril().bool())
    assert tree.paths(chain.parents)[0, -1].tolist() == list(range(128))
    assert tree.validate(chain, 128).all()


def test_nothing_proposed() -> None:
    none = Proposal.empty(3)
    assert tree.depths(none.parents, none.sizes).shape == (3, 0)
    assert tree.ancestors(none.parents).shape == tree.paths(none.parents).shape == (3, 0, 0)
    tokens, depth = tree.path_tokens(none)
    assert tokens.shape == (3, 1, 0) and depth.tolist() == [[0], [0], [0]]
    assert tree.validate(none, 10).tolist() == [True] * 3
    merged, maps = tree.merge([none, none])
    assert merged.widths == (0, 0, 0) and [m.shape for m in maps] == [(3, 0), (3, 0)]


def test_is_chain() -> None:
    some = Proposal.trees([[(1, ROOT), (2, 0), (3, 1)], [(1, ROOT), (2, ROOT)], [], [(1, ROOT), (2, 0), (3, 0)], [(4, ROOT)]])
    assert tree.is_chain(some.parents, some.sizes).tolist() == [True, False, True, False, True]


@quick
@given(batches)
def test_sound_proposals_are_sound(proposal: Proposal) -> None:
    assert tree.validate(proposal, VOCAB).all()


@quick
@given(st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=4), min_size=1, max_size=4), st.data())
def test_many_chains_are_judged_like_few(guesses: list[list[int]], data: st.DataObject) -> None:
    chains = Proposal.chains(guesses)
    for _ in range(data.draw(st.integers(0, 2))):
        name = data.draw(st.sampled_from(["tokens", "parents", "source", "sizes"]))
        field = getattr(chains, name).clone()
        if field.numel():
            field.view(-1)[data.draw(st.integers(0, field.numel() - 1))] = data.draw(st.sampled_from([-9, -1, 0, 1, 3, 5, 99]))
        chains = replace(chains, **{name: field})
    assert tree._sound_few(chains, VOCAB).tolist() == tree._sound_many(chains, VOCAB).tolist()


def broken(**changes: Any) -> list[bool]:
    """Verdicts on a batch of two good trees after `field=(row, column, value)` changes, or whole new fields."""
    good = Proposal.trees([[(1, ROOT), (2, ROOT), (1, 1), (2, 1)], [(1, ROOT), (1, 0), (3, 1)]])
    assert tree.validate(good, VOCAB).all()
    fields = {}
    for name, change in changes.items():
        if isinstance(change, tuple) and name != "widths":
            *place, value = change
            fields[name] = getattr(good, name).clone()
            fields[name][tuple(place)] = value
        else:
            fields[name] = change
    return tree.validate(replace(good, **fields), VOCAB).tolist()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokens": (0, 2, VOCAB)}, [False, True]),
        ({"tokens": (0, 2, -1)}, [False, True]),
        ({"tokens": (1, 3, 99)}, [True, True]),  # not in use
        ({"tokens": (0, 3, 1)}, [False, True]),  # twins under node 1
        ({"tokens": (0, 0, 2)}, [False, True]),  # twins under the root
        ({"tokens": (0, 0, 2**62)}, [False, True]),
        ({"parents": (1, 1, 1)}, [True, False]),  # its own parent
        ({"parents": (1, 1, 2)}, [True, False]),  # a child before its parent
        ({"parents": (1, 0, -2)}, [True, False]),
        ({"parents": (1, 2, 77)}, [True, False]),
        ({"parents": (1, 3, 77)}, [True, True]),  # not in use
        ({"sizes": (1, 4)}, [True, False]),  # beyond its width
        ({"sizes": (0, -1)}, [False, True]),
        ({"sizes": (0, 5)}, [False, True]),
        ({"source": (0, 0, PROBE)}, [True, True]),
        ({"source": (0, 0, -2)}, [False, True]),
        ({"widths": (5, 3)}, [False, False]),
        ({"widths": (4, 4)}, [True, True]),
        ({"linear": True}, [False, True]),
        ({"tokens": torch.zeros(2, 4)}, [False, False]),
        ({"parents": torch.full((2, 4), -1, dtype=torch.int32)}, [False, False]),
        ({"tokens": torch.zeros(2, 5, dtype=torch.int64)}, [False, False]),
        ({"tokens": torch.zeros(8, dtype=torch.int64)}, [False, False]),
        ({"tokens": torch.tensor(1)}, [False, False]),
        ({"tokens": torch.zeros(3, 4, dtype=torch.int64)}, [False, False]),
        ({"sizes": torch.tensor([4])}, [False, False]),
        ({"sizes": torch.tensor([4.0, 3.0])}, [False, False]),
        ({"q": torch.zeros(2, 4, VOCAB)}, [False, False]),  # a row short
        ({"q": torch.zeros(2, 5, VOCAB)}, [True, True]),
    ],
)
def test_faults_are_found_in_the_request_that_has_them(changes: dict[str, Any], expected: list[bool]) -> None:
    assert broken(**changes) == expected


def test_unsound_links_do_no_harm() -> None:
    wild = torch.tensor([[5, 0, -7, 10**12], [1, 0, 3, 2]])  # out of range, and cycles
    sizes = torch.tensor([4, 4])
    tree.depths(wild, sizes)
    tree.ancestors(wild)
    tree.paths(wild)


def offers(inputs: list[Proposal], b: int) -> dict[tuple[int, ...], list[int]]:
    """Every token path offered for request b in the order of first offer, with the sources that offered it."""
    seen: dict[tuple[int, ...], list[int]] = {}
    for proposal in inputs:
        for word, source in zip(words(proposal, b), proposal.source[b].tolist(), strict=False):
            seen.setdefault(word, []).append(source)
    return seen


@quick
@given(st.integers(1, 3).flatmap(lambda b: st.lists(proposals(b), min_size=2, max_size=4)))
def test_merge_is_the_union(inputs: list[Proposal]) -> None:
    merged, maps = tree.merge(inputs)
    several = sum(p.columns > 0 for p in inputs) > 1
    assert tree.validate(merged, VOCAB).all()
    for b in range(len(merged.widths)):
        offered, got = offers(inputs, b), words(merged, b)
        assert got == list(offered)  # the same paths, once each, in the order of first offer
        guesses = [[s for s in sources if s != PROBE] for sources in offered.values()]
        assert merged.source[b, : len(got)].tolist() == [g[0] if g else PROBE for g in guesses]
        for proposal, renamed in zip(inputs, maps, strict=True):
            assert renamed.shape == proposal.tokens.shape
            size = int(proposal.sizes[b])
            assert [got[j] for j in renamed[b, :size].tolist()] == words(proposal, b)
            assert (renamed[b, size:] == NONE).all()
    if several:
        assert merged.widths == tuple(merged.sizes.tolist())
        assert merged.columns == max(merged.widths)
        assert merged.linear == bool(tree.is_chain(merged.parents, merged.sizes).all())


@quick
@given(batches)
def test_merging_with_itself_or_alone_changes_nothing(proposal: Proposal) -> None:
    alone, (renamed,) = tree.merge([proposal])
    assert alone is proposal
    twice, maps = tree.merge([proposal, proposal])
    for b in range(len(proposal.widths)):
        size = int(proposal.sizes[b])
        expected = padded(list(range(size)), proposal.columns)
        assert [m[b].tolist() for m in (renamed, *maps)] == [expected] * 3
        for name in ("tokens", "parents", "source"):
            assert getattr(twice, name)[b, :size].tolist() == getattr(proposal, name)[b, :size].tolist()


def test_a_guess_beats_a_probe_whoever_comes_first() -> None:
    probe = replace(Proposal.trees([[(1, ROOT), (2, 0)]]), source=torch.tensor([[PROBE, PROBE]]))
    guess = Proposal.trees([[(1, ROOT), (3, 0)]], source=4)
    late = Proposal.trees([[(1, ROOT)]], source=6)
    for order in ([probe, guess, late], [guess, late, probe]):
        merged, _ = tree.merge(order)
        found = dict(zip(words(merged, 0), merged.source[0].tolist(), strict=True))
        assert found == {(1,): 4, (1, 2): PROBE, (1, 3): 4}


def test_equal_tokens_on_different_paths_stay_apart() -> None:
    left, right = Proposal.chains([[1, 2, 3]]), Proposal.chains([[2, 2, 3]])
    merged, _ = tree.merge([left, right])
    assert merged.sizes.tolist() == [6] and not merged.linear


def test_chains_where_one_extends_the_other_stay_linear() -> None:
    merged, maps = tree.merge([Proposal.chains([[1, 2], [7]]), Proposal.chains([[1, 2, 3], []])])
    assert merged.linear and merged.widths == (3, 1)
    assert merged.tokens.tolist() == [[1, 2, 3], [7, 0, 0]]
    assert [m.tolist() for m in maps] == [[[0, 1], [0, NONE]], [[0, 1, 2], [NONE] * 3]]


def test_merge_refuses_what_it_cannot_answer_for() -> None:
    chain = Proposal.chains([[1, 2]])
    drawn = replace(chain, q=torch.full((1, 3, VOCAB), 1 / VOCAB))
    with pytest.raises(ValueError, match="cannot be merged"):
        tree.merge([chain, drawn])
    assert tree.merge([drawn, Proposal.empty(1)])[0].q is drawn.q
    with pytest.raises(ValueError, match="same batch"):
        tree.merge([chain, Proposal.empty(2)])
    with pytest.raises(ValueError, match="at least one"):
        tree.merge([])
