"""Which captured rounds there are: buckets of requests, rows and columns, and what stands in for what."""

from __future__ import annotations

import torch

from outrider.control.calibrate import GRID
from outrider.models.rounds import REQUESTS, quiet, shape_of
from outrider.types import Proposal


def tried(size: int, few: int) -> Proposal:
    """A batch in which the first few have one guess."""
    return chains(size, [1] * few + [0] * (size - few))


def chains(size: int, guesses: list[int]) -> Proposal:
    return Proposal.chains([[0] * n for n in guesses[:size]], torch.device("cpu"))


def test_in_large_batches_a_trial_of_any_size_finds_its_round_made_ready() -> None:
    timed = [shape_of(chains(size, [n] * size), 900, features=("states",)) for size, n in GRID if n]
    made = [*quiet(64, 8, ("states",)), *(shape for shape in timed if shape is not None)]
    for size in range(9, 65):
        for few in (1, 8):
            wanted = shape_of(tried(size, few), 900, features=("states",))
            assert wanted is not None and any(wanted.within(shape) for shape in made), (size, few)


def test_plain_rounds_are_made_ready_for_every_size_of_batch() -> None:
    for most in (1, 3, 64, 1000):
        plain = [shape.requests for shape in quiet(most, 8, ()) if not shape.columns]
        assert plain == [n for n in REQUESTS if n < 2 * most and (n <= most or n == min(m for m in REQUESTS if m >= most))]
    assert not [shape for shape in quiet(8, 8, ()) if shape.columns], "few are tried with as many as there are"
