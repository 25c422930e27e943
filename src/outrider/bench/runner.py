"""Measures drafters against plain decoding, side by side, on the same model, prompts and seeds.

Per workload, temperature, load and drafter: a warm-up of both, which is not counted, then pairs of runs,
plain and drafted, the order alternating (A B, B A, ...), so that a machine that slows down slows both. Depths of one drafter take
turns, so that a slow minute meets all of them. Before each drafted run the drafter is made anew: what one learned from an answer
it must not carry into the next run over the same prompts. Making it, and a few tokens to get it going, which it forgets again
where it can, are not timed. Every answer is compared with the first plain one, token by token.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import MAX_LABEL
from ..errors import BadInput, OutriderError
from ..heap import frozen
from ..llm import LLM
from ..models.target import ModelTarget
from ..protocols import Replayer
from ..results import Result
from . import compare, traffic, turns
from .numbers import Run
from .plan import PLAIN, Plan, Point
from .provenance import weights_file
from .report import Asked, Divergence, Name, Report, Row, row
from .usage import Gauge
from .workloads import Workload

FIRST_TOKENS = 8
"""What is written before every run, untimed, and as many more as one looks ahead if that was asked for: allocations, compiled
kernels, captured guesses and the like are paid then."""

WARMUPS, QUICKER = 5, 0.9
"""Whole runs that warm up a GPU, at most; and the part of the time before below which it was not warm yet."""

Tell = Callable[[str, float], None]
"""Hears what is being done, and which share of the whole is behind."""


@dataclass(slots=True)
class Cell:
    """A workload with one drafter, as it is being measured: its runs, and the plain ones beside them."""

    workload: Workload
    prompts: list[list[int]]
    who: Name
    runs: list[Run] = field(default_factory=list)
    plain: list[Run] = field(default_factory=list)
    warmup: float = 0.0

    @property
    def point(self) -> Point:
        return self.who.point


@dataclass(slots=True)
class Runner:
    """Runs a plan on a loaded model. `clock` gives seconds; `provenance` goes into the report as it is."""

    llm: LLM
    plan: Plan
    tell: Tell = lambda what, share: None
    clock: Callable[[], float] = time.perf_counter
    provenance: dict[str, Any] = field(default_factory=dict)
    _rows: list[Row] = field(default_factory=list)
    _divergences: list[Divergence] = field(default_factory=list)
    _workloads: list[Workload] = field(default_factory=list)
    _reference: list[Result] = field(default_factory=list)
    _open: list[Cell] = field(default_factory=list)
    _drafters: dict[str, dict[str, Any]] = field(default_factory=dict)
    _done: int = 0
    _gauge: Gauge = field(init=False)

    def __post_init__(self) -> None:
        self._gauge = Gauge.on(self.llm.engine.target.device)
        self.provenance = {**self.provenance, "energy": self._gauge.energy_note}

    def run(self) -> Report:
        """Everything. Ctrl-C passes through; `report` then has what was measured. Raises `OutriderError` for a drafter that
        cannot start, a prompt that is too long, and a model that gives no valid scores."""
        self._workloads += [w.first(self.plan.limit) for w in self.plan.workloads]
        for workload in self._workloads:  # what does not fit is found now, not after an hour
            self._encoded(workload)
        for draft in dict.fromkeys(draft for draft, _ in self.plan.arms):
            self.llm.switch(draft, control=self.plan.control)
        self.provenance["drafters"] = self._drafters
        self.provenance["prompts"] = {w.name: w.sha256 for w in self._workloads}
        with frozen():
            for workload, point in itertools.product(self._workloads, self.plan.points):
                whole = turns.expand(self.llm, workload, self.plan.params(point), point.group)
                self._measure(whole, self._encoded(whole), point)
        self.tell("done", 1.0)
        return self.report()

    def report(self, interrupted: bool = False) -> Report:
        """What there is so far, the whole pairs of rows that were not finished included."""
        for cell in list(self._open):
            self._close(cell)
        places = [w.name for w in self._workloads]
        points = self.plan.points
        rows = sorted(self._rows, key=lambda r: (places.index(r.workload), points.index(r.point), r.draft != PLAIN))
        asked = tuple(Asked.of(w) for w in self._workloads)
        return Report(tuple(rows), tuple(self._divergences), asked, self.plan.settings, self.provenance, interrupted)

    def _encoded(self, workload: Workload) -> list[list[int]]:
        """Token ids of all prompts. `BadInput` names one that the context cannot hold."""
        prompts = [p.encode(self.llm.tokenizer) for p in workload.prompts]
        for i, ids in enumerate(prompts):
            if len(ids) >= self.llm.max_model_len:
                raise BadInput(
                    f"workload {workload.name}, prompt {i + 1}: {len(ids)} tokens, but the context of {self.llm.name} holds "
                    f"{self.llm.max_model_len}, answer included; take it out"
                )
        return prompts

    def _measure(self, workload: Workload, prompts: list[list[int]], point: Point) -> None:
        """All drafters on one workload, under one set of conditions. The row of plain decoding is made of the plain runs beside
        theirs."""
        self._reference = []
        plain = Cell(workload, prompts, Name(PLAIN, PLAIN, point))
        self._open = [plain]
        for draft, arms in itertools.groupby(self.plan.arms, lambda arm: arm[0]):
            cells = [Cell(workload, prompts, Name(draft, draft, point, depth)) for _, depth in arms]
            self._open = [*cells, plain]
            for cell in cells:
                plain.warmup, cell.warmup = self._warmed(plain), self._warmed(cell)
            for i in range(self.plan.repeats):
                for cell in cells:
                    self._pair(cell, plain, turned=i % 2 == 1)
            for cell in cells:
                self._close(cell)
        if not self.plan.arms:
            plain.warmup = self._warmed(plain)
            for _ in range(self.plan.repeats):
                plain.runs.append(self._run(plain, prompts))
        self._close(plain)

    def _pair(self, cell: Cell, plain: Cell, turned: bool) -> None:
        """Both, one after the other, in this order or `turned`; they count when both are there."""
        if turned:
            b, a = self._run(cell, cell.prompts), self._run(plain, plain.prompts)
        else:
            a, b = self._run(plain, plain.prompts), self._run(cell, cell.prompts)
        cell.plain.append(a)
        plain.runs.append(a)
        cell.runs.append(b)

    def _warmed(self, cell: Cell) -> float:
        """Seconds of the warm-up: the first prompts; on a GPU then all, twice at least, until that no longer gets quicker, since
        rounds of every shape are captured when they are met. What has run already is warm."""
        total, before = self._run(cell, cell.prompts[: cell.point.group]).seconds, float("inf")
        for _ in range(WARMUPS if self.llm.engine.target.device.type == "cuda" and not (cell.runs or cell.warmup) else 0):
            again = self._run(cell, cell.prompts, counts=False).seconds
            total += again
            if again > QUICKER * before or cell.point.rate is not None:
                break
            before = again
        return total

    def _run(self, cell: Cell, prompts: list[list[int]], counts: bool = True) -> Run:
        """One pass over the prompts, group by group, timed. What the first plain one says is what all must say."""
        self.tell(self._title(cell), self._done / self.plan.runs)
        self._done += counts
        self._prepare(cell, prompts)
        run, sinks = Run(open=cell.point.rate is not None), self.llm.engine.sinks
        sinks.append(run.hear)
        self._gauge.start()
        try:
            for group in _groups(prompts, cell.point.batch or len(prompts)):
                self._wait()
                begin = self.clock()
                run.results += self._answer(cell, group, run)
                self._wait()
                run.seconds += self.clock() - begin
        finally:
            sinks.remove(run.hear)
        run.usage = self._gauge.stop()
        self._check(cell, run)
        if cell.who.draft == PLAIN and len(run.results) > len(self._reference):
            self._reference = run.results
        return run

    def _title(self, cell: Cell) -> str:
        """What is being run, with the conditions if there are several."""
        depth = "" if cell.who.depth is None else f", depth {cell.who.depth}"
        point = f", {cell.point}" if len(self.plan.points) > 1 else ""
        return f"{cell.workload.name}: {cell.who.draft}{depth}{point}"

    def _answer(self, cell: Cell, group: list[list[int]], run: Run) -> list[Result]:
        """Answers to prompts that are asked together, or one by one as they come."""
        params, rate = self.plan.params(cell.point, cell.who.depth), cell.point.rate
        params = dataclasses.replace(params, label=_label(cell.workload.name))
        if rate is None:
            return self.llm.generate(group, params)
        at = traffic.arrivals(len(group), rate, self.plan.seed)
        return traffic.play(self.llm, group, params, at, run.times)

    def _prepare(self, cell: Cell, prompts: list[list[int]]) -> None:
        """The drafter, fresh, with a few tokens behind it. One that replays answers is told them."""
        draft = cell.who.draft
        if draft != PLAIN or self.llm.engine.drafter.name != PLAIN:
            self.llm.switch(draft, control=self.plan.control)
        drafter = self.llm.engine.drafter.drafter
        cell.who = dataclasses.replace(cell.who, drafter=drafter.name, synthetic=isinstance(drafter, Replayer))
        path = getattr(getattr(drafter, "config", None), "path", None)
        if path and draft not in self._drafters:
            self._drafters[draft] = {"path": str(path), **weights_file(str(path))}
        if isinstance(drafter, Replayer):
            for result in self._reference:
                drafter.record(result.prompt_token_ids, self.plan.params(cell.point), result.token_ids)
        params = self.plan.params(cell.point, cell.who.depth)
        few = dataclasses.replace(params, max_tokens=min(FIRST_TOKENS + (cell.who.depth or 0), self.plan.max_tokens))
        self.llm.generate(list(prompts[: cell.point.group]), few)
        if not isinstance(drafter, Replayer):  # which would have to be told again
            self.llm.engine.drafter.renew()

    def _check(self, cell: Cell, run: Run) -> None:
        """Note a drafter that was switched off; `OutriderError` for an answer that ended in an error of its own."""
        reason = self.llm.engine.drafter.reason
        if reason is not None:
            cell.who = dataclasses.replace(cell.who, note=reason)
        for i, result in enumerate(run.results):
            if result.finish_reason == "error":
                why = result.error or "the model gave no valid scores; try another --dtype or --device"
                raise OutriderError(f"workload {cell.workload.name}, prompt {i + 1}: {why}")

    def _wait(self) -> None:
        """Until the device has done what it was told: work of one group must not be counted with the next."""
        device = self.llm.engine.target.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _close(self, cell: Cell) -> None:
        """A row of what was measured, if anything was."""
        self._open.remove(cell)
        if cell.runs:
            self._rows.append(row(cell.workload, cell.who, cell.runs, cell.plain or cell.runs, self._equal(cell), cell.warmup))

    def _equal(self, cell: Cell) -> int:
        """How many answers are the plain ones. The first divergence of every prompt is written down."""
        equal, seen = 0, set[int]()
        for run in cell.runs:
            for i, (want, got) in enumerate(zip(self._reference, run.results, strict=True)):
                same = (want.token_ids, want.text, want.finish_reason) == (got.token_ids, got.text, got.finish_reason)
                equal += same
                if not same and i not in seen:
                    seen.add(i)
                    self._divergences.append(self._difference(cell, i, want, got))
        return equal

    def _difference(self, cell: Cell, prompt: int, want: Result, got: Result) -> Divergence:
        at = compare.divergence(want.token_ids, got.token_ids)
        at = len(want.token_ids) if at is None else at
        ours, theirs = (r.token_ids[at] if at < len(r.token_ids) else None for r in (want, got))
        request = self.llm._request(list(want.prompt_token_ids), self.plan.params(cell.point))
        request.tokens += want.token_ids[:at]
        target = self.llm.engine.target
        assert isinstance(target, ModelTarget)
        judged = compare.judge(target, request, ours, theirs)
        where = dataclasses.asdict(cell.point) | {"depth": cell.who.depth}
        name, draft = cell.workload.name, cell.who.draft
        return Divergence(name, draft, prompt + 1, at, ours, theirs, judged.near_tie, judged.gap, **where)


def _label(name: str) -> str | None:
    """A workload's name as a label of its requests."""
    return "".join(c for c in name if c.isprintable())[:MAX_LABEL].strip() or None


def _groups(prompts: Sequence[list[int]], size: int) -> Iterator[list[list[int]]]:
    for i in range(0, len(prompts), size):
        yield list(prompts[i : i + size])
