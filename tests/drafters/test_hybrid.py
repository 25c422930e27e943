"""Cascade and merge: grammar, choices, each member's view, and what happens when a member fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import registry, tree
from outrider.config import SamplingParams
from outrider.drafters import _joint
from outrider.drafters._members import Hand
from outrider.drafters.hybrid import Hybrid, Member, members
from outrider.errors import BadInput, OutriderWarning
from outrider.guard import Guard
from outrider.protocols import Drafter, KVNeed, Needs
from outrider.types import NONE, PROBE, Batch, Budget, PassRows, Proposal, Request, Scores, Slots, Verdict

from .. import heads, probes, tiny
from ..contract.test_text import OPTIONS, answers, check_statistics, plain, requests
from ..test_tree import Nodes, forests, words

# Grammar


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("suffix+ngram", ["suffix", "ngram"]),
        ("suffix( width=2 ;depth=8) + ngram(max=5)", ["suffix: width=2 ,depth=8", "ngram:max=5"]),
        ("examples/copycat.py(depth=5)", ["examples/copycat.py:depth=5"]),
        (
            "hybrid(members=suffix(depth=3;width=2)+ngram;merge=yes)+none",
            ["hybrid:members=suffix(depth=3;width=2)+ngram,merge=yes", "none"],
        ),
        ("ngram()", ["ngram:"]),
    ],
)
def test_members_are_read(text: str, want: list[str]) -> None:
    assert members(text) == want
    for spec in want:
        if not spec.startswith("examples"):
            registry.parse(spec)


@pytest.mark.parametrize(
    "text", ["", "+", "suffix+", "suffix(", "suffix)", "suffix(depth=2", "suffix(depth=2)x", "(depth=2)", "ngram)+(x"]
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="hybrid"):
        members(text)


def test_specs_reach_the_members() -> None:
    made = registry.parse("hybrid:merge=yes,members=suffix(depth=7;width=2)+ngram(depth=3)")
    assert isinstance(made, Hybrid) and made.merge and [m.drafter.name for m in made.members] == ["suffix", "ngram"]
    assert (made.depth, made.nodes) == (7, 17) and registry.parse("hybrid:members=ngram(depth=3)").nodes == 3
    with pytest.raises(BadInput, match="no key"):
        registry.parse("hybrid:members=ngram(deep=3)")


# Needs


def test_needs_are_united_and_two_owners_are_refused() -> None:
    owner, reader = probes.Owner({}), probes.Reader()
    made = Hybrid.of([owner, reader, probes.Exiter()])
    assert made.needs == Needs(("hidden:last", "hidden:0,2"), True, KVNeed(2, 1, 2), True)
    with pytest.raises(BadInput, match="owner and owner each want KV memory"):
        Hybrid.of([owner, probes.Owner({})])


# Whole runs: no member may have been switched off


def sound(made: Hybrid, option: str, **world) -> list:
    ours = requests(OPTIONS[option])
    assert tuple(map(tuple, tiny.World(**world).run(made, ours))) == plain(option)
    assert [m.reason for m in made.members] == [None] * len(made.members)
    for request in ours:
        check_statistics(request)
    return ours


def zoo(option: str) -> list[Drafter]:
    return [
        registry.parse("suffix:factor=3"),
        probes.Replay(answers(option), depth=3, spoil=0.4),
        tiny.draft_model(2, depth=3, width=2),
        probes.Reader(),
        probes.Exiter(),
        registry.parse("ngram:min=1"),
    ]


@pytest.mark.parametrize("cache", ["paged", "slots"])
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("option", ["greedy", "sampled", "masks"])
def test_every_member_keeps_working(option: str, merge: bool, cache: str) -> None:
    ours = sound(Hybrid.of(zoo(option), merge), option, cache=cache)
    told = Counter(o for r in ours for o in r.origins)
    assert len(told) >= 3, "several members have brought tokens"


@pytest.mark.parametrize("merge", [False, True])
def test_tight_memory(merge: bool) -> None:
    sound(Hybrid.of(zoo("sampled"), merge), "sampled", tokens=128)


def test_an_owner_of_kv_keeps_its_columns() -> None:
    """Its memory is checked by the probe itself, every round: it must be moved along the accepted path, as in a run alone."""
    owner = probes.Owner(answers("sampled"))
    sound(Hybrid.of([probes.Prober(answers("sampled")), owner], merge=True), "sampled")
    assert owner.checked > 100


@pytest.mark.parametrize("accept", ["rejection", "block", "traversal"])
@pytest.mark.parametrize("merge", [False, True])
def test_classical_rules_keep_every_member(merge: bool, accept: str) -> None:
    ours = requests(OPTIONS["sampled"])
    for request in ours:
        request.rule = accept
    made = Hybrid.of([registry.parse("suffix"), tiny.draft_model(2, depth=3)], merge)
    tiny.World().run(made, ours, accept)
    assert [m.reason for m in made.members] == [None] * 2
    assert sum(o == 1 for r in ours for o in r.origins) > 5


def test_a_drawn_guess_keeps_its_law_in_a_cascade() -> None:
    """A draft that is the target itself is accepted in full under `rejection`, if q comes with its guess and only with that."""
    params = replace(OPTIONS["sampled"], max_tokens=40)
    ours = [tiny.request(p, replace(params, seed=i + 1), rule="rejection") for i, p in enumerate(tiny.prompts(5, seed=8))]
    tiny.World().run(Hybrid.of([registry.parse("ngram:depth=2"), tiny.draft_model(3, depth=3)]), ours, "rejection")
    drawn = [r for r in ours if 1 in r.origins]
    assert drawn
    alone = [tiny.request([2 + i], replace(params, seed=i + 1), rule="rejection") for i in range(3)]
    tiny.World().run(Hybrid.of([Mute(), tiny.draft_model(3, depth=3)]), alone, "rejection")
    assert all(r.stats.accepted == r.stats.drafted > 0 for r in alone)


class Mute(Drafter):
    """Never has a guess."""

    name = "mute"
    depth = nodes = 2

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        return Proposal.empty(len(batch))


# Choices


class Told(Drafter):
    """Guesses a fixed chain and remembers which requests it was asked for."""

    def __init__(self, name: str, chain: list[int], only: set[int] | None = None) -> None:
        self.name, self.chain, self.only, self.asked = name, chain, only, list[list[int]]()
        self.depth = self.nodes = len(chain)

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        self.asked.append([b for b, n in enumerate(budget.nodes) if n])
        speaks = [self.only is None or b in self.only for b in range(len(batch))]
        return Proposal.chains([self.chain[: d if s else 0] for d, s in zip(budget.depth, speaks, strict=True)])


def batch(count: int, rule: str = "coupled") -> Batch:
    made = tuple(tiny.request([2, 3, 4], SamplingParams(max_tokens=20), rule=rule) for _ in range(count))
    return Batch(made, (1,) * count, (True,) * count, (20,) * count)


def started(*drafters: Drafter, merge: bool = False) -> Hybrid:
    made = Hybrid.of(drafters, merge)
    tiny.World().engine(made)
    return made


def timed(made: Hybrid, ahead: bool) -> None:
    """Of rounds for one request that each take a second, however many rows there are."""
    for i in range(9):
        made._beats.begin(1.0 * i, ahead, 1)
        made._beats.made(1.0 * i, 1, (1, 5, 9)[i % 3], 0.0)


def outcome(made: Proposal, accepted: list[int]) -> Verdict:
    """A verdict that keeps the first so many nodes of every chain."""
    path = torch.tensor([[c if c < a else NONE for c in range(made.columns)] for a in accepted])
    count = torch.tensor(accepted)
    return Verdict(path, count, torch.zeros(len(accepted), made.columns + 1, dtype=torch.int64), count + 1, count * 0)


def scores(made: Proposal) -> Scores:
    none = torch.zeros(0, dtype=torch.int64)
    return Scores(torch.zeros(len(made.widths), made.columns + 1, dtype=torch.int64), PassRows(none, none, none, none), {})


def play(made: Hybrid, some: Batch, accepted, rounds: int) -> list[Proposal]:
    """Rounds in which `accepted(sources of a request)` says how many guesses are kept."""
    out = []
    for _ in range(rounds):
        guess = made.propose(some, Budget((made.depth,) * len(some), (made.nodes,) * len(some)))
        out.append(guess)
        kept = [accepted(guess.source[b, : guess.widths[b]].tolist()) for b in range(len(some))]
        made.observe(some, guess, outcome(guess, kept), scores(guess))
        for request, right in zip(some.requests, kept, strict=True):
            request.tokens += [0] * (right + 1)
    return out


def test_who_has_no_guess_is_passed_on_alone() -> None:
    one, two = Told("one", [5, 6, 7, 8], {0, 2}), Told("two", [9])
    made = started(one, two)
    [guess] = play(made, batch(3, "rejection"), lambda s: 0, 1)
    assert one.asked == [[0, 1, 2]] and two.asked == [[1]]
    assert guess.widths == (4, 1, 4) and guess.source[:, 0].tolist() == [0, 1, 0] and guess.tokens[1, 0] == 9 and guess.linear


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_member_that_is_mostly_wrong_gives_way_and_comes_back(rule: str) -> None:
    made = started(Told("bad", [5, 6, 7, 8]), Told("good", [9, 10, 11, 12]))
    some = batch(2, rule)
    late = play(made, some, lambda s: len(s) if s and s[0] == 1 else 0, 40)[-20:]
    assert sum(int(g.source[0, 0]) == 1 for g in late) >= 15, "the better one is chosen"
    turned = play(made, some, lambda s: len(s) if s and s[0] == 0 else 0, 60)[-20:]
    assert sum(int(g.source[0, 0]) == 0 for g in turned) >= 15, "and when times change, the other"


def test_a_dear_member_is_not_asked_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the tokens, but a round of ten times the time: not worth it under the coupled rule, where clocks count."""
    now = [0.0]
    monkeypatch.setattr("outrider.drafters.hybrid.time.perf_counter", lambda: now[0])

    class Slow(Told):
        def propose(self, some: Batch, budget: Budget) -> Proposal:
            now[0] += 10.0
            return super().propose(some, budget)

    slow = Slow("slow", [9, 10, 11, 12])
    made = started(Told("cheap", [5]), slow)
    some = batch(1)

    def kept(sources: list[int]) -> int:
        now[0] += 1.0  # the pass
        return len(sources)

    play(made, some, kept, 10)
    before = len(slow.asked)
    play(made, some, kept, 40)
    assert len(slow.asked) - before <= 1 < before + 1
    assert [m.clock.seconds for m in made.members] == [0.0, 10.0]


@pytest.mark.parametrize("level", [0.2, 1.0, 10.0])
@pytest.mark.parametrize("talks", [0.0, 0.5, 1.0])
def test_a_member_that_is_always_wrong_takes_little_time(level: float, talks: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """`level`: seconds per level, where a pass takes one; `talks`: how often the cheap member has a guess."""
    now, spent, heard = [0.0], [0.0], [0.0]
    monkeypatch.setattr("outrider.drafters.hybrid.time.perf_counter", lambda: now[0])

    class Slow(Told):
        def propose(self, some: Batch, budget: Budget) -> Proposal:
            now[0] += level * max(budget.depth)
            spent[0] += level * max(budget.depth)
            return super().propose(some, budget)

    class Sometimes(Told):
        def propose(self, some: Batch, budget: Budget) -> Proposal:
            heard[0] += talks
            self.only = None if heard[0] % 1 == 0 and talks else {-1}
            return super().propose(some, budget)

    made, some = started(Sometimes("cheap", [5, 6]), Slow("slow", [9, 10, 11, 12])), batch(1)

    def kept(sources: list[int]) -> int:
        now[0] += 1.0  # the pass
        return sources.count(0)

    play(made, some, kept, 100)
    now[0], spent[0] = 100.0, 0.0
    made.members[1].looked = 100.0
    play(made, some, kept, 640)
    assert spent[0] <= 0.012 * now[0]


def test_classical_choices_do_not_read_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(seconds: float) -> list[int]:
        now = [0.0]

        def tick() -> float:
            now[0] += seconds
            return now[0]

        monkeypatch.setattr("outrider.drafters.hybrid.time.perf_counter", tick)
        made = started(Told("one", [5, 6]), Told("two", [9, 10, 11, 12]))
        return [int(g.source[0, 0]) for g in play(made, batch(1, "block"), lambda s: len(s) // 2, 30)]

    assert chosen(0.0) == chosen(5.0)


def test_records_say_what_became_of_each_members_guesses() -> None:
    one, two = Told("one", [5, 6, 7, 8]), Told("two", [5, 6, 9, 9])
    made = started(one, two, merge=True)
    some = batch(1)
    play(made, some, lambda s: 3, 1)  # 5, 6, 7
    assert [m.record(some.requests[0]).accepted for m in made.members] == [3, 2]
    assert [m.record(some.requests[0]).promised for m in made.members] == [4, 4]


# Failures


class Crasher(Told):
    """Raises where it is told to, after some rounds."""

    def __init__(self, where: str, after: int = 2, error: BaseException | None = None) -> None:
        super().__init__("crasher", [5, 6])
        self.where, self.left, self.error = where, after, error or ZeroDivisionError("oops")

    def _maybe(self, where: str) -> None:
        if where == self.where:
            self.left -= 1
            if self.left < 0:
                raise self.error

    def start(self, start) -> None:
        self._maybe("start")

    def propose(self, some: Batch, budget: Budget) -> Proposal:
        self._maybe("propose")
        made = super().propose(some, budget)
        return replace(made, tokens=made.tokens + tiny.VOCAB) if self.where == "nonsense" else made

    def observe(self, some: Batch, proposal: Proposal, verdict: Verdict, told: Scores) -> None:
        self._maybe("observe")

    def release(self, request) -> None:
        self._maybe("release")


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize(("where", "after"), [("start", 0), ("propose", 2), ("observe", 2), ("release", 0), ("nonsense", 0)])
def test_a_failing_member_is_switched_off_alone(where: str, after: int, merge: bool) -> None:
    made = Hybrid.of([Crasher(where, after), probes.Replay(answers("sampled"), depth=3)], merge)
    ours = requests(OPTIONS["sampled"])
    with pytest.warns(OutriderWarning, match="its member 'crasher' was switched off"):
        texts = tiny.World().run(made, ours)
    assert tuple(map(tuple, texts)) == plain("sampled")
    assert made.members[0].reason is not None and made.members[1].reason is None
    assert sum(o == 1 for r in ours for o in r.origins) > 20
    if where == "nonsense":
        assert "unsound" in str(made.members[0].reason)


def test_a_member_may_run_out_of_memory_once() -> None:
    class Short(Told):
        forgot, bad = 0, (2, 5, 6)

        def propose(self, some: Batch, budget: Budget) -> Proposal:
            made = super().propose(some, budget)
            if len(self.asked) in self.bad:
                raise torch.OutOfMemoryError("no room")
            return made

        def release(self, request) -> None:
            self.forgot += 1

    short = Short("short", [5, 6])
    made, some = started(short), batch(2)
    play(made, some, len, 5)
    assert made.members[0].reason is None and short.forgot == 4
    with pytest.warns(OutriderWarning, match="'short' was switched off: it failed with OutOfMemoryError"):
        play(made, some, len, 1)


def test_a_member_that_is_off_wants_no_states() -> None:
    """Rounds are launched ahead only where nobody reads the target's states."""

    class Reading(Crasher):
        needs = Needs(("hidden:last",), gaps=True)

    engine = tiny.World().engine(Hybrid.of([Reading("propose", 0), Told("one", [5])]))
    assert not engine.drafter.follows((), guessing=False)
    with pytest.warns(OutriderWarning, match="its member 'crasher' was switched off"):
        engine.drafter.propose(batch(1), Budget((2,), (2,)))
    assert engine.drafter.follows((), guessing=False) and engine.drafter.working


def test_when_none_is_left_the_hybrid_is_switched_off() -> None:
    made = Hybrid.of([Crasher("propose", 0), Crasher("propose", 1, SystemExit(3))])
    ours = requests(OPTIONS["sampled"])
    with pytest.warns(OutriderWarning, match="none of its members is left"):
        texts = tiny.World().run(made, ours, may_fail=True)
    assert tuple(map(tuple, texts)) == plain("sampled")


def test_interrupts_pass_through() -> None:
    made = started(Crasher("propose", 0, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        play(made, batch(1), lambda s: 0, 1)


def test_release_forgets() -> None:
    made = Hybrid.of(zoo("sampled"))
    sound(made, "sampled")
    assert not any(m.records for m in made.members)


def test_what_a_member_drew_and_kept_silent_about_is_not_anothers() -> None:
    """Its q must not end up in the next member's proposal."""

    class Sneak(Mute):
        name = "sneak"

        def start(self, start) -> None:
            self.sampler = start.sampler

        def propose(self, some: Batch, budget: Budget) -> Proposal:
            n = len(some)
            at = torch.arange(n)
            where = Slots(some.requests, at, at * 0 + 3, torch.zeros(n, 0, dtype=torch.int64), at * 0, at * 0)
            self.sampler.choose(torch.zeros(n, tiny.VOCAB, dtype=torch.float64), where)
            return Proposal.empty(n)

    class Attacher(Told):
        def start(self, start) -> None:
            self.sampler = start.sampler

        def propose(self, some: Batch, budget: Budget) -> Proposal:
            return self.sampler.attach(some, super().propose(some, budget))

    some = batch(2, "rejection")
    budget = Budget((2, 2), (2, 2))
    assert started(Sneak(), Attacher("attacher", [5, 6])).propose(some, budget).q is None
    both = started(Attacher("attacher", [5, 6]))
    sneak = Sneak()
    sneak.start(both._start)
    sneak.propose(some, budget)
    assert both.propose(some, budget).q is not None, "without the care taken this is what would happen"


# Views


@st.composite
def several(draw: st.DrawFn) -> list[Proposal]:
    batch_size = draw(st.integers(1, 3))
    out = []
    for i in range(draw(st.integers(1, 3))):
        nodes: list[Nodes] = [draw(forests(6)) for _ in range(batch_size)]
        out.append(_joint.signed(Proposal.trees(nodes), i))
    return out


@settings(max_examples=150, deadline=None)
@given(parts=several(), data=st.data())
def test_select_gives_each_request_one_members_guesses(parts: list[Proposal], data: st.DataObject) -> None:
    count = len(parts[0].widths)
    chosen = [data.draw(st.integers(NONE, len(parts) - 1)) for _ in range(count)]
    vocab = 5
    parts = [replace(p, q=torch.full((count, p.columns + 1, vocab), 1 / vocab)) if i % 2 else p for i, p in enumerate(parts)]
    whole, maps = _joint.select(dict(enumerate(parts)), chosen)
    assert bool(tree.validate(whole, vocab).all())
    for b, c in enumerate(chosen):
        assert words(whole, b) == (words(parts[c], b) if c != NONE else [])
        assert whole.source[b, : int(whole.sizes[b])].tolist() == ([c] * int(parts[c].sizes[b]) if c != NONE else [])
        drawn = c != NONE and parts[c].q is not None and parts[c].widths[b] > 0
        if whole.q is not None and any(parts[k].widths[b] for k in range(len(parts))):
            rows = int(whole.sizes[b]) + 1
            assert bool((whole.q[b, :rows].sum(1) > 0.5).all()) == drawn or not drawn
        elif drawn:
            raise AssertionError("q was lost")
        for i, renamed in maps.items():
            size = int(parts[i].sizes[b]) if i == c else 0
            assert renamed[b].tolist() == [*range(size), *[NONE] * (parts[i].columns - size)]


@settings(max_examples=150, deadline=None)
@given(parts=several(), data=st.data())
def test_each_member_sees_its_own_nodes(parts: list[Proposal], data: st.DataObject) -> None:
    """After a merge: the longest start of the accepted path that a member offered, its own choices, its own rows."""
    whole, maps = tree.merge(parts)
    count, n = len(whole.widths), whole.columns
    paths = []
    for b in range(count):
        ends = [*range(int(whole.sizes[b])), NONE]
        at, path = data.draw(st.sampled_from(ends)), list[int]()
        while at != NONE:
            path.insert(0, at)
            at = int(whole.parents[b, at])
        paths.append(path + [NONE] * (n - len(path)))
    path = torch.tensor(paths).reshape(count, n)
    accepted = (path != NONE).sum(1)
    verdict = Verdict(path, accepted, torch.zeros(count, n + 1, dtype=torch.int64), accepted + 1, accepted * 0)
    choice = torch.arange(count * (n + 1)).view(count, n + 1) + 100
    place = [(b, s) for b in range(count) for s in range(-1, int(whole.sizes[b]) + 1)]
    request, slot = (torch.tensor(x, dtype=torch.int64) for x in zip(*place, strict=True))
    rows = PassRows(request, request * 0, torch.arange(len(place)), slot)
    scored = slot >= 0
    slots = Slots((), request[scored], request[scored], torch.zeros(int(scored.sum()), 0), request[scored], slot[scored])
    logits = torch.arange(len(place))[scored][:, None].float()
    told = Scores(choice, rows, {"x": torch.arange(len(place))[:, None]}, logits, slots, processed=choice[:, :, None].float())
    for part, renamed in zip(parts, maps, strict=True):
        back = _joint.inverse(renamed, n)
        seen = _joint.verdict_for(part, back, verdict)
        mine = _joint.scores_for(renamed, back, seen, verdict, told)
        keep = dict[tuple[int, int], int]()
        for b in range(count):
            line = [words(whole, b)[c] for c in paths[b] if c != NONE]
            own = words(part, b)
            want = [own.index(w) for w in line[: next((i for i, w in enumerate(line) if w not in own), len(line))]]
            assert [c for c in seen.path[b].tolist() if c != NONE] == want and seen.accepted[b] == len(want)
            for j, w in enumerate(own):
                assert mine.choice[b, j + 1] == choice[b, words(whole, b).index(w) + 1] == mine.processed[b, j + 1, 0]
            assert mine.choice[b, 0] == choice[b, 0] and (mine.choice[b, len(own) + 1 :] == NONE).all()
            for i, (r, s) in enumerate(place):
                if r != b:
                    continue
                word = words(whole, b)[s - 1] if s > 0 else None
                on_path = s > 0 and s - 1 in paths[b]
                if s <= 0:
                    keep[i, s] = s
                elif word in own and (own.index(word) in want or not on_path):
                    keep[i, s] = own.index(word) + 1
                elif on_path:
                    keep[i, s] = NONE  # as good as a known token
        assert mine.features["x"][:, 0].tolist() == [i for i, _ in keep] == mine.rows.virtual.tolist()
        assert mine.rows.slot.tolist() == list(keep.values())
        with_slot = [i for (i, _), s in keep.items() if s >= 0]
        assert mine.logits[:, 0].tolist() == with_slot and mine.slots.slot.tolist() == [s for s in keep.values() if s >= 0]


def test_probes_stay_probes() -> None:
    made = Proposal.trees([[(1, -1), (2, 0)]])
    marked = replace(made, source=torch.tensor([[PROBE, 0]]))
    assert _joint.signed(marked, 3).source.tolist() == [[PROBE, 3]]


def test_a_members_own_expectation_is_corrected_by_what_came_true() -> None:
    member = Member(registry.parse("suffix"), 0)
    request = tiny.request([1, 2])
    record = member.record(request)
    record.promise = 4.0
    assert member.worth(request) == 4.0
    for _ in range(30):
        record.count(4.0, 1)
    assert 1.0 < member.worth(request) < 1.6


def test_members_that_can_keep_groups_apart_do_so() -> None:
    """What one group's text ended with is no guess for another's."""
    told = SamplingParams(max_tokens=6, temperature=0.0)

    def guesses(isolated: bool) -> int:
        made = Hybrid.of([registry.parse("suffix"), heads.eagle()])
        if isolated:
            made.isolate()
        lookup = made.members[0].drafter
        first, second = (replace(tiny.request([2, 3, 4], told), id=i, group=name) for i, name in ((1, "a"), (2, "b")))
        some = Batch((second,), (1,), (True,), (20,))
        tiny.World().engine(made)
        first.tokens += [7, 8, 9, 10, 7, 8, 9, 11]
        lookup.propose(Batch((first,), (1,), (True,), (20,)), Budget((4,), (4,)))
        made.release(first)
        second.tokens += [7, 8, 9]
        return lookup.propose(some, Budget((4,), (4,))).widths[0]

    assert guesses(False) > 0 == guesses(True)


def test_a_lesser_guess_stands_beside_the_better_one_where_its_rows_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("outrider.drafters.hybrid.time.perf_counter", lambda: now[0])

    class Timed(Told):
        def propose(self, some: Batch, budget: Budget) -> Proposal:
            now[0] += 0.01
            return super().propose(some, budget)

    def kept(sources: list[int]) -> int:
        now[0] += 1.0  # the pass
        return sources.count(1) if sources[0] == 1 else 0

    made = started(Told("one", [5, 6]), Timed("two", [9, 10, 11, 12]))
    guesses = play(made, batch(1), kept, 60)
    assert sorted(guesses[0].source[0].tolist()) == [0, 0, 1, 1], "both, of the second a first look of two levels"
    assert sum(g.source[0].tolist() == [1] * 4 for g in guesses[-20:]) >= 15, "until one is known to be bad"
    drawn = started(Told("one", [5, 6]), Told("two", [9, 10, 11, 12]))
    assert all(len(set(g.source[0].tolist())) == 1 for g in play(drawn, batch(1, "rejection"), lambda s: 1, 20))


def test_a_member_looks_ahead_as_far_as_it_pays() -> None:
    member, request = Member(Told("x", [5, 6, 7, 8]), 0), tiny.request([1, 2])
    member.pace.add(0.1)

    passes = 1.0 + 0.02 * np.arange(5.0)
    for _ in range(60):
        record = member.record(request)
        record.promise, record.levels = 4.0, 4
        member.count(request, 2)
    assert member.best(request, 4, passes, 0.0)[0] == 2 and member.best(request, 1, passes, 0.0)[0] == 1
    for _ in range(60):
        member.count(request, 4)
    levels, speed = member.best(request, 4, passes, 0.0)
    assert levels == 4 and speed == pytest.approx(5 / 1.48, rel=0.1)


@pytest.mark.parametrize("dear", [0.0, 0.3])
def test_levels_of_chains_and_of_trees_have_their_own_price(dear: float) -> None:
    """A device grows trees level by level: two nodes each may take far longer than one, and a pass over them hardly longer."""
    drafter = Told("x", [5, 6, 7, 8])
    drafter.nodes = 8
    member, request, passes = Member(drafter, 0), tiny.request([1, 2]), np.full(9, 1.0)
    for _ in range(60):
        member.record(request).promise, member.record(request).levels = 4.0, 4
        member.count(request, 2)
    assert member.trees.widths == (1.0, 2.0)
    for width, seconds in ((1.0, 0.01), (2.0, 0.01 + dear)) * 3:
        member.trees.now = width
        member.took(4, 0.001, 4 * seconds)
        assert member.pace.seconds == pytest.approx(seconds)
    member.best(request, 4, passes, 0.0)
    assert member.trees.now == (1.0 if dear else 2.0)


@pytest.mark.parametrize("launch", [0.0, 2.0])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_launch_that_is_waited_for_is_paid_for_beside_a_guess_at_hand(launch: float, ahead: bool) -> None:
    """Four tokens at hand in a pass of one second, against five by a replay whose levels take no time: more, but for its launch
    where the device waits for it."""
    made = started(Told("lookup", [5]), Told("replayed", [9, 10, 11, 12]))
    some, member = replace(batch(1), blind=ahead), made.members[1]
    timed(made, ahead)
    for _ in range(8):
        member.took(4, launch, 0.0)
    assert member.launch == launch
    levels = made._levels(member, some, Budget((4,), (8,)), 0, Hand(3.0, 4, 0.0))
    assert (levels > 0) == (ahead or not launch)


def test_who_could_not_win_is_not_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tokens at hand, in a pass that takes no longer than any: four more, if all were right, are no more."""
    made = started(Told("lookup", [5]), Told("model", [9, 10, 11, 12]))
    member, weighed = made.members[1], list[int]()
    monkeypatch.setattr(member, "best", lambda *rest: weighed.append(1) or (4, 99.0))
    member.pace.add(1e-3)
    for value, levels, asked in ((4.0, 4, 1), (4.0, 2, 1), (3.9, 4, 2)):
        assert made._levels(member, batch(1), Budget((4,), (8,)), 0, Hand(value, 5, 0.0)) == levels, "or a first look"
        assert len(weighed) == asked
        timed(made, False)


def test_a_member_is_shown_the_very_proposal_that_it_made() -> None:
    """Some know by it whose round it was. With another's number on it, it is another; with `q`, it is not kept."""

    class Watching(Told):
        made: Proposal | None = None
        shown: list[bool]

        def propose(self, some: Batch, budget: Budget) -> Proposal:
            self.made = self.made or super().propose(some, budget)
            return self.made

        def observe(self, some: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
            self.shown.append(proposal is self.made)

    one, two = Told("one", []), Watching("two", [9, 10])
    one.depth, two.shown = 1, []
    guesses = play(started(one, two), batch(1), lambda s: len(s), 6)
    assert two.shown == [True] * 6 and all(g.source[0].tolist() == [1, 1] for g in guesses)
    assert len({id(g) for g in guesses}) == 1, "signed once"
    member, q = Member(two, 1), torch.ones(1, 3, 5)
    part = replace(guesses[0], q=q)
    assert member.signed(part) is not member.signed(part) and member.made(part) is part


def test_a_trusted_member_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = started(Told("wild", [10**9] * 3), Told("tame", [5]))
    assert not made.members[0].trusted, "since nobody is, in tests"
    made.members[0].trusted = True
    guard = Guard(made, tiny.VOCAB)
    budget = Budget((made.depth,), (made.nodes,))
    with pytest.warns(OutriderWarning, match="unsound proposals"):
        found = [guard.propose(batch(1), budget) for _ in range(4)]
    assert not any(any(p.widths) for p in found) and not guard.working


def test_nodes_of_levels_that_are_rounded_up_have_a_price() -> None:
    """Seven levels of 29 nodes: so many times 29 / 7 is 30, rounded up."""
    drafter = Told("x", [5, 6, 7, 8, 9, 10, 11])
    drafter.nodes = 29
    made, many = started(drafter), batch(4)
    made.members[0].pace.add(1e-3)
    passes = made._passes(many, Budget((7,) * 4, (29,) * 4))
    assert made.members[0].best(None, 7, passes, 1.0)[0] == 7 and len(passes) > 30


def test_states_that_a_pass_goes_on_from_are_not_kept() -> None:
    made, world = Hybrid.of([registry.parse("suffix"), probes.Exiter()]), tiny.World()
    world.run(made, [tiny.request(p) for p in tiny.prompts(2, seed=1)])
    kept = [m._signed for m in made.members]
    assert all(pair is None or pair[0].resume is None for pair in kept)
    made.renew()
    assert made.members[0]._signed is None or made.members[1]._signed is None


def test_who_looks_less_far_ahead_once_started_is_known_by_that() -> None:
    class Shrinking(Told):
        def start(self, start: Any) -> None:
            self.depth = self.nodes = 2

    [member] = started(Shrinking("x", [5, 6, 7, 8])).members
    assert member.rates.positions == 2 and member.trees.full == 1.0


def test_promises_are_kept_apart_by_how_much_they_promise() -> None:
    member = Member(registry.parse("suffix"), 0)
    request = tiny.request([1, 2])
    record = member.record(request)
    for _ in range(30):
        for promise, kept in ((1.0, 0), (8.0, 8)):
            record.promise = promise
            member.count(request, kept)
    other = tiny.request([1, 2])
    for one, share in ((request, 0.1), (other, 0.3)):
        member.record(one).promise = 1.0
        assert member.worth(one) < share
        member.record(one).promise = 8.0
        assert member.worth(one) > 7.0
    strict = tiny.request([1, 2], SamplingParams(temperature=1.0), rule="rejection")
    member.record(strict).promise = 1.0
    assert member.worth(strict) == 1.0, "its text must not depend on what others wrote"


def test_what_all_members_take_is_the_hybrids_memory() -> None:
    class Heavy(Mute):
        def memory(self, dtype: torch.dtype) -> tuple[int, int]:
            return 10 * dtype.itemsize, 3

    assert Hybrid.of([Heavy(), Mute(), Heavy()]).memory(torch.float32) == (80, 6)


def test_one_that_must_be_whole_does_not_start_without_a_member() -> None:
    made = Hybrid.of([Mute(), Crasher("start", 0)])
    made.whole = True
    with pytest.warns(OutriderWarning, match="'hybrid' was switched off: it failed to start with ZeroDivisionError"):
        tiny.World().engine(made)


def test_beginnings_are_shared_as_far_as_the_owner_of_kv_allows() -> None:
    """Lookup, which has a store of finished texts and no KV, has no say in it."""
    owner = heads.eagle()
    made = Hybrid.of([registry.parse("suffix"), owner])
    engine = tiny.World().engine(made)
    request = tiny.request(list(range(2, 22)), SamplingParams(max_tokens=4, temperature=0.0))
    engine.add(request)
    engine.step()
    assert made.shared(request) == owner.shared(request) > 0


def test_a_member_that_fails_while_sharing_is_switched_off_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = heads.eagle()
    made = Hybrid.of([registry.parse("suffix"), owner])
    engine, request = tiny.World().engine(made), tiny.request(list(range(2, 22)))

    def fails(request: Request) -> int:
        raise errors.pop()

    monkeypatch.setattr(owner, "shared", fails)
    errors: list[Exception] = [KeyError("gone"), torch.OutOfMemoryError("no memory")]
    assert engine.drafter.shared(request) == 0 and made.members[1].reason is None, "want of memory is forgiven once"
    with pytest.warns(OutriderWarning, match="member 'eagle' was switched off: it failed with KeyError"):
        assert engine.drafter.shared(request) == 0
    assert engine.drafter.working and engine.drafter.shared(request) == len(request.tokens) and not errors
