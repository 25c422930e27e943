"""The whole way: texts, training, examination, card, and that the drafter is found; stopped anywhere, it goes on."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams, trained
from outrider.drafters.draft_model import DraftModel
from outrider.errors import BadInput, BadWeights, DrafterMismatch, OutOfMemory, OutriderError, OutriderWarning
from outrider.models import lean, weights
from outrider.train import again
from outrider.train import run as runs
from outrider.train.card import PLOT
from outrider.train.corpus import MANIFEST, read_manifest
from outrider.train.evaluate import Exam, examine
from outrider.train.loop import Recipe
from outrider.train.run import Plan, Training, changes_target, method, trainable

from .conftest import WRITING

RECIPE = Recipe(steps=40, batch_tokens=512, rate=2e-2, longest=64, held_tokens=800, check=20)
EXAM = Exam(prompts=6, answer=24)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Own drafters and own cache, for all tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OUTRIDER_HOME", "OUTRIDER_CACHE"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name)))
        yield trained.home()


def plan(model: str, spec: str = "draft_model:layers=1", **changes: Any) -> Plan:
    return Plan(spec, model, writing=WRITING, recipe=RECIPE, exam=EXAM, device="cpu", command="outrider train ...", **changes)


def go(made: Plan, until: float = float("inf")) -> Any:
    return Training(made, lambda what, share: None, lambda sign: None, until).run()


@pytest.fixture(scope="module")
def done(home, model):
    return go(plan(model))


def test_it_ends_with_a_drafter_that_is_found(done, model, loaded):
    assert done.stage == "done" and done.out.parent == trained.home() / "drafters"
    greedy, sampled = done.card["results"]
    assert greedy["tau"] > 1.3 and sampled["tau"] > 1.1
    assert greedy["equal"] == sampled["equal"] == greedy["prompts"] == 6
    [entry] = trained.find(loaded.fingerprint)
    assert (entry.method, entry.path, entry.tau) == ("draft_model", done.out, greedy["tau"])
    llm = LLM(model, device="cpu")
    assert llm.drafter_name == "hybrid" and "draft_model, which was trained for this model" in llm.notices[0]
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=24)
    plain = LLM(model, draft="none", device="cpu").generate([[5, 6, 7]], params)[0]
    assert llm.generate([[5, 6, 7]], params)[0].token_ids == plain.token_ids
    llm.switch("draft_model:depth=2")
    assert llm.drafter_name == "draft_model" and str(done.out) in llm.notices[-1]


def spoil(path: Path, how: str) -> None:
    """Damage that the config, a look at the weights' head, or only reading all of them shows."""
    file = path / "model.safetensors"
    if how == "config":
        (path / "config.json").write_text("{")
    elif how == "keys":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "hidden_size"}))
    elif how == "head":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"hidden_act": "what"}))
    elif how == "gone":
        file.unlink()
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    else:
        tensors = load_file(file)
        save_file({k: v * torch.nan for k, v in tensors.items()} if how == "nan" else {"x": torch.zeros(1)}, file)


@pytest.mark.filterwarnings("ignore:drafter 'hybrid' was switched off")
@pytest.mark.parametrize("how", ["config", "keys", "head", "gone", "cut", "nan", "other"])
def test_one_that_is_damaged_is_passed_over(done, model, tmp_path, monkeypatch, how):
    """By `auto` alone, which says so, and takes the next best."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    for name in ("bad", "good"):
        shutil.copytree(done.out, tmp_path / "drafters" / name)
    card = json.loads((done.out / "card.json").read_text())
    (tmp_path / "drafters" / "bad" / "card.json").write_text(json.dumps(card | {"tau": 9.0}))
    spoil(tmp_path / "drafters" / "bad", how)
    llm = LLM(model, device="cpu")
    assert llm.drafter_name == "hybrid" and len(llm.notices) >= 2
    assert "passed over" in llm.notices[-2] and "bad" in llm.notices[-2] and "trained for this model" in llm.notices[-1]
    shutil.rmtree(tmp_path / "drafters" / "good")
    alone = LLM(model, device="cpu")
    assert alone.drafter_name == "suffix" and "passed over" in alone.notices[-2]
    with pytest.raises(OutriderError):
        LLM(model, draft="draft_model", device="cpu")
    llm.switch("auto")
    assert llm.drafter_name == "suffix"


def test_a_method_that_nobody_trained(done, model):
    with pytest.raises(BadInput, match=r"needs path.*outrider train medusa --model"):
        LLM(model, draft="medusa", device="cpu")


def test_held_out_acceptance_got_better(done):
    curve = done.card["curve"]
    assert curve[-1]["acceptance"] > 0.15 and curve[-1]["step"] == 40


def test_the_card_tells_all_and_nothing_but_the_drafter_is_beside_it(done):
    files = {p.name for p in done.out.iterdir()}
    assert files == {"card.json", "README.md", PLOT, "config.json", "model.safetensors", "run"}
    page = (done.out / "README.md").read_text()
    for words in (
        "outrider train ...",
        "held out",
        "| 0 |",
        "| 1 |",
        "of 40 steps",
        f"![loss and acceptance on held-out texts]({PLOT})",
    ):
        assert words in page
    card = json.loads((done.out / "card.json").read_text())
    assert card["data"]["settings"]["seed"] == 0 and card["options"]["layers"] == 1 and card["training"]["recipe"]["rate"] == 2e-2
    assert (done.out / PLOT).read_text().startswith("<?xml")


def test_a_card_tells_how_to_do_it_again(done, model, tmp_path):
    card = again.read(str(done.out / "card.json"))
    found = {part: again.KINDS[part](**values) for part, values in again.settings(card).items()}
    assert found["recipe"] == RECIPE and found["exam"] == EXAM
    assert found["writing"] == dataclasses.replace(WRITING, tokens=card["data"]["taught"])
    assert method(again.spec(card)) == ("draft_model", DraftModel, card["options"])
    (tmp_path / "card.json").write_text(json.dumps({k: v for k, v in card.items() if k != "data"}))
    with pytest.raises(BadWeights, match="no training that could be done again"):
        again.read(str(tmp_path / "card.json"))
    for name, message in (("ship/nothing", "came with the package"), (str(tmp_path / "x" / "card.json"), "cannot be read")):
        assert again.is_card(name)
        with pytest.raises(BadInput, match=message):
            again.read(name)


def test_what_came_with_the_package_can_be_trained_again():
    for name in again.names():
        card = again.read(f"ship/{name}")
        assert method(again.spec(card))[2] == card["options"]
        assert {part: again.KINDS[part](**values) for part, values in again.settings(card).items()}


def test_a_second_run_has_nothing_to_do(done, model, monkeypatch):
    monkeypatch.setattr(runs, "examine", lambda *a: pytest.fail("examined again"))
    again = go(plan(model))
    assert again.card == json.loads((done.out / "card.json").read_text())


def test_every_step_goes_on(home, model, tmp_path):
    """Texts, then training, are stopped; the card is that of an uninterrupted run."""
    made = plan(model, "draft_model:layers=1,width=16", out=tmp_path / "out", texts=tmp_path / "texts")
    assert go(made, time.monotonic()).stage == "texts"

    def press(sign: Any) -> None:
        if sign.step == 25:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Training(made, lambda what, share: None, press).run()
    assert not (tmp_path / "out" / "card.json").exists()
    ended = go(made)
    whole = go(dataclasses.replace(made, out=tmp_path / "other"))
    strip = [[{k: v for k, v in p.items() if k != "seconds"} for p in o.card["curve"]] for o in (ended, whole)]
    assert strip[0] == strip[1] and ended.card["results"] == whole.card["results"]
    assert {e.path for e in trained.entries()} >= {tmp_path / "out", tmp_path / "other"}


def test_a_full_disk_at_the_card(done, model, monkeypatch):
    """The drafter is there; the command says what to do, and then has only the examination left."""
    (done.out / "card.json").rename(done.out / "kept.json")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OutOfMemory, match=r"card cannot be written.*No space left.*run the command again"):
            go(plan(model))
    (done.out / "kept.json").rename(done.out / "card.json")


def test_time_is_kept_and_what_there_is_can_be_used(home, model, tmp_path):
    made = dataclasses.replace(plan(model, out=tmp_path / "out"), recipe=dataclasses.replace(RECIPE, steps=100_000, patience=0))
    stopped = go(made, time.monotonic() + 2)
    assert stopped.stage == "training" and stopped.card is None
    assert (tmp_path / "out" / "config.json").is_file() and tmp_path / "out" not in [e.path for e in trained.entries()]
    early = go(dataclasses.replace(made, finish=True), time.monotonic() + 1)
    assert early.stage == "done" and not early.card["training"]["over"] and early.card["training"]["step"] > 1


def test_medusa_goes_the_same_way(home, model, tmp_path):
    ended = go(plan(model, "medusa:heads=2", out=tmp_path / "medusa"))
    assert ended.card["results"][0]["tau"] > 1.2 and len(ended.card["curve"][-1]["acceptance"]) == 2
    assert LLM(model, draft="medusa", device="cpu").drafter_name == "medusa"


def test_medusa_2_makes_another_model_and_a_drafter_for_that_one_alone(home, model, loaded, tmp_path):
    recipe = dataclasses.replace(RECIPE, steps=24, check=12)
    spec = "medusa:lora=2,heads=2,warm=6"
    assert changes_target(spec) and not changes_target("medusa") and not changes_target("draft_model")
    made = go(dataclasses.replace(plan(model, spec), recipe=recipe))
    card = made.card
    assert card["target_changed_from"] == {"model": "tiny", "fingerprint": loaded.fingerprint}
    assert card["fingerprint"] != loaded.fingerprint and card["model"] == "tiny-medusa"
    assert not [e for e in trained.find(loaded.fingerprint) if e.path == made.out]
    assert [e.path for e in trained.find(card["fingerprint"])] == [made.out]
    assert card["curve"][-1]["target_kl"] < 0.5 and "is a changed model" in (made.out / "README.md").read_text()
    assert all(r["equal"] == r["prompts"] for r in card["results"])
    target = str(made.out / "tiny-medusa")
    assert weights.fingerprint(weights.resolve(model)) == loaded.fingerprint != weights.fingerprint(weights.resolve(target))
    picked = LLM(target, device="cpu")
    assert picked.drafter_name == "hybrid" and "else medusa, which was trained for this model" in picked.notices[-1]
    with pytest.warns(OutriderWarning, match="other weights"):
        LLM(model, draft=f"medusa:path={made.out}", device="cpu").generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    with pytest.raises(BadInput, match="drop --shard"):
        go(plan(model, spec, shard=True))


def test_eagle_goes_the_same_way(home, model, tmp_path):
    ended = go(plan(model, "eagle:steps=3", out=tmp_path / "eagle"))
    assert ended.card["results"][0]["tau"] > 1.2 and len(ended.card["curve"][-1]["acceptance"]) == 3
    assert LLM(model, draft="eagle", device="cpu").drafter_name == "eagle"


def test_features_kept_on_disk_give_the_same_run(done, model, tmp_path):
    """In bf16, so nearly the same."""
    kept = go(plan(model, out=tmp_path / "kept", cache=True))
    assert any(weights.cache_dir().rglob("features/*/*.safetensors"))
    assert kept.card["curve"][-1]["loss"] == pytest.approx(done.card["curve"][-1]["loss"], rel=0.05)


def test_states_kept_in_memory_give_the_same_run_as_far_as_there_is_room(done, model, tmp_path, monkeypatch):
    kept = go(plan(model, keep=True, out=tmp_path / "kept"))
    assert kept.card["curve"][-1]["loss"] == pytest.approx(done.card["curve"][-1]["loss"], rel=1e-3)
    monkeypatch.setattr(runs, "free_memory", lambda device: 2**16)
    with pytest.warns(OutriderWarning, match=r"--keep wants .* of the texts are kept"):
        some = go(plan(model, keep=True, out=tmp_path / "more"))
    assert some.card["curve"][-1]["loss"] == pytest.approx(done.card["curve"][-1]["loss"], rel=1e-3)


def test_from_the_targets_own_layers(home, model, tmp_path):
    """`init`: evenly spread layers of a model to begin with; own rows too."""
    recipe = dataclasses.replace(RECIPE, rate=1e-4, steps=5)
    for options, least in (("layers=2", 1.3), ("layers=0,rows=own", 3.0), ("layers=0,vocab=40", 2.0)):
        made = plan(model, f"draft_model:init={model},{options}", out=tmp_path / options[-6:])
        ended = go(dataclasses.replace(made, recipe=recipe))
        assert ended.card["results"][0]["tau"] > least
        assert ended.card["options"]["init"] == "tiny" and str(Path(model).parent) not in (ended.out / "card.json").read_text()
    assert go(dataclasses.replace(made, recipe=recipe)).card == json.loads((ended.out / "card.json").read_text())


def test_a_drafter_that_cannot_draft_gets_no_card(done, llm, monkeypatch):
    monkeypatch.setattr(DraftModel, "propose", lambda *a: (_ for _ in ()).throw(ValueError("a bug")))
    with pytest.warns(OutriderWarning), pytest.raises(OutriderError, match=r"cannot draft for tiny.*a bug"):
        examine(llm, f"draft_model:path={done.out}", [[3, 4, 5]], EXAM, lambda what, share: None)


def test_another_models_draft_is_refused(done, tmp_path):
    config = json.loads((done.out / "config.json").read_text())
    config["outrider"] |= {"hidden": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((done.out / "model.safetensors").read_bytes())
    with pytest.raises(DrafterMismatch, match="outrider train draft_model"):
        lean.load(tmp_path, (torch.zeros(48, 32), torch.zeros(48, 32)), torch.float32)


def test_methods_and_their_options():
    assert {"draft_model", "medusa"} <= set(trainable())
    assert method("draft_model:width=16")[2]["width"] == 16
    for spec, message in (
        ("ngram", "has nothing to train; these have: draft_model"),
        ("nothing", "unknown drafter"),
        ("draft_model:depth=3", "has no key depth"),
        ("draft_model:layers=x", "must be int"),
    ):
        with pytest.raises(BadInput, match=message):
            method(spec)


def test_a_name_that_no_spec_can_hold(home, model):
    with pytest.raises(BadInput, match="must not have a comma"):
        Training(plan(model, out=Path("a,b")), lambda what, share: None, lambda sign: None)


def test_manifests_tell_who_wrote(done, loaded):
    for path in weights.cache_dir().rglob(MANIFEST):
        manifest = read_manifest(path.parent)
        assert manifest is not None and manifest["fingerprint"] == loaded.fingerprint and manifest["model"] == "tiny"


def test_an_eagle_goes_on_from_another_or_from_the_targets_last_layer(home, model, tmp_path):
    first = go(plan(model, "eagle:steps=2", out=tmp_path / "first"))
    recipe = dataclasses.replace(RECIPE, rate=1e-6, steps=4, check=2)
    for init in (str(tmp_path / "first"), "target"):
        made = Training(
            dataclasses.replace(
                plan(model, f"eagle:steps=2,init={init}", out=tmp_path / Path(init).name / "next"), recipe=recipe
            ),
            lambda what, share: None,
            lambda sign: None,
        ).run()
        start, end = (c.card["curve"][i]["loss"] for c, i in ((made, 0), (first, -1)))
        assert start == pytest.approx(end, rel=0.02) if init != "target" else made.card["results"][0]["tau"] > 1
        assert made.card["options"]["init"] == Path(init).name
    with pytest.raises(DrafterMismatch, match="cannot start from"):
        go(plan(model, f"eagle:steps=2,inner=8,init={tmp_path / 'first'}", out=tmp_path / "narrow"))
    with pytest.raises(BadInput, match="version 3"):
        go(plan(model, "eagle:version=1,steps=2,init=target", out=tmp_path / "old"))
