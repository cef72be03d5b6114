"""The reports of Representation Surgery and ProbSurgery."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rich.table import Table
from rich.text import Text

from ..baselines.results import SurgeryResult
from ..baselines.settings import ProbSurgerySettings, RepresentationSurgerySettings
from ..report import RunReport
from ..report.tables import change_cell, number_cell, samples_cell, task_table

__all__ = ["ProbSurgeryReport", "RepresentationSurgeryReport", "SurgeryReport"]


@dataclass(frozen=True, kw_only=True)
class SurgeryReport(RunReport):
    """A training of modules after the final representation.

    Attributes:
        result: What the training did. Where the run did not complete, the tasks that were finished.
    """

    result: SurgeryResult | None = None

    def table(self) -> Table:
        """The change of the loss on held-out inputs where there are any: in training it falls."""
        table = task_table(
            f"{self.method} {self.status}: mean |difference| to the expert",
            *("samples", "before", "after", "held-out", "after", "change"),
        )
        data = {entry.task: entry for entry in self.data}
        trained = {task.task: task for task in self.result.tasks} if self.result else {}
        for name in dict.fromkeys([*data, *trained]):
            start = end = heldout_start = heldout_end = None
            if task := trained.get(name):
                start, end = task.loss_start, task.loss_end
                heldout_start, heldout_end = task.heldout_start, task.heldout_end
            losses = map(number_cell, (start, end, heldout_start, heldout_end))
            if heldout_start is not None:
                start, end = heldout_start, heldout_end
            worse = start is not None and end is not None and end > start
            change = change_cell(start, end, worse=worse)
            table.add_row(Text(name), samples_cell(data.get(name)), *losses, change)
        return table

    def numbers(self) -> dict[str, float | None]:
        """Single numbers by a name: also ``loss_start/<task>`` and ``loss_end/<task>``."""
        numbers = super().numbers()
        for task in self.result.tasks if self.result else ():
            numbers[f"loss_start/{task.task}"] = task.loss_start
            numbers[f"loss_end/{task.task}"] = task.loss_end
        return numbers


@dataclass(frozen=True, kw_only=True)
class RepresentationSurgeryReport(SurgeryReport):
    """A run of Representation Surgery."""

    method: ClassVar[str] = "representation_surgery"

    settings: RepresentationSurgerySettings


@dataclass(frozen=True, kw_only=True)
class ProbSurgeryReport(SurgeryReport):
    """A run of ProbSurgery."""

    method: ClassVar[str] = "prob_surgery"

    settings: ProbSurgerySettings
