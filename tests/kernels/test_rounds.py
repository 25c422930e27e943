"""The ends of a captured round on many random forests: rows against `tree`, the rule against `accept.coupled.walk`."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from outrider import tree
from outrider.accept.coupled import walk
from outrider.kernels.rounds import SPAN, STOPS, Lanes, decide, prepare
from outrider.models import lanes as book
from outrider.models.fields import KEEP, Fields, Shape
from outrider.types import Batch, Finish, Proposal
from tests.kernels.places import DEVICE

BLOCKS, VOCAB, MAX_LEN = 6, 12, 250
CASES = [
    (seed, branching, columns)
    for seed in range(12)
    for branching in (False, True)
    for columns in (0, 1, 5, 8)
    if columns or not branching
]


@dataclass
class Case:
    """A round: lanes, what the host says, what it would know of every request, guesses and the target's choices by slot."""

    lanes: Lanes
    given: Fields
    proposal: Proposal
    requests: list[SimpleNamespace]
    choice: Tensor
    rows: int
    branching: bool

    @property
    def columns(self) -> int:
        return self.proposal.columns

    def decide(self) -> Tensor:
        """`[B, 3 + 2 (N + 1)]`, from a buffer full of something else."""
        result = torch.full((len(self.given.lane), 3 + 2 * (self.columns + 1)), 77, dtype=torch.int32, device=DEVICE)
        decide(self.lanes, self.given, self.by_rows(), result, self.branching)
        return result.cpu()

    def by_rows(self) -> Tensor:
        flat = torch.zeros(self.rows, dtype=torch.int64)
        first = self.given.first.tolist()
        for b in range(len(self.requests)):
            flat[first[b] : first[b + 1]] = self.choice[b, : first[b + 1] - first[b]]
        return flat.to(DEVICE)

    def prepare(self) -> Any:
        rows = prepare(self.lanes, self.given, self.rows, (VOCAB, MAX_LEN), self.branching)
        return SimpleNamespace(**{f.name: getattr(rows, f.name).cpu() for f in fields(rows)})

    def state(self) -> dict[str, Tensor]:
        return {f.name: getattr(self.lanes, f.name).cpu().clone() for f in fields(self.lanes)}


def forest(rng: random.Random, size: int, branching: bool) -> list[tuple[int, int]]:
    """Nodes (token, parent) whose siblings are distinct."""
    nodes: list[tuple[int, int]] = []
    for column in range(size):
        parent = rng.randrange(-1, column) if branching else column - 1
        taken = {t for t, p in nodes if p == parent}
        nodes.append((rng.choice([t for t in range(VOCAB) if t not in taken]), parent))
    return nodes


def choices(rng: random.Random, nodes: list[tuple[int, int]], columns: int) -> list[int]:
    """The target's token at every slot: often a guess, seldom invalid."""
    out = []
    for slot in range(columns + 1):
        children = [t for t, p in nodes if p == slot - 1]
        guessed = children and rng.random() < 0.85
        out.append(rng.choice(children) if guessed else -1 if rng.random() < 0.1 else rng.randrange(VOCAB))
    return out


def request(rng: random.Random, columns: int) -> SimpleNamespace:
    stops = frozenset(rng.sample(range(VOCAB), rng.choice([0, 0, 1, 3])))
    tokens = [rng.randrange(VOCAB) for _ in range(rng.choice([2, 63, 64, 130, 245]))]
    done = rng.choice([0, 0, 0, 0, int(Finish.STOP)])
    return SimpleNamespace(
        stop_ids=stops, room=rng.choice([1, 2, columns + 1, 100]), tokens=tokens, done=done, kept=bool(done) or rng.random() < 0.5
    )


def case(seed: int, branching: bool, columns: int, spare: int = 0) -> Case:
    """Up to four requests and some padding, in lanes in no order; half of them known to the host only by KEEP. `spare`: rows that
    nobody owns, beside a few."""
    rng = random.Random(seed * 1000 + columns * 10 + branching)
    requests = [request(rng, columns) for _ in range(rng.randint(1, 4))]
    drafted = [forest(rng, rng.randint(0, columns), branching) for _ in requests]
    widths = [rng.randint(len(nodes), columns) for nodes in drafted]
    padding = rng.randint(0, 2)
    total = len(requests) + padding
    lanes = Lanes.make(8, BLOCKS, DEVICE)
    lane = rng.sample(range(7), len(requests)) + [7] * padding
    for at, r in zip(lane, requests, strict=False):
        fill(lanes, at, r, rng)
    rows = len(requests) + sum(widths) + rng.randint(0, 3) + spare
    flat = torch.zeros(Fields.size(Shape(total, rows, columns, branching, 1024), 1), dtype=torch.int32)
    given = Fields.of(flat, Shape(total, rows, columns, branching, 1024), 1)
    given.lane[:] = torch.tensor(lane)
    ends = [sum(w + 1 for w in widths[:b]) for b in range(len(widths) + 1)]
    given.first[:] = torch.tensor(ends + [ends[-1]] * padding)
    for part in (given.last, given.previous, given.length, given.room):
        part[:] = KEEP
    for b, (r, nodes) in enumerate(zip(requests, drafted, strict=True)):
        given.sizes[b] = len(nodes)
        given.tokens[b] = torch.tensor([rng.randrange(VOCAB) for _ in range(columns)])  # what is not in use may hold anything
        given.parents[b] = torch.tensor([rng.randrange(-3, columns + 3) for _ in range(columns)])
        if nodes:
            given.tokens[b, : len(nodes)], given.parents[b, : len(nodes)] = torch.tensor(nodes).T
        if not r.kept:
            given.last[b], given.previous[b], given.length[b], given.room[b] = r.tokens[-1], r.tokens[-2], len(r.tokens), r.room
    count = len(requests)
    tables = (given.tokens[:count].long(), given.parents[:count].long(), given.sizes[:count].long())
    proposal = Proposal(*tables, torch.zeros_like(tables[0]), tuple(widths), linear=not branching)
    chosen = torch.tensor([choices(rng, nodes, columns) for nodes in drafted])
    on_device = Fields(*(getattr(given, f.name).to(DEVICE) for f in fields(given)))
    return Case(lanes, on_device, proposal, requests, chosen, rows, branching)


def fill(lanes: Lanes, at: int, r: SimpleNamespace, rng: random.Random) -> None:
    """A lane as a request left it: with its state where the device must know it, else with something stale."""
    lanes.done[at] = r.done
    lanes.stops[at, : len(r.stop_ids)] = torch.tensor(sorted(r.stop_ids), dtype=torch.int32, device=DEVICE)
    lanes.table[at] = torch.tensor(rng.sample(range(1, 50), BLOCKS), dtype=torch.int32, device=DEVICE)
    state = (r.tokens[-1], r.tokens[-2], len(r.tokens), r.room) if r.kept else (0, 0, 3, 9)
    lanes.last[at], lanes.previous[at], lanes.length[at], lanes.room[at] = state


def walked(c: Case) -> Tensor:
    """What the plain rule says, in the shape of a captured round's result."""
    ready = tuple(r.done == 0 for r in c.requests)
    batch: Any = Batch(tuple(c.requests), (1,) * len(ready), ready, (c.columns,) * len(ready))
    v = walk(c.proposal, c.choice, batch)
    spare = torch.full((len(ready), 1), -1)
    return torch.cat([torch.stack([v.accepted, v.counts, v.finish], 1), v.tokens, v.path, spare], 1).int()


@pytest.mark.parametrize(("seed", "branching", "columns"), CASES)
def test_the_rule_is_the_coupled_rule(seed, branching, columns):
    c = case(seed, branching, columns)
    c.prepare()
    before, result, after = c.state(), c.decide(), c.state()
    count = len(c.requests)
    assert torch.equal(result[:count], walked(c))
    nothing = torch.tensor([0, 0, 0, *[-1] * (2 * columns + 2)], dtype=torch.int32)
    assert torch.equal(result[count:], nothing.expand(len(result) - count, -1))
    used = c.given.lane.tolist()
    for b, r in enumerate(c.requests):
        lane, n = used[b], int(result[b, 1])
        text = r.tokens + result[b, 3 : 3 + n].tolist()
        state = [int(after[name][lane]) for name in ("last", "previous", "length", "room", "done")]
        assert state == [text[-1], text[-2], len(text), r.room - n, r.done or int(result[b, 2])]
    others = [lane for lane in range(8) if lane not in used[:count]]
    for name, value in after.items():
        assert torch.equal(value[others], before[name][others])
    for name in ("key", "heat", "top_k", "top_p", "min_p", "stops", "table"):
        assert torch.equal(after[name], before[name])


def test_the_random_rounds_hold_what_matters():
    """The cases above end in every way, accept much and nothing, and branch."""
    every = torch.cat([walked(case(*c))[:, :3] for c in CASES])
    assert {0, int(Finish.STOP), int(Finish.LENGTH), int(Finish.ERROR)} <= set(every[:, 2].tolist())
    assert {0, 1, 2, 3, 4} <= set(every[:, 0].tolist())
    assert any(r.kept for c in CASES for r in case(*c).requests)
    assert any(r.done for c in CASES for r in case(*c).requests)


@pytest.mark.parametrize(("seed", "branching", "columns"), CASES)
def test_rows_stand_where_the_tree_says(seed, branching, columns):
    c = case(seed, branching, columns)
    rows, first = c.prepare(), c.given.first.tolist()
    p = c.proposal
    live = tree.used(p.sizes, columns)
    deep, paths = tree.depths(p.parents, p.sizes), tree.paths(p.parents.where(live, -1))
    for b, r in enumerate(c.requests):
        length, lane = len(r.tokens), int(c.given.lane[b])
        assert int(rows.known[b]) == length
        for slot in range(first[b + 1] - first[b]):
            row, node = first[b] + slot, slot - 1
            assert int(rows.lane[row]) == lane
            if r.done or node >= int(p.sizes[b]):
                assert (int(rows.attend[row]), int(rows.write[row])) == (-1, 0)
                continue
            depth = int(deep[b, node]) if slot else 0
            position, virtual = length - 1 + depth, length - 1 + slot
            assert int(rows.token[row]) == (int(p.tokens[b, node]) if slot else r.tokens[-1])
            assert (int(rows.depth[row]), int(rows.attend[row])) == (depth, position)
            assert int(rows.position[row]) == min(position, MAX_LEN - 1)
            assert int(rows.write[row]) == int(c.lanes.table[lane, virtual // 64]) * 64 + virtual % 64
            if branching:
                path = [length + x for x in paths[b, node].tolist() if x >= 0] if slot else []
                assert rows.path[row].tolist()[:depth] == path
    check_free(rows, first[-1])
    assert rows.path.shape == (c.rows, columns + 1 if branching else 0)


def check_free(rows: Any, start: int) -> None:
    """From here on nobody owns a row."""
    assert bool((rows.attend[start:] == -1).all())
    assert not any(getattr(rows, name)[start:].any() for name in ("token", "write", "position", "depth"))


@pytest.mark.parametrize("spare", [SPAN - 1, SPAN, 2 * SPAN + 7])
@pytest.mark.parametrize("branching", [False, True])
def test_rows_that_nobody_owns_are_blank_however_many_there_are(spare, branching):
    c = case(3, branching, 5, spare)
    c.prepare()
    rows = c.prepare()  # what is in memory by then may be anything
    assert len(rows.attend) == c.rows > spare
    check_free(rows, int(c.given.first[-1]))


@pytest.mark.parametrize("seed", range(4))
def test_unsound_guesses_are_put_right(seed):
    """Parents that do not come first and tokens nobody has: rows and the rule both see the forest put right."""
    c = case(seed, True, 8)
    rng = random.Random(seed)
    wrong = torch.tensor([[rng.randrange(-9, 12) for _ in range(8)] for _ in c.requests])
    right = wrong.clamp(min=-1).minimum(torch.arange(8) - 1)
    count = len(c.requests)
    assert not torch.equal(wrong, right)
    c.given.parents[:count] = wrong.to(DEVICE)
    c.given.tokens[:count] += torch.tensor([VOCAB, -VOCAB] * 4, device=DEVICE) * (seed % 2)
    twin = replace(case(seed, True, 8), proposal=replace(c.proposal, parents=right))
    twin.given.parents[:count] = right.to(DEVICE)
    twin.given.tokens[:] = c.given.tokens.clamp(0, VOCAB - 1) if seed % 2 else c.given.tokens
    a, b = c.prepare(), twin.prepare()
    for f in fields(type(c.lanes)):
        assert torch.equal(getattr(c.lanes, f.name), getattr(twin.lanes, f.name))
    alive = b.attend >= 0
    for name in ("token", "attend", "write", "depth", "path"):
        assert torch.equal(getattr(a, name)[alive], getattr(b, name)[alive])
    if seed % 2 == 0:
        got = c.decide()
        assert torch.equal(got, twin.decide())
        assert torch.equal(got[:count], walked(twin))


def test_a_table_without_a_block_writes_to_the_scratch_page():
    c = case(0, False, 5)
    c.lanes.table[:] = 0
    assert not c.prepare().write.any()


def test_a_wrong_stop_list_or_a_wrong_parent_changes_the_verdict():
    """Negative controls."""
    right = chain_of_agreement()
    assert right.decide()[0, :3].tolist() == [4, 5, 0]
    stopped = chain_of_agreement()
    stopped.lanes.stops[:, STOPS - 1] = int(stopped.proposal.tokens[0, 2])
    assert stopped.decide()[0, :3].tolist() == [3, 3, int(Finish.STOP)]
    cut = chain_of_agreement()
    cut.given.parents[0, 2] = 0
    assert cut.decide()[0, :3].tolist() == [2, 3, 0]
    short = chain_of_agreement()
    short.lanes.room[:] = 2
    assert short.decide()[0, :3].tolist() == [2, 2, int(Finish.LENGTH)]


def chain_of_agreement() -> Case:
    """One request whose four guesses in a row, as a tree, are all right."""
    for seed in range(1000):
        c = case(seed, True, 5)
        tokens, parents = [3, 1, 4, 2, 0], [-1, 0, 1, 2, -1]
        if len(c.requests) == 1 and c.proposal.widths == (5,) and not c.requests[0].done and not c.requests[0].stop_ids:
            c.given.tokens[0], c.given.parents[0], c.given.sizes[0] = (
                torch.tensor(x, device=DEVICE) for x in (tokens, parents, 5)
            )
            c.lanes.room[:] = 50
            proposal = replace(c.proposal, tokens=torch.tensor([tokens]))
            return replace(c, proposal=proposal, choice=torch.tensor([[3, 1, 4, 2, 7, 7]]))
    raise AssertionError("no seed gives one request with five columns")


def test_lanes_agree_with_the_book():
    """Host and device number the same things in the same way."""
    assert book.STOPS == STOPS
    assert int(Lanes.make(3, 2, DEVICE).done.min()) == Finish.ABORT


@pytest.mark.parametrize("seed", range(6))
def test_a_lane_that_is_done_runs_again_on_the_hosts_word(seed):
    """A round whose result was lost may have ended a request that the host still knows as running."""
    c = case(seed, False, 5)
    c.lanes.done[c.given.lane[: len(c.requests)].long()] = int(Finish.STOP)
    c.given.length[0] = len(c.requests[0].tokens)
    c.given.last[0], c.given.previous[0], c.given.room[0] = c.requests[0].tokens[-1], c.requests[0].tokens[-2], 7
    rows = c.prepare()
    assert int(c.lanes.done[int(c.given.lane[0])]) == 0
    assert int(rows.attend[0]) == len(c.requests[0].tokens) - 1
