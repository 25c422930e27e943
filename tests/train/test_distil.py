"""Distilled draft models: their loss, their files, and that what was trained is what drafts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.drafters import _losses
from outrider.drafters._distil import frequent, spread
from outrider.drafters.draft_model import DraftModel
from outrider.errors import BadInput, BadWeights, DrafterMismatch, OutriderWarning
from outrider.models import lean
from outrider.protocols import Lesson

from .. import tiny
from ..heads import teacher


def lesson(family: str = "llama", rows: int = 4, length: int = 12) -> Lesson:
    model = tiny.model(family, dtype=torch.float32)
    tokens = torch.randint(2, tiny.VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(tokens, dtype=torch.bool)
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    taught = real.clone()
    taught[:, :3] = False
    return Lesson(tokens, taught, real, {"hidden:last": hidden}, lambda x: model.get_output_embeddings()(x).float())


def pupil(family: str = "llama", **options: Any) -> Any:
    torch.manual_seed(0)
    return DraftModel.pupil(teacher(family), {"layers": 1} | options)


SHAPES: list[dict[str, Any]] = [
    {},
    {"width": 16},
    {"vocab": 20},
    {"rows": "own"},
    {"rows": "own", "width": 16, "vocab": 20},
    {"width": 64},
]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_what_was_trained_is_what_is_loaded(family, options, tmp_path):
    made = pupil(family, **options)
    made.lean.save(tmp_path, made.origin, torch.float32)
    loaded, ids = lean.load(tmp_path, (teacher(family).embeddings, teacher(family).head), torch.float32)
    tokens = lesson(family).tokens
    want, got = made.lean.scores(made.lean(tokens)), loaded(input_ids=tokens, use_cache=False).logits
    assert (ids is None) == ("vocab" not in options)
    assert torch.allclose(want, got, atol=2e-4)


def test_borrowed_rows_are_not_stored(tmp_path):
    pupil(vocab=20).save(tmp_path)
    stored = load_file(tmp_path / lean.WEIGHTS)
    assert {"ids", "project_in", "project_out"} <= stored.keys()
    assert not any("embed" in name or "lm_head" in name for name in stored)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", lean.WEIGHTS]


@pytest.mark.parametrize("kind", _losses.LOSSES)
def test_training_brings_it_closer(kind):
    made, seen = pupil(width=16, loss=kind), lesson()
    optimiser = torch.optim.AdamW(made.module.parameters(), lr=1e-2)
    before = made.loss(seen)[1]
    for _ in range(40):
        loss, figures = made.loss(seen)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert figures["overlap"] > before["overlap"] + 0.2
    assert figures["acceptance"] > before["acceptance"]


@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("width", [1, 2])
def test_it_drafts_and_the_text_is_the_targets(options, width, tmp_path):
    pupil(**options).save(tmp_path)
    drafter = DraftModel(DraftModel.Config(str(tmp_path), depth=3, width=width))
    prompts = tiny.prompts(4)
    for temperature in (0.0, 1.0):
        params = tiny.request([2]).params.__class__(temperature=temperature, max_tokens=16, seed=3)
        plain = tiny.World().run(tiny.draft_model(1, depth=1), [tiny.request(p, params) for p in prompts])
        made = [tiny.request(p, params) for p in prompts]
        assert tiny.World().run(drafter, made) == plain
        assert sum(r.stats.drafted for r in made)


def test_a_perfect_draft_is_always_accepted(tmp_path):
    """The target's own layers in a draft that borrows its rows: nothing but the files' rounding is between them."""
    target = tiny.model(dtype=torch.float64)
    target.save_pretrained(tmp_path / "target")
    made = lean.Lean(
        target, (target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()), None
    )
    with torch.no_grad():
        for end in (target.get_input_embeddings(), target.get_output_embeddings()):
            end.project.data = end.project.double()
    (tmp_path / "draft").mkdir()
    made.save(tmp_path / "draft", lean.Origin("tiny", "", 32, tiny.VOCAB, True), torch.float64)
    requests = [tiny.request(p) for p in tiny.prompts(4)]
    tiny.World().run(DraftModel(DraftModel.Config(str(tmp_path / "draft"), depth=4)), requests)
    drafted, accepted = (sum(getattr(r.stats, name) for r in requests) for name in ("drafted", "accepted"))
    assert accepted >= 0.8 * drafted > 0  # what lies past the end of a text is never accepted


def test_loss_by_hand():
    scores, guess = torch.tensor([[0.5, 0.3, 0.2]]).log() + 3, torch.tensor([[0.6, 0.4]]).log() - 2
    [row] = _losses.distance(guess, _losses.truth(scores, lambda x: x, 3, torch.tensor([0, 2])))
    kl = 0.5 * torch.tensor(0.5 / 0.6).log() + 0.2 * torch.tensor(0.2 / 0.4).log()
    assert torch.allclose(row, torch.tensor([kl, 0.3, 0.7, 1.0]))
    share = torch.tensor(-2.1).exp()
    assert torch.allclose(_losses.mixed(row, "hybrid"), share * kl + (1 - share) * 0.3)


@pytest.mark.parametrize("ids", [None, torch.tensor([1, 4, 5, 9])], ids=["all", "some"])
def test_gradients_by_hand_are_those_of_the_definition(ids):
    generator = torch.Generator().manual_seed(0)
    scores, weights = torch.randn(6, 11, generator=generator) * 3, torch.randn(6, 4, generator=generator)
    guess = torch.randn(6, 11 if ids is None else 4, generator=generator).requires_grad_()
    log_p, log_q = scores.log_softmax(-1), guess.log_softmax(-1)
    some = log_p if ids is None else log_p[:, ids]
    overlap = torch.minimum(some.exp(), log_q.exp()).sum(-1)
    said = log_q.argmax(-1) if ids is None else ids[log_q.argmax(-1)]
    kl = (some.exp() * (some - log_q)).sum(-1)
    wanted = torch.stack([kl, 1 - overlap, overlap, (said == log_p.argmax(-1)).float()], -1)
    found = _losses.distance(guess, _losses.truth(scores, lambda x: x, 11, ids))
    assert torch.allclose(found, wanted, atol=1e-6)
    for one, other in zip(torch.autograd.grad(found, guess, weights), torch.autograd.grad(wanted, guess, weights), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_parts_give_the_same_loss_and_gradients(monkeypatch):
    grads = []
    for entries in (2**28, 5 * tiny.VOCAB):
        monkeypatch.setattr(_losses, "_ENTRIES", entries)
        made = pupil()
        loss, _ = made.loss(lesson())
        loss.backward()
        grads.append([loss.detach(), *(p.grad for p in made.module.parameters())])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))


def test_the_most_frequent_tokens_and_those_that_end_a_text():
    ids = frequent(teacher(), 5)
    assert ids.tolist() == [0, 1, 45, 46, 47]


def test_layers_are_kept_evenly():
    assert spread(1, 30) == [0] and spread(2, 30) == [0, 29] and spread(3, 30) == [0, 14, 29]
    with pytest.raises(BadInput, match="has 3 layers"):
        spread(4, 3)


@pytest.mark.parametrize(
    "options", [{"layers": 0}, {"rows": "none"}, {"loss": "mse"}, {"init": "x", "width": 8}, {"vocab": -1}], ids=str
)
def test_bad_options(options):
    with pytest.raises(BadInput):
        pupil(**options)


def test_another_targets_draft(tmp_path):
    pupil().save(tmp_path)
    narrow = torch.zeros(tiny.VOCAB, 16)
    with pytest.raises(DrafterMismatch, match="borrows rows"):
        lean.load(tmp_path, (narrow, narrow), torch.float32)
    made = lean.origin(tmp_path)
    assert made is not None
    with pytest.warns(OutriderWarning, match="other weights"):
        made.check("g", "tiny")


def _spoil(path, how):
    if how == "missing":
        tensors = load_file(path / lean.WEIGHTS)
        tensors.pop("model.norm.weight")
        save_file(tensors, path / lean.WEIGHTS)
    elif how == "NaN":
        tensors = load_file(path / lean.WEIGHTS)
        tensors["model.norm.weight"][0] = torch.nan
        save_file(tensors, path / lean.WEIGHTS)
    elif how == "cut off":
        (path / lean.WEIGHTS).write_bytes((path / lean.WEIGHTS).read_bytes()[:-10])
    else:
        config = json.loads((path / "config.json").read_text())
        config[lean.KEY]["novel"] = 1
        (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("how", ["missing", "NaN", "cut off", "damaged"])
def test_damaged_directories(how, tmp_path):
    pupil().save(tmp_path)
    _spoil(tmp_path, how)
    with pytest.raises(BadWeights, match=how):
        lean.load(tmp_path, (teacher().embeddings, teacher().head), torch.float32)
