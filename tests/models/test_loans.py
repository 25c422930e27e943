"""Exit states on loan: verification starts from them where they are the pass's own, and from the beginning where they are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from outrider import registry
from outrider.config import SamplingParams
from outrider.errors import OutriderWarning
from outrider.types import Batch, Budget, Part, Proposal, Resume, Scores, Verdict

from .. import probes, tiny

PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = tiny.prompts(3, seed=5)


def requests() -> list:
    return [tiny.request(p, PARAMS) for p in PROMPTS]


class Exiter(probes.Exiter):
    """Does something to its proposal before it is judged."""

    name = "changed"

    def __init__(self, change: Callable[[Exiter, Batch, Proposal], Proposal]) -> None:
        super().__init__()
        self.change = change

    def propose(self, batch: Batch, budget: Budget) -> Proposal:
        return self.change(self, batch, super().propose(batch, budget))


def without(which: slice) -> Callable[[Exiter, Batch, Proposal], Proposal]:
    def change(own: Exiter, batch: Batch, made: Proposal) -> Proposal:
        assert made.resume is not None
        return replace(made, resume=replace(made.resume, parts=made.resume.parts[which]))

    return change


def shorter(own: Exiter, batch: Batch, made: Proposal) -> Proposal:
    widths = tuple(max(0, w - 1) for w in made.widths)
    return replace(made, sizes=torch.tensor(widths), widths=widths)


def other_token(own: Exiter, batch: Batch, made: Proposal) -> Proposal:
    tokens = made.tokens.clone()
    if tokens.shape[1] > 1:
        tokens[:, 1] = (tokens[:, 1] + 1) % tiny.VOCAB
    return replace(made, tokens=tokens)


def written_over(own: Exiter, batch: Batch, made: Proposal) -> Proposal:
    own.view.run(batch, made, [Part(0, attention=False), Part(1, mlp=False), 2])
    return made


def run_again(own: Exiter, batch: Batch, made: Proposal) -> Proposal:
    """The first guess's place is written over by another guess's states, those after it are not run again."""
    other = replace(made, tokens=(made.tokens + 1) % tiny.VOCAB, sizes=made.sizes.clamp(max=1), widths=(1,) * len(batch))
    if min(made.widths) > 1:
        assert made.resume is not None
        again = own.view.run(batch, other, range(2), start=1, kv="shared")
        return replace(made, resume=Resume(2, (*made.resume.parts, again)))
    return made


def some(own: Exiter, batch: Batch, made: Proposal) -> Proposal:
    """Only the last request's rows were run, as a batch of its own."""
    part = Batch(batch.requests[-1:], batch.pending[-1:], batch.ready[-1:], batch.room[-1:])
    own.view.run(batch, made, [0])
    return replace(made, resume=Resume(2, (own.view.run(part, Proposal.empty(1), range(2), kv="shared"),)))


CHANGES = {
    "whole": without(slice(None)),
    "all but the last": without(slice(-1)),
    "all but the first": without(slice(1, None)),
    "shorter": shorter,
    "another token": other_token,
    "written over": written_over,
    "run again": run_again,
    "some requests": some,
}


@pytest.mark.parametrize("cache", ["paged", "slots"])
@pytest.mark.parametrize("name", CHANGES)
def test_the_text_is_that_of_plain_decoding(name: str, cache: str) -> None:
    plain = tiny.World(cache=cache).run(registry.parse("none"), requests())
    with warnings.catch_warnings():
        warnings.simplefilter("error", OutriderWarning)
        assert tiny.World(cache=cache).run(Exiter(CHANGES[name]), requests()) == plain


def layers_run(monkeypatch: pytest.MonkeyPatch, name: str) -> int:
    """Rows that went through the first layer."""
    world, rows = tiny.World(), 0
    write = world.cache.write

    def counted(layer: int, slots: torch.Tensor, *kv: torch.Tensor) -> None:
        nonlocal rows
        rows += len(slots) if layer == 0 else 0
        write(layer, slots, *kv)

    monkeypatch.setattr(world.cache, "write", counted)
    world.run(Exiter(CHANGES[name]), requests())
    return rows


def test_what_was_run_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = (layers_run(monkeypatch, name) for name in ("whole", "all but the last"))
    assert whole < cut < layers_run(monkeypatch, "written over")


def test_slots_in_between_must_have_been_run() -> None:
    def skipping(own: Exiter, batch: Batch, made: Proposal) -> Proposal:
        own.view.run(batch, made, [0])  # forgets what was run
        return replace(made, resume=Resume(2, (own.view.run(batch, made, range(2), start=1, kv="shared"),)))

    with pytest.warns(OutriderWarning, match="were not run through these layers"):
        tiny.World().run(Exiter(skipping), requests(), may_fail=True)


class Reading(Exiter):
    """Wants to see what enters a layer that verification could leave out."""

    name = "reading"
    needs = replace(Exiter.needs, features=("hidden:1",))

    def __init__(self, resumed: bool) -> None:
        super().__init__(lambda own, batch, made: made if resumed else replace(made, resume=None))
        self.seen: list[torch.Tensor] = []

    def observe(self, batch: Batch, proposal: Proposal, verdict: Verdict, scores: Scores) -> None:
        self.seen.append(scores.features["hidden:1"].clone())


def test_features_of_the_layers_left_out_are_still_right() -> None:
    drafters = [Reading(True), Reading(False)]
    for drafter in drafters:
        tiny.World().run(drafter, requests())
    assert len(drafters[0].seen) == len(drafters[1].seen) > 3
    assert all(torch.equal(a, b) for a, b in zip(drafters[0].seen, drafters[1].seen, strict=True))


@pytest.mark.parametrize("cache", ["paged", "slots"])
def test_recall_reads_the_same_again(cache: str) -> None:
    world = tiny.World(cache=cache, tokens=1024)
    drafter = probes.Exiter()
    engine = world.engine(drafter)
    request = tiny.request(list(range(2, 32)), PARAMS)
    engine.add(request)
    for _ in range(4):
        engine.step()
    free, kv = world.cache.free(), [x.clone() for x in world.cache.view(1, request, request.computed)]
    logits = drafter.view.recall(request, range(3), 5)
    assert logits is not None and logits.shape == (5, tiny.VOCAB)
    assert logits[:-1].argmax(1).tolist() == request.tokens[-4:]
    assert world.cache.free() == free
    assert all(torch.equal(a, b) for a, b in zip(kv, world.cache.view(1, request, request.computed), strict=True))
    cut = drafter.view.recall(request, [Part(0), Part(1, attention=False), Part(2, mlp=False)], 5)
    assert cut is not None and not torch.allclose(cut, logits)
    with pytest.raises(ValueError, match="cannot read"):
        drafter.view.recall(request, range(3), 500)


def test_recall_without_memory() -> None:
    world, drafter = tiny.World(tokens=48), probes.Exiter()
    engine = world.engine(drafter)
    request = tiny.request(list(range(2, 32)), PARAMS)
    engine.add(request)
    engine.step()
    free = world.cache.free()
    assert drafter.view.recall(request, range(3), 20) is None and world.cache.free() == free
