"""What happens to errors, warnings and Ctrl-C: one clear message and the right exit status."""

from __future__ import annotations

import functools
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from io import TextIOWrapper
from typing import ParamSpec, TextIO

import typer

from ..errors import OutriderError, OutriderWarning

P = ParamSpec("P")

INTERRUPTED = 130
BROKEN_PIPE = 141
BUG = 70
TALKATIVE = ("torchao", "torch.utils._pytree")
"""Loggers that remark on their own installation when transformers imports them."""


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Run `command` so that nothing but a message and an exit status escapes from it.

    An `OutriderError` ends with its own exit status (2), Ctrl-C with 130, a reader that went away (`| head`) with 141,
    anything else with 70. Tracebacks appear only under `--debug`.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        debug = bool(kwargs.get("debug"))
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # names of files may hold what no encoding can write
        with _warnings_in_one_line(debug):
            try:
                command(*args, **kwargs)
                sys.stdout.flush()
            except KeyboardInterrupt:
                say("interrupted")
                raise typer.Exit(INTERRUPTED) from None
            except BrokenPipeError:
                _silence_stdout()
                raise typer.Exit(BROKEN_PIPE) from None
            except OutriderError as error:
                raise typer.Exit(_report(f"error: {error}", error.exit_status, debug)) from None
            except (typer.Exit, typer.Abort):
                raise
            except Exception as error:
                kind = type(error).__name__
                said = f"error: {kind}: {error}" if str(error) else f"error: {kind}"
                hint = "" if debug else "\nthis is a bug in outrider: run again with --debug for the traceback, and report it"
                raise typer.Exit(_report(said + hint, BUG, debug)) from None

    return run


def say(text: str) -> None:
    """One message for people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def _report(message: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc(file=sys.stderr)
    say(message)
    return status


@contextmanager
def _warnings_in_one_line(debug: bool) -> Iterator[None]:
    """Our own warnings appear as `warning: ...`, the same one once; those of the libraries below, and their remarks, only under
    `--debug`."""
    seen = set[str]()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if str(message) in seen:
            return
        seen.add(str(message))
        ours = issubclass(category, OutriderWarning)
        say(f"warning: {message}" if ours else f"warning: {filename}:{lineno}: {category.__name__}: {message}")

    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
        warnings.simplefilter("always", OutriderWarning)
        warnings.showwarning = show
        with nullcontext() if debug else _hushed():
            yield


@contextmanager
def _hushed() -> Iterator[None]:
    before = {logger: logger.level for logger in map(logging.getLogger, TALKATIVE)}
    for logger in before:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)


def _silence_stdout() -> None:
    """Nobody reads any more: keep the interpreter from failing again when it flushes at exit."""
    try:
        fd = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):
        return
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, fd)
    os.close(devnull)
