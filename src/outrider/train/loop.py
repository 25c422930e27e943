"""The training loop: batches, steps, checks on held-out texts, checkpoints. It knows nothing of what is being trained."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BadInput, BadWeights, OutOfMemory, OutriderError
from ..protocols import Lesson, Pupil
from ..trained import sweep
from . import checkpoint
from .capture import Capture, batches, shuffled
from .corpus import Corpus
from .ranks import Ranks

_RATE = 1e-3
_SHORTEST, _FEWEST = 12, 4
"""Tokens of a text, and of its taught part, below which there is nothing to learn."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. How long: `steps`, or `tokens` seen, or `epochs` over the texts, the first that is not 0. A pass has
    `batch_tokens`, padding included, a step `accumulate` passes; texts are cut to `longest`. AdamW with `rate` (0: what suits the
    pupil, or 1e-3), which rises over the share `warmup` of all steps and falls as a cosine; gradients clipped to the norm `clip`.
    Every `check` steps (0: twenty times in all) held-out texts of `held_tokens` tell how far it is; `patience` checks without a
    gain end it (0: never). A checkpoint is written every `save_minutes`."""

    steps: int = 0
    tokens: int = 0
    epochs: float = 3.0
    batch_tokens: int = 8192
    accumulate: int = 1
    longest: int = 1024
    rate: float = 0.0
    warmup: float = 0.04
    weight_decay: float = 0.0
    clip: float = 1.0
    check: int = 0
    held_tokens: int = 40_000
    patience: int = 6
    save_minutes: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "accumulate", "longest", "held_tokens"):
            if getattr(self, name) < 1:
                raise BadInput(f"training: {name} must be at least 1, got {getattr(self, name)}")
        if not self.rate >= 0 or not 0 <= self.warmup < 1 or not self.clip > 0:
            raise BadInput("training: rate must not be negative, clip must be above 0, warmup from 0 to below 1")
        if not (self.steps or self.tokens or self.epochs > 0):
            raise BadInput("training: give steps, tokens or epochs")

    def scale(self, step: int, total: int) -> float:
        """The share of `rate` at a step."""
        rising = max(1, round(self.warmup * total))
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rising) / max(1, total - rising))))


@dataclass(slots=True)
class State:
    """Where a run stands. `curve`: a point per check, as in the card. `best` held-out acceptance, `stale` checks since."""

    identity: dict[str, Any]
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = -1.0
    best_step: int = 0
    stale: int = 0
    done: bool = False
    curve: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Late:
    """A step that was launched, read while the next one runs: where the run stood after it, and on their way to the host loss,
    norm of the gradient, whether a rank asks to stop and to save, and acceptance."""

    step: int
    tokens: int
    seconds: float
    figures: Tensor
    ready: torch.cuda.Event | None = None

    @classmethod
    def of(cls, state: State, figures: Tensor) -> Late:
        if not figures.is_cuda:
            return cls(state.step, state.tokens, state.seconds, figures)
        sent, ready = figures.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return cls(state.step, state.tokens, state.seconds, sent, ready)

    def read(self) -> tuple[float, ...]:
        """The figures, once they are there."""
        if self.ready is not None:
            self.ready.synchronize()
        return tuple(self.figures.tolist())


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of life: what the last step showed. `left`: seconds until the end, or until the time is up."""

    step: int
    total: int
    loss: float
    acceptance: tuple[float, ...]
    held: tuple[float, ...]
    speed: float
    left: float


class Trainer:
    """Trains `pupil` on `corpus` and keeps its checkpoints in `directory`. `identity`: what makes this run another than others;
    `directory` with a checkpoint of another one raises `BadInput`."""

    def __init__(
        self, pupil: Pupil, capture: Capture, corpus: Corpus, recipe: Recipe, directory: Path, ranks: Ranks | None = None
    ) -> None:
        self.pupil, self.capture, self.corpus, self.recipe, self.directory = pupil, capture, corpus, recipe, directory
        self.ranks = ranks or Ranks()
        self.texts, held = (self._usable(corpus.split(h)) for h in (False, True))
        if not self.texts or not held:
            which = "held-out " if self.texts else ""
            raise BadInput(f"there are no {which}texts long enough to learn from ({_SHORTEST} tokens): write more of them")
        self.held = self._held(held)
        self.limits = (recipe.batch_tokens, recipe.longest)
        self.parameters = [p for p in pupil.module.parameters() if p.requires_grad]
        self.rate = recipe.rate or float(getattr(pupil, "rate", _RATE))
        kernels = {"fused" if capture.device.type == "cuda" else "foreach": True}
        self.optimiser = torch.optim.AdamW(
            self.parameters, self.rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay, **kernels
        )
        self.total = self._total()
        limits = {k: v for k, v in asdict(recipe).items() if k != "save_minutes"}
        self.state = State(
            {**limits, "rate": self.rate, "total": self.total, "texts": len(corpus.starts), "world": self.ranks.world}
        )
        self._last: tuple[float, ...] = ()

    def resume(self, facts: dict[str, Any]) -> bool:
        """Go on from the checkpoint, if there is one. `facts` are part of the run's identity."""
        self.state.identity |= facts
        sweep(self.directory)
        path = self.directory / checkpoint.CHECKPOINT
        if not path.is_file():
            self.ranks.broadcast(self.pupil.module)
            return False
        try:
            found = State(**checkpoint.read(path, self.pupil.module, self.optimiser))
        except TypeError as error:
            raise BadWeights(f"{path} is another version's ({error}); remove it to start anew") from error
        differing = sorted(
            k for k in found.identity.keys() | self.state.identity.keys() if found.identity.get(k) != self.state.identity.get(k)
        )
        if differing:
            told = "; ".join(f"{k} {found.identity.get(k)!r}, now {self.state.identity.get(k)!r}" for k in differing)
            raise BadInput(f"{self.directory} holds a run with other settings ({told:.300}); give another --out, or remove it")
        self.state = found
        return True

    def run(self, show: Callable[[Sign], None], until: float = float("inf")) -> bool:
        """Train to the end (True), or until the time `until` (of `time.monotonic`) or Ctrl-C, with a checkpoint either way.

        Raises `OutriderError` for a loss that is not finite, `OutOfMemory` with a batch that may fit, `KeyboardInterrupt`."""
        if self.state.done:
            return True
        began = time.monotonic() - self.state.seconds
        saved, slowest, stream = time.monotonic(), 0.0, self._stream()
        waiting, asked, over = list[Late](), (False, False), False
        with stopping() as stop:
            while not self.state.done and not over:
                at = time.monotonic()
                waiting.append(self._step(stream, began, asked))
                flags = [self._tell(waiting.pop(0), show, until) for _ in waiting[1:]]
                now = time.monotonic()
                slowest = max(slowest, now - at)
                late = self.ranks.first and now - saved > 60 * self.recipe.save_minutes
                asked = (stop.is_set() or now + slowest > until, late)
                saved = now if late else saved
                if self.ranks.world == 1:  # several do what all have heard of
                    flags.append(asked)
                if any(map(any, flags)) or self._checks(self.state.step):
                    flags.append(self._tell(waiting.pop(), show, until))
                over = any(stopped for stopped, _ in flags)
                if any(map(any, flags)) or self.state.done:
                    self.save()
            if stop.is_set():
                raise KeyboardInterrupt
        return self.state.done

    def save(self) -> None:
        """A checkpoint, by rank 0."""
        if self.ranks.first:
            checkpoint.write(self.directory / checkpoint.CHECKPOINT, self.pupil.module, asdict(self.state), self.optimiser)

    def finish(self) -> None:
        """The best weights that a check of this run has seen; as they are before the first one."""
        path = self.directory / checkpoint.BEST
        if self.state.best_step and path.is_file():
            checkpoint.read(path, self.pupil.module)

    def check(self) -> dict[str, Any]:
        """Figures on held-out texts, means over their taught tokens, and the loss."""
        sums: dict[str, Tensor] = {}
        weight = 0.0
        self.pupil.module.eval()
        with torch.no_grad():
            for indices in self.held:
                lesson = self.capture.lesson(self.corpus, indices, self.recipe.longest)
                loss, figures = self._loss(lesson)
                taught = float(len(lesson.where()[0]))
                weight += taught
                for name, value in {"loss": loss.detach(), **figures}.items():
                    sums[name] = sums.get(name, torch.zeros_like(value, dtype=torch.float64)) + value.double() * taught
        self.pupil.module.train()
        return {name: self.ranks.mean(value / weight).tolist() for name, value in sums.items()}

    def _step(self, stream: Iterator[list[int]], began: float, asked: tuple[bool, bool] = (False, False)) -> Late:
        """One step of the optimiser; the host waits for none of it. The run began at the time `began`; this rank has `asked` to
        stop, or to save."""
        recipe, state = self.recipe, self.state
        tokens, loss, figures = 0, torch.zeros((), device=self.capture.device), dict[str, Tensor]()
        self.pupil.module.train()
        self.optimiser.zero_grad(set_to_none=True)
        try:
            for indices in islice(stream, recipe.accumulate):
                lesson = self.capture.lesson(self.corpus, indices, recipe.longest)
                part, figures = self._loss(lesson)
                torch.autograd.backward(part / recipe.accumulate)
                loss = loss + part.detach() / recipe.accumulate
                tokens += sum(min(int(self.corpus.lengths[i]), recipe.longest) for i in indices)
        except torch.OutOfMemoryError as error:
            half = recipe.batch_tokens // 2
            raise OutOfMemory(
                f"no memory for passes of {recipe.batch_tokens:,} tokens on {self.capture.device}; the same steps in smaller "
                f"passes: --batch-tokens {half} --accumulate {2 * recipe.accumulate}"
            ) from error
        self.ranks.average(self.parameters)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, recipe.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate * recipe.scale(state.step, self.total)
        self.optimiser.step()
        state.step, state.tokens = state.step + 1, state.tokens + tokens * self.ranks.world
        state.seconds = time.monotonic() - began
        shared = self.ranks.mean(torch.stack([loss, *(torch.full_like(loss, float(a)) for a in asked)]))
        row = [x.detach().float().reshape(-1) for x in (shared[0], norm, shared[1:], *_acceptance(figures))]
        return Late.of(state, torch.cat(row))

    def _tell(self, late: Late, show: Callable[[Sign], None], until: float) -> tuple[bool, bool]:
        """Read a step's figures, look at held-out texts if it is time to, show both; whether a rank asked to stop, to save."""
        loss, norm, stop, save, *acceptance = late.read()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise OutriderError(
                f"the loss is {loss:.4g} (gradient norm {norm:.4g}) at step {late.step}, so training stops; the last "
                f"checkpoint is as it was: give a --rate below {self.rate:g} and another --out"
            )
        if self._checks(late.step):
            self._look()
        left = min((self.total - late.step) * late.seconds / max(1, late.step), until - time.monotonic())
        speed = late.tokens / max(1e-9, late.seconds)
        show(Sign(late.step, self.total, loss, tuple(acceptance), self._last, speed, left))
        return stop > 0, save > 0

    def _loss(self, lesson: Lesson) -> tuple[Tensor, dict[str, Tensor]]:
        cuda = self.capture.device.type == "cuda"
        with torch.autocast(self.capture.device.type, torch.bfloat16, enabled=cuda):
            return self.pupil.loss(lesson)

    def _checks(self, step: int) -> bool:
        every = self.recipe.check or max(1, self.total // 20)
        return step % every == 0 or step >= self.total

    def _look(self) -> None:
        """Figures on held-out texts, and whether that was the last step."""
        state, recipe = self.state, self.recipe
        figures = self.check()
        state.curve.append({"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds, 1), **figures})
        self._last = _row(figures["acceptance"])
        reached = sum(self._last) / len(self._last)
        if reached > state.best:
            state.best, state.best_step, state.stale = reached, state.step, 0
            if self.ranks.first:
                checkpoint.write(self.directory / checkpoint.BEST, self.pupil.module, {"step": state.step})
        else:
            state.stale += 1
        state.done = state.step >= self.total or bool(recipe.patience and state.stale >= recipe.patience)

    def _stream(self) -> Iterator[list[int]]:
        """This rank's batches, from where the run stands."""
        world, passed = self.ranks.world, self.state.step * self.recipe.accumulate
        every = (b for epoch in count() for b in shuffled(self.corpus, self.texts, self.limits, (self.recipe.seed, epoch)))
        return islice(every, passed * world + self.ranks.rank, None, world)

    def _total(self) -> int:
        recipe = self.recipe
        if recipe.steps:
            return recipe.steps
        per_epoch = sum(1 for _ in shuffled(self.corpus, self.texts, self.limits, (recipe.seed, 0)))
        seen = sum(min(int(self.corpus.lengths[i]), recipe.longest) for i in self.texts)
        epochs = recipe.tokens / seen if recipe.tokens else recipe.epochs
        return max(1, math.ceil(epochs * per_epoch / (recipe.accumulate * self.ranks.world)))

    def _usable(self, indices: list[int]) -> list[int]:
        longest, corpus = self.recipe.longest, self.corpus
        ends = corpus.lengths.clamp(max=longest)
        good = (ends >= _SHORTEST) & (ends - corpus.prompts >= _FEWEST)
        return [i for i in indices if good[i]]

    def _held(self, indices: list[int]) -> list[list[int]]:
        """Batches of held-out texts, `held_tokens` in all, the same every time."""
        ends = self.corpus.lengths.clamp(max=self.recipe.longest)[indices].cumsum(0)
        some = indices[: max(1, int((ends <= self.recipe.held_tokens).sum()))]
        return batches(self.corpus, some, self.recipe.batch_tokens, self.recipe.longest)


def _acceptance(figures: dict[str, Tensor]) -> list[Tensor]:
    found = figures.get("acceptance")
    return [] if found is None else [found]


def _row(value: float | list[float]) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


@contextmanager
def stopping() -> Iterator[threading.Event]:
    """An event that Ctrl-C or a polite kill sets; the second Ctrl-C interrupts at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    kept = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
