"""What cells will take: as similar cells took, or else by a simple model that says so."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..report.text import format_bytes, format_duration
from ..tables.results import BASE, EXPERTS, NO_CALIBRATOR, Cell, CellResult, Size
from .experiment import Experiment

__all__ = ["MODEL", "Estimate", "Estimator"]

CPU_RATE = 1e11
GPU_RATE = 2e13
START_UP = 30.0
OVERHEAD_BYTES = 1.5 * 2**30
SMOKE_INPUTS = 128

MODEL = (
    "≈ was not measured. It is (inputs × tasks) × 2 × parameters × tokens / rate + "
    f"{START_UP:.0f} s, with 100 GFLOP/s on a CPU and 20 TFLOP/s on a GPU, and for memory the "
    "models held in float32 + 1.5 GiB."
)
"""The model in words."""


@dataclass(frozen=True)
class Estimate:
    """What a cell will take.

    Attributes:
        seconds: Elapsed, with evaluation and start.
        memory_bytes: Highest resident memory of the method; None if unknown.
        measured: Whether it is what this or similar cells took.
    """

    seconds: float
    memory_bytes: float | None
    measured: bool

    @property
    def texts(self) -> tuple[str, str]:
        """Time and memory, with ``≈`` before what was not measured."""
        mark = "" if self.measured else "≈ "
        memory = "" if self.memory_bytes is None else mark + format_bytes(self.memory_bytes)
        return mark + format_duration(self.seconds), memory


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Estimates of a table's cells.

    Attributes:
        experiment: The table.
        tasks: Number of tasks that are evaluated.
        results: Cells that are done, of the same size and on this machine.
        size: Of the table.
        gpu: Whether there is one.
    """

    experiment: Experiment
    tasks: int
    results: Mapping[Cell, CellResult]
    size: Size
    gpu: bool

    @property
    def model_bytes(self) -> float:
        """Size of one saved model."""
        return self.experiment.cost.parameters * 4

    def of(self, cell: Cell) -> Estimate:
        """The estimate of a cell: of its own result, of like cells, or by the model."""
        own = [cell] if cell in self.results else []
        same = [c for c in self.results if replace(c, seed=cell.seed) == cell]
        # what a calibrator takes hardly depends on who merged
        column = [
            c
            for c in self.results
            if c.calibrator == cell.calibrator != NO_CALIBRATOR and not (c.point or cell.point)
        ]
        if like := [self.results[c] for c in own or same or column]:
            seconds = [(result.finished - result.started).total_seconds() for result in like]
            memory = [r.peak_memory_bytes for r in like if r.peak_memory_bytes is not None]
            return Estimate(statistics.fmean(seconds), max(memory, default=None), measured=True)
        return self._modelled(cell)

    def _modelled(self, cell: Cell) -> Estimate:
        cost = self.experiment.cost
        forwards, models, runs = 0.0, 3, 1
        if cell.merger == EXPERTS:
            runs = self.tasks
        elif cell.merger != BASE:
            method = self.experiment.calibrators[cell.calibrator]
            if cell.calibrator == NO_CALIBRATOR:
                method = self.experiment.mergers[cell.merger]
            forwards, models = method.forwards, method.models or self.tasks + 2
        evaluated = cost.test_inputs
        if self.size == "smoke":  # a few samples, a few steps, one batch
            forwards, evaluated = min(forwards, SMOKE_INPUTS), min(evaluated, SMOKE_INPUTS)
        inputs = self.tasks * (forwards + evaluated)
        rate = GPU_RATE if self.gpu else CPU_RATE
        seconds = inputs * 2 * cost.parameters * cost.tokens / rate + runs * START_UP
        return Estimate(seconds, models * self.model_bytes + OVERHEAD_BYTES, measured=False)
