"""Searches for a drafter's best options on this model and machine, by measured tokens per second beside plain decoding.

Half of the prompts are for the search, the other half (held out) for the verdict on what it found: the best of many noisy
measurements looks better than it is. Trials alternate between Optuna's tree-structured Parzen estimator (Bergstra et al. 2011)
and changes to the best values so far; all are kept in a journal, from which the same search goes on.

A drafter class can be tuned that has `knobs(layers)`, what to search for a target of so many layers, `guesses(layers)`, values by
knob to begin with, and `options(values)`, what they are as options after `NAME:`.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import registry
from ..drafters import _tuned
from ..errors import BadInput, OutriderError
from ..llm import LLM
from ..models.target import ModelTarget
from ..protocols import Knob
from .plan import Plan
from .report import Row
from .runner import Runner, Tell
from .workloads import Workload

CONTROL = "fixed"
"""Nobody but the options decides how far to look ahead."""
INSTALL = 'pip install "outrider[tune]"'
_STARTUP = 8
"""Trials after which the best values so far are changed, too."""

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Best:
    """The best trial so far, and how many there were."""

    values: Values
    score: float
    trials: int


def optuna() -> Any:
    """The module. Raises `OutriderError` where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise OutriderError(f"tuning needs Optuna; run: {INSTALL}") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Search:
    """Looks for values of `knobs` with the highest score. With a `journal`, a file, trials are kept there under `name`, and those
    that are there already count. Raises `BadInput` for a journal that cannot be read."""

    def __init__(self, knobs: Sequence[Knob], name: str, journal: Path | None = None, seed: int = 0) -> None:
        import numpy as np

        module = optuna()
        self._module, self._knobs = module, {knob.name: knob for knob in knobs}
        self._spaces = {knob.name: _space(module, knob) for knob in knobs}
        options = {"sampler": module.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP), "direction": "maximize"}
        try:
            self._study = module.create_study(storage=_storage(module, journal), study_name=name, load_if_exists=True, **options)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(f"cannot go on from the journal {journal} ({error}); delete it to begin anew") from None
        self._done = self._finished()
        self._random = np.random.default_rng((seed, len(self._done)))

    @property
    def best(self) -> Best | None:
        """None before the first trial."""
        if not self._done:
            return None
        values, score = max(self._done, key=lambda trial: trial[1])
        return Best(values, score, len(self._done))

    def suggest(self, guesses: Sequence[Values]) -> None:
        """Try these first, unless trials were made already."""
        for values in () if self._done else guesses:
            self._study.enqueue_trial({name: self._whole(name, value) for name, value in values.items()})

    def trial(self, score: Callable[[Values], float]) -> float:
        """One more; Ctrl-C and errors pass through and leave no trace of it."""
        if len(self._done) >= _STARTUP and len(self._done) % 2:
            self._study.enqueue_trial(self._changed())
        trial = self._study.ask(self._spaces)
        try:
            found = score(dict(trial.params))
        except BaseException:
            self._study.tell(trial, state=self._module.trial.TrialState.FAIL)
            raise
        self._study.tell(trial, found)
        self._done.append((dict(trial.params), found))
        return found

    def _finished(self) -> list[tuple[Values, float]]:
        complete = (self._module.trial.TrialState.COMPLETE,)
        return [(t.params, t.value) for t in self._study.get_trials(states=complete) if t.value is not None]

    def _changed(self) -> dict[str, float]:
        """The best values with one to three of them changed."""
        assert self.best is not None
        values = dict(self.best.values)
        names = list(self._knobs)
        for i in self._random.choice(len(names), size=min(len(names), int(self._random.integers(1, 4))), replace=False):
            knob = self._knobs[names[i]]
            if (knob.low, knob.high) == (0, 1) and knob.whole:
                values[knob.name] = 1 - values[knob.name]
            else:
                step = self._random.normal(0, max(0.15 * (knob.high - knob.low), 1.0 * knob.whole))
                values[knob.name] = self._whole(knob.name, values[knob.name] + step)
        return values

    def _whole(self, name: str, value: float) -> float:
        knob = self._knobs[name]
        value = min(max(float(value), knob.low), knob.high)
        return round(value) if knob.whole else value


def _storage(module: Any, journal: Path | None) -> Any:
    """Trials on disk; None keeps them in memory."""
    if journal is None:
        return None
    journal.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", module.exceptions.ExperimentalWarning)
        return module.storages.JournalStorage(module.storages.journal.JournalFileBackend(str(journal)))


def _space(module: Any, knob: Knob) -> Any:
    if knob.whole and (knob.low, knob.high) == (0, 1):
        return module.distributions.CategoricalDistribution((0, 1))
    if knob.whole:
        return module.distributions.IntDistribution(int(knob.low), int(knob.high))
    return module.distributions.FloatDistribution(knob.low, knob.high)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure: `trials` in all, earlier ones included; `minutes` for the search of this call (None: no limit);
    `prompts` for both halves together; `repeats` pairs of runs for the verdict."""

    trials: int = 60
    minutes: float | None = None
    prompts: int = 8
    max_tokens: int = 48
    temperature: float = 0.0
    repeats: int = 3

    def __post_init__(self) -> None:
        if self.trials < 1 or self.prompts < 2 or self.repeats < 1:
            raise BadInput(f"tuning needs at least 1 trial, 2 prompts and 1 repeat, got {self}")


QUICK = Sizes(trials=10, prompts=2, max_tokens=24, repeats=2)
"""A first impression."""


def tunable(method: str) -> Any:
    """The drafter class of that name. `BadInput` for one that has nothing to search for."""
    found = registry.get(method)
    if not hasattr(found, "knobs"):
        known = [name for name in registry.names() if hasattr(registry.get(name), "knobs")]
        raise BadInput(f"drafter {method!r} has no options to search for; those that have: {', '.join(known)}")
    return found


def halves(workloads: Sequence[Workload], prompts: int) -> tuple[Workload, Workload]:
    """One half of the first `prompts` prompts, taken from the workloads in turn, for the search, the other for the verdict.
    `BadInput` for fewer than two."""
    longest = max(len(w.prompts) for w in workloads)
    mixed = [w.prompts[i] for i in range(longest) for w in workloads if i < len(w.prompts)][:prompts]
    if len(mixed) < 2:
        raise BadInput("tuning needs two prompts or more: some to search with, others for the verdict")
    source = "+".join(w.name for w in workloads)
    return Workload("search", source, tuple(mixed[0::2])), Workload("held-out", source, tuple(mixed[1::2]))


@dataclass(slots=True)
class Tuner:
    """Tunes `method` on a loaded model. `measure(spec, workload, repeats)` gives a `Row` with a speed-up; `clock` seconds."""

    llm: LLM
    method: str
    workloads: tuple[Workload, Workload]
    sizes: Sizes
    tell: Tell = lambda what, share: None
    clock: Callable[[], float] = time.perf_counter
    provenance: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def fingerprint(self) -> str:
        """Of the model; see `protocols.TargetView`."""
        target = self.llm.engine.target
        assert isinstance(target, ModelTarget)
        return target.decoder.signature

    @property
    def layers(self) -> int:
        target = self.llm.engine.target
        assert isinstance(target, ModelTarget)
        return target.decoder.num_layers

    def search(self, journal: Path) -> Search:
        """The trials made so far under just these circumstances, ready for more. `BadInput` for a target with too few layers."""
        prompts = [p.sha256 for w in self.workloads for p in w.prompts]
        what = (self.method, self.fingerprint, prompts, self.sizes.max_tokens, self.sizes.temperature, self.seed)
        name = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
        knobs = tunable(self.method).knobs(self.layers)
        if any(knob.low > knob.high for knob in knobs):
            raise BadInput(f"{self.llm.name} has too few layers ({self.layers}) for {self.method}")
        search = Search(knobs, name, journal, self.seed)
        search.suggest(tunable(self.method).guesses(self.layers))
        return search

    def run(self, search: Search) -> Best:
        """Trials until there are as many as wanted, or time is up; at least one in all. Ctrl-C passes through."""
        started, total = self.clock(), self.sizes.trials
        while (best := search.best) is None or best.trials < total:
            if best is not None and self.sizes.minutes is not None and self.clock() - started > 60 * self.sizes.minutes:
                break
            done = 0 if best is None else best.trials
            so_far = "" if best is None else f", best so far {best.score:.2f} times plain decoding"
            self.tell(f"trial {done + 1} of {total}{so_far}", 0.9 * done / total)
            search.trial(lambda values: _speedup(self.measure(self.spec(values), self.workloads[0], 1)))
        return best

    def spec(self, values: Values) -> str:
        """As `--draft` takes it."""
        return _tuned.spec_of(self.method, tunable(self.method).options(values))

    def verdict(self, best: Best) -> _tuned.Tuned:
        """What was found, measured on the prompts that were held out; enabled only if it is faster than plain decoding there."""
        options = tunable(self.method).options(best.values)
        self.tell("measuring the best on the prompts held out", 0.95)
        row = self.measure(_tuned.spec_of(self.method, options), self.workloads[1], self.sizes.repeats)
        assert row.speedup is not None
        won = row.speedup.median > 1 and row.verdict != "loses" and row.equal == row.compared
        held = {"speedup": row.speedup.median, "low": row.speedup.low, "high": row.speedup.high, "verdict": row.verdict}
        more = {
            "held_out": held | {"tau": row.tau, "alpha": row.alpha, "equal": row.equal, "compared": row.compared},
            "search": {"speedup": best.score, "trials": best.trials, "workloads": self.workloads[0].source},
            "prompts": {w.name: [p.sha256 for p in w.prompts] for w in self.workloads},
            "settings": {
                "max_tokens": self.sizes.max_tokens,
                "temperature": self.sizes.temperature,
                "repeats": self.sizes.repeats,
            },
            "provenance": dict(self.provenance),
        }
        return _tuned.Tuned(self.method, self.fingerprint, options, won, row.speedup.median, more)

    def measure(self, spec: str, workload: Workload, repeats: int) -> Row:
        """Against plain decoding, in turns."""
        s = self.sizes
        plan = Plan((spec,), (workload,), s.max_tokens, (s.temperature,), seed=self.seed, repeats=repeats, control=CONTROL)
        report = Runner(self.llm, plan).run()
        return next(row for row in report.rows if row.speedup is not None)


def _speedup(row: Row) -> float:
    assert row.speedup is not None
    return row.speedup.median


def quick(sizes: Sizes) -> Sizes:
    """The same, but no more than `QUICK`."""
    names = ("trials", "prompts", "max_tokens", "repeats")
    return replace(sizes, **{name: min(getattr(sizes, name), getattr(QUICK, name)) for name in names})
