"""The audit: does speculation change anything, on this machine, with this model?

**Coupled rule.** The text is a function of model, request and key, so it is tested by equality: every prompt is answered
without a drafter, once per temperature, then with each drafter, all prompts in one ragged batch and some of them alone. Prompts
take turns with the groups of options (`cases.py`). Other lossless rules are compared in this way at T = 0, where they are
deterministic too. At T > 0, and for the coupled rule as well, texts of many seeds on a tiny model are held against the
enumerated law (`law.py`), and a rule with an exact enumeration of its own (`exact.law_error`) must agree to 1e-12.

**False alarms.** Equality of texts has none but by rounding: a divergence counts as a fault only if it takes a change of more
than `compare.TOLERANCE` in some logit. For fp32 that is 1e-3; between passes of width 1, 2, 5 and whole prefills, 19 million
logits (SmolLM2-135M on CPU) differed by 9e-5 at most, so that 1e-3 is about 60 standard deviations. The tolerances of fp16
and bf16 follow from their last places and were not measured. Each of at most a hundred law tests fails a right engine with
probability below 1e-12 (a bound that holds for every sample size). Together below 1e-9 a run.

**Power.** A fault that changes a compared token with probability e, whatever the token, escapes a drafter's n tokens with
probability (1 - e)**n: at e = 4.61 / n that is 0.01. The report states this e as `detects`. For known bugs, `selftest.py`
measures it.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .. import registry
from ..accept import RULES
from ..config import SamplingParams
from ..errors import OutriderError
from ..llm import LLM
from ..models.quantize import scheme_of
from ..models.target import ModelTarget
from ..protocols import Replayer
from ..results import Result
from . import compare, law
from .cases import GROUPS, TEMPERATURES, Case, cases

SOLO = 2
"""Requests per temperature that are answered alone as well."""
LAW_SAMPLES = 2048
LOSSY = "lossy, as declared"
_NONE = "none"

Tell = Callable[[str, float], None]
"""Hears what is being done, and which share of the whole is behind."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to audit: drafter specs, rule names, and how much of it. `seed` shifts every request's seed; `strict`: a
    drafter that cannot start is an error, not a line."""

    drafts: tuple[str, ...]
    rules: tuple[str, ...]
    prompts: int = 20
    max_tokens: int = 20
    seed: int = 0
    strict: bool = True


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the report. `method`: a drafter's spec, or what else was compared; `temperature` None: all. `tokens` were
    compared (samples drawn, for a law test); `verdict`: exact, fault, LOSSY, or "skipped"; `note` says more."""

    method: str
    rule: str
    temperature: float | None
    tokens: int
    divergences: int
    near_ties: int
    verdict: str
    drafted: int = 0
    accepted: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """A first divergence that rounding does not explain (or does, if `near_tie`): tokens None where a text had ended."""

    method: str
    rule: str
    temperature: float
    group: str
    prompt: str
    alone: bool
    position: int
    want: int | None
    got: int | None
    gap: float
    near_tie: bool


@dataclass(frozen=True, slots=True)
class Report:
    """All of it. `ok` says that there is no fault; `detects` is the smallest rate of wrong tokens that the lines of every
    drafter under every rule, taken together, would have shown with probability 0.99."""

    model: str
    fingerprint: dict[str, str]
    lines: tuple[Line, ...]
    differences: tuple[Difference, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        return all(line.verdict != "fault" for line in self.lines)

    @property
    def detects(self) -> float | None:
        sums: dict[tuple[str, str], int] = {}
        for x in self.lines:
            if x.drafted:
                sums[x.method, x.rule] = sums.get((x.method, x.rule), 0) + x.tokens
        return min(1.0, 4.61 / min(sums.values())) if sums else None


def runnable(model: str, layers: int) -> list[str]:
    """Specs of all registered drafters that this model can have: those without required options, and those that only need the
    path of a model, for which the target serves, cut to its first third where the drafter can do that. Not those that replay
    answers, since they would have none."""
    specs = []
    for name in registry.names():
        config = getattr(registry.get(name), "Config", None)
        fields = dataclasses.fields(config) if config is not None else ()
        needed = {f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING}
        if issubclass(registry.get(name), Replayer):
            continue
        if not needed and name != _NONE:
            specs.append(name)
        elif needed == {"path"}:
            cut = f",layers={max(1, layers // 3)}" if any(f.name == "layers" for f in fields) else ""
            specs.append(f"{name}:path={model}{cut}")
    return specs


@dataclass(slots=True)
class Auditor:
    """Runs a plan on a loaded model."""

    llm: LLM
    plan: Plan
    tell: Tell = lambda what, share: None
    differences: list[Difference] = field(default_factory=list)
    _made: dict[float, list[Case]] = field(default_factory=dict)
    _plain: dict[Case, Result] = field(default_factory=dict)

    def run(self) -> Report:
        """Everything, line by line. Raises `OutriderError` for a drafter that was asked for by name and cannot start."""
        started, lines = time.perf_counter(), []
        jobs = list(self._jobs())
        for i, (what, job) in enumerate(jobs):
            self.tell(what, i / len(jobs))
            lines += job()
        self.tell("done", 1.0)
        seconds = time.perf_counter() - started
        return Report(self.llm.name, fingerprint(self.llm), tuple(lines), tuple(self.differences), seconds)

    def _jobs(self) -> Iterator[tuple[str, Callable[[], list[Line]]]]:
        """What to do, in order: plain answers first, then drafter by drafter, then the law of every rule."""
        lossless = [r for r in self.plan.rules if RULES[r].lossless]
        for heat in TEMPERATURES:
            if lossless:
                yield f"plain decoding, T = {heat:g}", partial(self._reference, heat)
        for draft in self.plan.drafts:
            for rule in lossless:
                yield f"{draft}, {rule}", partial(self._drafter, draft, rule)
        for rule in self.plan.rules:
            if RULES[rule].lossless:
                yield f"law of {rule}", partial(_laws, rule)
            else:
                yield rule, partial(_lossy, rule)

    def _cases(self, heat: float) -> list[Case]:
        if heat not in self._made:
            self._made[heat] = cases(self.llm, heat, self.plan.prompts, self.plan.max_tokens, self.plan.seed)
        return self._made[heat]

    def _reference(self, heat: float) -> list[Line]:
        """The plain answers at one temperature, and the check that they do not depend on the batch."""
        self.llm.switch(_NONE)
        every = self._cases(heat)
        self._plain.update(zip(every, self._answer(every), strict=True))
        solo = _solo(every, heat)
        return [self._compare((_NONE, "coupled", heat), [(c, self._alone(c), True) for c in solo])]

    def _drafter(self, draft: str, rule: str) -> list[Line]:
        """A drafter under a rule: ragged batch and alone at all temperatures; other rules at T = 0 only."""
        try:
            self.llm.switch(draft, rule, control="fixed")  # every guess that can be made is a chance to go wrong
        except OutriderError as error:
            if self.plan.strict:
                raise
            return [Line(draft, rule, None, 0, 0, 0, "skipped", note=str(error))]
        coupled = rule == "coupled"
        return [self._drafted(draft, rule, heat, alone=coupled) for heat in (TEMPERATURES if coupled else (0.0,))]

    def _drafted(self, draft: str, rule: str, heat: float, alone: bool) -> Line:
        every = self._cases(heat) if alone else self._cases(heat)[: len(GROUPS)]
        got = [(c, r, False) for c, r in zip(every, self._answer(every), strict=True)]
        if alone:
            got += [(c, self._alone(c), True) for c in _solo(every, heat)]
        line = self._compare((draft, rule, heat), got)
        reason = self.llm.engine.drafter.reason
        if reason is not None:
            return dataclasses.replace(line, verdict="fault", note=reason)
        return line if line.drafted else dataclasses.replace(line, note="it made no guesses, so this proves nothing about it")

    def _answer(self, every: Sequence[Case]) -> list[Result]:
        return self.llm.generate([list(c.prompt) for c in every], [c.params for c in every])

    def _alone(self, case: Case) -> Result:
        """A batch of one, as deep as the drafter likes."""
        return self.llm.generate([list(case.prompt)], dataclasses.replace(case.params, depth=None))[0]

    def _compare(self, who: tuple[str, str, float], got: Sequence[tuple[Case, Result, bool]]) -> Line:
        """One line of the report; first divergences go to `differences`."""
        found = []
        for case, result, alone in got:
            difference = self._difference(who, case, result, alone)
            found += [difference] if difference is not None else []
        self.differences += found
        ties = sum(d.near_tie for d in found)
        stats = [r.stats for _, r, _ in got]
        return Line(
            *who,
            tokens=sum(len(r.token_ids) for _, r, _ in got),
            divergences=len(found) - ties,
            near_ties=ties,
            verdict="fault" if len(found) > ties else "exact",
            drafted=sum(s.drafted for s in stats),
            accepted=sum(s.accepted for s in stats),
        )

    def _difference(self, who: tuple[str, str, float], case: Case, result: Result, alone: bool) -> Difference | None:
        plain = self._plain[case]
        at = compare.divergence(plain.token_ids, result.token_ids)
        if at is None and (plain.text, plain.finish_reason) == (result.text, result.finish_reason):
            return None
        at = len(plain.token_ids) if at is None else at
        want, got = (ids[at] if at < len(ids) else None for ids in (plain.token_ids, result.token_ids))
        request = self.llm._request(list(case.prompt), case.params)
        request.tokens += plain.token_ids[:at]
        target = self.llm.engine.target
        assert isinstance(target, ModelTarget)
        judged = compare.judge(target, request, want, got)
        return Difference(*who, case.group, case.text, alone, at, want, got, judged.gap, judged.near_tie)


def _solo(every: Sequence[Case], heat: float) -> list[Case]:
    """A few cases, of other groups at each temperature."""
    first = SOLO * TEMPERATURES.index(heat)
    return [every[(first + i) % len(every)] for i in range(SOLO)]


def _lossy(rule: str) -> list[Line]:
    return [Line("all", rule, None, 0, 0, 0, LOSSY)]


def _laws(rule: str) -> list[Line]:
    """The law of short texts on the tiny model, through the real engine, at every T > 0, with and without a filter."""
    kinds: tuple[tuple[str, dict[str, Any], int], ...] = (("(law)", {}, 3), ("(law, top-k)", {"top_k": 3}, 2))
    lines = []
    for heat in TEMPERATURES[1:]:
        for name, options, length in kinds:
            found = law.run(SamplingParams(temperature=heat, **options), rule, LAW_SAMPLES, length)
            verdict = "fault" if found.fails else "exact"
            note = f"n KL = {found.information:.1f}, P <= {found.alarm:.1g}"
            lines.append(Line(name, rule, heat, found.samples * length, int(found.fails), 0, verdict, note=note))
    return lines + _enumerated(rule)


def _enumerated(rule: str) -> list[Line]:
    """The rule's own exact enumeration, where there is one."""
    if rule == "coupled" or importlib.util.find_spec(f"{__package__}.exact") is None:
        return []
    exact: Any = importlib.import_module(f"{__package__}.exact")
    error = float(exact.law_error(rule))
    wrong = not error < 1e-12
    return [Line("(enumeration)", rule, None, 0, int(wrong), 0, "fault" if wrong else "exact", note=f"largest error {error:.1e}")]


def fingerprint(llm: LLM) -> dict[str, str]:
    """What a replay needs to be the same: equality of bits is promised within one of these."""
    target = llm.engine.target
    assert isinstance(target, ModelTarget)
    device = target.device
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    dtype = str(target.decoder.dtype).removeprefix("torch.")
    scheme = scheme_of(target.decoder.model)
    weights = {"dtype": dtype, "quantize": scheme, "packed products": str(target.decoder.packed)}
    return {"torch": torch.__version__, "device": card, **weights}
