"""Training on a card, the embedded model: a draft that borrows its rows and guesses some tokens only, from nothing to its card,
stopped in between; it must not change a token, and one that begins as the model itself must guess well."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.drafters._unrolled import Joined, _pairs, plain
from outrider.train.data import Writing
from outrider.train.evaluate import Exam
from outrider.train.loop import Recipe
from outrider.train.run import Outcome, Plan, Training

from .conftest import MODEL

WRITING = Writing(tokens=60_000, answer=128, turn=32, batch=256, held=0.1)
RECIPE = Recipe(steps=60, batch_tokens=8192, longest=256, held_tokens=8000, check=20)
EXAM = Exam(prompts=16, answer=64)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


def go(place: Path, spec: str, until: float = float("inf"), **changes: Any) -> Outcome:
    name = spec.partition(":")[0]
    plan = Plan(spec, MODEL, place / f"{name}-{abs(hash(spec))}", place / "texts", "cuda", "auto", WRITING, RECIPE, EXAM)
    return Training(dataclasses.replace(plan, **changes), lambda what, share: None, lambda sign: None, until).run()


@pytest.mark.parametrize("spec", ["draft_model:layers=1,width=256,vocab=8192", "medusa:vocab=8192", "eagle:vocab=8192,steps=3"])
def test_from_nothing_to_a_card(place: Path, spec: str) -> None:
    stopped = go(place, spec, time.monotonic())
    assert stopped.stage in ("texts", "training")
    ended = go(place, spec)
    assert ended.card is not None
    first, last = ended.card["curve"][0], ended.card["curve"][-1]
    assert last["loss"] < first["loss"]
    for score in ended.card["results"]:
        assert score["equal"] == score["prompts"] == 16 and score["acceptance_rate"] > 0


@pytest.mark.parametrize("steps", [1, 4])
def test_attention_of_training_is_that_of_the_definition(steps: int) -> None:
    """bf16 by the fused kernel against fp32 by the formula, forward and back."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 200, 9, 64), *[(3, 200, 3, 64)] * (2 * steps)]
    made = [torch.randn(shape, generator=generator).cuda().bfloat16().requires_grad_() for shape in shapes]
    exact = [x.detach().float().requires_grad_() for x in made]
    weights = torch.randn(shapes[0], generator=generator).cuda()
    found, wanted = Joined.apply(0.125, *made), plain(exact[0], _pairs(exact[1:]), 0.125)
    slopes = torch.autograd.grad(found, made, weights.bfloat16()), torch.autograd.grad(wanted, exact, weights)
    for got, want in zip((found, *slopes[0]), (wanted, *slopes[1]), strict=True):
        assert float((got.float() - want).norm() / want.norm()) < 1e-2


def test_the_models_own_layers_guess_what_the_model_says(place: Path) -> None:
    recipe = dataclasses.replace(RECIPE, steps=2, rate=1e-6)
    ended = go(place, f"draft_model:init={MODEL},layers=0", recipe=recipe)
    assert ended.card is not None
    for score in ended.card["results"]:
        assert score["tau"] > 4 and score["equal"] == score["prompts"]
