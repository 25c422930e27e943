"""`outrider tune`: which options make a drafter fast on this model and this machine?"""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BadInput
from . import options as o
from .audit import progress
from .guard import say

if TYPE_CHECKING:
    from ..bench.tune import Best, Sizes
    from ..bench.workloads import Workload
    from ..drafters._tuned import Tuned

Method = Annotated[str, typer.Argument(metavar="METHOD", help="The drafter to tune: layer_skip or early_exit.")]
Workloads = Annotated[
    list[str],
    typer.Option(
        "--workload",
        metavar="NAME|FILE",
        help="A workload by name ('all' for every one) or a file, as of outrider bench (repeatable; default: its six). "
        "Half of the prompts are held out for the verdict.",
    ),
]
Trials = Annotated[int, typer.Option(min=1, help="Sets of options to try, those of earlier calls included.")]
Minutes = Annotated[float | None, typer.Option(min=0, help="End the search after so long.")]
Quick = Annotated[bool, typer.Option("--quick", help="A first impression: ten trials, two prompts, short answers.")]
Limit = Annotated[int, typer.Option(min=2, help="How many prompts to use, in all.")]
Repeats = Annotated[int, typer.Option(min=1, help="Pairs of runs, plain and drafted, for the verdict.")]
Output = Annotated[
    str | None, typer.Option(metavar="PATH", help="Write the result here (default: where the drafter finds it by itself).")
]
Seed = Annotated[int, typer.Option(min=0, help="Of the search and of every request.")]


def tune(
    method: Method,
    model: o.Model = o.DEFAULT_MODEL,
    workload: Workloads = [],  # noqa: B006 - typer copies the default
    trials: Trials = 60,
    minutes: Minutes = None,
    quick: Quick = False,
    limit: Limit = 8,
    max_tokens: o.MaxTokens = 48,
    temperature: o.Temperature = 0.0,
    repeats: Repeats = 3,
    seed: Seed = 0,
    device: o.Device = "auto",
    dtype: o.Dtype = "auto",
    quantize: o.Quantize = "none",
    threads: o.Threads = None,
    output: Output = None,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Search for a drafter's best options by measured tokens per second, and keep them where the drafter finds them.

    What loses against plain decoding is not put to use. Ctrl-C keeps all trials: the same command goes on from there."""
    from ..bench import tune as tuning

    tuning.optuna()
    tuning.tunable(method)
    sizes = tuning.Sizes(trials, minutes, limit, max_tokens, temperature, repeats)
    sizes = tuning.quick(sizes) if quick else sizes
    halves = tuning.halves(_workloads(workload), sizes.prompts)
    if output is not None and (Path(output).is_dir() or not Path(output).parent.is_dir()):
        raise BadInput(f"--output {output}: give a file in a directory that exists")
    options = o.ModelOptions(model, "none", "coupled", device, dtype, None, threads, prefix_cache=False, quantize=quantize)
    found, path = _search(options, (method, halves, sizes, seed), output)
    if json:
        typer.echo(jsonlib.dumps(jsonlib.loads(path.read_text()) | {"path": str(path)}))
    else:
        show(found, path)


def _workloads(names: list[str]) -> list[Workload]:
    from ..bench import workloads as known

    return list(known.gather(names))


def _search(
    options: o.ModelOptions, what: tuple[str, tuple[Workload, Workload], Sizes, int], output: str | None
) -> tuple[Tuned, Path]:
    """Search and verdict, written to a file. Ctrl-C says what there is by then."""
    from ..bench.provenance import provenance
    from ..bench.tune import Tuner
    from ..drafters import _tuned
    from .answer import loaded

    method, halves, sizes, seed = what
    with loaded(options) as llm, progress() as tell:
        tuner = Tuner(llm, method, halves, sizes, tell, provenance=provenance(llm, options.model), seed=seed)
        path = Path(output) if output is not None else _tuned.place(method, tuner.fingerprint)
        journal = path.with_suffix(".journal")
        search = tuner.search(journal)
        try:
            found = tuner.verdict(tuner.run(search))
        except KeyboardInterrupt:
            _interrupted(search.best, tuner, journal)
            raise
        _tuned.write(path, found)
    return found, path


def _interrupted(best: Best | None, tuner: Any, journal: Path) -> None:
    if best is None:
        say("no trial was finished yet")
        return
    say(f"{best.trials} trials are kept in {journal}; the same command goes on from there")
    say(f"best so far, {best.score:.2f} times plain decoding where it was chosen: --draft {tuner.spec(best.values)}")


def show(found: Tuned, path: Path) -> None:
    """The verdict in words."""
    held = found.more["held_out"]
    span = "" if held["low"] is None else f" [{held['low']:.2f}, {held['high']:.2f}]"
    typer.echo(f"best of {found.more['search']['trials']} trials: --draft {found.spec}")
    typer.echo(f"on prompts that were held out: {held['speedup']:.2f}{span} times the speed of plain decoding")
    typer.echo(f"tokens per pass {held['tau']:.2f}, {held['alpha']:.0%} of the guesses were right")
    if found.enabled:
        typer.echo(f"kept in {path}: from now on --draft {found.method} uses it on this model")
    else:
        typer.echo(f"LOSS: not put to use; {path} says so, and --draft {found.method} makes no guesses on this model")
