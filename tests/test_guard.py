"""Whatever a drafter does, the text is that of plain decoding, the run goes on, and a warning says what happened."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache as memo
from typing import Any

import pytest
import torch

from outrider import registry, tree
from outrider.config import SamplingParams
from outrider.errors import DrafterMismatch, OutriderWarning
from outrider.guard import Guard
from outrider.protocols import Drafter, KVNeed, Needs, Start
from outrider.types import ROOT, Batch, Budget, Finish, Proposal, Request, Resume, Scores, Verdict

from . import probes, tiny

PROMPTS = tiny.prompts(3, seed=21)
PARAMS = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, seed=5)


def requests() -> list[Request]:
    return [tiny.request(p, PARAMS) for p in PROMPTS]


@memo
def plain() -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, tiny.World().run(registry.parse("none"), requests())))


def answers() -> dict[tuple[int, ...], tuple[int, ...]]:
    return {tuple(p): a for p, a in zip(PROMPTS, plain(), strict=True)}


def spoiled(change: Callable[[Proposal, Budget], Any], rounds: range = range(100)) -> Drafter:
    """A perfect drafter whose proposals are changed in the given rounds."""

    class Spoiled(probes.Replay):
        name = "spoiled"
        seen = -1

        def propose(self, batch: Batch, budget: Budget) -> Proposal:
            self.seen += 1
            made = super().propose(batch, budget)
            return change(made, budget) if self.seen in rounds else made

    return Spoiled(answers(), depth=4)


def run(drafter: Drafter) -> Any:
    """The engine after all requests are done; texts and memory are checked."""
    world, made = tiny.World(), requests()
    engine = world.engine(drafter)
    for r in made:
        engine.add(r)
    while engine.step() is not None:
        pass
    assert tuple(tuple(r.output) for r in made) == plain(), "the text changed"
    assert all(r.finish is Finish.LENGTH and r.error is None for r in made)
    assert world.cache.free() == world.cache.capacity
    engine.accepted = sum(r.stats.accepted for r in made)
    return engine


def tokens(value: int) -> Callable[[Proposal, Budget], Proposal]:
    def change(made: Proposal, budget: Budget) -> Proposal:
        tokens = made.tokens.clone()
        tokens[:, -1] = value
        return replace(made, tokens=tokens)

    return change


def parents(rows: list[int]) -> Callable[[Proposal, Budget], Proposal]:
    def change(made: Proposal, budget: Budget) -> Proposal:
        given = torch.tensor(rows[: made.columns]).expand_as(made.tokens)
        return replace(made, parents=given, linear=False)

    return change


UNSOUND: dict[str, Callable[[Proposal, Budget], Any]] = {
    "token past the vocabulary": tokens(tiny.VOCAB),
    "huge token": tokens(2**62),
    "negative token": tokens(-1),
    "very negative token": tokens(-(2**62)),
    "float tokens": lambda m, b: replace(m, tokens=m.tokens.double()),
    "nan tokens": lambda m, b: replace(m, tokens=torch.full(m.tokens.shape, torch.nan)),
    "int32 tokens": lambda m, b: replace(m, tokens=m.tokens.int()),
    "bool parents": lambda m, b: replace(m, parents=m.parents > 0),
    "parent after child": parents([1, 0, 1, 2]),
    "own parent": parents([0, 1, 2, 3]),
    "parent beyond the table": parents([ROOT, 99, 0, 0]),
    "very negative parent": parents([-7, 0, 1, 2]),
    "twins": lambda m, b: replace(m, tokens=torch.full_like(m.tokens, 3), parents=torch.full_like(m.parents, ROOT), linear=False),
    "no chain although promised": lambda m, b: replace(m, parents=torch.full_like(m.parents, ROOT)),
    "sizes beyond widths": lambda m, b: replace(m, sizes=m.sizes + 1),
    "negative sizes": lambda m, b: replace(m, sizes=m.sizes - 9),
    "float sizes": lambda m, b: replace(m, sizes=m.sizes.double()),
    "widths beyond columns": lambda m, b: replace(m, widths=tuple(w + 1 for w in m.widths)),
    "widths that are no numbers": lambda m, b: replace(m, widths=tuple(map(float, m.widths))),
    "widths of another batch": lambda m, b: replace(m, widths=(*m.widths, 0)),
    "unknown source": lambda m, b: replace(m, source=m.source - 2),
    "one request too few": lambda m, b: Proposal.chains([[1]] * (len(m.widths) - 1)),
    "one request too many": lambda m, b: Proposal.chains([[1]] * (len(m.widths) + 1)),
    "wide but empty": lambda m, b: replace(Proposal.empty(len(m.widths)), widths=(3,) * len(m.widths)),
    "flat tensors": lambda m, b: replace(m, tokens=m.tokens[0]),
    "no proposal": lambda m, b: None,
    "a list": lambda m, b: m.tokens.tolist(),
    "more nodes than there is room": lambda m, b: Proposal.chains([list(range(40))] * len(m.widths)),
    "one node more than asked for": lambda m, b: Proposal.chains([[1] * (n + 1) for n in b.nodes]),
    "draft probabilities of another shape": lambda m, b: replace(m, q=torch.ones(2, 2)),
    "states that are none": lambda m, b: replace(m, resume="here"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_unsound_proposals_are_dropped_and_then_the_drafter(name: str) -> None:
    with pytest.warns(OutriderWarning, match="drafter 'spoiled' was switched off: it made 3 unsound.*text is unaffected") as seen:
        engine = run(spoiled(UNSOUND[name]))
    assert len(seen) == 1 and not engine.drafter.working and engine.accepted == 0


@pytest.mark.parametrize("name", UNSOUND)
def test_two_slips_are_forgiven(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = run(spoiled(UNSOUND[name], range(1, 3)))
    assert engine.drafter.working and engine.accepted > 0


@pytest.mark.parametrize("name", UNSOUND)
def test_guesses_that_nobody_looks_at_do_no_harm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, where the host does not wait to see them: they are put right, or cut down to nothing."""
    monkeypatch.setattr(Proposal, "unseen", property(lambda proposal: proposal.q is None))
    seen = []
    put_right = Guard._put_right
    monkeypatch.setattr(Guard, "_put_right", lambda self, made: seen.append(put_right(self, made)) or seen[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutriderWarning)
        run(spoiled(UNSOUND[name]))
    assert all(bool(tree.validate(made, tiny.VOCAB).all()) for made in seen)


def test_columns_not_in_use_may_hold_anything() -> None:
    """`widths` is only a bound of `sizes`: what lies between enters the pass, and must do no harm."""

    def change(made: Proposal, budget: Budget) -> Proposal:
        sizes = (made.sizes - 1).clamp(min=0)
        idle = torch.arange(made.columns) >= sizes[:, None]
        tokens, parents = made.tokens.masked_fill(idle, 10**15), made.parents.masked_fill(idle, -(10**15))
        return replace(made, tokens=tokens, parents=parents, sizes=sizes)

    for linear in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine = run(spoiled(lambda m, b, linear=linear: replace(change(m, b), linear=linear)))
        assert engine.drafter.working and engine.accepted > 0


class Failing(probes.Replay):
    """Fails at one place, from the second call on."""

    name = "failing"

    def __init__(self, where: str, error: BaseException, after: int = 1) -> None:
        super().__init__(answers(), depth=3)
        self.where, self.error, self.left = where, error, after

    def fail(self, where: str) -> None:
        if where == self.where:
            self.left -= 1
            if self.left < 0:
                raise self.error

    def start(self, start: Start) -> None:
        super().start(start)
        self.fail("start")

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        self.fail("propose")
        return super().propose(batch, budget)

    def observe(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        self.fail("observe")

    def release(self, request: Request) -> None:
        self.fail("release")


@pytest.mark.parametrize(("where", "after"), [("propose", 0), ("propose", 1), ("observe", 0), ("observe", 2), ("release", 0)])
def test_exceptions_switch_it_off_once(where: str, after: int) -> None:
    with pytest.warns(OutriderWarning, match=r"drafter 'failing' was switched off: it failed.*ZeroDivisionError: oh no") as seen:
        engine = run(Failing(where, ZeroDivisionError("oh no"), after))
    assert len(seen) == 1, "one failure, one warning"
    assert engine.drafter.reason in str(seen[0].message)


class Sharer(probes.Replay):
    """Wants memory in the pool, and fails when it is to say how much of it is there."""

    needs = Needs(kv=KVNeed(1, 1, 4))

    def shared(self, request: Request) -> int:
        raise ZeroDivisionError("oh no")


def test_one_that_fails_while_sharing_is_switched_off() -> None:
    made = [tiny.request(list(range(2, 30))) for _ in range(2)]
    with pytest.warns(OutriderWarning, match="it failed while sharing with ZeroDivisionError: oh no"):
        texts = tiny.World().run(Sharer(answers(), depth=3), made, may_fail=True, grain=8, max_requests=1)
    assert texts[0] == texts[1] and [r.taken for r in made] == [0, 24]


class Starving(Sharer):
    """Has no memory to say so, this many times."""

    def __init__(self, *args: Any, times: int) -> None:
        super().__init__(*args, depth=3)
        self.times = times

    def shared(self, request: Request) -> int:
        self.times -= 1
        if self.times >= 0:
            raise torch.OutOfMemoryError("no memory")
        return len(request.tokens)


@pytest.mark.filterwarnings("ignore::outrider.errors.OutriderWarning")
def test_one_that_wants_memory_while_sharing_may_try_again_once() -> None:
    for times, works in ((1, True), (2, False)):
        world = tiny.World()
        engine = world.engine(Starving(answers(), times=times), grain=8)
        engine.add(tiny.request(PROMPTS[0], PARAMS))
        while engine.step() is not None:
            pass
        assert engine.drafter.working is works, engine.drafter.reason


def test_a_drafter_that_cannot_start() -> None:
    with pytest.warns(OutriderWarning, match=r"drafter 'failing' was switched off: it failed to start with KeyError: 'weights'"):
        engine = run(Failing("start", KeyError("weights"), 0))
    assert not engine.drafter.working and engine.accepted == 0


def test_a_mismatch_at_the_start_is_the_users_to_mend() -> None:
    with pytest.raises(DrafterMismatch, match="other vocabulary"):
        tiny.World().engine(Failing("start", DrafterMismatch("other vocabulary"), 0))


@pytest.mark.parametrize("where", ["start", "propose", "observe", "release"])
def test_ctrl_c_passes_through(where: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(Failing(where, KeyboardInterrupt(), 0))


def test_switched_off_means_off() -> None:
    drafter = Failing("propose", RuntimeError("once"))
    with pytest.warns(OutriderWarning):
        run(drafter)
    assert drafter.left == -1, "it was asked again"


def test_a_request_that_wants_plain_decoding_gets_it_from_an_eager_drafter() -> None:
    world, made = tiny.World(), [tiny.request(p, replace(PARAMS, depth=d)) for p, d in zip(PROMPTS, (0, None, 2), strict=True)]

    class Eager(probes.Replay):
        name = "eager"

        def propose(self, batch: Batch, budget: Budget) -> Proposal:
            return Proposal.chains([self.guess(r, min(3, batch.room[b])) for b, r in enumerate(batch.requests)])

    with pytest.warns(OutriderWarning, match="more than asked for"):
        outputs = world.run(Eager(answers(), depth=3), made, may_fail=True)
    assert tuple(map(tuple, outputs)) == plain() and made[0].stats.drafted == 0


@pytest.mark.parametrize("kind", ["rows of another pass", "no such layer"])
def test_exit_states_that_do_not_cover_the_pass(kind: str) -> None:
    class Sloppy(probes.Exiter):
        name = "sloppy"

        def propose(self, batch: Batch, budget: Budget) -> Proposal:
            made = super().propose(batch, budget)
            resume = made.resume
            assert resume is not None
            if kind == "no such layer":
                return replace(made, resume=Resume(9, resume.parts))
            rows = resume.parts[0].rows
            shifted = replace(resume.parts[0], rows=replace(rows, virtual=rows.virtual + 1))
            return replace(made, resume=replace(resume, parts=(shifted, *resume.parts[1:])))

    with pytest.warns(OutriderWarning, match=r"states after layer \d+ do not cover .* the text is unaffected"):
        run(Sloppy())
