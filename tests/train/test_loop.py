"""The loop: it learns, resumes to the last bit, and nothing that goes wrong costs what was there before."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as spawned
from torch import nn

import outrider
from outrider import registry
from outrider.errors import BadInput, BadWeights, OutOfMemory, OutriderError
from outrider.models import weights
from outrider.models.hf import find_blocks
from outrider.train import checkpoint, launch
from outrider.train.capture import Capture
from outrider.train.corpus import Corpus
from outrider.train.loop import Recipe, Trainer
from outrider.train.ranks import Ranks, join
from outrider.train.run import trainable
from outrider.trained import UNFINISHED

SHARDED, TOKENS = ("hidden:1,2",), torch.arange(2, 26).view(2, 12)
RECIPE = Recipe(steps=12, batch_tokens=256, check=4, held_tokens=500, rate=1e-2, longest=64)


SMALLEST: dict[str, dict[str, Any]] = {"draft_model": {"layers": 1}, "medusa": {"heads": 2}, "eagle": {"steps": 2}}


class Toy:
    """Guesses the next token from the one before, with noise of its own so that random numbers matter."""

    features = ("hidden:0",)

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = nn.Sequential(nn.Embedding(48, 16), nn.Dropout(0.2), nn.Linear(16, 48))
        self.spoil = False

    def loss(self, lesson: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        wanted = lesson.taught[:, 1:]
        scores = self.module(lesson.tokens[:, :-1])[wanted]
        truth = lesson.tokens[:, 1:][wanted]
        right = (scores.argmax(-1) == truth).float().mean()
        loss = nn.functional.cross_entropy(scores, truth) * (torch.nan if self.spoil else 1.0)
        return loss, {"acceptance": torch.stack([right, right / 2])}

    def save(self, directory: Path) -> None:
        checkpoint.write(directory / "toy.safetensors", self.module, {})


def mean(acceptance: Any) -> float:
    row = acceptance if isinstance(acceptance, list) else [acceptance]
    return sum(row) / len(row)


def trainer(loaded, corpus, path, pupil=None, ranks=None, **changes):
    pupil = pupil or Toy()
    made = Trainer(pupil, Capture(loaded, pupil.features), corpus, dataclasses.replace(RECIPE, **changes), path, ranks)
    made.resume({"method": "toy"})
    return made


def losses(made, until=float("inf"), stop=None):
    seen: list[tuple[int, float]] = []

    def show(sign):
        seen.append((sign.step, sign.loss))
        if stop is not None and sign.step == stop:
            os.kill(os.getpid(), signal.SIGINT)

    try:
        made.run(show, until)
    except KeyboardInterrupt:
        assert stop is not None
    return seen


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_resumed_run_has_the_same_losses_to_the_last_bit(loaded, corpus, tmp_path, accumulate):
    whole = losses(whole_run := trainer(loaded, corpus, tmp_path / "a", accumulate=accumulate))
    parts = losses(trainer(loaded, corpus, tmp_path / "b", accumulate=accumulate), stop=3)
    torch.manual_seed(99)
    parts += losses(trainer(loaded, corpus, tmp_path / "b", accumulate=accumulate), stop=7)
    parts += losses(last := trainer(loaded, corpus, tmp_path / "b", accumulate=accumulate))
    assert parts == whole and [s for s, _ in whole] == list(range(1, 13))
    for a, b in zip(whole_run.parameters, last.parameters, strict=True):
        assert torch.equal(a, b)
    strip = [{k: v for k, v in point.items() if k != "seconds"} for point in whole_run.state.curve]
    assert strip == [{k: v for k, v in point.items() if k != "seconds"} for point in last.state.curve]


def test_it_learns_and_keeps_the_best(loaded, corpus, tmp_path):
    made = trainer(loaded, corpus, tmp_path, steps=60, check=10)
    before = made.check()
    losses(made)
    after = made.state.curve[-1]
    assert after["loss"] < before["loss"] and sum(after["acceptance"]) > sum(before["acceptance"])
    assert made.state.best == max(sum(p["acceptance"]) / 2 for p in made.state.curve)
    with torch.no_grad():
        for p in made.parameters:
            p.zero_()
    made.finish()
    assert sum(made.check()["acceptance"]) / 2 == made.state.best
    again = trainer(loaded, corpus, tmp_path, steps=60, check=10)
    assert again.run(lambda sign: pytest.fail("a finished run has no more steps"))


@pytest.mark.parametrize("method", trainable())
def test_every_method_gets_better_and_resumes_to_the_last_bit(method, loaded, corpus, tmp_path):
    """Whatever can be trained, in its smallest form."""

    def made(path, steps):
        torch.manual_seed(0)
        pupil = registry.get(method).pupil(teacher, SMALLEST.get(method, {}))
        capture = Capture(loaded, pupil.features)
        return Trainer(pupil, capture, corpus, dataclasses.replace(RECIPE, steps=steps, **sizes), path)

    sizes: dict[str, Any] = {"check": 40, "rate": 2e-2, "batch_tokens": 1024, "held_tokens": 2000}
    teacher = Capture(loaded).teacher(corpus.counts(48))
    whole = made(tmp_path / "a", 80)
    whole.resume({})
    before = whole.check()["acceptance"]
    seen = losses(whole)
    assert whole.state.best > mean(before) + 0.05
    first = made(tmp_path / "b", 80)
    first.resume({})
    parts = losses(first, stop=15)
    second = made(tmp_path / "b", 80)
    assert second.resume({}) and parts + losses(second) == seen


def test_time_is_kept(loaded, corpus, tmp_path):
    made = trainer(loaded, corpus, tmp_path)
    assert len(losses(made, until=time.monotonic())) == 1 and not made.state.done
    assert losses(trainer(loaded, corpus, tmp_path))[0][0] == 2


def test_a_killed_runs_best_weights_are_nobody_elses(loaded, corpus, tmp_path):
    """It was killed after a check and before its first checkpoint; the next run ends before its own first check."""
    losses(first := trainer(loaded, corpus, tmp_path, steps=2, check=1))
    (tmp_path / checkpoint.CHECKPOINT).unlink()
    second = trainer(loaded, corpus, tmp_path, rate=1e-4, check=6)
    losses(second, until=time.monotonic())
    kept = [p.clone() for p in second.parameters]
    second.finish()
    assert all(torch.equal(a, b) for a, b in zip(kept, second.parameters, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters, second.parameters, strict=True))


def test_what_killed_writers_left_is_removed_when_it_is_old(loaded, corpus, tmp_path):
    for name in (f".checkpoint.safetensors.abc{UNFINISHED}", f".abc{UNFINISHED}/model.safetensors", ".mine.markdown"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    trainer(loaded, corpus, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3, "somebody may be at work on them"
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    trainer(loaded, corpus, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [".mine.markdown"]


def test_it_ends_early_when_nothing_is_gained(loaded, corpus, tmp_path):
    made = trainer(loaded, corpus, tmp_path, steps=500, check=1, patience=3, rate=1e-9)
    steps = losses(made)
    assert len(steps) < 20 and made.state.done and made.state.stale == 3


def test_how_long_goes_by_steps_tokens_or_epochs(loaded, corpus, tmp_path):
    one = trainer(loaded, corpus, tmp_path, steps=0, epochs=1.0).total
    assert trainer(loaded, corpus, tmp_path, steps=0, epochs=2.0).total in (2 * one, 2 * one - 1)
    assert trainer(loaded, corpus, tmp_path, steps=0, epochs=1.0, accumulate=2).total == -(-one // 2)
    assert trainer(loaded, corpus, tmp_path, steps=0, tokens=1000).total < one


def test_the_rate_rises_and_falls():
    rates = [RECIPE.scale(i, 100) for i in range(100)]
    assert rates[0] == 0.25 and rates[3] == 1 and rates[4] == 1
    assert rates[4:] == sorted(set(rates[4:]), reverse=True) and rates[-1] < 0.01


def test_a_loss_that_is_not_a_number(loaded, corpus, tmp_path):
    losses(made := trainer(loaded, corpus, tmp_path), until=time.monotonic())
    kept = (tmp_path / checkpoint.CHECKPOINT).read_bytes()
    made.pupil.spoil = True
    with pytest.raises(OutriderError, match=r"the loss is nan .* at step 2.*--rate below 0.01"):
        losses(made)
    assert (tmp_path / checkpoint.CHECKPOINT).read_bytes() == kept


def test_out_of_memory_suggests_a_batch(loaded, corpus, tmp_path, monkeypatch):
    made = trainer(loaded, corpus, tmp_path, accumulate=2)
    monkeypatch.setattr(made.pupil, "loss", lambda lesson: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
    with pytest.raises(OutOfMemory, match="--batch-tokens 128 --accumulate 4"):
        losses(made)


def test_a_full_disk_leaves_the_last_checkpoint(loaded, corpus, tmp_path, monkeypatch):
    losses(made := trainer(loaded, corpus, tmp_path), until=time.monotonic())
    kept = (tmp_path / checkpoint.CHECKPOINT).read_bytes()
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OutOfMemory, match="No space left"):
        made.save()
    assert (tmp_path / checkpoint.CHECKPOINT).read_bytes() == kept and len(list(tmp_path.iterdir())) == 1


def test_a_damaged_checkpoint_and_another_run(loaded, corpus, tmp_path):
    losses(trainer(loaded, corpus, tmp_path), until=time.monotonic())
    with pytest.raises(BadInput, match=r"other settings.*rate"):
        trainer(loaded, corpus, tmp_path, rate=1e-4)
    path = tmp_path / checkpoint.CHECKPOINT
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(BadWeights, match="remove it to start anew"):
        trainer(loaded, corpus, tmp_path)
    module = Toy().module
    for state in ({"nothing": 1}, {}):
        checkpoint.write(path, module, state, torch.optim.AdamW(module.parameters()) if state else None)
        with pytest.raises(BadWeights, match="remove it to start anew"):
            trainer(loaded, corpus, tmp_path)


def test_too_little_to_learn_from(loaded, corpus, tmp_path):
    none = dataclasses.replace(corpus, prompts=corpus.lengths)
    with pytest.raises(BadInput, match="no texts long enough"):
        trainer(loaded, none, tmp_path)
    with pytest.raises(BadInput, match="no held-out texts"):
        trainer(loaded, dataclasses.replace(corpus, held=corpus.held & False), tmp_path)


@pytest.mark.parametrize("changes", [{"batch_tokens": 0}, {"rate": -1.0}, {"epochs": 0.0}, {"clip": -1.0}], ids=str)
def test_bad_recipes(changes):
    with pytest.raises(BadInput):
        Recipe(**changes)


def _rank(rank: int, port: int, model: str, corpus: Corpus, path: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    loaded = weights.load(weights.resolve(model))
    pupil = Toy()
    with torch.no_grad():
        for p in pupil.module.parameters():
            p += rank  # rank 0's weights are broadcast
    pupil.module[1].p = 0.0  # type: ignore[index, union-attr]
    ranks = join(torch.device("cpu"))
    made = trainer(loaded, corpus, path, pupil, ranks, steps=4, accumulate=1)
    seen = losses(made)
    layers = find_blocks(loaded.model)
    ranks.shard(layers, torch.device("cpu"))
    part = sum(p.to_local().numel() for p in layers.parameters())  # type: ignore[attr-defined]
    states = Capture(loaded, SHARDED).run(TOKENS)
    torch.save((seen, [p.detach() for p in made.parameters], part, states), path / f"rank-{rank}.pt")
    ranks.leave()


@pytest.mark.slow
def test_two_ranks_do_what_one_does_with_twice_the_batches(model, loaded, corpus, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawned.spawn(_rank, (port, model, corpus, tmp_path), nprocs=2)
    (first, mine, *shares), (second, theirs, *_) = (torch.load(tmp_path / f"rank-{r}.pt") for r in (0, 1))
    assert first == second and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    pupil = Toy()
    pupil.module[1].p = 0.0
    alone = trainer(loaded, corpus, tmp_path / "alone", pupil, Ranks(), steps=4, accumulate=2)
    assert [loss for _, loss in losses(alone)] == pytest.approx([loss for _, loss in first], abs=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(alone.parameters, mine, strict=True))
    whole = sum(p.numel() for p in find_blocks(loaded.model).parameters())
    assert shares[0] == pytest.approx(whole / 2, rel=0.02)
    wanted = Capture(loaded, SHARDED).run(TOKENS)
    assert wanted.keys() == shares[1].keys()
    assert all(torch.allclose(wanted[name], states, atol=1e-6) for name, states in shares[1].items())


def test_processes_are_launched_and_end_together(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(outrider.__file__).parents[1]))
    assert launch.launch(["version"], 2) == 0
    assert launch.launch(["version", "--no-such-option"], 2) == 2
    with pytest.raises(BadInput, match="--gpus 99"):
        launch.check(99, "auto")
    launch.check(99, "cpu")
