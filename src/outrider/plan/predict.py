"""From chances and costs to speed.

A round looks K ahead for B requests and takes

    t_draft(K, B) + t_verify(rows, B) + the rest,

where rows are those of the pass, guesses that are not made left out, and the rest is what the host does beside: less for plain
rounds, which may be launched before the one before them was read. A text takes the reading of its prompt, the drafter's own
reading of it, and its rounds; the first token comes with the reading, and no round looks past the end. Plain decoding is
reckoned in the same way, and the speed-up is the ratio of the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .acceptance import Answer, Chances, Record
from .costs import Costs


@dataclass(frozen=True, slots=True)
class Prediction:
    """One depth at one batch: expected `tau` (tokens per round and request), `rows` per pass, seconds of a round, tokens per
    second of all requests together, the same of plain decoding, and their ratio. `known`: costs of such passes were measured."""

    depth: int
    batch: int
    tau: float
    rows: float
    round_seconds: float
    tokens_per_second: float
    plain_tokens_per_second: float
    known: bool

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second


@dataclass(slots=True)
class Walk:
    """Sums over the rounds of some texts."""

    tokens: int = 0
    rounds: int = 0
    turns: int = 0
    rows: int = 0
    seconds: float = 0.0
    inside: float = 0.0


def predict(source: Record | Chances, costs: Costs, depth: int, batch: int) -> Prediction:
    """What looking `depth` ahead will bring."""
    return _recorded(source, costs, depth, batch) if isinstance(source, Record) else _expected(source, costs, depth, batch)


def grid(source: Record | Chances, costs: Costs, depths: Iterable[int], batches: Iterable[int]) -> list[Prediction]:
    """Every depth at every batch."""
    depths = tuple(depths)
    return [predict(source, costs, depth, batch) for batch in batches for depth in depths]


def best(predictions: Sequence[Prediction], batch: int) -> Prediction | None:
    """The fastest of a batch; None where each of them is slower than plain decoding."""
    found = max((p for p in predictions if p.batch == batch), key=lambda p: p.speedup, default=None)
    return found if found is not None and found.speedup > 1.0 else None


def plain_round(costs: Costs, batch: int) -> float:
    """Seconds of a round without guesses."""
    return costs.plain(batch) + costs.other(batch, 0)


def share(costs: Costs, batch: int, depth: int) -> float:
    """What one guess costs to draft, in plain rounds: the c of the textbook formula."""
    return costs.draft(batch, depth) / (depth * plain_round(costs, batch)) if depth else 0.0


def break_even(costs: Costs, depths: Iterable[int], batch: int, offer: Sequence[float] = (1.0,)) -> float | None:
    """The least chance of a guess, the same at every position, at which some depth is no slower than plain decoding; None where
    even right guesses do not pay. `offer`: how often there is a guess at all, by position."""

    def gains(rate: float) -> bool:
        return any(_expected(Chances((rate,), tuple(offer)), costs, k, batch).speedup >= 1.0 for k in tried)

    tried = tuple(k for k in depths if k)
    if not gains(1.0):
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if gains(middle) else (middle, high)
    return high


def _expected(chances: Chances, costs: Costs, depth: int, batch: int) -> Prediction:
    """Far from the ends of texts."""
    plain = batch / plain_round(costs, batch)
    tau, guesses = chances.round(depth)
    rows = batch * (1.0 + guesses)
    if costs.asked or not depth:
        drafting = costs.draft(batch, depth)
    else:
        drafting = sum(p * costs.draft(batch, k) for k, p in enumerate(chances.deepest(depth)))
    passing = costs.verify(batch, rows) + costs.beyond(batch, depth) if depth else costs.plain(batch)
    seconds = drafting + passing + costs.other(batch, depth)
    return Prediction(depth, batch, tau, rows, seconds, batch * tau / seconds, plain, costs.knows(batch, rows))


def _recorded(record: Record, costs: Costs, depth: int, batch: int) -> Prediction:
    """By walking through the texts."""
    drafted, plain = Walk(), Walk()
    for group in record.groups(batch):
        _walk(group, depth, costs, drafted)
        _walk(group, 0, costs, plain)
    rounds = max(1, drafted.rounds)
    tau, rows = drafted.tokens / drafted.turns, drafted.rows / rounds
    speeds = (drafted.tokens / drafted.seconds, plain.tokens / plain.seconds)
    return Prediction(depth, batch, tau, rows, drafted.inside / rounds, *speeds, costs.knows(batch, rows))


def _walk(group: Sequence[Answer], depth: int, costs: Costs, walk: Walk) -> None:
    """All rounds of some texts that are written together, added to `walk`. The pass that reads a prompt is one of its turns."""
    walk.seconds += costs.reading(len(group)) + (costs.begin(len(group)) if depth else 0.0)
    walk.tokens += sum(a.tokens for a in group)
    walk.turns += len(group)
    written = [(a, 1) for a in group if a.tokens > 1]
    while written:
        asked = [(a, at, a.ask(at, depth)) for a, at in written]
        guesses = [a.guesses(at, k, costs.nodes(len(asked), k)) for a, at, k in asked]
        drafted, rows = sum(k > 0 for _, _, k in asked), len(asked) + sum(guesses)
        levels = max(k for _, _, k in asked) if costs.asked else max(guesses)
        seconds = costs.other(len(asked), levels)
        if drafted:
            seconds += costs.draft(drafted, levels) + costs.verify(len(asked), rows) + costs.beyond(len(asked), levels)
        else:
            seconds += costs.plain(len(asked))
        walk.rounds, walk.turns, walk.rows = walk.rounds + 1, walk.turns + len(asked), walk.rows + rows
        walk.seconds, walk.inside = walk.seconds + seconds, walk.inside + seconds
        moved = [(a, at + a.gained(at, k)) for a, at, k in asked]
        written = [(a, at) for a, at in moved if at < a.tokens]
