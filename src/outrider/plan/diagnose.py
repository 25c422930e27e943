"""Why so few guesses are right: what can be told from a pair of models, from a benchmark's result, or from a short run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from ..errors import OutriderError
from ..models import weights
from ..models.gguf_file import read_header
from .acceptance import Answer, Chances, Record
from .read import Measured, Report

LOW = 0.4
"""Share of right guesses below which something is to be looked for."""
APART = 0.6
"""A kind of text that has less than this part of the best one's share is a domain the drafter does not know."""
CUT = 0.25
"""Share of rounds with every guess right above which the depth is too small."""
FADES = 0.75
"""The last third of the texts, or deep guesses, should have at least this part of what the first has."""
SILENT = 0.5
"""Share of rounds without any guess that is worth a word."""
WARM = 0.1
"""Share of right guesses that a temperature may cost without a word."""
FEW = 30
"""Guesses that tell something."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """One thing looked at: `remedy` says what to try next, where something is wrong; `note` what is worth knowing."""

    name: str
    value: str
    remedy: str | None = None
    note: str | None = None


def of_records(records: Mapping[str, Record], cooler: Mapping[str, Record] | None = None) -> Iterator[Symptom]:
    """From texts by workload, as `Measurer.guesses` judges them; `cooler`: the same at temperature 0."""
    tested = {name: sum(len(_tested(a)) for a in record.answers) for name, record in records.items()}
    rates = {name: record.rate for name, record in records.items() if tested[name] >= FEW}
    for name, record in records.items():
        chances = record.chances
        value = f"{record.rate:.0%} of the guesses right, {chances.accept[0]:.0%} of the first ones"
        if name in rates:
            yield _domain(name, value, rates, chances.offer[0])
        else:
            note = f"{tested[name]} guesses are too few to judge: take more or longer texts"
            yield Symptom(f"domain: {name}", value, note=note)
    together = Record(tuple(a for record in records.values() for a in record.answers))
    yield _along_the_text(together)
    places = sum(a.tokens - 1 for a in together.answers)
    yield _along_the_look_ahead(together.chances, places, "texts")
    yield _cut(_full(together), together.depth)
    if cooler is not None:
        yield _temperature(together.rate, Record(tuple(a for r in cooler.values() for a in r.answers)).rate)


def of_report(report: Report, draft: str | None = None) -> Iterator[Symptom]:
    """From a benchmark's result, drafter by drafter (or of one)."""
    drafts = [draft] if draft is not None else list(dict.fromkeys(row.draft for row in report.rows))
    for name in drafts:
        rows = [row for row in report.rows if row.draft == name]
        for row in rows:
            beside = [r for r in rows if (r.temperature, r.batch, r.depth) == (row.temperature, row.batch, row.depth)]
            yield from _row(row, {r.workload: r.chances.rate for r in beside if r.tested >= FEW})


def _row(row: Measured, rates: Mapping[str, float]) -> Iterator[Symptom]:
    where = f"{row.draft} on {row.workload}" + (f" ({row.where})" if row.where else "")
    value = f"{row.chances.rate:.0%} of the guesses right, {row.chances.accept[0]:.0%} of the first ones, tau {row.tau:.2f}"
    if row.note:
        yield Symptom(where, value, f"{row.note}: mend that first")
        return
    if row.tested < FEW:
        yield Symptom(where, value, note=f"{row.tested:.0f} guesses are too few to judge: measure more prompts")
        return
    found = _domain(row.workload, value, rates, row.chances.offer[0])
    yield Symptom(where, found.value, found.remedy, found.note)
    yield _along_the_look_ahead(row.chances, row.rounds, where)
    if row.depth is not None:
        yield _cut(row.accepted_share_at_end, row.depth, where)
    if row.temperature > 0 and row.chances.rate < LOW:
        yield Symptom(
            f"temperature, {where}",
            f"{row.temperature:g}",
            "measure once more with --temperature 0: if far more guesses are right then, the text itself is hard to foretell",
        )


def _domain(name: str, value: str, rates: Mapping[str, float], offered: float) -> Symptom:
    """One kind of text beside the others."""
    best = max(rates.values())
    seldom = f"guesses are made in {offered:.0%} of the rounds" if offered < SILENT else None
    if rates[name] < APART * best and best >= LOW:
        return Symptom(
            f"domain: {name}",
            value,
            f"the drafter does not know such texts (others reach {best:.0%}): train one on them (outrider train), take one that "
            "copies from the context if they repeat it, or leave speculation off there",
            seldom,
        )
    if rates[name] < LOW:
        return Symptom(
            f"domain: {name}",
            value,
            "few guesses are right: look at the other findings; a draft of the same family that was taught the same format, or "
            "one trained for this model (outrider train), is the way up",
            seldom,
        )
    return Symptom(f"domain: {name}", value, note=seldom)


def _along_the_text(record: Record) -> Symptom:
    """Whether guesses get worse where the context is long."""
    spots = sorted((a.prompt + t, right > 0) for a in record.answers for t, right in _tested(a))
    third = len(spots) // 3
    if third < FEW:
        return Symptom("context length", f"{len(spots)} guesses are too few to compare", note="more or longer texts would tell")
    first, last = spots[:third], spots[-third:]
    begin, end = (sum(hit for _, hit in part) / third for part in (first, last))
    value = f"first guesses right: {begin:.0%} up to {first[-1][0]:,} tokens, {end:.0%} from {last[0][0]:,} on"
    remedy = "the draft was probably trained on shorter texts: train it on longer ones, or speculate less far in long contexts"
    return Symptom("context length", value, remedy if end < FADES * begin else None)


def _tested(answer: Answer) -> list[tuple[int, int]]:
    """Places that had a guess, with how many were right there."""
    return [(t, right) for t, (right, rows) in enumerate(zip(answer.right, answer.rows, strict=True)) if rows]


def _along_the_look_ahead(chances: Chances, rounds: int, where: str) -> Symptom:
    """Whether a drafter loses the thread after a few guesses, as far as enough of `rounds` rounds came so far."""
    tested = accumulate((rounds * chances.offer[0], *chances.accept), mul)
    firm = [a for a, n in zip(chances.accept, tested, strict=False) if n >= FEW] or [chances.accept[0]]
    shown = ", ".join(f"{a:.0%}" for a in firm)
    fading = next((i for i, a in enumerate(firm[1:], 2) if a < FADES * firm[0]), None)
    name = f"look-ahead, {where}"
    if fading is None or firm[0] < LOW:
        return Symptom(name, f"guess by guess, if those before were right: {shown}")
    remedy = (
        f"from guess {fading} on they are much worse than the first: a smaller depth costs little, or train with more steps "
        "ahead, so that the drafter learns to follow its own guesses"
    )
    return Symptom(name, f"guess by guess, if those before were right: {shown}", remedy)


def _full(record: Record) -> float:
    """Share of places, with room ahead, whose guesses were right to the last."""
    spots = [right >= a.depth for a in record.answers for t, right in _tested(a) if a.tokens - t - 1 > a.depth]
    return sum(spots) / len(spots) if spots else 0.0


def _cut(share: float, depth: int, where: str = "texts") -> Symptom:
    """Whether good guesses are cut off by the depth."""
    value = f"all {depth} guesses right in {share:.0%} of the rounds"
    remedy = f"the depth cuts off good guesses: raise it (depth={2 * depth}), and let the controller say how far"
    return Symptom(f"depth, {where}", value, remedy if share > CUT else None)


def _temperature(warm: float, cold: float) -> Symptom:
    """What drawing costs."""
    value = f"{warm:.0%} of the guesses right, {cold:.0%} at temperature 0"
    remedy = (
        "the temperature costs guesses: lower it, or narrow the choice (top_p, min_p); keep the coupled rule, under which drafts "
        "draw with the same noise as the model"
    )
    return Symptom("temperature", value, remedy if warm < cold - WARM else None)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft model of its own, as far as acceptance depends on it. `templates`: chat templates, empty where there
    is none, None where it cannot be told; `kept`: the dtype in which the draft's files have it."""

    translated: bool
    templates: tuple[str | None, str | None]
    dtypes: tuple[str, str]
    kept: str
    quantize: str
    contexts: tuple[int, int]


def of_pair(pair: Pair) -> Iterator[Symptom]:
    """What can be told without a run."""
    if pair.translated:
        remedy = "a draft with the model's own tokenizer: in translation guesses agree less often, and drafting takes longer"
        yield Symptom("tokenizer", "another one than the model's, guesses are translated", remedy)
    else:
        yield Symptom("tokenizer", "the model's own")
    yield _template(*pair.templates)
    yield _numbers(pair)
    long, short = pair.contexts
    note = (
        f"texts longer than {short:,} tokens get no guesses; a draft trained for longer ones would go on"
        if short < long
        else None
    )
    yield Symptom("context", f"draft {short:,}, model {long:,} tokens", note=note)


def _template(target: str | None, draft: str | None) -> Symptom:
    """Whether both were taught the same frame around a conversation."""
    if target is None or draft is None:
        return Symptom("chat template", "not compared", note="the draft's files do not tell")
    if target and not draft:
        remedy = "take the draft's chat (instruct) version: this one never saw the format in which the model is asked"
        return Symptom("chat template", "the model has one, the draft has none", remedy)
    if draft and not target:
        remedy = "the model is a plain one: a plain draft of the same family suits it better than a chat version"
        return Symptom("chat template", "the draft has one, the model has none", remedy)
    if target.split() != draft.split():
        remedy = (
            "the two were taught different formats: a draft of the same family and generation, or training it (outrider train)"
        )
        return Symptom("chat template", "the two differ", remedy)
    return Symptom("chat template", "the same" if target else "neither has one")


def _numbers(pair: Pair) -> Symptom:
    """Whether the two are computed alike."""
    target, draft = pair.dtypes
    value = f"draft {draft}, model {target}" + (f" with {pair.quantize} weights" if pair.quantize != "none" else "")
    if target != draft:
        return Symptom("numbers", value, f"run both in {target}: near-ties between tokens fall differently otherwise")
    if pair.quantize != "none":
        return Symptom("numbers", value, note="a draft trained for the unrounded model may agree a little less")
    lost = pair.kept not in ("", draft) and draft != "float32"
    note = f"the draft's files have {pair.kept}; if few guesses are right, try --dtype {pair.kept}" if lost else None
    return Symptom("numbers", value, note=note)


def template_of(name: str) -> str | None:
    """The chat template in a model's files, empty where there is none, None where there is no telling. Loads nothing."""
    try:
        source = weights.resolve(name)
        if source.path is None:
            return None
        if source.kind != "directory":
            return str(read_header(source.path).get("tokenizer.chat_template", str, ""))
        own = source.path / "chat_template.jinja"
        if own.is_file():
            return own.read_text(encoding="utf-8")
        return _text(_read(source.path / "tokenizer_config.json").get("chat_template"))
    except (OutriderError, OSError, ValueError):
        return None


def dtype_of(name: str) -> str:
    """In which dtype a model's directory says its numbers are; empty where it does not."""
    path = Path(name).expanduser() / "config.json"
    try:
        found = _read(path)
    except (OSError, ValueError):
        return ""
    return str(found.get("dtype") or found.get("torch_dtype") or "").removeprefix("torch.")


def _read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _text(found: Any) -> str:
    """A template, or the default one of several."""
    if isinstance(found, Sequence) and not isinstance(found, str):
        named = {str(t.get("name")): str(t.get("template", "")) for t in found if isinstance(t, dict)}
        return named.get("default", next(iter(named.values()), ""))
    return str(found or "")
