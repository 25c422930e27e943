"""`outrider plan`: will speculation pay, how deep, at which batch, on which card, and with which drafter?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import BadInput, OutriderError
from . import options as o
from .audit import progress
from .bundle import check_file
from .drafters import AUTO, check_draft
from .outlook import Result, report
from .workloads import Workloads

if TYPE_CHECKING:
    from ..plan.gather import Place
    from ..plan.outlook import Case

MOST = 10**9
"""Of texts, and of their tokens: no card will have room for more."""
From = Annotated[
    str | None, typer.Option("--from", metavar="RESULT.json", help="Acceptance and costs from outrider bench --output.")
]
Acceptance = Annotated[float | None, typer.Option(help="Share of guesses taken to be right, 0 to 1.")]
Task = Annotated[str | None, typer.Option(help="Take the published share for code, summarise, creative or question.")]
Drafts = Annotated[list[str], typer.Option("--draft", metavar="SPEC", help="A drafter to plan with (repeatable; default: auto).")]
Depths = Annotated[str, typer.Option(metavar="LIST", help="Depths to weigh, like 1-12 or 2,4,8.")]
Batches = Annotated[
    str | None, typer.Option("--batch", metavar="LIST", help="Requests at a time, like 1,4,16 (default: 1; on a card 1,4,16,64).")
]
CardName = Annotated[str | None, typer.Option("--card", help="Plan for this card from its data sheet: H100, L4, RTX4090, ...")]
Requests = Annotated[
    int | None, typer.Option(min=1, max=MOST, help="Texts that must have room at once (default: the largest batch).")
]
Length = Annotated[int, typer.Option(min=2, max=MOST, help="Tokens of a text, prompt and answer together.")]
Load = Annotated[float | None, typer.Option(min=1, metavar="TOKENS", help="Tokens to be written per day.")]
Price = Annotated[float | None, typer.Option(min=0, help="Of a GPU hour, in any currency.")]
Limit = Annotated[int, typer.Option(min=1, help="Prompts per workload, where something is measured.")]
Output = Annotated[str | None, typer.Option(metavar="FILE", help="Write the JSON object to a file as well.")]


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be planned, read from the command line."""

    model: str
    drafts: tuple[str, ...]
    depths: tuple[int, ...]
    batches: tuple[int, ...]
    source: str | None
    rate: float | None
    label: str
    workloads: tuple[str, ...]
    sizes: tuple[int, int, float]
    """Prompts per workload, tokens per answer, temperature."""


def plan(
    model: o.Model = o.DEFAULT_MODEL,
    source: From = None,
    acceptance: Acceptance = None,
    task: Task = None,
    draft: Drafts = [],  # noqa: B006 - typer copies the default
    depths: Depths = "1-12",
    batch: Batches = None,
    card: CardName = None,
    requests: Requests = None,
    length: Length = 1024,
    load: Load = None,
    price: Price = None,
    workload: Workloads = [],  # noqa: B006
    limit: Limit = 1,
    max_tokens: o.MaxTokens = 64,
    temperature: o.Temperature = 0.0,
    device: o.Device = "auto",
    dtype: o.Dtype = "auto",
    quantize: o.Quantize = "none",
    threads: o.Threads = None,
    json: o.Json = False,
    output: Output = None,
    debug: o.Debug = False,
) -> None:
    """Foretell speed-up by drafter, depth and batch, and say when not to speculate.

    Chances come from --from, --acceptance or --task, else they are measured now; costs from --card's data sheet, from the result,
    or from a short measurement on this machine. On a card, a config.json is enough: no weights are needed."""
    _check_together(card, requests, load, price)
    batches = numbers(batch, "--batch") if batch is not None else (1, 4, 16, 64) if card is not None else ()
    rate, label = assumption(source, acceptance, task)
    counts = (limit, max_tokens, temperature)
    ask = Ask(model, tuple(draft), numbers(depths, "--depths"), batches, source, rate, label, tuple(workload), counts)
    _check_drafts(ask, card)
    if output is not None:
        check_file("--output", Path(output))
    place = _place(ask, card, (dtype, quantize), length)
    options = o.ModelOptions(model, "none", "coupled", device, dtype, None, threads, prefix_cache=False, quantize=quantize)
    result = Result(model)
    cases = _cases(ask, place, options, result)
    cases = _judge(ask, place, cases, result)
    _outlooks(ask, cases, result)
    if place is not None:
        _memory(place, cases, (requests or max(batches, default=1), length), result)
    if load is not None:
        _days(load, price, result)
    report(result, json, output)


def _check_drafts(ask: Ask, card: str | None) -> None:
    """`BadInput` for drafters that cannot be planned, and for a model that cannot be measured."""
    for spec in ask.drafts:
        check_draft(spec)
        if spec == "none":
            raise BadInput("none makes no guesses, and every plan is held against it already: leave it out")
    if card is None and ask.source is None and Path(ask.model).name == "config.json":
        raise BadInput(f"{ask.model} has no weights to measure: name a --card to plan for, or give the whole model")


def _check_together(card: str | None, requests: int | None, load: float | None, price: float | None) -> None:
    """`BadInput` for an option without the one that gives it a meaning."""
    if card is None and requests is not None:
        raise BadInput("--requests asks what has room on a card: name it with --card")
    if load is None and price is not None:
        raise BadInput("--price is that of GPU hours for a load: give the tokens per day with --load")
    if not all(math.isfinite(value) for value in (load, price) if value is not None):
        raise BadInput("--load and --price must be finite numbers")


def numbers(text: str, option: str) -> tuple[int, ...]:
    """`1-3,8` -> (1, 2, 3, 8). Raises `BadInput` for anything else, and for numbers below 1 or above 1,024."""
    found: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        try:
            first, last = int(low), int(high if dash else low)
        except ValueError:
            first, last = 0, 0
        if not 1 <= first <= last <= 1024:
            raise BadInput(f"{option} {text!r} is no list of numbers from 1 to 1024, like 1-12 or 1,4,16")
        found |= set(range(first, last + 1))
    return tuple(sorted(found))


def assumption(source: str | None, acceptance: float | None, task: str | None) -> tuple[float | None, str]:
    """The share of right guesses that is to be taken for granted, if any, and what to call it."""
    from ..plan import tasks

    given = [n for n, v in (("--from", source), ("--acceptance", acceptance), ("--task", task)) if v is not None]
    if len(given) > 1:
        raise BadInput(f"{' and '.join(given)} exclude each other: each says how good guesses are; give one")
    if task is not None:
        found = tasks.find(task)
        return found.middle, f"{task} ({found.low:.0%} to {found.high:.0%} published)"
    if acceptance is not None and not 0 <= acceptance <= 1:
        raise BadInput(f"--acceptance is a share between 0 and 1, got {acceptance:g}")
    return acceptance, "" if acceptance is None else f"{acceptance:.0%} assumed"


def _place(ask: Ask, card: str | None, kept: tuple[str, str], length: int) -> Place | None:
    if card is None:
        return None
    from ..plan import cards
    from ..plan.gather import Place, form
    from ..plan.sizes import size

    return Place(cards.find(card), size(ask.model), form(*kept), length)


def _cases(ask: Ask, place: Place | None, options: o.ModelOptions, result: Result) -> list[Case]:
    """What is known of every drafter, measured where it must be."""
    from ..plan import gather
    from ..plan.read import read

    if ask.source is not None:
        report = read(ask.source)
        result.notes += report.notes
        if place is None:
            result.model = report.model or result.model
        elif report.model not in ("", place.target.name):
            result.notes.append(f"chances are those measured with {report.model}; with {place.target.name} they may be others")
        loose = sorted({r.draft for r in report.rows if r.depth is None})
        if loose:
            result.notes.append(
                f"{', '.join(loose)}: measured under a controller that changed the depth; --control fixed tells more of each"
            )
        return gather.from_report(report, ask.drafts, ask.depths, place)
    if place is not None and ask.rate is not None:
        return gather.assumed(ask.drafts, ask.rate, ask.label, place)
    return _measured(ask, place, options)


def _measured(ask: Ask, place: Place | None, options: o.ModelOptions) -> list[Case]:
    """A short measurement here; a rate that was given stands in for what was guessed."""
    from dataclasses import replace

    from ..bench import workloads
    from ..config import SamplingParams
    from ..plan import gather
    from ..plan.acceptance import Chances
    from ..plan.measure import Measurer
    from .answer import loaded

    limit, tokens, temperature = ask.sizes
    chosen = workloads.gather(ask.workloads, limit)
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=0)
    cases: list[Case] = []
    with loaded(options) as llm, progress() as tell:
        prompts = [p.encode(llm.tokenizer) for w in chosen for p in w.prompts]
        measurer = Measurer(llm, prompts, params, tell=tell)
        for draft in ask.drafts or (AUTO,):
            found = measurer.run(draft, ask.depths, ask.batches or (1,))
            cases += gather.from_found(found, [(w.name, len(w.prompts)) for w in chosen], place)
    if ask.rate is None:
        return cases
    once = {case.draft: case for case in cases}
    return [replace(case, acceptance=Chances((ask.rate,)), workload=ask.label) for case in once.values()]


def _judge(ask: Ask, place: Place | None, cases: list[Case], result: Result) -> list[Case]:
    """Pairs of target and draft model, by size and cost. The cases worth planning: a pair that cannot pay is left out, unless its
    guesses were measured."""
    from ..plan import gather, pairs
    from ..plan.sizes import size

    try:
        target = place.target if place is not None else size(result.model)
    except OutriderError as error:
        result.notes.append(f"the size of {result.model} is not known, so no draft is recommended: {error}")
        return cases
    result.wanted = pairs.wanted(target)
    if target.experts:
        result.notes.append(f"{target.name} has {target.experts} experts per layer: every guess may need others, and costs more")
    refused = set()
    for case in {case.draft: case for case in cases}.values():
        own = gather.model_of(case.draft)
        if own is not None:
            judged = pairs.judge(target, own, case.costs, ask.depths, ask.batches[0] if ask.batches else 1)
            result.pairs.append((case.draft, judged))
            refused |= {case.draft} if judged.refused else set()
    return [case for case in cases if case.costs.measured or case.draft not in refused]


def _outlooks(ask: Ask, cases: list[Case], result: Result) -> None:
    """Every case's plan, at the batches asked for (where others of its drafter and workload do not know them better), or at the
    one it was measured at."""
    from ..plan.costs import Table
    from ..plan.outlook import outlook

    def known(case: Case) -> tuple[int, ...]:
        return tuple(sorted(case.costs.parts["verify"])) if isinstance(case.costs, Table) else ()

    for case in cases:
        mine, beside = known(case), [c for c in cases if (c.draft, c.workload) == (case.draft, case.workload)]
        asked = [b for b in ask.batches if b in mine or not any(b in known(c) for c in beside)]
        batches = asked if ask.batches else mine[-1:] or (1,)
        if batches:
            result.outlooks.append(outlook(case, ask.depths, batches))


def _memory(place: Place, cases: list[Case], load: tuple[int, int], result: Result) -> None:
    """Whether everything has room on the card, for each drafter and for none."""
    from ..plan import gather
    from ..plan.fit import fit

    if 0 < place.target.context < load[1]:
        result.notes.append(f"{place.target.name} was made for texts of {place.target.context:,} tokens, not of {load[1]:,}")
    result.fits.append(("none", fit(place.card, place.target, None, place.form, load)))
    for draft in dict.fromkeys(case.draft for case in cases):
        own = gather.tenth(place.target) if draft == gather.TENTH else gather.model_of(draft)
        if own is not None:
            result.fits.append((draft, fit(place.card, place.target, own, place.form, load)))


def _days(load: float, price: float | None, result: Result) -> None:
    """What a day's tokens take, for every plan and batch."""
    from ..plan.fit import day

    for one in result.outlooks:
        for a in one.advice:
            name = f"{one.draft}, {one.workload}"
            result.days.append((name, a.batch, day(load, a.plain_tokens_per_second, a.tokens_per_second, price)))
