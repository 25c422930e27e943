"""The command line. One small file per command; torch and the engine are imported only when a command runs."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the `outrider` console script. Exit status: 0 done, 1 a check failed, 2 bad input, 70 a bug, 130 Ctrl-C."""
    # Libraries below us chat on stderr about things a user of this command cannot change.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "0" if sys.stderr.isatty() else "1")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the answer
    try:
        from .app import app

        app()
    except KeyboardInterrupt:  # before any command took over
        sys.exit(130)


__all__ = ["main"]
