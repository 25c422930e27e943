"""What the benchmark asks: workloads written for this package, found by name, or files of the user's own.

They differ in how much of an answer can be guessed: `repetitive`, `edit` and `extract` repeat their prompt, `support` a template,
`creative` repeats nothing; `turns` are conversations in which the model's own answers stand between the questions.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path

from ..errors import BadInput
from . import spec_bench
from .conversation import Message, Prompt, Workload
from .readers import prompts_of, read

__all__ = ["DEFAULT", "Message", "Prompt", "Workload", "built_in", "find", "gather", "names", "read"]

ALL = "all"
DEFAULT = ("code", "chat", "summarise", "question", "creative", "repetitive")
"""What is measured if nothing is named, with `DEFAULT_PROMPTS` prompts of each."""
DEFAULT_PROMPTS = 10
FIRST_FILE = "workloads.jsonl"


@cache
def built_in() -> Mapping[str, Workload]:
    """The package's own workloads by name: those of `workloads.jsonl` first, then what the files of single tasks add, which are
    named like them. A prompt that stands in both counts once."""
    files = [f for f in (resources.files(__package__) / "data").iterdir() if f.name.endswith(".jsonl")]
    prompts: dict[str, dict[str, Prompt]] = {}
    for file in sorted(files, key=lambda f: (f.name != FIRST_FILE, f.name)):
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
            if line:
                entry = json.loads(line)
                found = prompts.setdefault(entry.get("workload", file.name.removesuffix(".jsonl")), {})
                found |= {p.sha256: p for p in prompts_of(entry, f"{file.name}, line {number}")}
    return {name: Workload(name, "built-in", tuple(found.values())) for name, found in prompts.items()}


def names() -> tuple[str, ...]:
    """Names of the built-in workloads."""
    return tuple(built_in())


def gather(wanted: Iterable[str], prompts: int | None = None) -> tuple[Workload, ...]:
    """Workloads by name or file, `all` for every built-in one, `spec_bench:FILE` for Spec-Bench's six; at most `prompts` prompts
    of each (see `Workload.spread`). Nothing wanted gives the default: six of them, and ten prompts of each unless `prompts` says
    otherwise."""
    asked = list(wanted)
    if not asked:
        asked, prompts = list(DEFAULT), prompts or DEFAULT_PROMPTS
    found = [w for name in asked for w in _each(name)]
    return tuple(w.spread(prompts) for w in found)


def _each(name: str) -> tuple[Workload, ...]:
    if name.startswith(spec_bench.PREFIX):
        return spec_bench.read(Path(name.removeprefix(spec_bench.PREFIX)))
    return tuple(built_in().values()) if name == ALL else (find(name),)


def find(name: str) -> Workload:
    """A built-in workload, or one from a file. Raises `BadInput` for what is neither, with the closest name."""
    if name in built_in():
        return built_in()[name]
    try:
        there = Path(name).is_file()
    except (OSError, ValueError):
        there = False
    if there:
        return read(Path(name))
    close = difflib.get_close_matches(name, (*names(), ALL), 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise BadInput(f"no workload {name!r}; {hint}there are {', '.join(names())}, {ALL}, spec_bench:FILE, or give a file")
