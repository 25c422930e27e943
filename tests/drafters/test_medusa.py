"""Medusa: which tree, which state, what is read from files, and that training brings heads closer."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config import SamplingParams
from outrider.drafters import _grown
from outrider.drafters._lora import Lora
from outrider.drafters._medusa import MedusaPupil, MedusaTraining
from outrider.drafters.medusa import Medusa
from outrider.errors import BadInput, BadWeights, DrafterMismatch, ModelNotFound, OutriderWarning
from outrider.models import checkpoint, medusa_heads
from outrider.models.products import PackedLinear
from outrider.types import NONE, ROOT

from .. import heads, probes, tiny

CHANCES = [[0.6, 0.2, 0.1], [0.5, 0.15], [0.4, 0.1]]


def brute(chances, nodes, depth):
    """The best connected set of nodes, by trying all rank paths."""
    paths = [p for d in range(1, depth + 1) for p in itertools.product(*(range(len(row)) for row in chances[:d]))]
    worth = {p: float(torch.tensor([chances[d][r] for d, r in enumerate(p)]).prod()) for p in paths}
    return sum(sorted(worth.values(), reverse=True)[:nodes])


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("nodes", [1, 3, 7, 15])
def test_the_tree_has_the_likeliest_nodes(nodes, depth):
    shape = _grown.sparse(CHANCES, nodes, depth)
    worth = []
    for column, (parent, rank, level) in enumerate(zip(shape.parents, shape.ranks, shape.depths, strict=True)):
        assert ROOT <= parent < column and level == 1 + (shape.depths[parent] if parent != ROOT else 0)
        worth.append(CHANCES[level - 1][rank] * (worth[parent] if parent != ROOT else 1))
    assert sum(worth) == pytest.approx(brute(CHANCES, nodes, depth))
    assert len(set(zip(shape.parents, shape.ranks, strict=True))) == len(shape)
    assert max(shape.depths) <= depth


def test_a_smaller_budget_is_a_part_of_the_tree():
    whole = _grown.sparse(CHANCES, 15, 3)
    for nodes in range(1, 15):
        part = _grown.sparse(CHANCES, nodes, 3)
        assert (whole.parents[:nodes], whole.ranks[:nodes]) == (part.parents, part.ranks)


def test_dead_nodes_take_what_hangs_under_them_along():
    tokens = torch.tensor([[10, 11, 12, 13, 14]])
    parents = torch.tensor([[-1, -1, 0, 1, 2]])
    live = torch.tensor([[False, True, True, True, True]])
    kept, above, sizes = _grown.compact(tokens, parents, live)
    assert sizes.tolist() == [2] and kept[0, :2].tolist() == [11, 13] and above[0, :2].tolist() == [-1, 0]


@pytest.mark.parametrize("nodes", [1, 6])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_reads_the_state_of_the_last_accepted_token(nodes, temperature):
    """Round by round the remembered state is that of a fresh forward over all tokens but the last."""
    drafter = heads.medusa(nodes=nodes)
    world = tiny.World()
    engine = world.engine(drafter)
    asked = [SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True, seed=i) for i in range(3)]
    made = [tiny.request(p, q) for p, q in zip(tiny.prompts(3, seed=5), asked, strict=True)]
    for request in made:
        engine.add(request)
    checked = 0
    while engine.step() is not None:
        for request in made:
            state = drafter._states.get(request.id)
            if state is not None and len(request.output) > 1:
                out = world.decoder.model.base_model  # the model's own forward attends through the engine's cache
                assert out is not None
                fresh = tiny.model().base_model(input_ids=torch.tensor([request.tokens[:-1]])).last_hidden_state[0, -1]
                assert torch.allclose(state.hidden, fresh, atol=1e-9)
                checked += 1
    assert checked > 20 and engine.drafter.working


def test_guesses_are_the_heads_own():
    """A chain at T = 0 is each head's favourite, read off the heads."""
    drafter = heads.medusa(nodes=1)
    world = tiny.World()
    engine = world.engine(drafter)
    request = tiny.request([3, 5, 7], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    engine.add(request)
    seen = []
    propose = drafter.propose
    drafter.propose = lambda batch, budget: seen.append((list(request.tokens), propose(batch, budget))) or seen[-1][1]
    while engine.step() is not None:
        pass
    model = tiny.model()
    for tokens, proposal in seen:
        if proposal.columns:
            hidden = model.base_model(input_ids=torch.tensor([tokens[:-1]])).last_hidden_state[0, -1]
            best = drafter.heads(hidden).argmax(-1)[: proposal.columns]
            assert proposal.tokens[0].tolist() == best.tolist()
    assert any(p.columns == 3 for _, p in seen)


def test_a_drafter_that_slept_through_the_prompt_guesses_nothing():
    sleeper = probes.Sleeper(heads.medusa(), 3)
    request = tiny.request([3, 5, 7], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    tiny.World().run(sleeper, [request])
    assert request.stats.drafted == 0


@pytest.mark.parametrize("rule", ["coupled", "block"])
def test_beginnings_that_were_taken_over_cost_no_guess(rule):
    """It reads the last state alone: behind a prompt that was taken over it guesses as if it had seen all of it."""
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=3)
    made = [tiny.request([2 + (i * 7) % 40 for i in range(44)], params, rule=rule) for _ in range(2)]
    tiny.World().run(heads.medusa(), made, rule, grain=8, max_requests=1)
    assert [r.taken for r in made] == [0, 40] and made[0].output == made[1].output
    assert made[0].stats.drafted == made[1].stats.drafted > 0 and made[0].stats.accepted == made[1].stats.accepted


def trained(loss="kl", steps=60, **options):
    pupil = MedusaPupil(heads.teacher(), MedusaTraining(heads=2, loss=loss, **options))
    seen = heads.lesson(("hidden:last",), rows=24)
    optimiser = torch.optim.AdamW([p for p in pupil.module.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss_, figures = pupil.loss(seen)
        loss_.backward()
        optimiser.step()
        losses.append(loss_.item())
    return pupil, losses, figures


@pytest.mark.parametrize("loss", ["kl", "tv", "hybrid", "ce"])
def test_training_brings_heads_closer(loss):
    _, losses, figures = trained(loss)
    assert losses[-1] < 0.9 * losses[0] and figures["acceptance"].shape == (2,)


def test_what_was_trained_is_accepted(tmp_path):
    """On texts of its target, trained heads beat untrained ones."""
    pupil, _, figures = trained("ce", steps=150, rows="own")
    pupil.save(tmp_path / "trained")
    fresh = MedusaPupil(heads.teacher(), MedusaTraining(heads=2, rows="own"))
    fresh.save(tmp_path / "fresh")
    assert pupil.accuracies[0][0] > 0.3 and float(figures["acceptance"][0]) > 0.5
    rate = {}
    for name in ("trained", "fresh"):
        made = [tiny.request(p, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)) for p in PROMPTS]
        tiny.World().run(Medusa(Medusa.Config(path=str(tmp_path / name), nodes=4)), made)
        rate[name] = sum(r.stats.accepted for r in made)
    assert rate["trained"] > rate["fresh"] + 5


PROMPTS = heads.lesson(("hidden:last",), rows=24).tokens[:8, :4].tolist()


@pytest.mark.parametrize("options", [{}, {"vocab": 20}, {"rows": "own"}, {"rows": "own", "vocab": 20, "layers": 2}], ids=str)
def test_what_is_saved_is_loaded(options, tmp_path):
    pupil = MedusaPupil(heads.teacher(), MedusaTraining(**options))
    heads.scrambled(pupil.module)
    pupil.save(tmp_path)
    stored = load_file(tmp_path / medusa_heads.FILE)
    borrowed = options.get("rows", "target") == "target"
    assert all(v.dtype is torch.bfloat16 for k, v in stored.items() if k != "ids")
    assert any(k.endswith("1.weight") and "linear" not in k for k in stored) is not borrowed or options.get("layers") == 2
    loaded, ids = medusa_heads.build(checkpoint.read(tmp_path), heads.teacher().head, torch.float32, "tiny")
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    want, got = pupil.heads(hidden), loaded(hidden)
    assert got.shape == (5, 4, options.get("vocab", tiny.VOCAB)) and (ids is None) == ("vocab" not in options)
    assert torch.allclose(want, got, atol=0.15)


def test_low_rank_changes_are_in_force_only_while_asked_for():
    model, tokens = copy.deepcopy(tiny.model(dtype=torch.float32)), torch.arange(2, 14)[None]
    lora = Lora(model, 2)
    heads.scrambled(lora)
    with torch.no_grad():
        before = model(tokens).logits
        with lora.applied():
            changed = model(tokens).logits
        assert torch.equal(model(tokens).logits, before) and not torch.allclose(changed, before, atol=1e-3)
        model.load_state_dict(lora.merged(model))
        assert torch.allclose(model(tokens).logits, changed, atol=1e-4)


def test_a_changed_target_needs_the_target():
    with pytest.raises(BadInput, match="not at hand"):
        Medusa.pupil(heads.teacher(), {"lora": 2})


@pytest.mark.parametrize("suffix", [".pt", ".bin"])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_public_files_are_read_without_running_code(suffix, prefix, tmp_path):
    source = heads.medusa_directory(rows="own")
    tensors = {prefix + k: v for k, v in load_file(source / medusa_heads.FILE).items()}
    torch.save(tensors, tmp_path / f"medusa_lm_head{suffix}")
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    request = tiny.request([3, 5, 7], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    again = tiny.request([3, 5, 7], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    tiny.World().run(Medusa(Medusa.Config(path=str(tmp_path), nodes=3)), [request])
    tiny.World().run(heads.medusa(nodes=3, rows="own"), [again])
    assert request.stats.drafted == again.stats.drafted > 0


def test_files_that_would_run_code_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 1}')
    torch.save({"x": print}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(BadWeights, match="without running code"):
        checkpoint.read(tmp_path)


def damaged(tmp_path, change):
    """A copy of good heads with its tensors and config changed."""
    shutil.copytree(heads.medusa_directory(), tmp_path, dirs_exist_ok=True)
    tensors, config = load_file(tmp_path / medusa_heads.FILE), json.loads((tmp_path / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, tmp_path / medusa_heads.FILE)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return Medusa.Config(path=str(tmp_path))


BAD = {
    "missing": (lambda t, c: t.pop("1.0.linear.bias"), BadWeights, "1.0.linear.bias is missing"),
    "nan": (lambda t, c: t["0.0.linear.bias"].fill_(float("nan")), BadWeights, "NaN"),
    "shape": (lambda t, c: t.update({"0.0.linear.bias": torch.zeros(3)}), BadWeights, "shape"),
    "hidden": (lambda t, c: t.update({"0.0.linear.weight": torch.zeros(16, 16)}), DrafterMismatch, "size 16"),
    "ids": (lambda t, c: t.update({"ids": torch.tensor([3, 400])}), DrafterMismatch, "token ids 3 to 400"),
    "count": (lambda t, c: c.update({"medusa_num_heads": 0}), BadWeights, "medusa_num_heads"),
    "more": (lambda t, c: c.update({"medusa_num_heads": 9}), BadWeights, "3.0.linear.weight is missing"),
    "kind": (lambda t, c: c.pop("medusa_num_heads"), BadWeights, "no directory of Medusa heads"),
}


@pytest.mark.parametrize("name", BAD)
def test_heads_that_do_not_fit_are_refused_by_name(name, tmp_path):
    change, error, words = BAD[name]
    with pytest.raises(error, match=words):
        tiny.World().engine(Medusa(damaged(tmp_path, change)))


def test_other_vocabularies_are_refused(tmp_path):
    shutil.copytree(heads.medusa_directory(rows="own"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / medusa_heads.FILE)
    for k in range(3):
        tensors[f"{k}.1.weight"] = torch.zeros(1000, 32)
    save_file(tensors, tmp_path / medusa_heads.FILE)
    with pytest.raises(DrafterMismatch, match="1000 tokens"):
        tiny.World().engine(Medusa(Medusa.Config(path=str(tmp_path))))


def test_another_revision_is_told(tmp_path):
    made = checkpoint.read(heads.medusa_directory())
    with pytest.warns(OutriderWarning, match="other weights"):
        checkpoint.same_target(made, "another", "tiny")
    checkpoint.same_target(made, "f", "tiny")
    checkpoint.same_target(replace(made, config={}), "another", "tiny")


def test_bad_options_are_refused(tmp_path):
    with pytest.raises(ModelNotFound, match="no directory"):
        Medusa(Medusa.Config(path=str(tmp_path / "nowhere")))
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        Medusa(Medusa.Config(path=str(tmp_path)))
    with pytest.raises(BadInput, match="nodes"):
        Medusa(Medusa.Config(path=str(heads.medusa_directory()), nodes=0))
    for wrong in ({"heads": 0}, {"rows": "some"}, {"loss": "mse"}, {"decay": 0.0}):
        with pytest.raises(BadInput):
            MedusaTraining(**wrong)


def test_rows_of_a_packed_head_can_be_borrowed():
    linear = torch.nn.Linear(24, 40, bias=False)
    assert torch.equal(PackedLinear(linear).weight, linear.weight)
    assert NONE == -1
