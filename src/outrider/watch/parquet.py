"""Traces as Parquet: one row for every request of every round, the first line of the trace in the schema's metadata."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import BadInput, OutriderError, OutriderWarning
from . import files

ROWS = 20_000
"""Of a row group."""
HEAD = b"outrider_trace"
ROUND = {
    "round": "int64",
    "at": "float64",
    "draft": "float64",
    "verify": "float64",
    "other": "float64",
    "batch": "int32",
    "rows": "int32",
    "prefill": "int32",
    "drafter": "string",
    "control": "string",
}
"""Columns that say the same of all requests of a round."""
ITEM = {"id": "int64", "label": "string", "rule": "string", "depth": "int32", "drafted": "int32", "accepted": "int32"} | {
    "tokens": "int32",
    "offered": "list",
    "origins": "list",
    "prompt_tokens": "int32",
    "finish": "string",
    "prompt": "string",
    "pieces": "string",
}
"""Columns of a request's share; `pieces` are JSON."""


def needed() -> Any:
    """The modules `pyarrow` and `pyarrow.parquet`. Raises `BadInput` where they are not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise BadInput("Parquet needs pyarrow: pip install 'outrider[trace]', or give the trace a name in .jsonl") from None
    return pyarrow


def ours(path: Path) -> bool:
    """Whether a Parquet file is a trace. Raises `BadInput` without pyarrow, `OSError` or `ValueError` for damaged files."""
    return HEAD in (needed().parquet.read_schema(path).metadata or {})


def convert(path: Path) -> None:
    """Make Parquet of the JSON lines that were written for `path`, those put aside included, and delete the lines. Each, the
    oldest first, puts aside the Parquet that is there. Where that fails the lines stay, and a warning says so."""
    for age in range(files.KEPT - 1, -1, -1):
        source = files.aside(files.lines_of(path), age)
        if not source.is_file():
            continue
        try:
            _write(source, path)
            source.unlink()
        except (OSError, OutriderError, ValueError, TypeError, AttributeError) as error:  # lines that are left may be damaged
            warnings.warn(f"cannot write {path} ({error}); the trace is in {source}", OutriderWarning, stacklevel=2)


def _write(source: Path, target: Path) -> None:
    """The whole file, or none."""
    from .reader import lines

    arrow = needed()
    kinds = {"int64": arrow.int64(), "int32": arrow.int32(), "float64": arrow.float64(), "string": arrow.string()}
    kinds["list"] = arrow.list_(arrow.int32())
    head, rounds = lines(source)
    fields = [(name, kinds[kind]) for name, kind in (ROUND | ITEM).items()]
    schema = arrow.schema(fields, metadata={HEAD: json.dumps(head).encode()})
    part, rows = target.with_name(target.name + ".part"), _rows(rounds)
    part.touch(0o600)
    try:
        with arrow.parquet.ParquetWriter(part, schema) as out:
            while group := list(islice(rows, ROWS)):
                out.write_table(arrow.Table.from_pylist(group, schema=schema))
        files.put_aside(target)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _rows(rounds: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for one in rounds:
        common = {name: one.get(name) for name in ROUND}
        for item in one["requests"]:
            pieces = {"pieces": json.dumps(item["pieces"])} if "pieces" in item else {}
            yield common | {name: item.get(name) for name in ITEM} | pieces


def read(path: Path) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """The trace's first line, and its rounds as they were. Raises `BadInput` for files that are no trace."""
    arrow = needed()
    try:
        file = arrow.parquet.ParquetFile(path)
        head = json.loads((file.schema_arrow.metadata or {})[HEAD])
    except (OSError, KeyError, ValueError, arrow.ArrowException) as error:
        raise BadInput(f"{path} is no trace ({error})") from None
    return head, _rounds(row for batch in file.iter_batches() for row in batch.to_pylist())


def _rounds(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    current: dict[str, Any] | None = None
    for row in rows:
        if current is None or row["round"] != current["round"]:
            if current is not None:
                yield current
            current = {name: row[name] for name in ROUND if row[name] is not None} | {"requests": []}
        item = {name: row[name] for name in ITEM if row[name] is not None}
        if "pieces" in item:
            item["pieces"] = json.loads(item["pieces"])
        current["requests"].append(item)
    if current is not None:
        yield current
