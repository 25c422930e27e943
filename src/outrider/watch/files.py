"""Where a trace is written: a file of JSON lines that grows, is put aside when it is full, and never harms who writes to it."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from pathlib import Path

from ..errors import BadInput, OutriderError, OutriderWarning

KEPT = 4
"""Files of one trace, the newest included; older ones are deleted."""
MIB = 2**20
PARQUET = ".parquet"
VERSION = 1


def aside(path: Path, age: int) -> Path:
    """The name of a file that was put aside: `trace.jsonl` -> `trace.1.jsonl`, of which 1 is the newest."""
    return path.with_name(f"{path.stem}.{age}{path.suffix}") if age else path


def lines_of(path: Path) -> Path:
    """The file of JSON lines that becomes `path`: itself, unless that is to be Parquet."""
    return path.with_name(path.name + ".jsonl") if path.suffix == PARQUET else path


def check(path: Path) -> None:
    """Raises `BadInput` where no trace can be written, or where something that is no trace would be overwritten."""
    if path.is_dir() or not path.parent.is_dir():
        raise BadInput(f"cannot write the trace {path}: give a file in a directory that exists")
    if path.suffix == PARQUET:
        from .parquet import needed

        needed()
    for one in (aside(name, age) for name in dict.fromkeys((path, lines_of(path))) for age in range(KEPT)):
        if one.is_file() and one.stat().st_size and not is_trace(one):
            raise BadInput(f"{one} exists and is no trace; delete it or give the trace another name")


def put_aside(path: Path) -> None:
    """Make room for a new file at `path`: what is there, and what was put aside before, gets older."""
    if not path.is_file() or not path.stat().st_size:
        return
    for age in range(KEPT - 1, 0, -1):
        older = aside(path, age - 1)
        if older.exists():
            os.replace(older, aside(path, age))


def is_trace(path: Path) -> bool:
    """Whether a file begins like one of ours."""
    try:
        with path.open("rb") as file:
            head = file.readline(65536)
        if head[:4] == b"PAR1":
            from .parquet import ours

            return ours(path)
        return "outrider_trace" in json.loads(head)
    except (OSError, ValueError, TypeError, RecursionError, OutriderError):
        return False


class Rolling:
    """Writes whole lines, each in one go, into files that only their owner may read. Beyond `limit` bytes the file is put aside
    and a new one begins with `head`. When a line cannot be written, one warning says so, and no more are."""

    def __init__(self, path: Path, head: bytes, limit: int) -> None:
        self.path, self._head, self._limit = path, head, limit
        self._size = 0
        self._file: int | None = None
        self._begin()

    def write(self, line: bytes) -> None:
        """Append a line, its end included. Raises nothing."""
        if self._file is None:
            return
        if self._size + len(line) > self._limit and self._regular:
            self.close()
            self._begin()
        self._put(line)

    def close(self) -> None:
        """Nothing more is written."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def ended(self) -> bool:
        """Whether no more is written."""
        return self._file is None

    @property
    def _regular(self) -> bool:
        return self.path.is_file() and self._size > len(self._head)

    def _begin(self) -> None:
        """An empty file with its first line; what was there before is put aside."""
        try:
            put_aside(self.path)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self.give_up(error)
        self._size = 0
        self._put(self._head)

    def _put(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            written = os.write(self._file, line)
            if written < len(line):  # the rest would not fit either
                raise OSError(None, "no space left on the device")
            self._size += written
        except OSError as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Write no more, and say why."""
        self.close()
        why = getattr(error, "strerror", None) or f"{error}" or type(error).__name__
        message = f"tracing has stopped: {self.path} cannot be written ({why}); answers go on as before"
        with contextlib.suppress(OutriderWarning):  # a caller may have turned warnings into errors; the run goes on all the same
            warnings.warn(message, OutriderWarning, stacklevel=2)
