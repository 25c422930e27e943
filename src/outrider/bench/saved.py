"""Reads a report back from its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import BadInput
from .latency import Latency, Percentiles
from .numbers import Speedup
from .report import FORMAT, Asked, Divergence, Report, Row


def read(path: Path) -> Report:
    """A report that `--json` or `--output` wrote, from its file or from the folder with `result.json`. Raises `BadInput` for what
    is none, and for one of another format."""
    file = path / "result.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror or error}") from None
    except ValueError as error:
        raise BadInput(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict) or "results" not in found or "provenance" not in found:
        raise BadInput(f"{file} is no result of `outrider bench`; give the file that --output wrote")
    if found.get("format") != FORMAT:
        raise BadInput(f"{file} has format {found.get('format', 1)}, this version reads {FORMAT}: measure it again")
    try:
        return report(found)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadInput(f"{file} is damaged: {type(error).__name__}: {error}; measure it again") from None


def report(found: Mapping[str, Any]) -> Report:
    """From the object of `Report.as_json`."""
    return Report(
        rows=tuple(_row(r) for r in found["results"]),
        divergences=tuple(Divergence(**d) for d in found["divergences"]),
        workloads=tuple(Asked(w["name"], w["source"], tuple(w["sha256"])) for w in found["workloads"]),
        settings=found["settings"],
        provenance=found["provenance"],
        interrupted=found["interrupted"],
    )


def _row(found: Mapping[str, Any]) -> Row:
    speedup = found["speedup"] and Speedup(**{**found["speedup"], "pairs": tuple(found["speedup"]["pairs"])})
    waits = {name: values and Percentiles(**values) for name, values in found["latency"].items()}
    lists = {name: tuple(found[name]) for name in ("acceptance_by_position", "offered_by_position", "paces")}
    return Row(**{**found, **lists, "speedup": speedup, "latency": Latency(**waits)})
