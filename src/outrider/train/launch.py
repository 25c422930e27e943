"""As many processes of this program as there are GPUs to train on, each told which it is, as `torchrun` tells it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from ..errors import BadInput

INTERRUPTED = 130
"""The exit status of a process that stopped at Ctrl-C with its work saved."""
_PAUSE, _GRACE = 0.1, 10.0
"""Seconds between looks at the processes, and from asking one to end until it is ended."""


def check(count: int, device: str) -> None:
    """`BadInput` for more processes than GPUs; on a CPU any number goes."""
    found = torch.cuda.device_count()
    if count > found and device != "cpu":
        raise BadInput(f"--gpus {count}: there are {found} here; ask for fewer, or --device cpu to try it out")


def launch(arguments: Sequence[str], count: int) -> int:
    """Run `python -m outrider` with the arguments `count` times, and wait; the exit status of the first that failed, or 0. When
    one fails the others are ended. Ctrl-C reaches all of them by itself; an end that this process is asked for is passed on, and
    they come to it together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "outrider", *arguments]
    running = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=None if rank == 0 else 2)
        for rank in range(count)
    ]
    kept = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: _end(running)),
    }
    try:
        return _waited(running)
    finally:
        _end(running)
        _buried(running)
        for number, handler in kept.items():
            signal.signal(number, handler)


def _waited(running: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        found = [process.poll() for process in running]
        failed = [status for status in found if status and status != INTERRUPTED]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in found:
            return INTERRUPTED if INTERRUPTED in found else 0
        time.sleep(_PAUSE)


def _buried(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Those that wait for one who is gone hear nothing any more."""
    for process in running:
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in running:
        if process.poll() is None:
            process.terminate()
