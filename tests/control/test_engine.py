"""Whatever a controller decides, the text does not change; and how decisions come out of a real engine."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider import LLM, registry
from outrider.bench import law
from outrider.config import SamplingParams
from outrider.control import CONTROLLERS, Adaptive, Fixed, Goodput, make
from outrider.control.limits import Shape, bounds
from outrider.errors import BadInput
from outrider.protocols import Drafter
from outrider.types import Batch, Budget, Finish, Request

from .. import tiny
from ..contract.drafters import every
from ..contract.test_text import OPTIONS, answers, plain, requests
from ..models.tiny_gguf import Tiny


class Erratic(Fixed):
    """Any depth a request may have, at random."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.shape, self.rng = Shape(drafter), random.Random(1)

    def budget(self, batch: Batch) -> Budget:
        limits = [bounds(batch, b, self._depth) for b in range(len(batch))]
        return self.shape.budget(batch, [self.rng.randint(low, high) for low, high in limits])


def hurried(drafter: Drafter) -> Goodput:
    """Under a clock that leaps about, so that decisions do, too."""
    rng = random.Random(2)
    ticks = itertools.accumulate(rng.expovariate(1.0) for _ in itertools.count())
    return Goodput(drafter, lambda: next(ticks))


MAKERS = {"erratic": Erratic, "goodput": Goodput, "hurried": hurried, "adaptive": Adaptive}


@pytest.mark.parametrize("control", MAKERS)
@pytest.mark.parametrize("option", ["greedy", "sampled", "penalties"])
@pytest.mark.parametrize("name", every())
def test_the_text_is_that_of_plain_decoding(name: str, option: str, control: str) -> None:
    world = tiny.World()
    world.control = MAKERS[control]
    drafter = every()[name](answers(option))
    assert tuple(map(tuple, world.run(drafter, requests(OPTIONS[option])))) == plain(option)


@pytest.mark.parametrize("control", MAKERS)
def test_text_of_preempted_requests(control: str) -> None:
    world = tiny.World(tokens=96)
    world.control = MAKERS[control]
    drafter = tiny.draft_model(2, depth=4)
    assert tuple(map(tuple, world.run(drafter, requests(OPTIONS["sampled"])))) == plain("sampled")


class Following(Erratic):
    """A depth that depends on what was accepted in the rounds before: allowed under the classical rules."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.last: dict[int, int] = {}

    def budget(self, batch: Batch) -> Budget:
        limits = [bounds(batch, b, self._depth) for b in range(len(batch))]
        wish = [self.last.get(r.id, 1) for r in batch.requests]
        depths = [min(high, max(1, w)) for (_, high), w in zip(limits, wish, strict=True)]
        return self.shape.budget(batch, [min(d, high) for d, (_, high) in zip(depths, limits, strict=True)])

    def observe(self, event: object) -> None:
        for item in event.committed:  # type: ignore[attr-defined]
            self.last[item.request.id] = 2 if item.accepted else 1


@pytest.mark.parametrize("control", [Following, Goodput])
@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
def test_the_law_of_classical_rules_under_a_depth_that_follows_past_rounds(rule: str, control: type) -> None:
    """The last two of four tokens, which later rounds wrote, against their enumerated law."""
    params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
    counts: Counter[tuple[int, ...]] = Counter()
    for start in range(0, 2048, 512):
        world = tiny.World(tokens=16 * 512, own=law._decoder(3))
        world.control = control
        made = [tiny.request(law.PROMPT, params, seed=start + i + 1, rule=rule) for i in range(512)]
        counts.update(tuple(text[2:]) for text in world.run(law._drafter(), made, rule))
    wanted: Counter[tuple[int, ...]] = Counter()
    for word, mass in law.enumerate_law(params, 4).items():
        wanted[word[2:]] += mass  # type: ignore[assignment]
    assert law.alarm(law.divergence(counts, wanted), len(wanted) - 1) > 1e-6


def test_a_named_seed_gives_the_same_text_under_a_classical_rule_whatever_the_clock() -> None:
    """The text depends on the depth there, so the depth must not depend on the time."""
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=5, ignore_eos=True)
    texts = []
    for control in (Fixed, Goodput, hurried):
        world = tiny.World()
        world.control = control
        made = [tiny.request(p, params, rule="rejection") for p in tiny.prompts(3, seed=8)]
        texts.append(world.run(tiny.draft_model(1, depth=3), made, "rejection"))
    assert texts[0] == texts[1] == texts[2]


def test_a_hopeless_drafter_is_soon_hardly_asked() -> None:
    """Every guess is wrong, and drafting costs as much as the pass."""

    class Wrong(Drafter):
        name = "wrong"
        depth = nodes = 4

        def __init__(self, inner: Drafter) -> None:
            self.inner = inner

        def start(self, start: object) -> None:
            self.inner.start(start)  # type: ignore[arg-type]

        def propose(self, batch: Batch, budget: Budget):  # type: ignore[no-untyped-def]
            proposal = self.inner.propose(batch, budget)
            proposal.tokens[:] = (proposal.tokens + 1) % tiny.VOCAB
            return proposal

        def release(self, request: object) -> None:
            self.inner.release(request)  # type: ignore[arg-type]

    world = tiny.World(max_len=500)
    world.control = Goodput
    engine = world.engine(Wrong(tiny.draft_model(3, depth=4)))
    made = tiny.request([2, 3, 4], SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True))
    engine.add(made)
    while engine.step() is not None:
        pass
    assert engine.drafter.working and len(made.output) == 300
    assert made.stats.drafted < 150, "of 1,200 that the drafter would have made"
    assert engine.controller.explain().startswith("goodput: mean depth 0.")
    assert not engine.controller._book.states, "finished requests are forgotten"


# The facade


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("control")
    Tiny().write(folder / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(folder / "cache"))
        yield str(folder / "tiny.gguf")


def test_every_controller_by_name_gives_the_same_text_and_explains_itself(model: str) -> None:
    prompt, params = "abcabcabcabc", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    llm = LLM(model, draft="ngram:min=1", dtype="float64")
    assert llm.control == "goodput" and isinstance(llm.engine.controller, Goodput)
    found = {}
    for name in CONTROLLERS:
        llm.switch("ngram:min=1", control=name)
        [found[name]] = llm.generate([prompt], params)
        assert found[name].stats.controller.startswith(name)
    assert len({r.token_ids for r in found.values()}) == 1
    llm.switch("none")
    assert llm.control == list(CONTROLLERS)[-1] and isinstance(llm.engine.controller, Fixed), "it is kept; nothing to control"
    with pytest.raises(BadInput, match="unknown controller 'slow'"):
        llm.switch("none", control="slow")
    assert llm.control == list(CONTROLLERS)[-1]


def test_an_unknown_controller_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="unknown controller 'fastest'"):
        LLM(str(tmp_path / "no such model"), control="fastest")


def test_a_request_may_refuse_guesses(model: str) -> None:
    llm = LLM(model, draft="ngram:min=1", control="fixed", dtype="float64")
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    free, off, capped = llm.generate(
        ["abcabcabcabc"] * 3,
        [params, SamplingParams(**{**_fields(params), "draft": "none"}), SamplingParams(**{**_fields(params), "max_depth": 1})],
    )
    assert free.token_ids == off.token_ids == capped.token_ids
    assert off.stats.drafted == 0 < capped.stats.drafted and len(capped.stats.acceptance_by_position) == 1
    assert len(free.stats.acceptance_by_position) > 1


def _fields(params: SamplingParams) -> dict[str, object]:
    return {"temperature": params.temperature, "max_tokens": params.max_tokens, "ignore_eos": params.ignore_eos}


def test_what_the_user_stopped_is_forgotten_in_time() -> None:
    world = tiny.World()
    world.control = lambda drafter: make("goodput", drafter)
    engine = world.engine(tiny.draft_model(2))
    stopped = tiny.request([2, 3], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    engine.add(stopped)
    for _ in range(3):
        engine.step()
    engine.abort([stopped])
    book = engine.controller._book
    assert stopped.id in book.states
    while book.round < 260:
        engine.add(tiny.request([2, 4], SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, depth=0)))
        while engine.step() is not None:
            pass
    assert stopped.id not in book.states


def test_who_has_ended_is_no_reason_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round in flight still has somebody who ended in the one before: the others say whether the next may be launched."""
    engine, asked = tiny.World().engine(registry.parse("none")), list[list[int]]()

    def follows(who: Sequence[Request], guessing: bool = True) -> bool:
        asked.append([r.id for r in who])
        return True

    monkeypatch.setattr(engine.scheduler, "calm", lambda batch: True)
    monkeypatch.setattr(engine.drafter, "follows", follows)
    requests = tuple(tiny.request([2, 3, 4]) for _ in range(3))
    pending: Any = SimpleNamespace(answer=object(), batch=SimpleNamespace(requests=requests))
    assert engine._blind(pending)
    requests[1].finish = Finish.LENGTH
    assert engine._blind(pending)
    assert asked == [[r.id for r in requests], [requests[0].id, requests[2].id]]
