"""What a run takes besides time: memory at its peak, and energy where the card counts it.

Energy is NVML's own total since the driver was loaded (`nvmlDeviceGetTotalEnergyConsumption`, millijoules): all that the card
drew, other programs' share included. It needs the driver's library alone, no package.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one run: bytes of this process's memory and of torch's on the card, both at their peak; joules of the card. None: not
    known."""

    memory: int | None = None
    device_memory: int | None = None
    joules: float | None = None

    @classmethod
    def over(cls, runs: Sequence[Usage]) -> Usage:
        """The highest peaks, all joules; what one run does not know, nobody knows."""
        memory, device = (_known([getattr(u, name) for u in runs]) for name in ("memory", "device_memory"))
        joules = [u.joules for u in runs if u.joules is not None]
        return cls(max(memory, default=None), max(device, default=None), sum(joules) if len(joules) == len(runs) else None)


def _known(values: Sequence[int | None]) -> list[int]:
    """All of them, or none where one is not known."""
    known = [v for v in values if v is not None]
    return known if len(known) == len(values) else []


@dataclass(slots=True)
class Gauge:
    """Watches one run at a time on a device. `energy` gives the card's joules so far, or is None; `energy_note` says what is
    measured, or why nothing is."""

    device: torch.device
    energy: Callable[[], float] | None = None
    energy_note: str = ""
    _begun: float | None = field(default=None)

    @classmethod
    def on(cls, device: torch.device) -> Gauge:
        """With an energy counter, if there is one."""
        if device.type != "cuda":
            return cls(device, None, "not measured (no GPU)")
        try:
            return cls(device, _counter(str(torch.cuda.get_device_properties(device).uuid)), "NVML, the whole card")
        except (OSError, AttributeError, RuntimeError) as error:
            return cls(device, None, f"not measured ({error})")

    def start(self) -> None:
        """Forget earlier peaks. On systems other than Linux the process's memory peaks once and for all."""
        with suppress(OSError):
            RESET.write_text("5")
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._begun = self._joules()

    def stop(self) -> Usage:
        """Since `start`."""
        begun, now = self._begun, self._joules()
        joules = None if begun is None or now is None else now - begun
        card = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return Usage(peak_memory(), card, joules)

    def _joules(self) -> float | None:
        """The counter, None where there is none or where it fails: no reason to lose a measurement."""
        try:
            return self.energy() if self.energy is not None else None
        except RuntimeError:
            return None


def peak_memory() -> int | None:
    """Bytes this process held at most, since the last reset; None where the system does not tell."""
    try:
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        pass
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _counter(uuid: str) -> Callable[[], float]:
    """Reads the card's joules. `OSError` without the driver's library, `RuntimeError` for what it refuses."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    handle, total = ctypes.c_void_p(), ctypes.c_ulonglong()

    def call(name: str, *arguments: object) -> None:
        status = getattr(nvml, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} says {status}")

    def joules() -> float:
        call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(total))
        return total.value / 1000

    call("nvmlInit_v2")
    call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid.removeprefix('GPU-')}".encode(), ctypes.byref(handle))
    joules()
    return joules
