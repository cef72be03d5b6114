"""``featcal-table``: the cells of a table, those that are missing run, and the table of them."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from ..command_line import environment_variables
from ..report.errors import ReportError, UnwritableDirectoryError
from ..tables.checks import TableError
from ..tables.published import PublishedNumberError
from ..tables.results import Size
from ..tables.terminal import terminal
from .builds import environment_of, make_builds
from .cells import Cell, Plan, Selection, plan_cells
from .compose import compose_config, compose_method
from .cost import MODEL, Estimate, Estimator
from .directory import Identity, State, Status, SweepDirectory
from .errors import ExperimentError, SweepError
from .experiment import load_experiment, table_names
from .launchers import LAUNCHERS, require_launcher
from .outcome import write_outcome
from .pools import Pools
from .preflight import Found, Place, check_sources, require_all, sources_of
from .sweep import run_pending, to_run

__all__ = ["main"]

PROGRAM = "featcal-table"
WIDTH = 130

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
        default="local",
        help="how Hydra runs cells: one after the other (local), some at once on this machine "
        "(joblib), on Slurm (submitit), on a Ray cluster (ray)",
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
    console = Console()
    if not console.is_terminal:
        # a log file has no width; rich's fallback of 80 columns would cut the columns
        console = Console(width=WIDTH)
    try:
        if options.list:
            _list(options, console)
            return 0
        return _Command(options, console).run()
    except _REFUSALS as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: stopped; the same command goes on from here", file=sys.stderr)
        return 130


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
    """One call of the command: the table it is about, and what is wanted of it."""

    options: argparse.Namespace
    console: Console

    def __post_init__(self) -> None:
        options = self.options
        self.size: Size = options.size
        self.config_dir: Path | None = options.config_dir and options.config_dir.absolute()
        if self.config_dir is not None and not self.config_dir.is_dir():
            raise SweepError(f"--config-dir {self.config_dir}: there is no such directory.")
        self.experiment = load_experiment(options.table, self.config_dir)
        self.selection = Selection.parse(
            self.experiment, self.size, options.only, options.seeds, options.tasks
        )
        self.extra = [text for text in options.overrides if not text.startswith("hydra")]
        self.launcher = require_launcher(options.launcher, options.jobs)
        self.launcher += [text for text in options.overrides if text.startswith("hydra")]
        output = options.output or Path("outputs/featcal_tables", options.table, self.size)
        self.directory = SweepDirectory(output.absolute())
        self.identity = Identity(
            table=self.experiment.name,
            size=self.size,
            tasks=self.selection.tasks,
            overrides=tuple(self.extra),
        )
        self.directory.check(self.identity)
        seeds = self.selection.seeds or (0,)
        self.environments = {
            seed: environment_of(self.experiment.build, seed) for seed in (0, *seeds)
        }
        self.pools = Pools.of(
            compose_config(
                [*self.experiment.pools, *self.experiment.overrides, *self.extra], self.config_dir
            ),
            self.experiment.expert,
        )
        if (published := self.experiment.published_values) is not None:
            published.resolve()  # wrong labels are found now, not after the last cell
        self.plans = self._plan(self.selection)

    def _plan(self, selection: Selection) -> list[Plan]:
        return plan_cells(
            self.experiment,
            self.size,
            selection,
            self.pools,
            self.directory.models,
            extra=self.extra,
            flags=["--config-dir", str(self.config_dir)] if self.config_dir else [],
            environments=self.environments,
        )

    def run(self) -> int:
        """List what would be run, or run it; see ``main`` for the exit status."""
        statuses = self.directory.statuses(self.plans, self.experiment.name)
        waiting = to_run(self.plans, statuses, retry_failed=self.options.retry_failed)
        if self.options.dry_run:
            self._show_plan(statuses, waiting)
            return 0
        if waiting:
            with self.directory.claim(self.identity):
                self._check(waiting)
                self.directory.begin(self.identity)
                self.console.print(f"{self._count(statuses)}; {len(waiting)} to run")
                statuses = run_pending(
                    self.plans,
                    self.directory,
                    self.identity,
                    self.launcher,
                    environments=self.environments,
                    retry_failed=self.options.retry_failed,
                )
        self._show_end(statuses)
        self._write(statuses)
        return 0 if all(status.state is State.DONE for status in statuses.values()) else 1

    def _check(self, waiting: Sequence[Plan]) -> None:
        """Builds of the embedded benchmark, and everything that the runs will read."""
        found = self._sources(waiting)
        if self.experiment.build and any(item.place is Place.MISSING for item in found):
            make_builds(self.experiment.build, sorted({plan.cell.seed for plan in waiting}))
            found = self._sources(waiting)
        require_all(found)

    def _sources(self, waiting: Sequence[Plan]) -> list[Found]:
        """What the runs read. That all their configurations compose is seen on the way."""
        methods: set[tuple[str, ...]] = set()
        others: dict[tuple[str, ...], int] = {}
        for plan in waiting:
            run = plan.runs[0]  # those of the experts differ in what is left out alone
            if run.task is None:
                methods.add(tuple(t for t in run.method if not _names_seed_or_model(t)))
            # each seed has a build of its own
            build = () if self.experiment.build is None else (f"seed={plan.cell.seed}",)
            kept = tuple(text for text in run.others if not _names_seed_or_model(text))
            others.setdefault((*kept, *build), plan.cell.seed)
        for method in sorted(methods):
            compose_method(method, self.config_dir)
        sources = []
        for overrides, seed in others.items():
            with environment_variables(self.environments[seed]):
                sources += sources_of(compose_config(overrides, self.config_dir))
        return check_sources(sources)

    def _count(self, statuses: Mapping[Cell, Status]) -> str:
        states = [status.state for status in statuses.values()]
        return ", ".join(
            f"{states.count(state)} {state.value}" for state in State if state in states
        )

    def _show_plan(self, statuses: Mapping[Cell, Status], waiting: Sequence[Plan]) -> None:
        import torch

        tasks = self.selection.tasks or self.experiment.sizes[self.size].tasks
        results = {cell: s.result for cell, s in statuses.items() if s.result is not None}
        estimator = Estimator(
            self.experiment,
            len(tasks or self.experiment.tasks or self.pools.tasks),
            results,
            size=self.size,
            gpu=torch.cuda.is_available(),
        )
        table = Table(title=f"{self.experiment.title} ({self.identity}) in {self.directory.path}")
        for name in ("cell", "state"):
            table.add_column(name, no_wrap=True)
        for name in ("time", "memory", "saved model"):
            table.add_column(name, justify="right")
        estimates = {plan.cell: estimator.of(plan.cell) for plan in self.plans}
        for plan in self.plans:
            estimate = estimates[plan.cell]
            table.add_row(
                plan.cell.id,
                statuses[plan.cell].state.value,
                estimate.mark + _duration(estimate.seconds),
                _memory(estimate),
                decimal(round(estimator.model_bytes())) if plan.saves else "",
            )
        self.console.print(table)
        seconds = sum(estimates[plan.cell].seconds for plan in waiting)
        disk = estimator.model_bytes() * sum(plan.saves for plan in waiting)
        self.console.print(
            f"{self._count(statuses)}. To run: {len(waiting)} cells, one after the other in "
            f"{_duration(seconds)}; saved models take {decimal(round(disk))}."
        )
        if any(not estimate.measured for estimate in estimates.values()):
            self.console.print(MODEL, highlight=False)
        self._show_sources(self._sources(waiting))

    def _show_sources(self, found: Sequence[Found]) -> None:
        table = Table(title="Models and data")
        for name in ("what", "where", "size"):
            table.add_column(name, justify="right" if name == "size" else "left")
        for item in found:
            where = item.place.value + (f": {item.problem}" if item.problem else "")
            table.add_row(item.source.title, where, decimal(item.bytes) if item.bytes else "")
        if found:
            self.console.print(table)
        downloads = [item.bytes or 0 for item in found if item.place is Place.HUB]
        self.console.print(
            f"{len(downloads)} to download"
            + (f", {decimal(sum(downloads))}" if any(downloads) else "")
            + f"; {sum(item.place is Place.MISSING for item in found)} missing"
        )
        if self.experiment.build:
            self.console.print(
                "what is missing of the embedded benchmark is built before the first cell"
            )

    def _show_end(self, statuses: Mapping[Cell, Status]) -> None:
        self.console.print(f"{self._count(statuses)} in {self.directory.path}")
        for cell, status in statuses.items():
            if status.failure is not None:
                failure = status.failure
                text = f"failed: {cell.id}: {failure.reason}; see {failure.log}"
                self.console.print(text, highlight=False, soft_wrap=True)
            elif status.state is State.BLOCKED:
                self.console.print(f"blocked: {cell.id}: what it starts from failed")
        if any(status.state is State.FAILED for status in statuses.values()):
            self.console.print("--retry-failed runs them again")

    def _write(self, statuses: Mapping[Cell, Status]) -> None:
        """The table of what is wanted now and of what else is done, from earlier sweeps."""
        everything = replace(self.selection, mergers=None, calibrators=None)
        others = self.directory.statuses(self._plan(everything), self.experiment.name)
        shown = {
            cell: status
            for cell, status in (others | dict(statuses)).items()
            if cell in statuses or status.state is State.DONE
        }
        written = write_outcome(
            self.experiment, self.pools, shown, self.directory, self._table_command()
        )
        if written is not None:
            self.console.print(terminal(written.document))
            self.console.print(f"written: {', '.join(path.name for path in written.files)}")

    def _table_command(self) -> str:
        options = self.options
        command = [PROGRAM, self.experiment.name, "--size", self.size]
        for flag, value in (
            ("--seeds", options.seeds),
            ("--tasks", options.tasks),
            ("--config-dir", options.config_dir),
        ):
            command += [] if value is None else [flag, str(value)]
        return shlex.join([*command, *self.extra])


def _names_seed_or_model(text: str) -> bool:
    key = text.partition("=")[0]
    return key == "seed" or key.endswith((".seed", ".merged_model"))


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _memory(estimate: Estimate) -> str:
    if estimate.memory_bytes is None:
        return ""
    return estimate.mark + decimal(round(estimate.memory_bytes))


if __name__ == "__main__":
    sys.exit(main())
