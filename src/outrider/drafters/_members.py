"""The members of a hybrid: how they are named, what each did lately, and what it takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..control.costs import Floats, bucket
from ..control.limits import Shape
from ..control.plan import Ints
from ..control.rates import Rates, Track, estimate
from ..control.shelf import apart
from ..control.streaks import Streaks, Text, previews
from ..control.tally import Tally
from ..control.trees import STAYS, Trees
from ..errors import BadInput
from ..protocols import Drafter
from ..trust import own
from ..types import Budget, Proposal, Request
from . import _joint

_DECAY = 0.9
"""How much of what was counted is left after a round."""
_HOPED = 0.6
"""Chance of a guess that is believed before anything was seen."""
_COMMON = 0.98
"""How much of everybody's record is left after a guess of the same grade."""
_FEW = 12.0
"""Guesses of a member below which its record may be bad luck."""
NOTHING = 1e-9
"""Seconds a level of a guess takes whose time is known otherwise."""
FIRST = 2
"""Levels of the first guess of a member whose time is not known."""
PACED = 8
"""Rounds for which it stands how far a member guesses."""
_LOOKS = 0.01
"""Share of the time for guesses that do not seem to pay."""


def grade(promise: float) -> int:
    """Promises that are kept alike: a guess of one token rests on less than one of many."""
    return min(4, int(promise).bit_length())


@dataclass(slots=True)
class Record(Tally):
    """What one member did for one request, lately: `grades` of its promises, how often it was `asked`, and what came true by
    level (`track`). `promise` and `levels` are those of its guess at hand; `pauses`: as many as there were when it was last
    looked at."""

    asked: float = 0.0
    promise: float = 0.0
    levels: int = 0
    pauses: int = 0
    grades: dict[int, Tally] = field(default_factory=dict)
    track: Track = field(default_factory=lambda: Track.empty(0))

    def count(self, promise: float, accepted: int) -> None:
        """Book a round in which the member was asked."""
        self._decay(1)
        self.add(promise, accepted, 1.0)
        self.asked += 1
        self.grades.setdefault(grade(promise), Tally()).add(promise, accepted, 1.0)

    def fade(self, rounds: int = 1) -> None:
        """Rounds without it: belief returns to the prior."""
        self._decay(rounds)
        self.track.fade(rounds)

    def _decay(self, rounds: int) -> None:
        keep = _DECAY**rounds
        self.asked *= keep
        for tally in (self, *self.grades.values()):
            tally.add(0.0, 0, keep)


@dataclass(frozen=True, slots=True)
class Hand:
    """A guess at hand: tokens it is expected to bring, its rows, and the seconds spent until now."""

    value: float
    width: int
    spent: float


@dataclass(frozen=True, slots=True)
class Cold:
    """Whether lookups promise little in these texts (requests and lengths), and until which round nobody looks again."""

    texts: tuple[tuple[int, int], ...]
    is_so: bool
    until: int

    @property
    def by(self) -> tuple[int, ...]:
        return tuple(name for name, _ in self.texts)


class Clock:
    """The middle one of the last seven durations; of one or two the least, since the first may have to be captured; 0 before
    there is one."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=7)

    def add(self, seconds: float) -> None:
        self._last.append(seconds)

    @property
    def seconds(self) -> float:
        return sorted(self._last)[len(self._last) // 2 if len(self._last) > 2 else 0] if self._last else 0.0

    @property
    def sure(self) -> bool:
        """Whether one that was odd does not count."""
        return len(self._last) > 2


@dataclass(slots=True)
class Learned:
    """How often a member's guesses came true in texts of all sorts: by level, by what they promised, of lookups by how many in a
    row were right; and how wide they are lately."""

    rates: Rates
    common: dict[int, Tally]
    streaks: Streaks
    trees: Trees


class Member:
    """A drafter with its number, its records, and what it takes. `pauses` counts rounds in which nobody was asked; `many`: more
    requests are written than are looked at one by one, and what is learned is `learned` of such batches."""

    def __init__(self, drafter: Drafter, index: int) -> None:
        self.drafter, self.index = drafter, index
        self.clock, self.paces, self.records = Clock(), (Clock(), Clock()), dict[int, Record]()
        self.replayed = False  # its last guess, on a device that the host does not wait for
        self.trusted = own(drafter)
        self._signed: tuple[Proposal, Proposal] | None = None
        self.reason: str | None = None
        self.strikes, self.starved, self.pauses = 0, False, 0
        self.levels = 0  # of its last guess, at most
        self.looked: float | None = None
        self.lookup, self.texts = previews(drafter), dict[int, Text]()
        self.stands = dict[int, tuple[int, int]]()  # by request: until which round it goes how many levels
        self.shared = 0, 0, 0  # until which round all requests of a batch of which size class go how many levels
        says = getattr(drafter, "expected", None)
        self.expected: Callable[[Request], float | None] | None = says if callable(says) else None
        self.many = False
        self.begin()

    def begin(self) -> None:
        """Nothing is known of its guesses. Some look less far ahead once they have started."""
        self._tables, drafter = dict[int, Ints](), self.drafter
        few = Learned(Rates(max(1, drafter.depth), _HOPED), {}, Streaks(), Trees(Shape(drafter).width))
        self.learned = {False: few}

    @property
    def _now(self) -> Learned:
        """What is known of it in batches like this one."""
        return apart(self.learned, self.many)

    @property
    def rates(self) -> Rates:
        return self._now.rates

    @property
    def common(self) -> dict[int, Tally]:
        return self._now.common

    @property
    def streaks(self) -> Streaks:
        return self._now.streaks

    @property
    def trees(self) -> Trees:
        return self._now.trees

    def forget(self) -> None:
        """There is no request any more."""
        for known in (self.records, self.texts, self.stands):
            known.clear()
        self._signed = None
        self.strikes, self.starved, self.pauses, self.shared = 0, False, 0, (0, 0, 0)

    def record(self, request: Request) -> Record:
        """What it did for a request; pauses since it was last looked at have worn it out."""
        record = self.records.get(request.id)
        if record is None:
            record = self.records[request.id] = Record(pauses=self.pauses, track=self.rates.track())
        if record.pauses != self.pauses:
            record.fade(self.pauses - record.pauses)
            record.pauses = self.pauses
        return record

    def signed(self, part: Proposal) -> Proposal:
        """A proposal of its own, with its number; of one that is made again and again, the same."""
        if part.q is not None or part.resume is not None:  # which take too much memory to be kept
            return _joint.signed(part, self.index)
        if self._signed is None or self._signed[0] is not part:
            self._signed = part, _joint.signed(part, self.index)
        return self._signed[1]

    def signs(self, part: Proposal) -> bool:
        """Whether this is what it made the last time, too."""
        return self._signed is not None and self._signed[0] is part

    def made(self, signed: Proposal) -> Proposal:
        """The last one that was signed, as it was made, if it is known."""
        return self._signed[0] if self._signed is not None and self._signed[1] is signed else signed

    def worth(self, request: Request) -> float:
        """Tokens its guess at hand is expected to bring: what it promises, as far as promises of that grade came true in this
        text and, unless the text must not depend on others, in all."""
        record, prior = self.record(request), 0.5 if self.expected is None else 1.0
        at = grade(record.promise)
        if not request.classical and at in self.common:
            prior = self.common[at].share(prior)
        return record.promise * record.grades.get(at, Tally()).share(prior)

    def book(self, request: Request, accepted: int | None, said: tuple[float, int] | None = None) -> None:
        """A round of a request that it knows: how many of its guesses were right, None where it had none or nobody can tell."""
        if request.id not in self.records:
            return
        if accepted is None:
            self.record(request).fade()
        else:
            self.count(request, accepted, said)

    def count(self, request: Request, accepted: int, said: tuple[float, int] | None = None) -> None:
        """Book a round in which it was asked for a request, and `said` how many tokens it promised in how many levels (None:
        those of the guess at hand)."""
        record = self.record(request)
        promise, levels = said or (record.promise, record.levels)
        record.count(promise, accepted)
        self.rates.learn([(record.track, min(accepted, levels), levels)])
        self.common.setdefault(grade(promise), Tally()).add(promise, accepted, _COMMON)

    def promise(self, request: Request, levels: int) -> float:
        """What it expects of a guess that it just made, of so many levels; the levels where it does not say."""
        said = None if self.expected is None else self.expected(request)
        return float(levels) if said is None else said

    def outlook(self, request: Request) -> float:
        """Tokens it is expected to bring if asked; half its depth before it ever was."""
        record = self.record(request)
        return (record.accepted + self.drafter.depth / 2) / (record.asked + 1)

    def usual(self) -> float:
        """Tokens that a guess brings as a rule."""
        return float(np.cumprod(self.rates.everybody()).sum())

    def wish(self, request: Request) -> int:
        """Levels it would like to guess, or those the request names."""
        return self.drafter.depth if request.params.depth is None else request.params.depth

    @property
    def pace(self) -> Clock:
        """What a level takes of guesses as wide as the next ones: chains may be made in another way."""
        return self.paces[self.trees.linear]

    @property
    def launch(self) -> float:
        """Seconds in which a device waits to be told to guess, where the host does no more than that and nothing was launched
        ahead."""
        return self.clock.seconds if self.replayed else 0.0

    def took(self, levels: int, host: float, device: float | None) -> None:
        """A guess of so many levels took the host so many seconds; a replay the device, which is in the time of the pass."""
        self.clock.add(host)
        self.replayed = device is not None
        self.pace.add(max(NOTHING, (host if device is None else device) / max(1, levels)))

    def rows(self, levels: int) -> int:
        """Nodes of a guess of so many levels."""
        return Shape(self.drafter).nodes(levels, self.trees.now)

    def best(self, request: Request | None, most: int, passes: Floats, spent: float) -> tuple[int, float]:
        """Of up to `most` levels as many as bring most tokens per second if it is asked (for a request, or for any), and how many
        that is; the next guesses are as wide as that takes. `passes`: seconds of a pass by the rows of guesses of each request;
        `spent`: seconds spent already."""
        luck, beliefs = 1 - self.rates.common.lately.tests[0] / _FEW, self.rates.beliefs()
        usual = beliefs.everybody if request is None else estimate(self.record(request).track, beliefs)
        chances = np.maximum(luck, usual)[:most]
        rows = self._table(len(chances))
        tokens = 1 + np.cumsum(np.cumprod(self.trees.spread(chances), axis=1), axis=1)
        levels = np.arange(1.0, len(chances) + 1)
        paces = [self.paces[self.trees.chain(w)].seconds or self.pace.seconds for w in self.trees.widths]
        speed = tokens / (spent + np.outer(paces, levels) + passes[rows])
        at, now = speed.argmax(axis=1), self.trees.now
        found = [(float(speed[i, k]), int(k) + 1, width) for i, (k, width) in enumerate(zip(at, self.trees.widths, strict=True))]
        fastest, many, self.trees.now = max(found, key=lambda one: one[0] * (STAYS if one[2] == now else 1.0))
        return many, fastest

    def together(self, now: int, requests: int, most: int, passes: Callable[[], Floats]) -> int:
        """How many levels, up to `most`, pay best for all of so many requests, in round `now`; `passes` as for `best`."""
        until, size, levels = self.shared
        if not self.pace.seconds:
            return FIRST
        if now >= until or size != bucket(requests):
            levels, _ = self.best(None, most, passes(), 0.0)
            self.shared = now + PACED, bucket(requests), levels
        return levels

    def _table(self, levels: int) -> Ints:
        """Nodes `[widths, levels]` of guesses of every width."""
        if levels not in self._tables:
            shape = Shape(self.drafter)
            rows = [[shape.nodes(n + 1, width) for n in range(levels)] for width in self.trees.widths]
            self._tables[levels] = np.array(rows)
        return self._tables[levels]

    def look(self, now: float, most: int) -> int:
        """Of `most` levels as many as may be guessed at time `now`, in seconds, only to measure anew what they bring: what the
        member takes must stay a small share of the time since it was last looked at."""
        if self.looked is None:
            self.looked = now
        levels = most if not self.pace.seconds else min(most, int(_LOOKS * (now - self.looked) / self.pace.seconds))
        if levels:
            self.looked = now
        return levels

    def budget(self, levels: Sequence[int], budget: Budget, used: Sequence[int]) -> Budget:
        """What it may spend for so many levels, of the nodes that are not `used`."""
        depths = [max(0, min(n, room - u)) for n, room, u in zip(levels, budget.nodes, used, strict=True)]
        rows = {d: self.rows(d) if d else 0 for d in set(depths)}
        nodes = [min(room - u, rows[d]) for d, room, u in zip(depths, budget.nodes, used, strict=True)]
        return Budget(tuple(depths), tuple(nodes))


def members(text: str) -> list[str]:
    """Specs from `NAME+NAME(key=value;key=value)+...`. Raises `BadInput` for what cannot be read."""
    parts, level, start = list[str](), 0, 0
    for i, sign in enumerate(text + "+"):
        level += (sign == "(") - (sign == ")")
        if level < 0 or (level and i == len(text)):
            raise BadInput(f"hybrid: the parentheses in members={text!r} do not match")
        if sign == "+" and not level:
            parts.append(text[start:i].strip())
            start = i + 1
    if not all(parts):
        raise BadInput(f"hybrid: an empty name in members={text!r}; write members=NAME+NAME(key=value;key=value)")
    return [_spec(part) for part in parts]


def _spec(part: str) -> str:
    name, bracket, rest = part.partition("(")
    if not bracket:
        return part
    if not rest.endswith(")") or not name.strip():
        raise BadInput(f"hybrid: cannot read {part!r}; write NAME(key=value;key=value)")
    options, level = "", 0
    for sign in rest[:-1]:
        level += (sign == "(") - (sign == ")")
        options += "," if sign == ";" and not level else sign
    return f"{name.strip()}:{options}"
