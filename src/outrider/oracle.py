"""The definition, in plain Python: no torch, no numpy, nothing clever.

Every vectorised piece (noise, processors, filters, the coupled rule, tree functions) is tested against this file, so it
is written to be read: one value at a time, in the order of the formulas.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .config import SamplingParams
    from .types import Request

NONE = -1
ROOT = -1
RUNNING, STOP, LENGTH, ERROR = 0, 1, 2, 3
"""Values of `types.Finish`; this file imports nothing at run time."""

_WORD = 2**64 - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def philox4x64(counter: Sequence[int], key: Sequence[int], rounds: int = 10) -> tuple[int, int, int, int]:
    """Philox4x64 (Salmon et al. 2011): four 64-bit words from a counter of four words and a key of two.

    The product uses 10 rounds; fewer exist for tests, which show that they are not enough.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (b >> 64) ^ c1 ^ k0, b & _WORD, (a >> 64) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def word(key: int, position: int, v: int, rounds: int = 10) -> int:
    """The 64 random bits of vocabulary entry `v` at `position`: word v % 4 of block v // 4 + 1, purpose 0 (text)."""
    return philox4x64((v // 4 + 1, position, 0, 0), (key, 0), rounds)[v % 4]


def gumbel(key: int, position: int, v: int, rounds: int = 10) -> float:
    """Gumbel noise -log(-log u), u = ((word >> 12) + 1/2) / 2**52 in fp64. Not yet rounded to fp32 (see `single`)."""
    u = ((word(key, position, v, rounds) >> 12) + 0.5) * 2.0**-52
    return -math.log(-math.log(u))


def uniform(key: int, purpose: int, node: int, start: int) -> float:
    """A number in [0, 1) of one of the classical rules' streams: word 0 of block 1 at position 0, for slot `node` of the round
    that began with `start` known tokens; u = (word >> 12) / 2**52."""
    return (philox4x64((1, 0, node, start), (key, purpose))[0] >> 12) * 2.0**-52


def single(x: float) -> float:
    """`x` rounded to fp32: 24 significant bits, ties to even (noise is never near the limits of fp32's exponent)."""
    if x == 0:
        return 0.0
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(mantissa, 24)), exponent - 24)


def process(logits: Sequence[float], request: Request, path: Sequence[int] = (), usable: int | None = None) -> list[float]:
    """Scores of one slot after everything but the noise: untempered, -inf where a processor or filter forbids a token.

    `path` are the drafted tokens between `request.tokens` and this slot. Where a token that may be chosen has a NaN or
    +inf score, every score is NaN: such a row chooses nothing.
    """
    scores = custom(mask(penalise(logits, request, path), request, path, usable), request, path)
    if any(math.isnan(s) or s == math.inf for s in scores):
        return [math.nan] * len(scores)
    if request.params.temperature == 0 or max(scores) == -math.inf:
        return scores
    kept = survivors(scores, request.params)
    return [s if v in kept else -math.inf for v, s in enumerate(scores)]


def penalise(logits: Sequence[float], request: Request, path: Sequence[int]) -> list[float]:
    """Penalties (repetition over prompt, output and path; frequency and presence over output and path), then bias."""
    params = request.params
    scores = list(logits)
    written = request.tokens[request.prompt_len :] + list(path)
    seen = set(request.tokens) | set(path)
    for v, score in enumerate(scores):
        if v in seen and params.repetition_penalty != 1:
            score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        count = written.count(v)
        if count:
            score = score - params.frequency_penalty * count
            score = score - params.presence_penalty
        scores[v] = score + params.logit_bias.get(v, 0.0)
    return scores


def mask(scores: Sequence[float], request: Request, path: Sequence[int], usable: int | None) -> list[float]:
    """Bad words, allowed ids, min_tokens and ids that no tokenizer entry stands behind."""
    params = request.params
    history = request.tokens + list(path)
    forbidden: set[int] = set()
    for bad in request.bad_words:
        rest = list(bad[:-1])
        if bad and len(history) >= len(rest) and history[len(history) - len(rest) :] == rest:
            forbidden.add(bad[-1])
    if len(history) - request.prompt_len < params.min_tokens:
        forbidden |= request.stop_ids
    if params.allowed_token_ids is not None:
        forbidden |= set(range(len(scores))) - set(params.allowed_token_ids)
    if usable is not None:
        forbidden |= set(range(usable, len(scores)))
    return [-math.inf if v in forbidden else score for v, score in enumerate(scores)]


def custom(scores: list[float], request: Request, path: Sequence[int]) -> list[float]:
    """The request's own functions, in turn."""
    if not request.params.processors:
        return scores
    from torch import float64, tensor  # what those functions are given is a tensor

    row = tensor(scores, dtype=float64)
    for function in request.params.processors:
        row = function((*request.tokens, *path), row)
    return [float(v) for v in row]


def survivors(scores: Sequence[float], params: SamplingParams) -> set[int]:
    """What top-k, top-p and min-p leave, in this order, of tempered scores (z - max z) / T.

    The shift by the maximum changes no probability and keeps tiny temperatures finite. Order: tempered score descending,
    id ascending. Top-p keeps the smallest prefix whose share of what top-k left reaches top_p.
    """
    top = max(scores)
    tempered = [(s - top) / max(params.temperature, sys.float_info.min) for s in scores]
    order = sorted((v for v in range(len(scores)) if tempered[v] > -math.inf), key=lambda v: (-tempered[v], v))
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = [math.exp(tempered[v]) for v in order]
    if params.top_p < 1:
        need, mass, size = params.top_p * math.fsum(weights), 0.0, 0
        while size < len(order) and mass < need:
            mass += weights[size]
            size += 1
        order, weights = order[:size], weights[:size]
    return {v for v, w in zip(order, weights, strict=True) if w >= params.min_p}


def perturb(logits: Sequence[float], request: Request, path: Sequence[int] = (), usable: int | None = None) -> list[float]:
    """Processed scores plus T * gumbel: their argmax is the token (Gumbel-max), ties to the lowest id."""
    scores = process(logits, request, path, usable)
    heat, position = request.params.temperature, len(request.tokens) + len(path)
    if heat == 0:
        return scores
    return [s + heat * single(gumbel(request.key, position, v)) if s > -math.inf else s for v, s in enumerate(scores)]


def choose(logits: Sequence[float], request: Request, path: Sequence[int] = (), usable: int | None = None) -> int:
    """The token of one slot, or NONE where no token is allowed or an allowed one has no finite score."""
    scores = perturb(logits, request, path, usable)
    if any(math.isnan(s) for s in scores) or max(scores) == -math.inf:
        return NONE
    return scores.index(max(scores))


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of every node (1 for children of the root); parents come before children."""
    result: list[int] = []
    for parent in parents:
        result.append(1 if parent == ROOT else result[parent] + 1)
    return result


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Columns from the root's child down to `node`, itself included; empty for the root."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


class Limits(NamedTuple):
    """What ends a request: the tokens in `stop_ids`, or `room` tokens more."""

    stop_ids: frozenset[int] | set[int]
    room: int


class Walk(NamedTuple):
    """Verdict for one request: columns of the accepted nodes, how many, the tokens to commit, and a `types.Finish` value."""

    path: list[int]
    accepted: int
    tokens: list[int]
    finish: int


def accept(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int], limits: Limits) -> Walk:
    """The coupled rule for one request: follow, from the root, the child that carries the slot's chosen token.

    `choices[s]` is the target's token at slot s (slot 0 the root, slot j + 1 node j), or NONE where it has none. What is
    committed: the accepted tokens and the choice at the last slot, cut after the first stop token and after `room` tokens.
    """
    path: list[int] = []
    while True:
        slot = path[-1] + 1 if path else 0
        below = [j for j in range(len(tokens)) if parents[j] == slot - 1 and tokens[j] == choices[slot] != NONE]
        if not below:
            break
        path.append(below[0])
    committed = [tokens[j] for j in path] + [choices[slot]]
    committed, finish = cut(committed, limits)
    accepted = min(len(path), len(committed))
    return Walk(path[:accepted], accepted, committed, finish)


def cut(tokens: Sequence[int], limits: Limits) -> tuple[list[int], int]:
    """The tokens that may be committed, and why they end: a stop token wins over the length limit it coincides with."""
    kept: list[int] = []
    for token in tokens:
        if len(kept) >= limits.room:
            return kept, LENGTH
        if token == NONE:
            return kept, ERROR
        kept.append(token)
        if token in limits.stop_ids:
            return kept, STOP
    return kept, LENGTH if len(kept) >= limits.room else RUNNING
