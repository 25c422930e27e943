"""Trained drafters that are at hand, by the weights they were trained for: the user's, and those that come with the package.

A trained drafter is a directory with a `card.json` that names `method`, `fingerprint` (of the target's weights), `model` (its
name) and `tau`, what it reached on held-out prompts. The user's are listed in `home() / "drafters"`: as directories there, or as
pointers (`NAME.json` with `path`) to where they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CARD = "card.json"
CONFIG = "config.json"
SHIPPED = Path(__file__).parent / "shipped"
UNFINISHED = ".unfinished"
"""Ends the names of files and directories that are not yet in their place."""
_DEAD = 3600.0
"""Seconds without a change after which nobody is at work on them any more."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A drafter for the target with this `fingerprint`; `tau`: tokens per round on held-out prompts."""

    method: str
    path: Path
    fingerprint: str
    model: str
    tau: float


def home() -> Path:
    """$OUTRIDER_HOME, or $XDG_DATA_HOME/outrider, or ~/.local/share/outrider. May not exist yet."""
    return user_dir("OUTRIDER_HOME", "XDG_DATA_HOME", ".local", "share")


def user_dir(own: str, xdg: str, *usual: str) -> Path:
    """A directory of the user's: the variable `own` names it, else it is `outrider` in what `xdg` names, or below home."""
    if chosen := os.environ.get(own):
        return Path(os.path.expanduser(chosen))
    base = os.environ.get(xdg) or os.path.join(os.path.expanduser("~"), *usual)
    return Path(base) / "outrider"


def entries() -> list[Trained]:
    """All that can be read, the best first; of equals, the user's before the package's."""
    found = [e for place in (*_listed(home() / "drafters"), *_listed(SHIPPED)) if (e := _entry(place)) is not None]
    return sorted({e.path.resolve(): e for e in reversed(found)}.values(), key=lambda e: (-e.tau, str(e.path)))


def find(fingerprint: str, method: str | None = None) -> list[Trained]:
    """Drafters for these weights (and of this method), the best first."""
    return [e for e in entries() if fingerprint and e.fingerprint == fingerprint and method in (None, e.method)]


def enlist(directory: Path) -> None:
    """Make the drafter in `directory`, which has a card, known to `find`. `OSError` where that cannot be noted."""
    place = home() / "drafters"
    directory = directory.resolve()
    if directory.parent == place.resolve():
        return
    place.mkdir(parents=True, exist_ok=True)
    name = f"{directory.name}-{hashlib.sha256(str(directory).encode()).hexdigest()[:12]}.json"
    write_json(place / name, {"path": str(directory)})


def write_json(path: Path, content: Any) -> None:
    """Write a file that is there as a whole or as it was before."""
    write_bytes(path, (json.dumps(content, indent=1) + "\n").encode())


def write_bytes(path: Path, content: bytes, sync: bool = True) -> None:
    """Write a file that is there as a whole or as it was before (after a power failure, too, if `sync`)."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=UNFINISHED, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sweep(directory: Path) -> None:
    """Remove what those who were killed while they wrote left in `directory`."""
    for left in directory.glob(f".*{UNFINISHED}"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _DEAD:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _listed(place: Path) -> list[Path]:
    """Directories of drafters, and where pointers lead."""
    try:
        return [_target(p) for p in sorted(place.iterdir()) if not p.name.startswith(".")]
    except OSError:
        return []


def _target(path: Path) -> Path:
    if path.suffix != ".json":
        return path
    try:
        return Path(str(json.loads(path.read_text(encoding="utf-8"))["path"]))
    except (OSError, ValueError, KeyError, TypeError):
        return path


def _entry(path: Path) -> Trained | None:
    try:
        card = json.loads((path / CARD).read_text(encoding="utf-8"))
        if not (path / CONFIG).is_file():
            return None
        return Trained(str(card["method"]), path, str(card["fingerprint"]), str(card["model"]), float(card["tau"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
