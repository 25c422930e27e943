"""`outrider train`: a drafter for any model, from texts that the model writes itself."""

from __future__ import annotations

import json as jsonlib
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BadInput
from . import options as o
from .drafters import HELP
from .guard import say

if TYPE_CHECKING:
    from ..train.loop import Sign
    from ..train.run import Outcome, Plan

_TEXTS, _TRAINING = "Texts", "Training"
_TINY = "tiny"
_PLACES = {"--out", "--texts", "--data"}
"""Options whose values are paths."""
_SELDOM = 10.0
"""Seconds between lines where there is no terminal."""
Method = Annotated[
    str,
    typer.Argument(
        metavar="METHOD[:key=value,...]",
        help="What to train, with its options; 'help' lists all of them. ship/NAME, or a card.json, is trained as it was before.",
    ),
]
Out = Annotated[str | None, typer.Option(metavar="DIR", help="Where the drafter goes (default: among your own, by model).")]
Data = Annotated[
    list[str],
    typer.Option(
        metavar="FILE",
        help="Prompts of your own, .jsonl, .parquet or .txt (repeatable); the model answers them first.",
        rich_help_panel=_TEXTS,
    ),
]
Texts = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="Where the texts are kept (default: a directory that all methods share).", rich_help_panel=_TEXTS
    ),
]
Write = Annotated[int | None, typer.Option(min=1, help="Tokens that the model is to write.", rich_help_panel=_TEXTS)]
Together = Annotated[int | None, typer.Option(min=1, help="Texts at a time (16; on a GPU 1,024).", rich_help_panel=_TEXTS)]
Answer = Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.", rich_help_panel=_TEXTS)]
Code = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Share of programming tasks among the prompts.", rich_help_panel=_TEXTS)
]
Writers = Annotated[int, typer.Option(min=1, help="Processes that write texts at once, over all GPUs.", rich_help_panel=_TEXTS)]
Minutes = Annotated[float | None, typer.Option(min=0.0, help="Stop after this long; the same command goes on.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Train for so many steps.", rich_help_panel=_TRAINING)]
Tokens = Annotated[int | None, typer.Option(min=1, help="Train on so many tokens.", rich_help_panel=_TRAINING)]
Epochs = Annotated[
    float | None, typer.Option(min=1e-3, help="Go over the texts so many times (default: 3).", rich_help_panel=_TRAINING)
]
BatchTokens = Annotated[int | None, typer.Option(min=1, help="Tokens per pass.", rich_help_panel=_TRAINING)]
Accumulate = Annotated[int | None, typer.Option(min=1, help="Passes per step.", rich_help_panel=_TRAINING)]
Longest = Annotated[int | None, typer.Option(min=1, help="Cut texts to so many tokens.", rich_help_panel=_TRAINING)]
Rate = Annotated[float | None, typer.Option(min=1e-9, help="The highest learning rate.", rich_help_panel=_TRAINING)]
Check = Annotated[int | None, typer.Option(min=1, help="Steps between looks at held-out texts.", rich_help_panel=_TRAINING)]
Seed = Annotated[int, typer.Option(min=0, help="Same seed, same texts and same training.")]
Quick = Annotated[bool, typer.Option("--quick", help="Little of everything, to see whether it works.")]
Cache = Annotated[bool, typer.Option("--cache", help="Keep the model's states on disk: large.", rich_help_panel=_TRAINING)]
Keep = Annotated[
    bool,
    typer.Option("--keep", help="Keep the model's states in the device's memory for later epochs.", rich_help_panel=_TRAINING),
]
Gpus = Annotated[
    int, typer.Option(min=1, help="Train on so many GPUs of this machine, a process each.", rich_help_panel=_TRAINING)
]
Shard = Annotated[
    bool,
    typer.Option(
        "--shard",
        help="Spread the model's layers over the GPUs (one that does not fit beside the drafter).",
        rich_help_panel=_TRAINING,
    ),
]
Finish = Annotated[bool, typer.Option("--finish", help="Examine what there is, even if training is not over.")]

QUICK: dict[str, dict[str, Any]] = {
    "writing": {"tokens": 60_000, "answer": 128, "turn": 48, "held": 0.1},
    "recipe": {"batch_tokens": 4096, "longest": 256, "held_tokens": 8000},
    "exam": {"prompts": 12, "answer": 48},
}
SMALL: dict[str, dict[str, Any]] = {
    "writing": {"tokens": 20_000, "answer": 64, "turn": 8, "held": 0.1, "batch": 64},
    "recipe": {"batch_tokens": 2048, "rate": 2e-2, "epochs": 6.0, "longest": 128, "held_tokens": 4000},
    "exam": {"prompts": 16, "answer": 48},
}
"""For the tiny model, that tries all this out in a minute."""
NAMES: dict[str, dict[str, str]] = {
    "writing": {"write": "tokens", "together": "batch", "answer": "answer", "code": "code"},
    "recipe": {n: n for n in ("steps", "tokens", "epochs", "batch_tokens", "accumulate", "longest", "rate", "check")},
}
"""Which options are which settings."""
TOGETHER = {"cpu": 16, "cuda": 1024}
"""Texts at a time, unless asked otherwise."""
STAGES = {
    "texts": "the texts are not all written yet",
    "training": "training is not over yet",
    "examination": "the drafter is trained but not examined yet",
}


def train(
    method: Method,
    model: o.Model = o.DEFAULT_MODEL,
    out: Out = None,
    data: Data = [],  # noqa: B006 - typer copies the default
    texts: Texts = None,
    write: Write = None,
    together: Together = None,
    answer: Answer = None,
    code: Code = None,
    writers: Writers = 1,
    minutes: Minutes = None,
    steps: Steps = None,
    tokens: Tokens = None,
    epochs: Epochs = None,
    batch_tokens: BatchTokens = None,
    accumulate: Accumulate = None,
    longest: Longest = None,
    rate: Rate = None,
    check: Check = None,
    seed: Seed = 0,
    quick: Quick = False,
    cache: Cache = False,
    keep: Keep = False,
    finish: Finish = False,
    gpus: Gpus = 1,
    shard: Shard = False,
    device: o.Device = "auto",
    dtype: o.Dtype = "auto",
    threads: o.Threads = None,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Train a drafter for a model, with texts that the model writes itself. Three steps: texts, training, examination on held-out
    prompts; interrupted at any of them, the same command goes on. --draft auto finds what came of it.

    --model tiny is a random model for trying this out."""
    given = dict(locals())
    if method == HELP:
        typer.echo(describe_methods())
        return
    until = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    _use(threads)
    plan = _plan(given)
    _warn(plan)
    if gpus > 1 and not ranked():
        raise typer.Exit(_several(gpus, device))
    report(_run(plan, until), json)


def _use(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _warn(plan: Plan) -> None:
    from ..train.renewal import WARNING
    from ..train.run import changes_target

    if changes_target(plan.method) and os.environ.get("RANK", "0") == "0":
        say("warning: " + WARNING.format(model=plan.model))


def ranked() -> bool:
    """Whether this process is one of several, and was told which."""
    return "WORLD_SIZE" in os.environ


def _several(gpus: int, device: str) -> int:
    from ..train import launch

    launch.check(gpus, device)
    return launch.launch(sys.argv[1:], gpus)


def _plan(given: dict[str, Any]) -> Plan:
    """From the command's parameters, by name. All that can be wrong with them is found before a model is loaded."""
    from ..train import again
    from ..train.run import Plan
    from ..train.run import method as known

    method, base = given["method"], SMALL if given["model"] == _TINY else QUICK if given["quick"] else {}
    if again.is_card(method):
        card = again.read(method)
        method, base = again.spec(card), again.settings(card)
    known(method)
    asked = {
        part: {field: given[name] for name, field in names.items() if given[name] is not None} for part, names in NAMES.items()
    }
    sizes = {part: {"seed": given["seed"]} | base.get(part, {}) | asked.get(part, {}) for part in again.KINDS}
    places: dict[str, Any] = {n: None if given[n] is None else Path(os.path.expanduser(given[n])) for n in ("out", "texts")}
    for name, place in places.items():
        if place is not None and place.exists() and not place.is_dir():
            raise BadInput(f"--{name} {place} is a file; give a directory")
    sizes["writing"]["files"] = tuple(given["data"])
    sizes["writing"].setdefault("batch", TOGETHER["cuda" if on_gpu(given["device"]) else "cpu"])
    return Plan(
        method,
        given["model"],
        **{part: kind(**sizes[part]) for part, kind in again.KINDS.items()},
        command=shlex.join(["outrider", *shown(sys.argv[1:])]),
        **places,
        **{name: given[name] for name in ("device", "dtype", "cache", "keep", "finish", "shard", "writers")},
    )


def shown(arguments: Sequence[str]) -> list[str]:
    """A command line for others to read, without directories."""
    from ..train.card import reduced

    out: list[str] = []
    for before, argument in zip(("", *arguments), arguments, strict=False):
        parts = re.split(r"([=,])", argument)
        places = before if len(parts) == 1 else parts[0]
        out.append("".join(Path(part).name if part and places in _PLACES else reduced(part) for part in parts))
    return out


def on_gpu(device: str) -> bool:
    """Whether a device of this name is a GPU."""
    import torch

    return torch.cuda.is_available() if device == "auto" else device.startswith("cuda")


def _run(plan: Plan, until: float) -> Outcome:
    from ..train.run import Training

    with progress() as (tell, show):
        try:
            return Training(plan, tell, show, until).run()
        except KeyboardInterrupt:
            say("what was done is kept: the same command goes on from there")
            raise


def report(outcome: Outcome, json: bool) -> None:
    """What came of it; for people, with what to do next."""
    from ..train.card import table

    if json:
        typer.echo(jsonlib.dumps({"stage": outcome.stage, "out": str(outcome.out), "card": outcome.card}))
        return
    if outcome.card is None and outcome.stage == "done":
        return  # one of several processes; the first one reports
    if outcome.card is None:
        say(f"{STAGES.get(outcome.stage, outcome.stage)}: run the same command again, or with --finish to take what there is")
        return
    for line in table(outcome.card["results"]):
        typer.echo("  ".join(f"{cell:>{width}}" for cell, width in zip(line, (4, 12, 10, 8, 10), strict=True)))
    if outcome.card.get("target_changed_from"):
        place = outcome.out / outcome.card["model"]
        typer.echo(f"the new target is in {place}, which is ANOTHER MODEL than {outcome.card['target_changed_from']['model']};")
        typer.echo(f"its drafter is in {outcome.out}; --draft auto finds it with --model {place}")
        return
    typer.echo(f"the drafter is in {outcome.out}; --draft auto finds it, and so does --draft {outcome.card['method']}")


def describe_methods() -> str:
    """Every method that can be trained, with its training options and their defaults."""
    from ..registry import get
    from ..train.run import trainable
    from .drafters import first_line, options

    lines = []
    for name in trainable():
        lines.append(f"{name}: {first_line(get(name))}")
        training = getattr(get(name), "Training", None)
        if training is not None:
            lines += [f"    {line}" for line in options(training)]
    return "\n".join(lines)


@contextmanager
def progress() -> Iterator[tuple[Callable[[str, float], None], Callable[[Sign], None]]]:
    """A bar on stderr, or a line now and then where that is no terminal: what hears of texts and examination, and of steps."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        told: dict[str, float] = {}

        def tell(what: str, share: float) -> None:
            kind, now = what.partition(":")[0], time.monotonic()
            if now - told.get(kind, -_SELDOM) >= _SELDOM:
                told[kind] = now
                say(f"{share:4.0%} {what}")

        yield tell, lambda sign: tell(described(sign), sign.step / sign.total)
        return
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def update(what: str, share: float) -> None:
            bar.update(task, description=what, completed=share)

        yield update, lambda sign: update(described(sign), sign.step / sign.total)


def described(sign: Sign) -> str:
    """One line: step, loss, acceptance by position (of the batch, then of held-out texts), speed, time left."""
    row = " ".join(f"{x:.2f}" for x in sign.acceptance)
    held = f" (held out {' '.join(f'{x:.2f}' for x in sign.held)})" if sign.held else ""
    left = f"{sign.left / 60:.0f} min" if sign.left > 90 else f"{max(0, sign.left):.0f} s"
    where = f"training: step {sign.step} of {sign.total}, loss {sign.loss:.3f}"
    return f"{where}, acceptance {row}{held}, {sign.speed:,.0f} tok/s, {left} left"
