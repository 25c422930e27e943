"""What a captured round puts into the ring, and guesses on a device that nobody looked at."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from outrider import tree
from outrider.kernels.ring import PLACES, Ring, post
from outrider.kernels.rounds import admit
from outrider.types import Proposal
from tests.kernels.places import DEVICE

WIDTH, COLUMNS, VOCAB = 1100, 5, 50


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_states_of_what_was_committed() -> None:
    """Three requests: a path of two nodes across the ring's end, none accepted, and one that had ended."""
    ring = Ring.make(4, WIDTH, torch.float32, torch.device(DEVICE))
    states = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    known, lane, first = ints(2 * PLACES, 3, 9), ints(2, 0, 1), ints(0, 5, 8, 12)
    rows = [
        [2, 3, 0, 21, 22, 23, -1, -1, -1, 0, 3, -1, -1, -1, -1],
        [0, 1, 0, 31, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1],
        [0, 0, 1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1],
    ]
    post(states, lane, first, known, torch.tensor(rows, dtype=torch.int32, device=DEVICE), ring)
    wanted = {(2, PLACES - 1): (0, 21), (2, 0): (1, 22), (2, 1): (4, 23), (0, 2): (5, 31)}
    for one in range(4):
        for place in range(PLACES):
            row, token = wanted.get((one, place), (None, 0))
            assert torch.equal(ring.states[one, place], torch.zeros_like(states[0]) if row is None else states[row])
            assert int(ring.tokens[one, place]) == token
    assert not ring.upto.any(), "that is the drafter's own mark"


def test_the_token_that_ends_a_text_early() -> None:
    """Accepted nodes past what was committed have no place."""
    ring = Ring.make(1, WIDTH, torch.float32, torch.device(DEVICE))
    states = torch.ones(4, WIDTH, device=DEVICE)
    row = [2, 2, 1, 21, 22, -1, -1, -1, -1, 0, 1, -1, -1, -1, -1]
    post(states, ints(0), ints(0, 4), ints(5), torch.tensor([row], dtype=torch.int32, device=DEVICE), ring)
    assert [int(p) for p in ring.states[0, :, 0].nonzero()] == [4, 5]


def given(widths: tuple[int, ...]) -> SimpleNamespace:
    b = len(widths)
    table = torch.full((3, b, COLUMNS), 77, dtype=torch.int32, device=DEVICE)
    ends = torch.tensor([0, *widths], device=DEVICE).cumsum(0) + torch.arange(b + 1, device=DEVICE)
    return SimpleNamespace(first=ends.int(), sizes=ints(*[77] * b), tokens=table[0], parents=table[1], source=table[2])


def test_sound_guesses_are_taken_as_they_are() -> None:
    nodes = [[(5, -1), (6, -1), (7, 0), (8, 2)], [(9, -1)], []]
    made = Proposal.trees(nodes, DEVICE, source=3)
    to = given(made.widths)
    admit(made, to, VOCAB)
    assert to.sizes.tolist() == [4, 1, 0]
    for b, some in enumerate(nodes):
        assert list(zip(to.tokens[b].tolist(), to.parents[b].tolist(), strict=True))[: len(some)] == some
        assert to.source[b, : len(some)].tolist() == [3] * len(some)
    assert (to.tokens[:, 4:] == 77).all(), "columns that nobody offered stay as they were"


@pytest.mark.parametrize("linear", [False, True])
def test_what_cannot_be_is_put_right(linear: bool) -> None:
    made = Proposal(
        torch.tensor([[-9, 2**40, 7], [1, 2, 3]], device=DEVICE),
        torch.tensor([[0, 5, -7], [-1, 0, 1]], device=DEVICE),
        torch.tensor([99, -4], device=DEVICE),
        torch.full((2, 3), -50, dtype=torch.int64, device=DEVICE),
        (2, 3),
        linear,
    )
    to = given(made.widths)
    admit(made, to, VOCAB)
    assert to.sizes.tolist() == [2, 0] and to.tokens[0, :3].tolist() == [0, VOCAB - 1, 7]
    assert to.parents[0, :3].tolist() == ([-1, 0, 1] if linear else [-1, 0, -1]) and (to.source[:, :3] == -1).all()
    kept = [to.tokens[:1, :3], to.parents[:1, :3], to.sizes[:1], to.source[:1, :3]]
    right = Proposal(*(x.long().cpu() for x in kept), (3,), linear)
    assert bool(tree.validate(right, VOCAB).all())


def test_guesses_that_lie_apart() -> None:
    """Slices of wider tables, and one number for all sources."""
    wide = torch.arange(24, device=DEVICE).view(2, 12) % 4
    made = Proposal(
        wide[:, :2],
        wide[:, 4:6] - 2,
        torch.tensor([2, 1], device=DEVICE),
        torch.zeros((), dtype=torch.int64, device=DEVICE).expand(2, 2),
        (2, 2),
    )
    to = given(made.widths)
    admit(made, to, VOCAB)
    assert to.tokens[:, :2].tolist() == wide[:, :2].tolist() and to.source[:, :2].tolist() == [[0, 0], [0, 0]]
