"""`TextSampler` against the definition (`oracle`), against the law it must follow, and against itself in other company."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import oracle
from outrider.config import SamplingParams
from outrider.errors import BadInput
from outrider.sampling import TextSampler, first_argmax
from outrider.types import NONE, Request, Slots

INF = math.inf


def request(id=0, tokens=(0, 1), prompt_len=1, key=9, stop_ids=(), bad_words=(), **options):
    params = SamplingParams(**{"temperature": 1.0, **options})
    return Request(id, list(tokens), prompt_len, params, key, 0, frozenset(stop_ids), tuple(bad_words))


def slots_of(requests, rows):
    """`rows`: (index of the request, drafted tokens before the slot)."""
    width = max((len(path) for _, path in rows), default=0)
    which = torch.tensor([b for b, _ in rows], dtype=torch.int64)
    depth = torch.tensor([len(path) for _, path in rows], dtype=torch.int64)
    known = torch.tensor([len(requests[b].tokens) for b, _ in rows], dtype=torch.int64)
    path = torch.tensor([[*p, *[NONE] * (width - len(p))] for _, p in rows], dtype=torch.int64).reshape(len(rows), width)
    return Slots(tuple(requests), which, known + depth, path, depth)


def tensor_scores(sampler, logits, slots):
    """The path of devices other than the CPU, on the CPU."""
    return sampler._device_scores(sampler._admit(logits), slots)


def same(a, b):
    return torch.equal(torch.nan_to_num(a, nan=12345.0), torch.nan_to_num(b, nan=12345.0))


# ---- against the definition ----


@st.composite
def calls(draw):
    vocab = draw(st.integers(5, 40))
    usable = draw(st.sampled_from([vocab, vocab, vocab - 2]))
    requests = [draw(requests_of(i, usable)) for i in range(draw(st.integers(1, 3)))]
    token = st.integers(0, usable - 1)
    rows = draw(st.lists(st.tuples(st.integers(0, len(requests) - 1), st.lists(token, max_size=4)), min_size=1, max_size=5))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (len(rows), vocab))
    if draw(st.booleans()):
        logits = np.round(logits * 2) / 2  # many ties
    if draw(st.booleans()):
        value = draw(st.sampled_from([math.nan, INF, -INF]))
        logits[rng.random(logits.shape) < draw(st.sampled_from([0.03, 0.3, 1.0]))] = value
    return usable, requests, rows, torch.from_numpy(logits)


@st.composite
def requests_of(draw, id, usable):
    token = st.integers(0, usable - 1)
    small = st.integers(0, 2)  # so that phrases of bad words do occur in histories
    tokens = draw(st.one_of(st.lists(token, min_size=1, max_size=8), st.lists(small, min_size=1, max_size=8)))
    options = {
        "temperature": draw(st.sampled_from([0, 0.01, 0.5, 0.7, 1.0, 1.7])),
        "top_k": draw(st.sampled_from([0, 0, -1, 1, 2, 3, 10, 100])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.01, 0.3, 0.5, 0.9, 0.95, 0.999])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.05, 0.2, 0.9, 1.0])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.0, 0.3, -0.7])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.0, 0.6, -0.1])),
        "logit_bias": draw(st.one_of(st.just({}), st.dictionaries(token, st.sampled_from([-50.0, -1.5, 0.5, 3.0])))),
        "allowed_token_ids": draw(st.one_of(st.none(), st.lists(token, min_size=1, max_size=6).map(tuple))),
        "min_tokens": draw(st.sampled_from([0, 0, 1, 3, 9])),
    }
    bad = st.lists(st.lists(small, min_size=1, max_size=3).map(tuple), max_size=3)
    return request(
        id,
        tokens,
        draw(st.integers(1, len(tokens))),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.sets(token, max_size=2)),
        draw(bad),
        **options,
    )


@settings(max_examples=200, deadline=None)
@given(call=calls())
def test_equal_to_the_definition(call):
    usable, requests, rows, logits = call
    before, slots = logits.clone(), slots_of(requests, rows)
    sampler = TextSampler(logits.shape[1], usable)
    expected = [oracle.perturb(z, requests[b], p, usable)[:usable] for z, (b, p) in zip(logits.tolist(), rows, strict=True)]
    chosen = [oracle.choose(z, requests[b], p, usable) for z, (b, p) in zip(logits.tolist(), rows, strict=True)]
    scores = sampler.scores(logits, slots)
    assert same(scores[:, :usable], torch.tensor(expected, dtype=torch.float64))
    assert (scores[:, usable:] == -INF).all()
    assert sampler.choose(logits, slots).tolist() == chosen
    assert first_argmax(scores).tolist() == chosen
    assert same(logits, before)


@settings(max_examples=200, deadline=None)
@given(call=calls())
def test_tensor_path_equals_the_definition(call):
    usable, requests, rows, logits = call
    sampler = TextSampler(logits.shape[1], usable)
    expected = [oracle.perturb(z, requests[b], p, usable)[:usable] for z, (b, p) in zip(logits.tolist(), rows, strict=True)]
    scores = tensor_scores(sampler, logits, slots_of(requests, rows))
    assert same(scores, torch.tensor(expected, dtype=torch.float64))


@settings(max_examples=60, deadline=None)
@given(call=calls())
def test_rows_do_not_care_who_shares_the_call(call):
    usable, requests, rows, logits = call
    for z in (logits, logits.float()):
        whole = TextSampler(z.shape[1], usable)
        slots = slots_of(requests, rows)
        scores, tensors, chosen = whole.scores(z, slots), tensor_scores(whole, z, slots), whole.choose(z, slots)
        for s, (b, path) in enumerate(rows):
            alone, slot = TextSampler(z.shape[1], usable), slots_of([requests[b]], [(0, path)])
            assert same(alone.scores(z[s : s + 1], slot), scores[s : s + 1])
            assert same(tensor_scores(alone, z[s : s + 1], slot), tensors[s : s + 1])
            assert alone.choose(z[s : s + 1], slot).tolist() == [int(chosen[s])]


OPTIONS = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.999, "repetition_penalty": 1.2},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 0.9, "min_p": 0.02},
)


@pytest.mark.parametrize("options", OPTIONS)
def test_full_size_rows_alone_and_together(options):
    """A real vocabulary in fp32: bits alone = bits among eight, strided or not; host = tensor path; choice = argmax."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(8, 2 * 49152, generator=generator)[:, ::2] * torch.linspace(0.1, 4, 8)[:, None]
    r = request(tokens=range(100, 200), prompt_len=50, key=2**63 + 11, **options)
    rows = [(0, [7] * d) for d in range(8)]
    sampler = TextSampler(49152)
    scores, chosen = sampler.scores(logits, slots_of([r], rows)), sampler.choose(logits, slots_of([r], rows))
    assert chosen.tolist() == first_argmax(scores).tolist()
    for s in range(8):
        alone = TextSampler(49152).scores(logits[s : s + 1].contiguous(), slots_of([r], rows[s : s + 1]))
        assert torch.equal(alone[0], scores[s])
    other = tensor_scores(sampler, logits, slots_of([r], rows))
    # the two paths may disagree about a token at the very edge of top-p, whose sums they round differently
    assert int(((other > -INF) != (scores > -INF)).sum()) <= 8
    both = (other > -INF) & (scores > -INF)
    assert torch.equal(other[both], scores[both])
    assert first_argmax(other).tolist() == chosen.tolist()


# ---- the law ----

LOGITS = torch.tensor([2.0, 1.1, 1.0, 0.3, 0.0, -0.5, -1.0, -2.0], dtype=torch.float64)
DRAWS = 50_000


def p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    used = expected > 0
    assert int(observed[~used].sum()) == 0
    statistic = ((observed[used] - expected[used]) ** 2 / expected[used]).sum()
    freedom = torch.tensor((int(used.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def law(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """Probabilities by the textbook, on `LOGITS` (which fall, so the filters keep a prefix)."""
    p = (LOGITS / temperature).softmax(0)
    if top_k:
        p[top_k:] = 0
        p /= p.sum()
    if top_p < 1:
        p[(p.cumsum(0) - p) >= top_p] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def draw(keys, positions, **options):
    params = SamplingParams(**{"temperature": 1.0, **options})
    requests = [Request(i, [0], 1, params, key, 0) for i, key in enumerate(keys)]
    n = len(requests)
    slots = Slots(
        tuple(requests), torch.arange(n), positions, torch.empty(n, 0, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
    )
    return TextSampler(8).choose(LOGITS.expand(n, 8), slots)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.15, "temperature": 1.5}, {"top_k": 6, "top_p": 0.9}],
)
def test_choices_follow_the_softmax(options):
    chosen = draw(range(DRAWS), torch.full((DRAWS,), 17), **options)
    assert p_value(torch.bincount(chosen, minlength=8).double(), law(**options) * DRAWS) > 1e-4


def test_the_law_test_sees_another_temperature():
    chosen = draw(range(5000), torch.full((5000,), 17), temperature=0.9)
    assert p_value(torch.bincount(chosen, minlength=8).double(), law() * 5000) < 1e-4


@pytest.mark.parametrize("reused", [False, True])
def test_positions_are_independent(reused):
    """Pairs of neighbouring tokens follow the product law; with one noise for both positions they do not."""
    keys, n = range(20_000), 20_000
    first = draw(keys, torch.full((n,), 4))
    second = draw(keys, torch.full((n,), 4 if reused else 5))
    pairs = torch.bincount(first * 8 + second, minlength=64).double()
    p = p_value(pairs, torch.outer(law(), law()).flatten() * n)
    assert p < 1e-4 if reused else p > 1e-4


def test_the_law_needs_ten_rounds():
    """The same test with the definition's noise at 2 rounds fails, so it does see bad noise."""
    n = 4000
    for rounds, good in ((2, False), (10, True)):
        count = Counter(max(range(8), key=lambda v: float(LOGITS[v]) + oracle.gumbel(key, 17, v, rounds)) for key in range(n))
        p = p_value(torch.tensor([float(count[v]) for v in range(8)], dtype=torch.float64), law() * n)
        assert (p > 1e-4) == good


# ---- corners ----


def test_ties_go_to_the_lowest_id():
    z = torch.zeros(3, 5000)
    z[:, [700, 1300, 4999]] = 5.0
    slots = slots_of([request(temperature=0)], [(0, [])] * 3)
    sampler = TextSampler(5000)
    assert sampler.choose(z, slots).tolist() == [700] * 3
    assert first_argmax(tensor_scores(sampler, z, slots)).tolist() == [700] * 3


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}])
@pytest.mark.parametrize("bad", [math.nan, INF])
def test_invalid_rows(options, bad):
    z = torch.zeros(4, 300)
    z[1, 299] = bad
    z[2] = -INF
    z[3, :] = bad
    r = request(**options)
    slots = slots_of([r], [(0, [])] * 4)
    sampler = TextSampler(300)
    chosen = sampler.choose(z, slots).tolist()
    assert chosen[0] >= 0
    assert chosen[1:] == [NONE] * 3
    for scores in (sampler.scores(z, slots), tensor_scores(sampler, z, slots)):
        assert scores[0].isfinite().any()
        assert not scores[1:].isfinite().any()
        assert first_argmax(scores).tolist() == chosen
    assert TextSampler(300, 299).choose(z, slots)[1] >= 0  # the bad score belongs to padding


def test_padding_of_the_vocabulary_is_never_chosen():
    z = torch.zeros(1, 64)
    z[0, 60:] = 50.0
    slots = slots_of([request()], [(0, [])])
    assert int(TextSampler(64, 60).choose(z, slots)) < 60
    assert TextSampler(64, 60).scores(z, slots)[0, 60:].tolist() == [-INF] * 4
    assert int(TextSampler(64).choose(z, slots)) >= 60


@pytest.mark.parametrize("options", OPTIONS)
def test_narrower_and_wider_rows_get_the_same_noise(options):
    z = torch.randn(1, 80, generator=torch.Generator().manual_seed(1))
    slots = slots_of([request(stop_ids=[70], bad_words=[(75,)], logit_bias={78: 1.0}, min_tokens=9, **options)], [(0, [3])])
    sampler = TextSampler(80)
    cut = z.clone()
    cut[:, 60:] = -INF
    wide = torch.cat([cut, torch.full((1, 20), 99.0)], dim=1)
    expected = sampler.scores(cut, slots)
    assert torch.equal(sampler.scores(z[:, :60], slots), expected[:, :60])
    assert torch.equal(sampler.scores(wide, slots)[:, :80], expected)
    assert sampler.scores(wide, slots).shape == (1, 100)
    assert sampler.choose(z[:, :60], slots).tolist() == sampler.choose(wide, slots).tolist() == first_argmax(expected).tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e-50, 1e-8])
def test_tiny_temperatures_are_greedy(temperature):
    z = torch.tensor([[0.0, 3.0, 2.0, -5.0]])
    for options in ({}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.5}):
        slots = slots_of([request(temperature=temperature, **options)], [(0, [])])
        assert TextSampler(4).choose(z, slots).tolist() == [1]
        assert first_argmax(tensor_scores(TextSampler(4), z, slots)).tolist() == [1]


@pytest.mark.parametrize(
    ("z", "options", "kept"),
    [
        ([1.0, 1.0, 1.0, 1.0], {"top_p": 0.5}, [0, 1]),
        ([1.0, 1.0, 1.0, 1.0], {"top_p": 0.51}, [0, 1, 2]),
        ([1.0, 2.0, 2.0, 2.0, 1.0], {"top_k": 2}, [1, 2]),
        ([1.0, 2.0, 2.0, 2.0, 2.0], {"top_k": 4, "top_p": 0.5}, [1, 2]),
        ([1.0, 2.0, 2.0, 2.0, 1.0], {"min_p": 1.0}, [1, 2, 3]),
        ([-INF, 2.0, -INF, -INF, 1.0], {"top_k": 3}, [1, 4]),
    ],
)
def test_filters_at_their_edges(z, options, kept):
    slots = slots_of([request(**options)], [(0, [])])
    logits, sampler = torch.tensor([z]), TextSampler(len(z))
    for scores in (sampler.scores(logits, slots), tensor_scores(sampler, logits, slots)):
        assert scores[0].isfinite().nonzero()[:, 0].tolist() == kept


def test_half_precision_logits_are_widened():
    z = torch.randn(2, 50, generator=torch.Generator().manual_seed(2)).bfloat16()
    slots = slots_of([request()], [(0, []), (0, [1])])
    assert torch.equal(TextSampler(50).choose(z, slots), TextSampler(50).choose(z.float(), slots))


def test_no_rows():
    slots = slots_of([request()], [])
    assert TextSampler(9).choose(torch.empty(0, 9), slots).shape == (0,)
    assert TextSampler(9).scores(torch.empty(0, 9), slots).shape == (0, 9)


# ---- history ----


def test_every_slot_sees_its_own_path():
    r = request(temperature=0, frequency_penalty=1.0)
    z = torch.tensor([[0.0, 0.5, 0.0, 0.9, 0.0]]).expand(3, 5)
    slots = slots_of([r], [(0, []), (0, [3]), (0, [1, 3])])
    # 1 was written once: 0.5 - 1; after 3 was drafted, 3 falls to -0.1
    assert TextSampler(5).choose(z, slots).tolist() == [3, 0, 0]


PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}


def test_counts_follow_the_request_however_often_and_late_they_are_read():
    rng = np.random.default_rng(0)
    r = request(0, rng.integers(0, 200, 50).tolist(), 20, temperature=0.7, **PENALTIES)
    sampler, z = TextSampler(200), torch.randn(2, 200, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for step in (0, 1, 0, 7, 200, 3):
        r.tokens += rng.integers(0, 200, step).tolist()
        slots = slots_of([r], [(0, []), (0, [5, 5, 199])])
        fresh = TextSampler(200).scores(z, slots)
        assert torch.equal(sampler.scores(z, slots), fresh)
        assert torch.equal(tensor_scores(sampler, z, slots), fresh)
        assert torch.equal(sampler.scores(z, slots), fresh)


def test_released_and_reused_ids_start_afresh():
    sampler, z = TextSampler(30), torch.zeros(1, 30)
    for tokens in ([1, 2, 3], [4, 5, 6, 7]):
        r = request(0, tokens, 1, temperature=0, **PENALTIES)
        slots = slots_of([r], [(0, [])])
        assert torch.equal(sampler.scores(z, slots), TextSampler(30).scores(z, slots))
    sampler.release(r)
    sampler.release(r)
    assert sampler._processors == {}
    assert torch.equal(sampler.scores(z, slots), TextSampler(30).scores(z, slots))


# ---- admission ----


@pytest.mark.parametrize(
    ("options", "bad_words", "field"),
    [
        ({"logit_bias": {100: 1.0}}, (), "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, (), "logit_bias"),
        ({"allowed_token_ids": (3, 100)}, (), "allowed_token_ids"),
        ({"stop_token_ids": (100,)}, (), "stop_token_ids"),
        ({}, [[1, 100]], "bad_words"),
    ],
)
def test_ids_out_of_range_are_named(options, bad_words, field):
    with pytest.raises(BadInput, match=rf"{field}.*(100|-1).*0 to 99"):
        TextSampler(128, 100).check(SamplingParams(**options), bad_words)


def test_ids_in_range_pass():
    options = {"logit_bias": {99: 1.0}, "allowed_token_ids": (0, 99), "stop_token_ids": (99,)}
    TextSampler(100).check(SamplingParams(**options), [[0, 99]])
