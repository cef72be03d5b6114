"""``featcal-table``: the cells of a table, those that are missing run, and the table of them."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..report.errors import ReportError, UnwritableDirectoryError
from ..report.text import format_bytes, format_duration
from ..tables.checks import TableError
from ..tables.published import PublishedNumberError
from ..tables.results import Cell
from ..tables.terminal import terminal
from .cells import Plan, Selection
from .directory import Identity, State, Status
from .errors import ExperimentError, SweepError
from .estimate import MODEL, Estimator
from .experiment import load_experiment, table_names
from .launchers import LAUNCHERS, require_launcher
from .preflight import Found, Place
from .sweep import Sweep, to_run

__all__ = ["main", "show_failures", "wide_console"]

PROGRAM = "featcal-table"

_REFUSALS = (
    ExperimentError,
    PublishedNumberError,
    ReportError,
    SweepError,
    TableError,
    UnwritableDirectoryError,
)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Run the missing cells of a table, each one FusionBench run, and make the "
        "table. Cells that are done are kept; a sweep that was stopped goes on where it was.",
    )
    parser.add_argument("table", nargs="?", help="a file of config/table; see --list")
    parser.add_argument(
        "overrides",
        nargs="*",
        help="Hydra overrides of all runs, such as fabric.accelerator=cpu or "
        "modelpool.models.dtd=/models/dtd; those of hydra.launcher.… go to the launcher",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="merger=KEY,…,calibrator=KEY,…",
        help="these rows and columns, and what they start from",
    )
    parser.add_argument("--seeds", help="how many (3), or which ones (0,2); default: the table's")
    parser.add_argument("--tasks", help="these tasks alone (a,b,c): averages are then partial")
    parser.add_argument(
        "--size", choices=("full", "smoke"), default="full", help="smoke: does every cell work?"
    )
    parser.add_argument(
        "--launcher",
        choices=list(LAUNCHERS),
        help="how cells are run: one after the other, each a program of its own (local) or all in "
        "this one (in_process), some at once on this machine (joblib), on Slurm (submitit), on a "
        "Ray cluster (ray); default: the table's, which is local for all but the demos",
    )
    parser.add_argument("--jobs", type=int, help="cells at once (joblib), or on the cluster")
    parser.add_argument("--output", type=Path, help="default: outputs/featcal_tables/TABLE/SIZE")
    parser.add_argument("--config-dir", type=Path, help="a directory with further configs")
    parser.add_argument("--dry-run", action="store_true", help="list cells, cost and downloads")
    parser.add_argument("--retry-failed", action="store_true", help="run failed cells again too")
    parser.add_argument("--list", action="store_true", help="list tables, or a table's keys")
    options = parser.parse_intermixed_args(arguments)
    if options.table is None and not options.list:
        parser.error("which table? --list lists them")
    if wrong := [text for text in options.overrides if "=" not in text and text[:1] != "~"]:
        parser.error(f"{' '.join(wrong)}: overrides look like modelpool.models.dtd=/models/dtd")
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: at least one")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0 if all wanted cells are done, 1 if some are not, 2 if nothing was begun.
    """
    options = parse_arguments(arguments)
    console = wide_console()
    try:
        if options.list:
            _list(options, console)
            return 0
        return _Command.of(options, console).run()
    except _REFUSALS as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: stopped; the same command goes on from here", file=sys.stderr)
        return 130


def wide_console() -> Console:
    """A console for wide tables: a log file has no width, and rich's 80 columns would cut some."""
    console = Console()
    return console if console.is_terminal else Console(width=130)


def _list(options: argparse.Namespace, console: Console) -> None:
    if options.table is None:
        for name in table_names(options.config_dir):
            console.print(f"{name:40} {load_experiment(name, options.config_dir).title}")
        return
    experiment = load_experiment(options.table, options.config_dir)
    console.print(f"{experiment.name}: {experiment.title}")
    for what, keys, methods in (
        ("rows (merger=)", experiment.rows_shown, experiment.mergers),
        ("columns (calibrator=)", experiment.columns_shown, experiment.calibrators),
    ):
        console.print(f"{what}:")
        for key in keys:
            console.print(f"  {key:32} {methods[key].title}")
    for name, curve in experiment.curves.items():
        console.print(f"curve {name}: {', '.join(map(str, curve.values))}")


@dataclass
class _Command:
    """One call of the command: the sweep it is about, what is wanted of it, and how it is run."""

    options: argparse.Namespace
    console: Console
    sweep: Sweep
    selection: Selection
    launcher: list[str] | None

    @classmethod
    def of(cls, options: argparse.Namespace, console: Console) -> _Command:
        """What a call of the command asks for; the directory and the pools are looked at."""
        config_dir: Path | None = options.config_dir and options.config_dir.absolute()
        if config_dir is not None and not config_dir.is_dir():
            raise SweepError(f"--config-dir {config_dir}: there is no such directory.")
        experiment = load_experiment(options.table, config_dir)
        selection = Selection.parse(
            experiment, options.size, options.only, options.seeds, options.tasks
        )
        launcher = require_launcher(options.launcher or experiment.launcher, options.jobs)
        if settings := [text for text in options.overrides if text.startswith("hydra")]:
            if launcher is None:
                raise SweepError(f"{' '.join(settings)}: the launcher in_process has no settings.")
            launcher += settings
        identity = Identity(
            table=experiment.name,
            size=options.size,
            tasks=selection.tasks,
            overrides=tuple(_own_overrides(options)),
        )
        output = options.output or Path("outputs/featcal_tables", options.table, options.size)
        sweep = Sweep.of(experiment, identity, output, config_dir)
        return cls(options, console, sweep, selection, launcher)

    def run(self) -> int:
        """List what would be run, or run it; see ``main`` for the exit status."""
        plans = self.sweep.plan(self.selection)
        statuses = self.sweep.statuses(plans)
        retry_failed = self.options.retry_failed
        waiting = to_run(plans, statuses, retry_failed=retry_failed)
        if self.options.dry_run:
            self._show_plan(plans, statuses, waiting)
            return 0
        if waiting:
            self.console.print(f"{_count(statuses)}; {len(waiting)} to run")
            statuses = self.sweep.run(plans, self.launcher, retry_failed=retry_failed)
        self.console.print(f"{_count(statuses)} in {self.sweep.directory.path}")
        show_failures(statuses, self.console)
        if any(status.state is State.FAILED for status in statuses.values()):
            self.console.print("--retry-failed runs them again")
        self._write(statuses)
        return 0 if all(status.state is State.DONE for status in statuses.values()) else 1

    def _show_plan(
        self, plans: Sequence[Plan], statuses: Mapping[Cell, Status], waiting: Sequence[Plan]
    ) -> None:
        import torch

        experiment, identity = self.sweep.experiment, self.sweep.identity
        tasks = identity.tasks or experiment.sizes[identity.size].tasks or experiment.tasks
        estimator = Estimator(
            experiment=experiment,
            tasks=len(tasks or self.sweep.pools.tasks),
            results={cell: s.result for cell, s in statuses.items() if s.result is not None},
            size=identity.size,
            gpu=torch.cuda.is_available(),
        )
        table = Table(title=f"{experiment.title} ({identity}) in {self.sweep.directory.path}")
        for name in ("cell", "state"):
            table.add_column(name, no_wrap=True)
        for name in ("time", "memory", "saved model"):
            table.add_column(name, justify="right")
        estimates = {plan.cell: estimator.of(plan.cell) for plan in plans}
        model_bytes = estimator.model_bytes
        for plan in plans:
            cell, estimate = plan.cell, estimates[plan.cell]
            saved = format_bytes(model_bytes) if plan.saves else ""
            table.add_row(cell.id, statuses[cell].state.value, *estimate.texts, saved)
        self.console.print(table)
        seconds = sum(estimates[plan.cell].seconds for plan in waiting)
        disk = model_bytes * sum(plan.saves for plan in waiting)
        self.console.print(
            f"{_count(statuses)}. To run: {len(waiting)} cells, one after the other in "
            f"{format_duration(seconds)}; saved models take {format_bytes(disk)}."
        )
        if any(not estimate.measured for estimate in estimates.values()):
            self.console.print(MODEL, highlight=False)
        self._show_sources(self.sweep.sources(waiting))

    def _show_sources(self, found: Sequence[Found]) -> None:
        table = Table(title="Models and data")
        for name in ("what", "where", "size"):
            table.add_column(name, justify="right" if name == "size" else "left")
        for item in found:
            where = item.place.value + (f": {item.problem}" if item.problem else "")
            table.add_row(item.source.title, where, format_bytes(item.bytes) if item.bytes else "")
        if found:
            self.console.print(table)
        downloads = [item.bytes or 0 for item in found if item.place is Place.HUB]
        size = f", {format_bytes(sum(downloads))}" if any(downloads) else ""
        missing = sum(item.place is Place.MISSING for item in found)
        self.console.print(f"{len(downloads)} to download{size}; {missing} missing")
        if self.sweep.experiment.build:
            later = "is built before the first cell"
            self.console.print(f"what is missing of the embedded benchmark {later}")

    def _write(self, statuses: Mapping[Cell, Status]) -> None:
        """The table of what is wanted now and of what else is done, from earlier sweeps."""
        everything = self.sweep.plan(replace(self.selection, mergers=None, calibrators=None))
        shown = {
            cell: status
            for cell, status in (self.sweep.statuses(everything) | dict(statuses)).items()
            if cell in statuses or status.state is State.DONE
        }
        written = self.sweep.write_table(shown, _table_command(self.options))
        if written is not None:
            self.console.print(terminal(written.document))
            self.console.print(f"written: {', '.join(path.name for path in written.files)}")


def show_failures(statuses: Mapping[Cell, Status], console: Console) -> None:
    """List the cells that failed, and those that wait for one of them."""
    for cell, status in statuses.items():
        if status.failure is not None:
            failure = status.failure
            text = f"failed: {cell.id}: {failure.reason}; see {failure.log}"
            console.print(text, highlight=False, soft_wrap=True)
        elif status.state is State.BLOCKED:
            console.print(f"blocked: {cell.id}: what it starts from failed")


def _count(statuses: Mapping[Cell, Status]) -> str:
    states = [status.state for status in statuses.values()]
    return ", ".join(f"{states.count(state)} {state.value}" for state in State if state in states)


def _own_overrides(options: argparse.Namespace) -> list[str]:
    """The overrides that are not for the launcher."""
    return [text for text in options.overrides if not text.startswith("hydra")]


def _table_command(options: argparse.Namespace) -> str:
    command = [PROGRAM, options.table, "--size", options.size]
    for flag, value in (
        ("--seeds", options.seeds),
        ("--tasks", options.tasks),
        ("--config-dir", options.config_dir),
    ):
        command += [] if value is None else [flag, str(value)]
    return shlex.join([*command, *_own_overrides(options)])


if __name__ == "__main__":
    sys.exit(main())
