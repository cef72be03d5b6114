"""A run's numbers for a metrics logger."""

from __future__ import annotations

from .run_report import RunReport

__all__ = ["scalars"]


def scalars(report: RunReport) -> dict[str, float]:
    """The numbers of a report under flat names.

    Args:
        report: The report.

    Returns:
        ``featcal/drift_before/<task>`` and ``featcal/drift_after/<task>`` (relative), their means,
        ``featcal/seconds`` and ``featcal/cpu_seconds``, peak memory in GiB, counts of modules and
        the worst condition and damping. What was not measured is left out.
    """
    values: dict[str, float | None] = {
        "featcal/mean_drift_before": report.mean_drift_before,
        "featcal/mean_drift_after": report.mean_drift_after,
        "featcal/seconds": report.wall_seconds,
        "featcal/cpu_seconds": report.cpu_seconds,
        "featcal/peak_memory_gib": _gib(report.peak_memory_bytes),
        "featcal/peak_device_gib": _gib(report.peak_device_bytes),
        "featcal/tasks_worsened": len(report.worsened) if report.drift_after else None,
    }
    for stage, drift in (("before", report.drift_before), ("after", report.drift_after)):
        values |= {f"featcal/drift_{stage}/{task.task}": task.final for task in drift}
    if report.result:
        modules = report.result.modules
        conditions = [m.condition for m in modules if m.condition is not None]
        values |= {
            "featcal/modules_calibrated": report.modules_calibrated,
            "featcal/modules_kept": report.modules_kept,
            "featcal/modules_skipped": report.modules_skipped,
            "featcal/max_condition": max(conditions, default=None),
            "featcal/max_damping": max((m.damping for m in modules), default=None),
        }
    return {name: float(value) for name, value in values.items() if value is not None}


def _gib(count: int | None) -> float | None:
    return None if count is None else count / 2**30
