"""`outrider version`: what a bug report needs."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Annotated

import typer

PACKAGES = ("outrider", "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy")


def version(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
) -> None:
    """Show the versions of outrider and of what it stands on."""
    for name in PACKAGES:
        print(f"{name} {_version(name)}")
    print(f"python {platform.python_version()}")
    print(f"platform {platform.platform()}")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
