"""Dequantised copies of GGUF models on disk, so that a second start takes seconds.

An entry is a directory that transformers loads, plus a manifest with every file's size, time and SHA-256. Entries appear
whole (written beside their place, then renamed), so processes may race; a damaged entry counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from ..errors import OutriderWarning
from ..trained import user_dir

_FORMAT = 1
"""Raised whenever the content of entries changes, so that older ones are not found."""
_MANIFEST = "outrider.json"
_TEMPORARY = ".tmp-"
_STALE_SECONDS = 24 * 3600
_SAMPLE = 64 * 1024
_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A dequantised copy: the source's `name`, its size on disk in `bytes`, the directory."""

    name: str
    bytes: int
    path: Path


def cache_dir() -> Path:
    """$OUTRIDER_CACHE, or $XDG_CACHE_HOME/outrider, or ~/.cache/outrider. May not exist yet."""
    return user_dir("OUTRIDER_CACHE", "XDG_CACHE_HOME", ".cache")


def entries() -> list[CachedModel]:
    """All whole entries, by name."""
    found = []
    for path in _listed(_root()):
        manifest = _manifest(path)
        if manifest is not None and not path.name.startswith(_TEMPORARY):
            size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
            found.append(CachedModel(manifest[0], size, path))
    return sorted(found, key=lambda entry: (entry.name, str(entry.path)))


def find(name: str, key: str) -> Path | None:
    """The entry of this name and content key, or None if there is none or it is damaged."""
    path = _place(name, key)
    return path if _intact(path) else None


def store(name: str, key: str, needed: int, write: Callable[[Path], None]) -> Path | None:
    """Makes an entry of about `needed` bytes with `write(directory)` and returns its directory.

    Where the disk is full or the directory cannot be written: an `OutriderWarning` and None, nothing is left behind."""
    root = _root()
    temporary: Path | None = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        if (free := shutil.disk_usage(root).free) < needed * 1.05:
            raise OSError(f"{needed / 2**20:,.0f} MiB are needed, {free / 2**20:,.0f} MiB are free")
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=root))
        write(temporary)
        _seal(temporary, name)
        return _publish(temporary, _place(name, key))
    except (OSError, SafetensorError) as error:
        warnings.warn(
            f"the dequantised model is not kept, so the next start is as slow as this one: {root}: {error}. "
            "Set OUTRIDER_CACHE to a directory with room.",
            OutriderWarning,
            stacklevel=2,
        )
        return None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def sampled_digest(*paths: Path) -> str:
    """A hash of files too big to read at each start: name, size, both ends and evenly spread samples of each."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE) * i // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _root() -> Path:
    return cache_dir() / "models" / f"v{_FORMAT}"


def _place(name: str, key: str) -> Path:
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80]
    return _root() / f"{plain}-{key[:24]}"


def _listed(root: Path) -> list[Path]:
    try:
        return [path for path in root.iterdir() if path.is_dir()]
    except OSError:
        return []


def _seal(path: Path, name: str) -> None:
    """Writes the manifest, last of all."""
    files = {}
    for file in sorted(path.iterdir()):
        stat = file.stat()
        files[file.name] = [stat.st_size, stat.st_mtime_ns, _sha256(file)]
    (path / _MANIFEST).write_text(json.dumps({"name": name, "files": files}, indent=1))


def _manifest(path: Path) -> tuple[str, dict[str, list[object]]] | None:
    """The entry's name and files, or None if there is no readable manifest."""
    try:
        content = json.loads((path / _MANIFEST).read_text())
        return str(content["name"]), dict(content["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _intact(path: Path) -> bool:
    """Every file is as it was written: by size and time, or, where the time differs, by content."""
    manifest = _manifest(path)
    if manifest is None:
        return False
    try:
        for name, (size, changed, digest) in manifest[1].items():
            stat = (path / name).stat()
            if stat.st_size != size or (stat.st_mtime_ns != changed and _sha256(path / name) != digest):
                return False
    except (OSError, ValueError, TypeError):
        return False
    return bool(manifest[1])


def _publish(temporary: Path, place: Path) -> Path:
    """Renames the finished directory into place. Another process's intact entry wins, a damaged one is moved away."""
    if place.exists():
        if _intact(place):
            return place
        doomed = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=place.parent))
        os.replace(place, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    try:
        os.replace(temporary, place)
    except OSError:
        if not _intact(place):
            raise
    return place


def _sweep(root: Path) -> None:
    """Removes what killed processes left behind."""
    for path in _listed(root):
        if path.name.startswith(_TEMPORARY) and time.time() - path.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
