"""Where a number comes from: versions, machine, model, command line."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..errors import OutriderError
from ..llm import LLM
from ..models import weights
from ..models.weight_cache import sampled_digest
from ..version import VERSION
from .audit import fingerprint

PACKAGES = ("torch", "transformers")
HERE = Path(__file__).parent


def provenance(llm: LLM, model: str, command: Sequence[str] | None = None) -> dict[str, Any]:
    """What a reader needs to judge a benchmark, or to repeat it. `model` as the user named it; `command` defaults to this
    process's own."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": _shown(sys.argv) if command is None else list(command),
        "commit": commit(),
        "outrider": VERSION,
        **{name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "model": {"name": llm.name, **weights_file(model)},
        **fingerprint(llm),
    }


def _shown(words: Sequence[str]) -> list[str]:
    """A command line without the directory that its program lies in, which is nobody's business."""
    name = Path(words[0]).name if words else ""
    return ["outrider" if name == "__main__.py" else name, *words[1:]]


def version(package: str) -> str | None:
    """Of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit this source stands on, `-dirty` where it was changed since; None outside a checkout of its own."""
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # installed, perhaps into somebody else's repository
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def weights_file(model: str) -> dict[str, Any]:
    """Size and hash (of samples, see `sampled_digest`) of the model's weights; nothing for a hub id, whose name says it all."""
    try:
        path = weights.resolve(model).path
        if path is None:
            return {}
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        return {"bytes": sum(f.stat().st_size for f in files), "sampled_sha256": sampled_digest(*files)}
    except (OSError, OutriderError):
        return {}
