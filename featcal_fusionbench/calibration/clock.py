"""Where the time and the memory of a run go, phase by phase."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .results import PhaseCost

__all__ = ["PhaseClock", "peak_resident_bytes"]


def peak_resident_bytes() -> int:
    """Highest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass
class _Entry:
    wall: float = 0.0
    cpu: float = 0.0
    resident: int = 0
    device: int | None = None


class PhaseClock:
    """Adds up the cost of phases that may be entered many times.

    Args:
        device: Device whose work is waited for at the end of a phase, so that asynchronous kernels
            are charged to the phase that launched them.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._entries: dict[str, _Entry] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time spent inside to the phase ``name``."""
        on_cuda = self._device.type == "cuda"
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            if on_cuda:
                torch.cuda.synchronize(self._device)
            entry = self._entries.setdefault(name, _Entry())
            entry.wall += time.perf_counter() - wall
            entry.cpu += time.process_time() - cpu
            entry.resident = peak_resident_bytes()
            if on_cuda:
                entry.device = torch.cuda.max_memory_allocated(self._device)

    def costs(self) -> tuple[PhaseCost, ...]:
        """The phases so far, in the order in which they were first entered."""
        return tuple(
            PhaseCost(name, entry.wall, entry.cpu, entry.resident, entry.device)
            for name, entry in self._entries.items()
        )
