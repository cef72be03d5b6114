"""What calibration did to the held-out drift, task by task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..calibration.results import TaskDrift

__all__ = ["DriftChange", "compare_drift", "mean_final_drift"]

# Rounding of the forwards alone moves a drift by about 1e-6 of itself.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class DriftChange:
    """Final drift of one task before and after calibration, both relative and on held-out inputs.

    Attributes:
        task: Name of the task.
        before: Drift of the merged model as it came.
        after: Drift of the calibrated model.
    """

    task: str
    before: float
    after: float

    @property
    def is_worse(self) -> bool:
        """Whether drift grew by more than rounding, or is no longer a number."""
        # Negated, so that a NaN, which compares as False with everything, counts as worse.
        return not self.after <= self.before * (1 + _ROUNDING)


def compare_drift(
    before: Sequence[TaskDrift], after: Sequence[TaskDrift]
) -> tuple[DriftChange, ...]:
    """Pair the tasks that were measured both times, in the order of ``before``."""
    final = {drift.task: drift.final for drift in after}
    return tuple(
        DriftChange(drift.task, drift.final, final[drift.task])
        for drift in before
        if drift.task in final
    )


def mean_final_drift(drift: Sequence[TaskDrift]) -> float | None:
    """Mean of the final drift over tasks, each task counting the same; None without tasks."""
    return sum(task.final for task in drift) / len(drift) if drift else None
