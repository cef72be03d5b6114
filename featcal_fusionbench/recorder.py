"""Keeps the report of a run up to date, and writes it however the run ends."""

from __future__ import annotations

import logging
import shlex
import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from .calibration import CalibrationResult, CalibrationSettings, PhaseClock
from .report import (
    RichProgress,
    RunReport,
    collect_versions,
    describe_machine,
    drift_figure,
    require_writable,
    summary_table,
    write_figure,
)

__all__ = ["REPORT_NAME", "RunRecorder"]

log = logging.getLogger(__name__)

REPORT_NAME = "featcal_report.json"
FIGURE_NAME = "featcal_drift.png"


class RunRecorder:
    """The report of one run, as it grows; a context manager around the run.

    Leaving it writes the report: complete, or with what there was when the run failed or was
    interrupted.

    Args:
        directory: Where report and figure go; made if it is missing.
        settings: The settings of the run.
        merger: Configuration of the upstream merger.
        clock: Adds up the costs of the run's phases.
        enabled: False on ranks other than 0: nothing is written or printed.

    Raises:
        UnwritableDirectoryError: Nothing can be written to the directory.
    """

    def __init__(
        self,
        directory: Path,
        settings: CalibrationSettings,
        merger: dict[str, Any],
        clock: PhaseClock,
        *,
        enabled: bool,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._enabled = enabled
        if enabled:
            require_writable(directory, "method.output_dir (or path.log_dir)")
        self.progress = RichProgress(enabled=enabled)
        self.report = RunReport(
            status="failed",
            settings=settings,
            started=datetime.now(timezone.utc),
            versions=collect_versions(),
            machine=describe_machine(),
            command=shlex.join(sys.argv),
            merger=merger,
        )

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            interrupted = isinstance(error, KeyboardInterrupt)
            text = f"{type(error).__name__}: {error}"
            self.update(status="interrupted" if interrupted else "failed", error=text)
            if self.report.result is None and self.progress.modules:
                self.update(result=CalibrationResult(self.progress.modules))
        self.update(finished=datetime.now(timezone.utc), phases=self._clock.costs())
        if self._enabled:
            self._write()

    def update(self, **changes: Any) -> None:
        """Set fields of the report."""
        self.report = replace(self.report, **changes)

    def warn(self, *warnings: str) -> None:
        """Log warnings and keep them in the report."""
        for warning in warnings:
            if self._enabled:
                log.warning(warning)
        self.update(warnings=(*self.report.warnings, *warnings))

    def print(self, renderable: Any) -> None:
        """Print a table, on rank 0."""
        if self._enabled:
            Console().print(renderable)

    def _write(self) -> None:
        outputs = dict(self.report.outputs)
        if self.report.drift_before:
            figure = self._directory / FIGURE_NAME
            write_figure(figure, drift_figure(self.report.drift_before, self.report.drift_after))
            outputs["figure"] = str(figure)
        outputs["report"] = str(self._directory / REPORT_NAME)
        self.update(outputs=outputs)
        self.report.write(self._directory / REPORT_NAME)
        if self.report.status != "planned":
            self.print(summary_table(self.report))
