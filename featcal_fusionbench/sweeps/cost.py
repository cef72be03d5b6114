"""What cells will take: as similar cells took, or else by a simple model that says so."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..tables.results import BASE, EXPERTS, NO_CALIBRATOR, CellResult, Size
from .cells import Cell
from .experiment import Experiment

__all__ = ["MODEL", "Estimate", "Estimator"]

CPU_RATE = 1e11
GPU_RATE = 2e13
START_UP = 30.0
OVERHEAD_BYTES = 1.5e9
SMOKE_INPUTS = 128

MODEL = (
    "≈ is no measurement but (inputs × tasks) × 2 × parameters × tokens / rate + "
    f"{START_UP:.0f} s, with 100 GFLOP/s on a CPU and 20 TFLOP/s on a GPU, and for memory the "
    "models held in float32 + 1.5 GB."
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
    def mark(self) -> str:
        """``≈`` before what was not measured."""
        return "" if self.measured else "≈ "


class Estimator:
    """Estimates of a table's cells.

    Args:
        experiment: The table.
        tasks: Number of tasks that are evaluated.
        results: Cells that are done, of the same size and on this machine.
        size: Of the table.
        gpu: Whether there is one.
    """

    def __init__(
        self,
        experiment: Experiment,
        tasks: int,
        results: Mapping[Cell, CellResult],
        *,
        size: Size,
        gpu: bool,
    ) -> None:
        self._experiment = experiment
        self._smoke = size == "smoke"
        self._tasks = tasks
        self._results = results
        self._rate = GPU_RATE if gpu else CPU_RATE

    def of(self, cell: Cell) -> Estimate:
        """The estimate of a cell: of its own result, of like cells, or by the model."""
        own = [cell] if cell in self._results else []
        same = [c for c in self._results if replace(c, seed=cell.seed) == cell]
        # what a calibrator takes hardly depends on who merged
        column = [
            c
            for c in self._results
            if c.calibrator == cell.calibrator != NO_CALIBRATOR and not (c.point or cell.point)
        ]
        for like in (own, same, column):
            if like:
                return _measured(self._results[c] for c in like)
        return self._modelled(cell)

    def _modelled(self, cell: Cell) -> Estimate:
        cost, every = self._experiment.cost, self._tasks + 2
        forwards, models, runs = 0.0, 3, 1
        if cell.merger == EXPERTS:
            runs = self._tasks
        elif cell.merger != BASE:
            merger = self._experiment.mergers[cell.merger]
            calibrator = self._experiment.calibrators[cell.calibrator]
            forwards = calibrator.forwards
            models = calibrator.models or every
            if cell.calibrator == NO_CALIBRATOR:
                forwards = merger.forwards
                models = merger.models or every
        evaluated = cost.test_inputs
        if self._smoke:  # a few samples, a few steps, one batch
            forwards, evaluated = min(forwards, SMOKE_INPUTS), min(evaluated, SMOKE_INPUTS)
        inputs = self._tasks * (forwards + evaluated)
        seconds = inputs * 2 * cost.parameters * cost.tokens / self._rate + runs * START_UP
        return Estimate(seconds, models * cost.parameters * 4 + OVERHEAD_BYTES, measured=False)

    def model_bytes(self) -> float:
        """Size of one saved model."""
        return self._experiment.cost.parameters * 4


def _measured(results: Iterable[CellResult]) -> Estimate:
    results = list(results)
    seconds = [(result.finished - result.started).total_seconds() for result in results]
    memory = [r.peak_memory_bytes for r in results if r.peak_memory_bytes is not None]
    return Estimate(statistics.fmean(seconds), max(memory, default=None), measured=True)
