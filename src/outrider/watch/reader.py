"""Reads traces back: from JSON lines, whole or cut short, and from Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BadInput
from ..types import NONE
from . import files
from .pieces import Mark

WORDS = ("rule", "label", "finish", "prompt", "drafter", "control")
MOST = 1e15
"""No number of a trace is larger."""
MARKS = tuple(mark.value for mark in Mark)


@dataclass(frozen=True, slots=True)
class Share:
    """A request's share of a round; see `trace.py` for the fields. `kept`: by depth, was the guess right?"""

    id: int
    rule: str
    depth: int
    drafted: int
    accepted: int
    tokens: int
    offered: tuple[int, ...]
    origins: tuple[int, ...]
    label: str | None = None
    finish: str | None = None
    prompt_tokens: int | None = None
    prompt: str | None = None
    pieces: tuple[tuple[str, str], ...] | None = None

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(int(i < len(self.origins) and self.origins[i] != NONE) for i in range(len(self.offered)))


@dataclass(frozen=True, slots=True)
class Round:
    """A round of a trace; times in seconds."""

    round: int
    at: float
    draft: float
    verify: float
    other: float
    batch: int
    rows: int
    prefill: int
    drafter: str
    requests: tuple[Share, ...]
    control: str | None = None

    @property
    def seconds(self) -> float:
        """What passed between the round before and this one."""
        return self.draft + self.verify + self.other


@dataclass(slots=True)
class Recording:
    """A trace that is read: its first line, its rounds (read once, while they are asked for), and what must be said of it."""

    head: dict[str, Any]
    rounds: Iterator[Round]
    notes: list[str] = field(default_factory=list)


def read(path: str | Path) -> Recording:
    """A trace. Raises `BadInput` for files that are none, now or at the first damaged line but the last: a last line that was cut
    short, by a killed process or a full disk, is left out with a note."""
    path = Path(path).expanduser()
    notes = list[str]()
    if not path.exists() and files.lines_of(path).exists():
        notes.append(f"{path} was never finished; this is what {files.lines_of(path)} holds")
        path = files.lines_of(path)
    if path.suffix == files.PARQUET:
        from . import parquet

        head, rounds = parquet.read(path)
    else:
        head, rounds = lines(path, notes)
    return Recording(head, map(_round, rounds), notes)


def lines(path: Path, notes: list[str] | None = None) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """The first line and the rounds of a file of JSON lines, as they stand there."""
    if path.exists() and not path.is_file():
        raise BadInput(f"cannot read the trace {path}: it is no file; traces are read twice, so save it in one first")
    try:
        with path.open("rb") as file:
            first = file.readline(files.MIB)
    except OSError as error:
        raise BadInput(f"cannot read the trace {path}: {error.strerror or error}") from None
    head = _parsed(first)
    version = head.get("outrider_trace") if isinstance(head, dict) else None
    if not isinstance(head, dict) or version is None:
        raise BadInput(f"{path} is no trace: its first line does not say so; `outrider generate --trace FILE` writes one")
    if version != files.VERSION:
        raise BadInput(f"{path} is a trace of version {version}; this program reads version {files.VERSION}")
    return head, _rounds(path, [] if notes is None else notes)


def _rounds(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        file.readline()
        for number, line in enumerate(file, 2):
            found = _parsed(line) if line.endswith(b"\n") else None
            if isinstance(found, dict) and isinstance(found.get("requests"), list):
                yield found
            elif file.read(1):
                raise BadInput(f"{path}, line {number}: no round of a trace")
            else:
                notes.append(f"the last line of {path} was cut short, and is left out")


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _round(found: dict[str, Any]) -> Round:
    try:
        shares = tuple(Share(**{name: _checked(name, value) for name, value in item.items()}) for item in found["requests"])
        values: dict[str, Any] = {name: _checked(name, value) for name, value in found.items() if name != "requests"}
        return Round(requests=shares, **values)
    except (TypeError, ValueError, AttributeError) as error:
        raise BadInput(f"a round of the trace is damaged: {error}") from None


def _checked(name: str, value: Any) -> Any:
    """A field's value, lists as tuples. Raises `ValueError` for one of the wrong kind."""
    if name in ("offered", "origins"):
        good = isinstance(value, list) and all(isinstance(one, int) and abs(one) < MOST for one in value)
    elif name == "pieces":
        good = isinstance(value, list) and all(_is_piece(one) for one in value)
    elif name in WORDS:
        good = value is None or isinstance(value, str)
    else:
        good = isinstance(value, int | float) and abs(value) < MOST
    if not good:
        raise ValueError(f"{name} is {value!r:.50}")
    return _frozen(value)


def _is_piece(value: Any) -> bool:
    """Text and what it is."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and value[1] in MARKS


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
