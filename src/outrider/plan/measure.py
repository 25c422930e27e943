"""Measures what a plan needs, on the loaded model: how good a drafter's guesses are, and what rounds cost.

*Guesses*: the drafter guesses at every place of the texts, and none of its guesses enters a pass; once a text is there, each
guess is compared with what came. Under the coupled rule a text depends on no guess, so this is what any round beginning there
would have had accepted. *Costs*: texts are written with the look-ahead changing every few rounds, in random order, so that every
depth is met at every length of context. The first round of each stretch does not count: a drafter catches up in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch

from .. import registry
from ..config import SamplingParams
from ..errors import BadInput, DrafterMismatch, OutriderError
from ..heap import frozen
from ..llm import LLM
from ..models.replay import Stage
from ..models.rounds import Machine
from ..protocols import Drafter, Replayer
from ..results import Result
from ..types import Stats
from .acceptance import Answer, Chances, Record
from .costs import Samples, Table
from .stretches import Lookout, Stretches, Watch, right

Tell = Callable[[str, float], None]
PLAIN = "none"
WARM = 8
"""Tokens that are written before anything counts."""
ENOUGH, MANY, PLENTY, PATIENCE = 6, 16, 40, 6
"""Rounds of every depth that are to be measured, as many as are worth it where they are not slow, or quick, and how many times as
many texts as asked for are written for them at most (on a GPU at least for `QUICK` seconds, however many that are)."""
WARMING, QUICK, SLOW = 0.5, 8.0, 30.0
"""Seconds of warming up; for which it is gone on (on a GPU always, since its hosts have slow moments that last a second) for
`PLENTY`; and for `MANY`."""
CALM, LONG = 3, 30.0
"""Groups in a row in which nothing had to be captured, after which a GPU is warm; and seconds after which it has to be."""


@dataclass(frozen=True, slots=True)
class Found:
    """One drafter, measured. `acceptance` is a `Record` wherever its guesses can be judged without being verified, else chances
    by position, from rounds of the greatest depth. `depths`: those that it can look ahead, of the depths asked for. `synthetic`:
    it plays known answers back."""

    draft: str
    drafter: str
    depths: tuple[int, ...]
    acceptance: Record | Chances
    costs: Table
    synthetic: bool = False


@dataclass(slots=True)
class Measurer:
    """Measures on `prompts`, with `params` for every request. `repeats`: how often the texts are written for the costs."""

    llm: LLM
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    repeats: int = 1
    tell: Tell = lambda what, share: None
    clock: Callable[[], float] = time.perf_counter
    _plain: list[Result] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.params.accept not in (None, "coupled"):
            raise BadInput("guesses are compared with the text, which only the coupled rule leaves as it is; drop the rule")
        if self.params.seed is None:  # the same text every time
            self.params = dataclasses.replace(self.params, seed=0)

    def run(self, draft: str, depths: Sequence[int], batches: Sequence[int]) -> Found:
        """Everything about one drafter. Raises `OutriderError` where it cannot start or is switched off."""
        with frozen(), contextlib.nullcontext() if self._machine is None else self._machine.exact():
            return self._run(draft, depths, batches)

    def _run(self, draft: str, depths: Sequence[int], batches: Sequence[int]) -> Found:
        spec = self.deepened(draft, max(depths))
        drafter = self._start(spec)
        reach = [k for k in depths if 0 < k <= drafter.depth] or [drafter.depth]
        judged = not self.probes(spec)
        reach = reach if judged else [drafter.depth]
        record = self.guesses(spec, max(reach)) if judged else None
        samples, stats = Samples(), Stats()
        for batch in batches:
            self.costs(spec, thinned(reach), batch, (samples, stats))
        acceptance = _by_position(stats) if record is None else record
        return Found(draft, drafter.name, tuple(reach), acceptance, samples.table(True), isinstance(drafter, Replayer))

    def deepened(self, draft: str, depth: int) -> str:
        """The same drafter looking `depth` ahead, where its options leave that open and it can."""
        if draft == "auto" or draft.endswith(".py"):
            return draft
        name, values = registry.split(draft)
        config = getattr(registry.get(name), "Config", None)
        if config is None or "depth" in values or "depth" not in {f.name for f in dataclasses.fields(config)}:
            return draft
        deeper = f"{draft}{',' if values else ':'}depth={depth}"
        try:
            self.llm.switch(deeper, control="fixed")
        except (BadInput, DrafterMismatch):
            return draft
        return deeper

    def probes(self, spec: str) -> bool:
        """Whether the drafter has nodes scored that are no guesses: it learns from them, and without them is another drafter."""
        self._start(spec)
        watch = Watch(self.llm.engine.drafter.drafter)
        self.llm.engine.controller = watch
        self._generate(self.prompts[:1])
        return watch.probing

    def guesses(self, spec: str, depth: int | None = None) -> Record:
        """What the drafter would have guessed at every place, `depth` deep or as deep as it likes."""
        depth = self._start(spec).depth if depth is None else min(depth, self._start(spec).depth)
        self._renew()
        answers = []
        for i, prompt in enumerate(self.prompts):
            self.tell(f"{spec}: what it guesses", i / len(self.prompts))
            lookout = Lookout(self.llm.engine.drafter.drafter, depth)
            self.llm.engine.controller = lookout
            [result] = self._generate([prompt], depth)
            answers.append(_answer(result, lookout, min(self.params.max_tokens, self.llm.max_model_len - len(prompt))))
        return Record(tuple(answers))

    def costs(self, spec: str, depths: Sequence[int], batch: int, into: tuple[Samples, Stats]) -> None:
        """Rounds of every depth, and plain ones, of groups of `batch` texts."""
        samples, stats = into
        groups = _groups(self.prompts, batch)
        without = self._read(groups)
        drafter = self._start(spec)
        control = Stretches(drafter, depths, Samples(), self.clock)
        begun = self.clock()
        self._timed(groups[0], control)  # first passes of every shape are slow
        calm = 0
        while self._on_gpu and (self.clock() - begun < WARMING or calm < CALM) and self.clock() - begun < LONG:
            captured = self._captured
            self._timed(groups[0], control)
            calm = calm + 1 if self._captured == captured else 0
        control = Stretches(drafter, depths, samples, self.clock)
        most, begun = PATIENCE * len(groups) * self.repeats, self.clock()
        for i in count():
            passed = self.clock() - begun
            early, worth = passed < QUICK, PLENTY if passed < QUICK else MANY if passed < SLOW else ENOUGH
            enough = i >= most or control.least >= worth
            if i >= len(groups) * self.repeats and enough and not (early and self._on_gpu):
                break
            self.tell(f"{spec}: what rounds cost, {batch} at a time", min(1.0, i / most))
            results = self._timed(groups[i % len(groups)], control, i % len(groups))
            read = [len(r.prompt_token_ids) for r in results]
            samples.contexts += read + [n + len(r.token_ids) for n, r in zip(read, results, strict=True)]
        control.close()
        samples.read(batch, without)
        rounds = samples.parts["other"]
        if not rounds.get((batch, 0)) or not any(rounds.get((batch, depth)) for depth in depths):
            raise BadInput("the answers are too short to measure rounds with and without guesses: raise --max-tokens")
        for name in ("rounds", "offered_at", "accepted_at"):
            setattr(stats, name, getattr(control.stats, name))

    def _read(self, groups: Sequence[list[list[int]]]) -> list[float]:
        """Seconds from the request to the first token, of every group, without a drafter that reads prompts, too."""
        self._start(PLAIN)
        samples = Samples()
        control = Stretches(self.llm.engine.drafter.drafter, (), samples, self.clock)
        params, self.params = self.params, dataclasses.replace(self.params, max_tokens=min(WARM, self.params.max_tokens))
        try:
            for group in [groups[0], *groups]:
                self._timed(group, control)
        finally:
            self.params = params
        return samples.parts["reading"][len(groups[0]), 0][1:]

    def _timed(self, group: list[list[int]], control: Stretches, which: int = 0) -> list[Result]:
        """One group of texts, which the drafter, if it can begin anew, has not met; what they take beside their rounds is the
        reading."""
        self._renew()
        self.llm.engine.controller = control
        control.wake(len(group), which)
        inside = control.inside
        self._wait()
        begun = self.clock()
        results = self._generate(group, control.most)
        self._wait()
        control.read(self.clock() - begun - (control.inside - inside))
        return results

    def _renew(self) -> None:
        """The drafter forgets what it met, if it can. One that plays answers back would have to be taught again."""
        if not isinstance(self.llm.engine.drafter.drafter, Replayer):
            self.llm.engine.drafter.renew()

    def _start(self, spec: str) -> Drafter:
        """The drafter, fresh, with a few tokens behind it."""
        self.llm.switch(spec, control="fixed")
        if isinstance(self.llm.engine.drafter.drafter, Replayer):
            self._teach(spec)
        drafter = self.llm.engine.drafter.drafter
        few = dataclasses.replace(self.params, max_tokens=min(WARM, self.params.max_tokens))
        self.llm.generate([list(self.prompts[0])], few)
        return drafter

    def _teach(self, spec: str) -> None:
        """Tell a drafter that plays answers back the plain ones."""
        if not self._plain:
            self.llm.switch(PLAIN)
            self._plain = [self._generate([prompt])[0] for prompt in self.prompts]
            self.llm.switch(spec, control="fixed")
        drafter = self.llm.engine.drafter.drafter
        assert isinstance(drafter, Replayer)
        for result in self._plain:
            drafter.record(result.prompt_token_ids, self.params, result.token_ids)

    def _generate(self, prompts: Sequence[Sequence[int]], depth: int | None = None) -> list[Result]:
        """Texts; `depth`: they are asked for with one, as those are of which is foretold what it brings. Drafters that choose how
        far to guess then go as far as that."""
        results = self.llm.generate([list(p) for p in prompts], dataclasses.replace(self.params, depth=depth))
        guard = self.llm.engine.drafter
        if guard.reason is not None:
            raise OutriderError(f"{guard.reason}; there is nothing to plan with it")
        bad = next((r for r in results if r.finish_reason == "error"), None)
        if bad is not None:
            raise OutriderError(bad.error or "the model gave no valid scores; try another --dtype or --device")
        return results

    @property
    def _captured(self) -> int:
        """Graphs that were captured so far."""
        return 0 if self._machine is None else self._machine.count

    @property
    def _machine(self) -> Machine | None:
        """Where rounds are captured."""
        stage: Stage | None = getattr(self.llm.engine.target, "stage", None)
        return None if stage is None else stage.machine

    @property
    def _on_gpu(self) -> bool:
        return self.llm.engine.target.device.type == "cuda"

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self.llm.engine.target.device)


def thinned(depths: Sequence[int]) -> list[int]:
    """Depths whose costs are measured: all up to four, every second one above, and the last; between them lines are drawn."""
    return [k for k in depths if k <= 4 or k % 2 == 0 or k == max(depths)]


def _by_position(stats: Stats) -> Chances:
    """From rounds that were run."""
    survival = [a / max(1, n) for a, n in zip(stats.accepted_at, stats.offered_at, strict=True)]
    return Chances.of_survival(survival, [n / max(1, stats.rounds) for n in stats.offered_at])


def _answer(result: Result, lookout: Lookout, limit: int) -> Answer:
    """What was guessed at each place of a text, against what came there."""
    text, places = result.token_ids, range(len(result.token_ids) - 1)
    none: list[tuple[int, int]] = []
    trees = [lookout.trees[i] if i < len(lookout.trees) else none for i in places]
    hits = tuple(right(tree, text[i + 1 :]) for i, tree in zip(places, trees, strict=True))
    rows = tuple(lookout.widths[i] if i < len(lookout.widths) else 0 for i in places)
    return Answer(hits, rows, lookout.depth, len(text), limit, len(result.prompt_token_ids))


def _groups(prompts: Sequence[Sequence[int]], size: int) -> list[list[list[int]]]:
    """Groups that are written together; where there are too few prompts, they are taken again."""
    many = [list(p) for p in prompts]
    if len(many) < size:
        many = [many[i % len(many)] for i in range(size)]
    return [many[i : i + size] for i in range(0, len(many) - size + 1, size)]
