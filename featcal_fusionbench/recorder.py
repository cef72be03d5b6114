"""Keeps the report of a run up to date, and writes it however the run ends."""

from __future__ import annotations

import logging
import shlex
import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from rich.console import Console

from .calibration import PhaseClock
from .report import (
    FeatCalReport,
    MethodSettings,
    RunReport,
    collect_versions,
    describe_machine,
    drift_figure,
    report_name,
    require_writable,
    summary_table,
    write_figure,
)

__all__ = ["RunRecorder"]

log = logging.getLogger(__name__)

FIGURE_NAME = "featcal_drift.png"

ReportT = TypeVar("ReportT", bound=RunReport)


class RunRecorder(Generic[ReportT]):
    """The report of one run, as it grows; a context manager around the run.

    Leaving it writes the report: complete, or with what there was when the run failed or was
    interrupted.

    Args:
        directory: Where report and figure go; made if it is missing.
        kind: The report's class.
        settings: The settings of the run.
        merger: Configuration of the upstream merger.
        merged_model: The merged model that stands in for it.
        clock: Adds up the costs of the run's phases.
        enabled: False on ranks other than 0: nothing is written or printed.

    Raises:
        UnwritableDirectoryError: Nothing can be written to the directory.
    """

    def __init__(
        self,
        directory: Path,
        kind: type[ReportT],
        settings: MethodSettings,
        *,
        merger: dict[str, Any],
        merged_model: str | None,
        clock: PhaseClock,
        enabled: bool,
    ) -> None:
        self.directory = directory
        self.clock = clock
        self.enabled = enabled
        if enabled:
            require_writable(directory, "method.output_dir (or path.log_dir)")
        self.report: ReportT = kind(
            status="failed",
            settings=settings,
            started=datetime.now(timezone.utc),
            versions=collect_versions(),
            machine=describe_machine(),
            command=shlex.join(sys.argv),
            merger=merger,
            merged_model=merged_model,
        )

    def __enter__(self) -> RunRecorder[ReportT]:
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
        self.update(finished=datetime.now(timezone.utc), phases=self.clock.costs())
        if self.enabled:
            self._write()

    def update(self, **changes: Any) -> None:
        """Set fields of the report."""
        self.report = replace(self.report, **changes)

    def add_output(self, name: str, path: Path | str) -> None:
        """Name a file that the run wrote."""
        self.update(outputs={**self.report.outputs, name: str(path)})

    def warn(self, *warnings: str) -> None:
        """Log warnings and keep them in the report."""
        for warning in warnings:
            if self.enabled:
                log.warning(warning)
        self.update(warnings=(*self.report.warnings, *warnings))

    def print(self, renderable: Any) -> None:
        """Print a table, on rank 0."""
        if self.enabled:
            Console().print(renderable)

    def _write(self) -> None:
        report = self.report
        if isinstance(report, FeatCalReport) and report.drift_before:
            figure = self.directory / FIGURE_NAME
            write_figure(figure, drift_figure(report.drift_before, report.drift_after))
            self.add_output("figure", figure)
        path = self.directory / report_name(report.method)
        self.add_output("report", path)
        self.report.write(path)
        if report.status != "planned":
            self.print(summary_table(self.report))
