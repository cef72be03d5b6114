"""Keeps the report of a run up to date, and writes it however the run ends."""

from __future__ import annotations

import logging
import secrets
import shlex
import sys
import tempfile
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import lightning
from rich.console import Console

from ..calibration import PhaseClock
from ..process.interrupts import deferred
from ..report import (
    RunReport,
    collect_versions,
    describe_machine,
    report_name,
    require_writable,
    summary_table,
    survives,
    write_figure,
)
from ..settings import MethodSettings

__all__ = ["RunRecorder"]

log = logging.getLogger(__name__)

ReportT = TypeVar("ReportT", bound=RunReport)


class RunRecorder(Generic[ReportT]):
    """The report of one run, as it grows; a context manager around the run.

    Leaving it writes the report: complete, or with what there was when the run failed or was
    interrupted. What is only to be looked at (figure, tables, logged numbers) ends no run: where it
    fails the report says so.

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
            self._stopped_by(error)
        self.update(finished=datetime.now(timezone.utc), phases=self.clock.costs())
        if not self.enabled:
            return
        try:
            self._draw()
        except BaseException as interrupt:  # _draw lets nothing else through
            if error is None:
                self._stopped_by(interrupt)
            raise
        finally:
            self._write()
        if self.report.status != "planned":
            self.print(summary_table(self.report))

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
            survives(lambda: Console().print(renderable))

    def log_scalars(self, fabric: lightning.Fabric, prefix: str) -> None:
        """Give the numbers of the finished report to the run's logger.

        Args:
            fabric: Has the logger.
            prefix: What their names start with.
        """
        values = {prefix + name: value for name, value in self.report.scalars().items()}
        try:
            fabric.log_dict(values)
        except Exception as error:
            self.warn(f"The logger did not take the run's numbers: {_named(error)}")
            if self.enabled:
                self._write()

    def _stopped_by(self, error: BaseException) -> None:
        # What is no Exception ends a program from outside: Ctrl-C, a signal, a handler's sys.exit.
        status = "failed" if isinstance(error, Exception) else "interrupted"
        self.update(status=status, error=_named(error))

    def _draw(self) -> None:
        path = self.directory / self.report.figure_name
        try:
            figure = self.report.figure()
            if figure is None:
                return
            write_figure(path, figure)
        except Exception as error:
            self.warn(f"{path} could not be made: {_named(error)}. The report has its numbers.")
        else:
            self.add_output("figure", path)

    def _write(self) -> None:
        name = report_name(self.report.method)
        try:
            self._write_to(self.directory / name)
        except OSError as error:
            kept = Path(tempfile.gettempdir()) / f"{secrets.token_hex(6)}_{name}"
            self.warn(f"The report cannot be written ({_named(error)}): look for it at {kept}.")
            if not survives(lambda: self._write_to(kept)):
                log.error("Nor can it be written there: the report is lost.")

    def _write_to(self, path: Path) -> None:
        self.add_output("report", path)
        with deferred():
            self.report.write(path)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
