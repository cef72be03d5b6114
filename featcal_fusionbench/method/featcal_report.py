"""The report of a calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rich.table import Table
from rich.text import Text

from ..calibration.results import CalibrationResult, PhaseCost, TaskDrift
from ..calibration.settings import CalibrationSettings
from ..report import RunReport
from ..report.drift import DriftChange, compare_drift, mean_final_drift
from ..report.tables import change_cell, number_cell, samples_cell, task_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FeatCalReport"]


@dataclass(frozen=True, kw_only=True)
class FeatCalReport(RunReport):
    """A calibration.

    Attributes:
        holding: What the calibration's waiting forwards held in memory, and why.
        result: What the loop did. Where the run did not complete, the modules that were finished.
            ``result.phases`` splits the calibration among ``phases`` further and is not added.
        drift_before: Held-out drift of the merged model.
        drift_after: Held-out drift of the calibrated model.
    """

    method: ClassVar[str] = "featcal"
    figure_name: ClassVar[str] = "featcal_drift.png"

    settings: CalibrationSettings
    holding: str = ""
    result: CalibrationResult | None = None
    drift_before: tuple[TaskDrift, ...] = ()
    drift_after: tuple[TaskDrift, ...] = ()

    @property
    def mean_drift_before(self) -> float | None:
        """Mean final drift of the merged model over tasks."""
        return mean_final_drift(self.drift_before)

    @property
    def mean_drift_after(self) -> float | None:
        """Mean final drift of the calibrated model over tasks."""
        return mean_final_drift(self.drift_after)

    @property
    def worsened(self) -> tuple[DriftChange, ...]:
        """Tasks whose held-out final drift grew."""
        changes = compare_drift(self.drift_before, self.drift_after)
        return tuple(change for change in changes if change.is_worse)

    @property
    def all_warnings(self) -> tuple[str, ...]:
        """The run's warnings and, last, the one about tasks that got worse."""
        worse = self.worsened
        if not worse:
            return self.warnings
        total = len(compare_drift(self.drift_before, self.drift_after))
        listed = ", ".join(f"{c.task} {c.before:.4f} to {c.after:.4f}" for c in worse)
        derived = (
            f"Held-out drift grew on {len(worse)} of {total} tasks ({listed}): there the "
            f"calibrated model may be worse than the merged one. Try another ridge_lambda (now "
            f"{self.settings.ridge_lambda:g}; go up and down by factors of 10, the right size "
            f"differs from model to model) and more samples per task (n_samples, now "
            f"{self.settings.n_samples})."
        )
        return self.warnings if derived in self.warnings else (*self.warnings, derived)

    @property
    def modules_calibrated(self) -> int:
        """Modules with new values."""
        return sum(m.calibrated for m in self.result.modules) if self.result else 0

    @property
    def modules_kept(self) -> int:
        """Planned modules that kept their merged values after all."""
        return sum(not m.calibrated for m in self.result.modules) if self.result else 0

    @property
    def modules_skipped(self) -> int:
        """Modules that kept their merged values by plan."""
        return len(self.result.skipped) if self.result else 0

    @property
    def _costs(self) -> tuple[PhaseCost, ...]:
        return self.phases or (self.result.phases if self.result else ())

    def summary(self) -> dict[str, Any]:
        """Derived numbers, for programs that read the file."""
        return {
            "mean_drift_before": self.mean_drift_before,
            "mean_drift_after": self.mean_drift_after,
            "worsened": [change.task for change in self.worsened],
            "modules_calibrated": self.modules_calibrated,
            "modules_kept": self.modules_kept,
            "modules_skipped": self.modules_skipped,
            **super().summary(),
        }

    def table(self) -> Table:
        """Final drift before and after, by task."""
        before = {drift.task: drift for drift in self.drift_before}
        after = {drift.task: drift for drift in self.drift_after}
        data = {entry.task: entry for entry in self.data}
        worse = {change.task for change in self.worsened}
        table = task_table(
            f"FeatCal {self.status}: final feature drift on held-out inputs",
            *("samples", "held-out", "before", "after", "change"),
        )

        def drift_cells(old: float | None, new: float | None, worse: bool) -> list[Text]:
            return [number_cell(old), number_cell(new), change_cell(old, new, worse=worse)]

        # dict.fromkeys: a set that keeps the order of the first appearance
        for task in dict.fromkeys([*data, *before, *after]):
            measured = before.get(task) or after.get(task)
            heldout = measured.inputs if measured else len(data[task].heldout_indices)
            old, new = (of[task].final if task in of else None for of in (before, after))
            cells = drift_cells(old, new, task in worse)
            table.add_row(Text(task), samples_cell(data.get(task)), Text(str(heldout)), *cells)
        if len({*before, *after}) > 1:
            old, new = self.mean_drift_before, self.mean_drift_after
            grew = old is not None and new is not None and DriftChange("mean", old, new).is_worse
            table.add_section()
            table.add_row(Text("mean", "bold"), Text(), Text(), *drift_cells(old, new, grew))
        return table

    def details(self) -> list[str]:
        """What happened to how many modules."""
        return [
            f"modules: {self.modules_calibrated} calibrated, {self.modules_kept} kept after a "
            f"failure, {self.modules_skipped} skipped by plan"
        ]

    def figure(self) -> Figure | None:
        """Drift block by block and task by task."""
        if not self.drift_before:
            return None
        from ..report.figures import drift_figure  # here: importing matplotlib can fail

        return drift_figure(self.drift_before, self.drift_after)

    def numbers(self) -> dict[str, float | None]:
        """Single numbers by a name: also the drift of each task, and of the solves the worst."""
        numbers: dict[str, float | None] = {
            **super().numbers(),
            "mean_drift_before": self.mean_drift_before,
            "mean_drift_after": self.mean_drift_after,
            "tasks_worsened": len(self.worsened) if self.drift_after else None,
        }
        for stage, drift in (("before", self.drift_before), ("after", self.drift_after)):
            numbers |= {f"drift_{stage}/{task.task}": task.final for task in drift}
        if self.result:
            modules = self.result.modules
            conditions = (m.condition for m in modules if m.condition is not None)
            numbers |= {
                "modules_calibrated": self.modules_calibrated,
                "modules_kept": self.modules_kept,
                "modules_skipped": self.modules_skipped,
                "max_condition": max(conditions, default=None),
                "max_damping": max((m.damping for m in modules), default=None),
            }
        return numbers
