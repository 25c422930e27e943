"""Do two servers write the same? Greedy texts, texts for a seed, log-probabilities; and does each repeat itself?

Their arithmetic is not ours to look into, so that rounding is judged from outside: a greedy text that turns where the two best
tokens were nearly even (as either server's log-probabilities show) may have been turned by it, any other may not.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ..errors import BadInput
from .compare import divergence
from .endpoint import REFUSED, Endpoint, Patience, Reply, Unanswered
from .prompts import PROMPTS

NEAR = 0.5
"""Nats between the two best tokens that rounding in bf16 may bridge, and by which a log-probability may differ for it."""
AGAIN = 4
"""Prompts that each server is asked twice."""
WARM = 0.8
HALF = "\ufffd"

Messages = list[dict[str, str]]
Tell = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to ask."""

    prompts: int = 20
    max_tokens: int = 20
    seed: int = 0

    def asked(self) -> Iterator[tuple[int, Messages]]:
        """Prompts by number; those beyond the list go round, and say which turn it is."""
        for i in range(self.prompts):
            turn = f" ({i // len(PROMPTS) + 1})" if i >= len(PROMPTS) else ""
            yield i, [{"role": "user", "content": PROMPTS[i % len(PROMPTS)] + turn}]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two texts part: the `character`, the `token` if one of the servers tells tokens, the `gap` between the two best there
    in nats (None: not told), and what each wrote from there on."""

    kind: str
    prompt: int
    character: int
    token: int | None
    gap: float | None
    near_tie: bool
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison. `rate`: share of the texts that differ, `first`: median character at which they part. For log-probabilities
    `compared` counts tokens, `differ` those off by more than rounding explains, `largest` and `mean` are nats. `verdict`: equal,
    rounding, differ, fault, or not compared (`note` says why)."""

    kind: str
    compared: int
    differ: int
    verdict: str
    near_ties: int = 0
    first: float | None = None
    largest: float | None = None
    mean: float | None = None
    note: str = ""

    @property
    def rate(self) -> float | None:
        return self.differ / self.compared if self.compared else None


@dataclass(slots=True)
class Report:
    """What was found. `ok`: nothing but rounding was, where the two promise the same."""

    first: Endpoint
    second: Endpoint
    lines: list[Line] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.errors and all(line.verdict != "fault" for line in self.lines)

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        servers = {name: {"url": e.url, "model": e.model} for name, e in (("endpoint", self.first), ("against", self.second))}
        lines = [dataclasses.asdict(line) | {"rate": line.rate} for line in self.lines]
        differences = [dataclasses.asdict(d) for d in self.differences]
        found = {"lines": lines, "differences": differences, "errors": self.errors, "seconds": self.seconds}
        return {"verdict": "same" if self.ok else "fault", **servers, **found}


def audit(first: Endpoint, second: Endpoint, plan: Plan, tell: Tell = lambda what, share: None) -> Report:
    """Ask both, compare everything. Requests that fail are noted; Ctrl-C passes through. Raises `Unanswered` for a server that is
    gone."""
    if plan.prompts < 1:
        raise BadInput(f"--prompts must be at least 1, got {plan.prompts}")
    started, report = time.perf_counter(), Report(first, second)
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": plan.max_tokens}
    tell("log-probabilities", 0.0)
    scored = [_ask(report, e, plan, {**greedy, "top_logprobs": 2}, optional=True) for e in (first, second)]
    tell("greedy texts", 0.4)
    plain = [_ask(report, e, plan, greedy) for e in (first, second)]
    _texts(report, "greedy", plain, scored, strict=True)
    tell("texts for a seed", 0.7)
    warm = [_ask(report, e, plan, {**greedy, "temperature": WARM, "seed": plan.seed}) for e in (first, second)]
    _texts(report, "seeded", warm, scored=[], strict=first.native and second.native)
    report.lines.append(_logprobs(first, second, scored))
    for name, endpoint, texts in (("endpoint, again", first, warm[0]), ("against, again", second, warm[1])):
        tell(name, 0.9)
        few = dataclasses.replace(plan, prompts=min(AGAIN, plan.prompts))
        more = _ask(report, endpoint, few, {**greedy, "temperature": WARM, "seed": plan.seed})
        _texts(report, name, [texts[: few.prompts], more], scored=[], strict=endpoint.native)
    report.seconds = time.perf_counter() - started
    return report


def _ask(report: Report, endpoint: Endpoint, plan: Plan, body: dict[str, Any], optional: bool = False) -> list[Reply | None]:
    """All answers; `optional`: a server that refuses is not to blame, and is asked no more. Raises `Unanswered` for one that is
    gone."""
    replies, patience = list[Reply | None](), Patience()
    for i, messages in plan.asked():
        more = {"seed": body["seed"] + i} if "seed" in body else {}
        try:
            replies.append(endpoint.ask(messages, **{**body, **more}))
            patience.heard()
        except Unanswered as error:
            if optional and error.status in REFUSED and not any(replies):
                return [None] * plan.prompts
            report.errors.append(str(error))
            patience.failed(error)
            replies.append(None)
        if optional and i == 0 and replies[0] is not None and not replies[0].places:
            return [None] * plan.prompts
    return replies


def _texts(
    report: Report, kind: str, sides: Sequence[list[Reply | None]], scored: Sequence[list[Reply | None]], strict: bool
) -> None:
    """Compare texts; `strict`: a difference that rounding does not explain is a fault."""
    found: list[Difference] = []
    compared = 0
    for i, (a, b) in enumerate(zip(*sides, strict=True)):
        if a is None or b is None:
            continue
        compared += 1
        if whole(a.text) != whole(b.text):
            witnesses = [side[i] for side in scored]
            found.append(_difference(kind, i, a, b, [w for w in witnesses if w is not None]))
    near = sum(d.near_tie for d in found)
    plain = "fault" if strict else "differ"
    verdict = plain if len(found) > near else "rounding" if found else "equal" if compared else "not compared"
    first = statistics.median(d.character for d in found) if found else None
    unseen = "no log-probabilities show how close it was" if strict and any(d.gap is None for d in found) else ""
    note = unseen if compared else "no answers to compare"
    line = Line(kind, compared, len(found), verdict, near, first, note=note)
    report.lines.append(line)
    report.differences += found


def whole(text: str) -> str:
    """Without half a character at its end, where an answer was cut off: some servers show it, some do not."""
    return text.rstrip(HALF)


def _difference(kind: str, prompt: int, a: Reply, b: Reply, witnesses: Sequence[Reply]) -> Difference:
    at = divergence([*map(ord, whole(a.text))], [*map(ord, whole(b.text))])
    assert at is not None
    token, gaps = None, list[float]()
    for reply in witnesses:
        place = _token(reply, at)
        if place is None or reply.text[:at] != a.text[:at]:
            continue
        token = place if token is None else token
        _, own, other = reply.places[place]
        gaps += [abs(own - other)] if other is not None else []
    gap = min(gaps, default=None)
    tails = (a.text[at : at + 40], b.text[at : at + 40])
    return Difference(kind, prompt, at, token, gap, gap is not None and gap <= NEAR, *tails)


def _token(reply: Reply, character: int) -> int | None:
    """The token that holds a character of the text, or comes next; None where tokens are not told or make up another text."""
    ends = list(accumulate(len(token) for token, _, _ in reply.places))
    if "".join(token for token, _, _ in reply.places)[: len(reply.text)] != reply.text:
        return None
    return next((i for i, end in enumerate(ends) if character < end), None)


def _logprobs(first: Endpoint, second: Endpoint, scored: Sequence[list[Reply | None]]) -> Line:
    """Of the tokens that both wrote, up to the first that differs."""
    lacking = [e.url for e, side in zip((first, second), scored, strict=True) if not any(side)]
    if lacking:
        return Line("logprobs", 0, 0, "not compared", note=f"{' and '.join(lacking)} gives none")
    gaps: list[float] = []
    for a, b in zip(*scored, strict=True):
        for (token, x, _), (other, y, _) in zip(a.places if a else (), b.places if b else (), strict=False):
            if token != other:
                break
            gaps.append(abs(x - y))
    if not gaps:
        return Line("logprobs", 0, 0, "not compared", note="no two answers begin with the same token")
    off = sum(gap > NEAR for gap in gaps)
    verdict = "fault" if off else "equal" if max(gaps) == 0 else "rounding"
    return Line("logprobs", len(gaps), off, verdict, largest=max(gaps), mean=statistics.fmean(gaps))
