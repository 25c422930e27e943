"""Reads a report back from its JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..errors import BadInput
from .latency import Latency, Percentiles
from .numbers import Speedup
from .report import FORMAT, Asked, Divergence, Report, Row

T = TypeVar("T")


def read(path: Path) -> Report:
    """A report that `--json` or `--output` wrote, from its file or from the folder with `result.json`. Raises `BadInput` for what
    is none, and for one of another format."""
    file = path / "result.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict) or "results" not in found or "provenance" not in found:
        raise BadInput(f"{file} is no result of `outrider bench`; give the file that --output wrote")
    if found.get("format") != FORMAT:
        raise BadInput(f"{file} has format {found.get('format', 1)}, this version reads {FORMAT}: measure it again")
    try:
        return report(found)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise BadInput(f"{file} is damaged: {type(error).__name__}: {error}; measure it again") from None


def report(found: Mapping[str, Any]) -> Report:
    """From the object of `Report.as_json`. Anything else raises one of the errors that `read` turns into words."""
    return Report(
        rows=tuple(_row(r) for r in found["results"]),
        divergences=tuple(_divergence(d) for d in found["divergences"]),
        workloads=tuple(_checked(Asked(w["name"], w["source"], tuple(w["sha256"]))) for w in found["workloads"]),
        settings=_object("settings", found["settings"]),
        provenance=_provenance(found["provenance"]),
        interrupted=bool(found["interrupted"]),
    )


def _row(found: Mapping[str, Any]) -> Row:
    pairs = found["speedup"] and {**found["speedup"], "pairs": tuple(found["speedup"]["pairs"])}
    speedup = _checked(Speedup(**pairs)) if pairs else None
    if speedup is not None and min(speedup.median, *speedup.pairs) <= 0:
        raise ValueError("a speed-up of 0")
    waits = {name: _checked(Percentiles(**values)) if values else None for name, values in found["latency"].items()}
    lists = {name: tuple(found[name]) for name in ("acceptance_by_position", "offered_by_position", "paces")}
    costs = _object("costs", found["costs"])
    return _checked(Row(**{**found, **lists, "costs": costs, "speedup": speedup, "latency": Latency(**waits)}))


def _divergence(found: Mapping[str, Any]) -> Divergence:
    gap = math.inf if found["gap"] is None else found["gap"]  # JSON knows no infinity
    return _checked(Divergence(**{**found, "gap": gap}))


def _provenance(found: Any) -> Mapping[str, Any]:
    _object("prompts", _object("provenance", found).get("prompts", {}))
    return dict(found)


def _object(name: str, found: Any) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{name} is no object")
    return found


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


KINDS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": _count,
    "float": lambda value: _number(value) or value == math.inf,
    "int | None": lambda value: value is None or _count(value),
    "float | None": lambda value: value is None or _number(value),
    "tuple[float, ...]": lambda values: all(map(_number, values)),
    "tuple[str, ...]": lambda values: all(isinstance(v, str) for v in values),
}
"""What a field may hold, by its annotation. Nothing that is measured is below 0."""


def _checked(made: T) -> T:
    """The same; `ValueError` for a field that is not what its annotation says."""
    for field in dataclasses.fields(made):  # type: ignore[arg-type]
        value = getattr(made, field.name)
        if not KINDS.get(str(field.type), lambda value: True)(value):
            raise ValueError(f"{field.name} is {value!r:.60}")
    return made
