"""Where `outrider bench` leaves its result: a JSON file, a page, or a folder with both."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadInput
from .guard import say

if TYPE_CHECKING:
    from ..bench.report import Report


@dataclass(frozen=True, slots=True)
class Bundle:
    """Files to write; None: not asked for."""

    json: Path | None = None
    html: Path | None = None

    @classmethod
    def of(cls, output: str | None, html: str | None) -> Bundle:
        """From the options. A folder is made now: `BadInput` comes before an hour of measuring, not after."""
        if "" in (output, html):
            raise BadInput("--output and --html need a path, got an empty one")
        data, page = (None if path is None else Path(path) for path in (output, html))
        if data is not None and data.suffix.lower() != ".json":
            _make(data)
            page = page or data / "result.html"
            data = data / "result.json"
        for option, path in (("--output", data), ("--html", page)):
            if path is not None:
                check_file(option, path)
        if data is not None and page is not None and data.resolve() == page.resolve():
            raise BadInput(f"--output and --html both name {data}; give each a file of its own")
        return cls(data, page)

    def save(self, found: dict[str, Any]) -> None:
        """The JSON object, if it was asked for."""
        if self.json is not None and not _written(self.json, lambda: json.dumps(found, indent=1) + "\n"):
            say("the object follows on standard error")
            say(json.dumps(found))

    def write(self, report: Report) -> None:
        """What was asked for. A full disk costs the files, not the result."""
        self.save(report.as_json())
        if self.html is not None and report.rows:
            from ..bench.page import page

            _written(self.html, lambda: page(report))


def check_file(option: str, path: Path) -> None:
    """`BadInput` for a path at which no file can be, or none may be written."""
    if path.is_dir() or not path.parent.is_dir():
        raise BadInput(f"{option} {path}: give a file in a directory that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInput(f"{option} {path}: not writable; give another place, or change its permissions")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--output {folder}: neither a .json file nor a folder ({error.strerror or error})") from None


def _written(path: Path, text: Callable[[], str]) -> bool:
    try:
        path.write_text(text(), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        say(f"warning: cannot write {path}: {error.strerror or error}")
        return False
    say(f"wrote {path}")
    return True
