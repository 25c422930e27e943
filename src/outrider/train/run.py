"""From nothing to a trained drafter: the target writes texts, a pupil learns from them, the engine examines it. Every step
goes on from where an earlier command left it."""

from __future__ import annotations

import gc
import hashlib
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from .. import registry, trained
from ..bench.provenance import provenance
from ..errors import BadInput, OutOfMemory, OutriderWarning
from ..llm import LLM
from ..loading import pick_device, pick_dtype
from ..models import weights
from ..models.footprint import free_memory
from ..models.hf import find_blocks
from ..protocols import Pupil, Renewal
from . import card, renewal, tiny
from .capture import Capture
from .corpus import Corpus, load, matching
from .crew import Crew, Place, assist, gpus
from .data import Tell, Writer, Writing
from .evaluate import Exam, examine, held_prompts
from .loop import Recipe, Sign, Trainer
from .ranks import Ranks, join, local_device

PLAIN = "none"
_TOGETHER, _SPARE = 256, 128
"""Requests that write at once, and tokens of KV memory that each may need beyond its text (guesses, half-filled blocks)."""
_SHARE = 0.8
"""Of the free memory, what may hold kept states."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to train: `method`, as in `NAME[:key=value,...]` with training options, for `model`, into `out` (None: a directory of
    the user's own drafters). `texts`: where the texts are kept (None: a directory that all methods share). `finish`: examine what
    there is, even if training is not over. `shard`: several ranks share the target's layers, for one that does not fit beside its
    pupil. `writers`: processes that write texts, over all GPUs. `command`: what to tell those who want to do it again."""

    method: str
    model: str
    out: Path | None = None
    texts: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    writing: Writing = field(default_factory=Writing)
    recipe: Recipe = field(default_factory=Recipe)
    exam: Exam = field(default_factory=Exam)
    cache: bool = False
    keep: bool = False
    finish: bool = False
    shard: bool = False
    writers: int = 1
    command: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far it got. `stage`: the step that is not over, or `done`; `card` as in `card.json`, None while there is none."""

    stage: str
    out: Path
    card: dict[str, Any] | None = None


def trainable() -> list[str]:
    """Methods that can be trained."""
    return [name for name in registry.names() if hasattr(registry.get(name), "pupil")]


def method(spec: str) -> tuple[str, type, dict[str, Any]]:
    """Name, class and training options of a method. `BadInput` for one that cannot be trained, or not so."""
    name, values = registry.split(spec)
    cls = registry.get(name)
    if not hasattr(cls, "pupil"):
        raise BadInput(f"{name!r} has nothing to train; these have: {', '.join(trainable())}")
    made = registry.configure(cls, values, "Training")
    return name, cls, values if made is None else asdict(made)


def changes_target(spec: str) -> bool:
    """Whether training so makes another model of the target. Raises like `method`."""
    _, cls, options = method(spec)
    kind: Any = getattr(cls, "Training", None)
    return kind is not None and bool(getattr(kind(**options), "changes_target", False))


class Training:
    """One plan on its way. `tell` hears of texts and examination, `show` of every training step. `until` as `time.monotonic`."""

    def __init__(self, plan: Plan, tell: Tell, show: Callable[[Sign], None], until: float = float("inf")) -> None:
        self.plan, self.tell, self.show, self.until = plan, tell, show, until
        self.name, self.cls, self.options = method(plan.method)
        self.model = str(tiny.directory()) if plan.model == tiny.NAME and not Path(plan.model).exists() else plan.model
        self.device = local_device(pick_device(plan.device))
        self.dtype = pick_dtype(plan.dtype, self.device)
        self.source = weights.fetch(weights.resolve(self.model))
        self.fingerprint = weights.fingerprint(self.source)
        kind = f"{self.name}-joint" if changes_target(plan.method) else self.name
        self.out = plan.out or trained.home() / "drafters" / f"{self.source.name}-{kind}-{self.fingerprint[:8]}"
        if "," in str(self.out):
            raise BadInput(f"{self.out}: a drafter's directory must not have a comma in its name, which parts a spec's options")
        if plan.shard and changes_target(plan.method):
            raise BadInput("a target that is changed by its training must be whole on every GPU: drop --shard")
        self.texts = plan.texts or self._shared()
        self.was: dict[str, str] = {}
        self.ranks = Ranks()

    def run(self) -> Outcome:
        """All steps, as far as there is time."""
        self.ranks = join(self.device)
        try:
            return self._run()
        finally:
            self.ranks.leave()

    def _run(self) -> Outcome:
        if not self.ranks.first:
            self.tell, self.show = lambda what, share: None, lambda sign: None
        if self.ranks.first and not self.write():
            return self._early("texts")
        if self.ranks.any(self._late(), self.device):
            return self._early("texts")
        loaded = self._load()
        corpus = load(self.texts)
        over, trainer = self.train(loaded, corpus)
        self.ranks.leave()
        if not self.ranks.first:
            return Outcome("done", self.out)
        known = self._judged(trainer)
        if over and known is not None:
            return Outcome("done", self.out, known)
        trainer.finish()
        if isinstance(trainer.pupil, Renewal):
            self._renew(trainer.pupil, loaded)
        self._save(trainer.pupil)
        if (not over or self._late()) and not self.plan.finish:
            return Outcome("examination" if over else "training", self.out)
        recipe = asdict(self.plan.recipe) | {"rate": trainer.rate}
        run = asdict(trainer.state) | {"recipe": recipe, "total": trainer.total, "over": over}
        del trainer, loaded
        return Outcome("done", self.out, self.judge(corpus, run))

    def _load(self) -> weights.Loaded:
        """The target: whole, or this rank's share of it."""
        if not self.plan.shard or self.ranks.world == 1:
            return weights.load(self.source, dtype=self.dtype, device=str(self.device))
        loaded = weights.load(self.source, dtype=self.dtype)
        loaded.model.requires_grad_(False)
        self.ranks.shard(find_blocks(loaded.model, loaded.name), self.device)
        module: Any = loaded.model
        module.to(self.device)
        return loaded

    def write(self) -> bool:
        """The texts; whether there are enough."""
        identity = self.plan.writing.identity(self.source.name, self.fingerprint)
        there = matching(self.texts, identity)
        if there is not None and there["taught"] >= self.plan.writing.tokens:
            return True
        cards = gpus() if self.device.type == "cuda" else []
        with Crew(self.plan, Place(self.texts, identity), cards, self.until) as crew, self._writer() as writer:
            return writer.write(self.tell, self.until, partial(crew.source, writer))

    def assist(self, index: int, count: int, wanted: Callable[[], bool]) -> None:
        """Be one of `count` writers; see `crew`."""
        with self._writer() as writer:
            assist(writer, index, count, wanted)

    @contextmanager
    def _writer(self) -> Iterator[Writer]:
        """The target, ready to write."""
        writing = self.plan.writing
        llm = self._llm(min(writing.batch, _TOGETHER), writing.prompt + writing.answer)
        try:
            yield Writer(llm, writing, self.texts, self.fingerprint)
        finally:
            llm.close()
            del llm
            _free()

    def train(self, loaded: weights.Loaded, corpus: Corpus) -> tuple[bool, Trainer]:
        """Train as far as there is time; whether that was all."""
        torch.manual_seed(self.plan.recipe.seed)
        capture = Capture(loaded)
        build: Any = self.cls
        pupil: Pupil = build.pupil(capture.teacher(corpus.counts(capture.vocabulary)), self.options)
        if set(pupil.features) - set(capture.features) or self.plan.cache or self.plan.keep:
            cache = self.texts / "features" if self.plan.cache else None
            capture = Capture(loaded, pupil.features, cache, self._room() if self.plan.keep else 0)
        if self.plan.keep:
            self._weigh(capture, corpus)
        trainer = Trainer(pupil, capture, corpus, self.plan.recipe, self.out / "run", self.ranks)
        trainer.resume({"method": self.name, "options": self.options, "fingerprint": self.fingerprint})
        return trainer.run(self.show, self.until), trainer

    def _room(self) -> int:
        """Bytes of the device's memory that may hold kept states."""
        return int(free_memory(self.device) * _SHARE)

    def _weigh(self, capture: Capture, corpus: Corpus) -> None:
        """Say so if not all states can be kept."""
        size, room = capture.size(corpus, self.plan.recipe.longest), capture.room
        if size > room:
            text = (
                f"--keep wants {size / 2**30:.1f} GiB for the states of these texts, and {self.device} has "
                f"{room / 2**30:.1f} GiB for them: {room / size:.0%} of the texts are kept, the model passes over the others "
                "every time"
            )
            warnings.warn(text, OutriderWarning, stacklevel=2)

    def judge(self, corpus: Corpus, run: dict[str, Any]) -> dict[str, Any]:
        """Examine the drafter, write its card, and make it known."""
        _free()
        prompts, exam = held_prompts(corpus, self.plan.exam.prompts), self.plan.exam
        llm = self._llm(exam.batch, max(map(len, prompts), default=0) + exam.answer)
        scores = examine(llm, f"{self.name}:path={self.out}", prompts, self.plan.exam, self.tell)
        made = {
            "method": self.name,
            "model": self.source.name,
            "fingerprint": self.fingerprint,
            "tau": scores[0].tau,
            "options": card.reduced(self.options),
            "target_changed_from": self.was,
            "results": [asdict(s) for s in scores],
            "data": {k: v for k, v in corpus.manifest.items() if k != "shards"},
            "exam": asdict(self.plan.exam),
            "training": {k: v for k, v in run.items() if k not in ("curve", "identity")},
            "identity": card.reduced(run["identity"]),
            "curve": run["curve"],
            "command": self.plan.command,
            "provenance": provenance(llm, self.model, [self.plan.command]),
        }
        llm.close()
        try:
            plotted = card.write(self.out, made)
        except OSError as error:
            raise OutOfMemory(
                f"the card cannot be written in {self.out} ({error.strerror or error}); make room and run the command again: the "
                "drafter itself is whole"
            ) from error
        if not plotted:
            warnings.warn("no plot was drawn: pip install 'outrider[train]' brings matplotlib", OutriderWarning, stacklevel=2)
        try:
            trained.enlist(self.out)
        except OSError as error:
            text = f"--draft auto will not find the drafter: {trained.home()} cannot be written ({error}); name it by its path"
            warnings.warn(text, OutriderWarning, stacklevel=2)
        return made

    def _renew(self, pupil: Renewal, loaded: weights.Loaded) -> None:
        """From here on the target is the one that came out of training."""
        self.was = {"model": self.source.name, "fingerprint": self.fingerprint}
        place = self.out / f"{self.source.name}-{self.name}"
        self.fingerprint = renewal.publish(pupil, loaded, place)
        self.model, self.source = str(place), weights.resolve(str(place))

    def _save(self, pupil: Pupil) -> None:
        """The drafter's files, each as a whole."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            trained.sweep(self.out)
            with tempfile.TemporaryDirectory(prefix=".", suffix=trained.UNFINISHED, dir=self.out) as fresh:
                pupil.save(Path(fresh))
                for file in sorted(Path(fresh).iterdir()):
                    file.replace(self.out / file.name)
        except (OSError, SafetensorError) as error:
            raise OutOfMemory(
                f"the drafter cannot be saved in {self.out} ({error}); make room and run the command again: training is kept"
            ) from error

    def _judged(self, trainer: Trainer) -> dict[str, Any] | None:
        """The card, if it tells of just this training."""
        try:
            found = dict(json.loads((self.out / trained.CARD).read_text(encoding="utf-8")))
            same = found["identity"] == card.reduced(trainer.state.identity) and found["training"]["step"] == trainer.state.step
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if same else None

    def _llm(self, requests: int, length: int) -> LLM:
        """The target, with memory for so many requests of this length, if there is as much: others may share the device."""
        how: Any = {"draft": PLAIN, "device": str(self.device), "dtype": self.plan.dtype}
        try:
            return LLM(self.model, kv_tokens=requests * (length + _SPARE), **how)
        except OutOfMemory:
            return LLM(self.model, **how)

    def _late(self) -> bool:
        return time.monotonic() > self.until

    def _early(self, stage: str) -> Outcome:
        self.ranks.any(True, self.device)
        return Outcome(stage, self.out)

    def _shared(self) -> Path:
        """Texts of the same target and settings are the same for all methods."""
        what = json.dumps(self.plan.writing.identity(self.source.name, self.fingerprint), sort_keys=True)
        return weights.cache_dir() / "texts" / f"{self.source.name}-{hashlib.sha256(what.encode()).hexdigest()[:16]}"


def _free() -> None:
    """Give a model's memory back before the next one is loaded."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
