"""What a round came to: the quick way of telling the commonest share of it says what the whole way says."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

from outrider.config import SamplingParams
from outrider.outcome import Outcome
from outrider.text import TextStream
from outrider.types import NONE, PROBE, Batch, Finish

from . import tiny
from .test_text import Bytes


def shares(seed: int) -> Outcome:
    """A round of some requests in all kinds of states."""
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    requests, rows = [], []
    for b in range(count):
        params = SamplingParams(max_tokens=20, stop=rng.choice(((), ("zz",))), logprobs=rng.choice((None, None, None, 0)))
        made = tiny.request([2] * 5, params)
        made.id = b
        made.text = rng.choice((None, TextStream(Whole(), params.stops), TextStream(Bytes(), params.stops)))
        made.finish = rng.choice((Finish.RUNNING,) * 6 + (Finish.ABORT,))
        made.failures = rng.choice(({}, {}, {(1, 2): "why"}))
        tokens = rng.choice(([7], [7], [7, 8], [7, 8, 9], [0xC3], []))
        made.tokens += tokens
        requests.append(made)
        width = rng.choice((0, 2, 2)) if tokens else 0
        finish = rng.choice((0, 0, 0, 1, 2, 3)) if tokens else 0
        rows.append((min(width, len(tokens) - 1) if tokens else 0, len(tokens), finish, width, tokens))
    accepted, counts, finishes, sizes, tokens = map(list, zip(*rows, strict=True))
    linear = rng.random() < 0.7
    parents, way = ([-1, 0], [0, 1]) if linear else ([-1, -1], [1, NONE])
    path = [[*way[:a], *[NONE] * (2 - a)] for a in accepted]
    if not linear:
        accepted = [min(1, a) for a in accepted]
    batch = Batch(tuple(requests), (1,) * count, (True,) * count, (4,) * count)
    table, source = [[3, 4]] * count, [rng.choice(([0, 0], [1, 1], [0, PROBE])) for _ in range(count)]
    told = (accepted, counts, finishes, sizes, tokens, path, table, [parents] * count, source)
    return Outcome(batch, *told, linear=linear)


class Whole:
    """A tokenizer every token of which is a whole character."""

    def decode(self, ids: Any, skip_special: bool = True) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    def whole(self, token: int, skip_special: bool = True) -> str:
        return self.decode([token])


def told(outcome: Outcome, quick: bool) -> tuple[Any, ...]:
    """What is committed, and what it leaves of the requests."""
    items = outcome.committed() if quick else tuple(outcome.commit(b) for b in range(len(outcome.batch)))
    left = [
        (r.tokens, r.finish, r.origins, r.stats, r.failures, r.error, r.text.text if r.text else None, r.logprobs)
        for r in outcome.batch.requests
    ]
    return [item._replace(request=item.request.id) for item in items], left


def test_the_quick_way_says_what_the_whole_way_says() -> None:
    quick, chains = 0, 0
    for seed in range(900):
        outcome = shares(seed)
        assert told(copy.deepcopy(outcome), True) == told(copy.deepcopy(outcome), False), seed
        found = [made for b in range(len(outcome.batch)) if (made := copy.deepcopy(outcome)._quick(b)) is not None]
        quick, chains = quick + len(found), chains + sum(made.drafted > 0 for made in found)
    assert quick > 60 and chains > 30


def test_probabilities_of_a_prompt_are_not_skipped() -> None:
    outcome = next(o for o in map(shares, range(99)) if o._quick(0) is not None)
    assert replace(outcome, prompt={0: [()]})._quick(0) is None
