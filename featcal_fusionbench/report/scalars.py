"""A run's numbers for a metrics logger."""

from __future__ import annotations

from .run_report import FeatCalReport, RunReport, SurgeryReport

__all__ = ["scalars"]


def scalars(report: RunReport) -> dict[str, float]:
    """The numbers of a report under flat names.

    Args:
        report: The report.

    Returns:
        Names that start with the method's: ``featcal/seconds``, ``…/cpu_seconds`` and peak memory
        in GiB; of FeatCal ``featcal/drift_before/<task>`` and ``featcal/drift_after/<task>``
        (relative), their means, counts of modules and the worst condition and damping; of the
        surgery methods ``…/loss_start/<task>`` and ``…/loss_end/<task>``. What was not measured is
        left out.
    """
    values: dict[str, float | None] = {
        "seconds": report.wall_seconds,
        "cpu_seconds": report.cpu_seconds,
        "peak_memory_gib": _gib(report.peak_memory_bytes),
        "peak_device_gib": _gib(report.peak_device_bytes),
    }
    if isinstance(report, FeatCalReport):
        values |= _of_calibration(report)
    if isinstance(report, SurgeryReport) and report.result:
        for task in report.result.tasks:
            values[f"loss_start/{task.task}"] = task.loss_start
            values[f"loss_end/{task.task}"] = task.loss_end
    return {f"{report.method}/{k}": float(v) for k, v in values.items() if v is not None}


def _of_calibration(report: FeatCalReport) -> dict[str, float | None]:
    values: dict[str, float | None] = {
        "mean_drift_before": report.mean_drift_before,
        "mean_drift_after": report.mean_drift_after,
        "tasks_worsened": len(report.worsened) if report.drift_after else None,
    }
    for stage, drift in (("before", report.drift_before), ("after", report.drift_after)):
        values |= {f"drift_{stage}/{task.task}": task.final for task in drift}
    if report.result:
        modules = report.result.modules
        conditions = [m.condition for m in modules if m.condition is not None]
        values |= {
            "modules_calibrated": report.modules_calibrated,
            "modules_kept": report.modules_kept,
            "modules_skipped": report.modules_skipped,
            "max_condition": max(conditions, default=None),
            "max_damping": max((m.damping for m in modules), default=None),
        }
    return values


def _gib(count: int | None) -> float | None:
    return None if count is None else count / 2**30
