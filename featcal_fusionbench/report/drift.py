"""What calibration did to the held-out drift, task by task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..calibration.results import TaskDrift
from ..calibration.settings import CalibrationSettings

__all__ = ["DriftChange", "compare_drift", "mean_final_drift", "worsened", "worsening_warning"]

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


def worsened(before: Sequence[TaskDrift], after: Sequence[TaskDrift]) -> tuple[DriftChange, ...]:
    """The tasks whose held-out final drift is larger after calibration than before."""
    return tuple(change for change in compare_drift(before, after) if change.is_worse)


def worsening_warning(
    before: Sequence[TaskDrift], after: Sequence[TaskDrift], settings: CalibrationSettings
) -> str | None:
    """Say which tasks got worse and what to try; None where none did."""
    worse = worsened(before, after)
    if not worse:
        return None
    total = len(compare_drift(before, after))
    listed = ", ".join(f"{c.task} {c.before:.4f} to {c.after:.4f}" for c in worse)
    return (
        f"Held-out drift grew on {len(worse)} of {total} tasks ({listed}): there the calibrated "
        f"model may be worse than the merged one. Try another ridge_lambda (now "
        f"{settings.ridge_lambda:g}; go up and down by factors of 10, the right size differs from "
        f"model to model) and more samples per task (n_samples, now {settings.n_samples})."
    )
