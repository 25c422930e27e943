"""The definition itself, held to cases worked out by hand."""

from __future__ import annotations

import math

import pytest

from outrider import oracle
from outrider.config import SamplingParams
from outrider.oracle import ERROR, LENGTH, NONE, RUNNING, STOP, Limits
from outrider.types import Finish, Request

INF = math.inf


def request(tokens=(0, 1), prompt_len=1, stop_ids=(), bad_words=(), **options):
    params = SamplingParams(**{"temperature": 0, **options})
    return Request(0, list(tokens), prompt_len, params, 9, 9, frozenset(stop_ids), tuple(bad_words))


def test_constants_are_those_of_the_types():
    assert (RUNNING, STOP, LENGTH, ERROR) == (Finish.RUNNING, Finish.STOP, Finish.LENGTH, Finish.ERROR)


def test_penalties_and_bias_in_order():
    r = request((0, 1), 1, repetition_penalty=2, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={2: 10.0})
    # 0: prompt only; 1: once in output, once in path; 2: path; 3: never seen
    assert oracle.process([4.0, -4.0, 4.0, 4.0], r, [1, 2]) == [2.0, -8.0 - 1.0 - 0.25, 2.0 - 0.5 - 0.25 + 10.0, 4.0]


def test_masks():
    r = request((0, 1), 1, stop_ids=[4], bad_words=[(2,), (1, 3), (0, 9, 1)], min_tokens=2)
    assert oracle.process([1.0] * 5, r) == [1.0, 1.0, -INF, -INF, -INF]
    assert oracle.process([1.0] * 5, r, [0]) == [1.0, 1.0, -INF, 1.0, 1.0]
    allowed = request(allowed_token_ids=(1, 3))
    assert oracle.process([1.0] * 5, allowed, usable=3) == [-INF, 1.0, -INF, -INF, -INF]


def test_filters_see_tempered_scores_in_order():
    # shares at T = 0.5: 0.86, 0.12, 0.02, 0.002; at T = 1: 0.64, 0.24, 0.09, 0.03
    z = [3.0, 2.0, 1.0, 0.0]
    assert kept(z, temperature=0.5, top_p=0.9) == [0, 1]
    assert kept(z, temperature=1, top_p=0.9) == [0, 1, 2]
    assert kept(z, temperature=0.5, top_p=0.8) == [0]
    assert kept(z, temperature=1, top_p=0.8) == [0, 1]
    assert kept(z, temperature=1, min_p=0.2) == [0, 1]
    assert kept(z, temperature=0.5, min_p=0.2) == [0]
    # top-p works on what top-k left, renormalised: 0.73 and 0.27
    assert kept(z, temperature=1, top_p=0.7) == [0, 1]
    assert kept(z, temperature=1, top_k=2, top_p=0.7) == [0]


def test_ties_keep_the_lowest_ids():
    assert kept([1.0, 2.0, 2.0, 2.0, 1.0], top_k=2) == [1, 2]
    assert kept([1.0] * 4, top_p=0.5) == [0, 1]
    assert kept([1.0] * 4, top_p=0.51) == [0, 1, 2]
    assert oracle.choose([1.0, 2.0, 2.0], request()) == 1


def kept(z, **options):
    scores = oracle.process(z, request(**{"temperature": 1, **options}))
    return [v for v, s in enumerate(scores) if s > -INF]


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_invalid_rows_choose_nothing(bad):
    assert oracle.choose([0.0, bad, 1.0], request()) == NONE
    assert oracle.choose([0.0, bad, 1.0], request(bad_words=[(1,)])) == 2
    assert oracle.choose([-INF, -INF], request(temperature=1, top_p=0.5)) == NONE


def test_noise_moves_the_choice_and_zero_temperature_does_not():
    hot = request(temperature=1)
    picks = set()
    for position in range(60):
        hot.tokens = [0] * position
        picks.add(oracle.choose([0.0, 0.1, 0.0], hot))
        hot.params, kept_params = SamplingParams(temperature=0), hot.params
        assert oracle.choose([0.0, 0.1, 0.0], hot) == 1
        hot.params = kept_params
    assert picks == {0, 1, 2}


def test_depths_and_paths():
    parents = [-1, 0, 0, -1, 2, 4]
    assert oracle.depths(parents) == [1, 2, 2, 1, 3, 4]
    assert oracle.path_to(parents, 5) == [0, 2, 4, 5]
    assert oracle.path_to(parents, 3) == [3]
    assert oracle.path_to(parents, -1) == []


# tree:  root -> 10 (0), 20 (1); 10 -> 11 (2), 12 (3); 12 -> 13 (4)
TOKENS, PARENTS = [10, 20, 11, 12, 13], [-1, -1, 0, 0, 3]
FREE = Limits(frozenset(), 100)
FULL = [10, 12, 99, 99, 13, 77]


@pytest.mark.parametrize(
    ("choices", "limits", "expected"),
    [
        (FULL, FREE, ([0, 3, 4], 3, [10, 12, 13, 77], RUNNING)),
        ([5, 12, 99, 99, 13, 77], FREE, ([], 0, [5], RUNNING)),
        ([20, 12, 50, 99, 13, 77], FREE, ([1], 1, [20, 50], RUNNING)),
        # a stop token ends the text wherever it stands, accepted or bonus
        (FULL, Limits({12}, 100), ([0, 3], 2, [10, 12], STOP)),
        (FULL, Limits({77}, 100), ([0, 3, 4], 3, [10, 12, 13, 77], STOP)),
        (FULL, Limits({10, 77}, 100), ([0], 1, [10], STOP)),
        # the limit, alone and together with a stop token
        (FULL, Limits(frozenset(), 4), ([0, 3, 4], 3, [10, 12, 13, 77], LENGTH)),
        (FULL, Limits(frozenset(), 3), ([0, 3, 4], 3, [10, 12, 13], LENGTH)),
        (FULL, Limits(frozenset(), 1), ([0], 1, [10], LENGTH)),
        (FULL, Limits(frozenset(), 0), ([], 0, [], LENGTH)),
        (FULL, Limits({12}, 2), ([0, 3], 2, [10, 12], STOP)),
        (FULL, Limits({12}, 1), ([0], 1, [10], LENGTH)),
        # no choice: what was accepted before stays, unless something ended the text first
        ([NONE] * 6, FREE, ([], 0, [], ERROR)),
        ([10, 12, 99, 99, NONE, 77], FREE, ([0, 3], 2, [10, 12], ERROR)),
        ([10, 12, 99, 99, NONE, 77], Limits(frozenset(), 2), ([0, 3], 2, [10, 12], LENGTH)),
        ([10, 12, 99, 99, NONE, 77], Limits({12}, 9), ([0, 3], 2, [10, 12], STOP)),
    ],
)
def test_coupled_rule(choices, limits, expected):
    assert tuple(oracle.accept(TOKENS, PARENTS, choices, limits)) == expected


def test_plain_decoding_is_an_empty_tree():
    assert tuple(oracle.accept([], [], [4], FREE)) == ([], 0, [4], RUNNING)


def test_first_of_two_equal_children_is_followed():
    assert oracle.accept([1, 1], [-1, -1], [1, 2, 3], FREE).path == [0]


def test_padding_never_matches_a_missing_choice():
    assert oracle.accept([NONE], [-1], [NONE, 5], FREE).tokens == []
