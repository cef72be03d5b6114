"""The cells of a table: which there are, what each needs, and the commands that make it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from ..tables.results import BASE, EXPERTS, NO_CALIBRATOR, TRAINED_ON_TEST_INPUTS, Cell, Size
from .builds import environment_of
from .command_line import (
    BASE_METHOD,
    evaluate_only,
    override,
    settings_overrides,
    shell_command,
    take_expert,
)
from .errors import ExperimentError, require_known
from .experiment import REFERENCE_ROWS, Calibrator, Experiment, Merger, SizeSettings
from .pools import Pools

__all__ = ["Plan", "Planner", "Run", "Selection", "cells_of"]


@dataclass(frozen=True)
class Selection:
    """What of a table is wanted; None means all.

    Attributes:
        mergers: Keys of rows.
        calibrators: Keys of columns.
        seeds: The seeds.
        tasks: The tasks that are evaluated.
    """

    mergers: tuple[str, ...] | None = None
    calibrators: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = None
    tasks: tuple[str, ...] | None = None

    @classmethod
    def parse(
        cls,
        experiment: Experiment,
        size: Size,
        only: Sequence[str] = (),
        seeds: str | None = None,
        tasks: str | None = None,
    ) -> Selection:
        """Read a selection as it stands on the command line.

        Args:
            experiment: The table.
            size: Its size.
            only: Each ``merger=a,b`` or ``calibrator=c``; a comma may also begin the next name.
            seeds: A number of seeds, or a list such as ``0,2`` (``0,`` for seed 0 alone).
            tasks: A list of tasks.

        Raises:
            ExperimentError: A name is unknown, or a list cannot be read.
        """
        chosen: dict[str, list[str]] = {"merger": [], "calibrator": []}
        keys = {"merger": (*REFERENCE_ROWS, *experiment.rows_shown)}
        keys |= {"calibrator": experiment.columns_shown}
        axis = ""
        for part in ",".join(only).split(",") if only else ():
            axis, key = part.strip().split("=", 1) if "=" in part else (axis, part.strip())
            if axis not in chosen:
                raise ExperimentError(
                    f"--only {part!r} is not readable: give merger=KEY,… and calibrator=KEY,…"
                )
            what = {"merger": "row", "calibrator": "column"}[axis]
            require_known(f"{what} of {experiment.name}", [key], keys[axis])
            chosen[axis].append(key)
        return cls(
            mergers=tuple(chosen["merger"]) or None,
            calibrators=tuple(chosen["calibrator"]) or None,
            seeds=_seeds(seeds, experiment.sizes[size].seeds),
            tasks=tuple(task.strip() for task in tasks.split(",")) if tasks else None,
        )

    def has(self, cell: Cell) -> bool:
        """Whether a cell is wanted; its seed is not looked at."""
        return (self.mergers is None or cell.merger in self.mergers) and (
            self.calibrators is None or cell.calibrator in self.calibrators
        )


def _seeds(text: str | None, default: int) -> tuple[int, ...]:
    if text is None:
        return tuple(range(default))
    try:
        if "," in text:
            seeds = tuple(int(part) for part in text.split(",") if part.strip())
        else:
            seeds = tuple(range(int(text)))
    except ValueError:
        seeds = ()
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ExperimentError(
            f"--seeds {text!r} is not readable: give how many (3 for 0, 1 and 2) or which ones, "
            "each once and none negative (0,2; `0,` for seed 0 alone)."
        )
    return seeds


@dataclass(frozen=True)
class Run:
    """One run of the ``fusion_bench`` command.

    Attributes:
        label: Its directory below the cell's.
        config_dir: A further directory with configs.
        method: Overrides of the method.
        others: All other overrides, but for those that say where its files go.
        task: The only task that it evaluates; None: all.
    """

    label: str
    config_dir: str | None
    method: tuple[str, ...]
    others: tuple[str, ...]
    task: str | None = None

    @property
    def overrides(self) -> tuple[str, ...]:
        """All overrides."""
        return (*self.method, *self.others)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command's arguments."""
        flags = () if self.config_dir is None else ("--config-dir", self.config_dir)
        return (*flags, *self.overrides)


@dataclass(frozen=True)
class Plan:
    """How a cell is made.

    Attributes:
        cell: The cell.
        needs: The cell whose saved model it starts from.
        saves: Whether other cells start from its model.
        runs: Its runs, one but for the experts. They take the saved model of ``needs``.
        command: A command line that makes the cell from nothing, for readers.
        tasks: All tasks of the table.
        labels: What a reader must know of the result.
        stage: 0 for cells that need none, and one more than that of the needed cell for the others.
    """

    cell: Cell
    needs: Cell | None
    saves: bool
    runs: tuple[Run, ...]
    command: str
    tasks: tuple[str, ...]
    labels: tuple[str, ...]
    stage: int


def cells_of(experiment: Experiment, size: Size, seeds: Sequence[int]) -> list[Cell]:
    """All cells of a table and its curves, in the table's order."""
    places: list[tuple[str, str, tuple[tuple[str, Any], ...]]] = [
        (row, NO_CALIBRATOR, ()) for row in REFERENCE_ROWS
    ]
    for row in experiment.rows_shown:
        places += [(row, column, ()) for column in experiment.columns_of(row)]
    for name, curve in experiment.curves.items():
        for row, column in product(curve.mergers, curve.calibrators):
            places += [(row, column, ((name, value),)) for value in curve.values_at(size)]
    return [
        Cell(row, column, seed, point)
        for row, column, point in places
        # one run is enough of what is deterministic
        for seed in (seeds if experiment.is_random(row, column) else (0,))
    ]


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Plans a table's cells.

    Attributes:
        experiment: The table.
        size: Its size.
        selection: What is wanted.
        pools: The table's composed pools.
        models: Directory of saved merged models.
        extra: Overrides of all runs that the user adds.
        config_dir: A further directory with configs.
    """

    experiment: Experiment
    size: Size
    selection: Selection
    pools: Pools
    models: Path
    extra: Sequence[str] = ()
    config_dir: Path | None = None

    def plans(self) -> list[Plan]:
        """Plan the wanted cells and those that they need, in an order that can be followed.

        Raises:
            ExperimentError: Nothing is selected, or a task does not exist.
        """
        experiment = self.experiment
        for chosen in (experiment.tasks, self._sized.tasks, self.selection.tasks):
            require_known("task", chosen or (), self.pools.tasks)
        if not self._evaluated:
            raise ExperimentError(f"--tasks leaves none of {', '.join(self._tasks)}.")
        everything = cells_of(experiment, self.size, self.selection.seeds or (0,))
        wanted = [cell for cell in everything if self.selection.has(cell)]
        if not wanted:
            raise ExperimentError(
                f"--only leaves no cell of {experiment.name}: not every row has every column."
            )
        # each cell after what it needs, and only once
        order = dict.fromkeys(link for cell in wanted for link in reversed(self._chain(cell)))
        # saved is what any cell could start from, wanted now or not: more may be wanted later
        saved = {link for cell in (*everything, *order) for link in self._chain(cell)[1:2]}
        plans = [self._plan(cell, cell in saved) for cell in order]
        return sorted(plans, key=lambda plan: plan.stage)

    @property
    def _sized(self) -> SizeSettings:
        return self.experiment.sizes[self.size]

    @property
    def _tasks(self) -> tuple[str, ...]:
        return _among(self.pools.tasks, self.experiment.tasks)

    @property
    def _evaluated(self) -> tuple[str, ...]:
        return _among(_among(self._tasks, self._sized.tasks), self.selection.tasks)

    def _chain(self, cell: Cell) -> list[Cell]:
        """A cell, then the cell whose model it starts from, and so on."""
        if cell.is_reference or not self.experiment.save_merged:
            return [cell]
        if origin := self.experiment.mergers[cell.merger].origin:
            row, column = origin
        elif cell.calibrator != NO_CALIBRATOR:
            row, column = cell.merger, NO_CALIBRATOR
        else:
            return [cell]
        seed = cell.seed if self.experiment.is_random(row, column) else 0
        return [cell, *self._chain(Cell(row, column, seed))]

    def _plan(self, cell: Cell, saves: bool) -> Plan:
        _, *needed = self._chain(cell)
        from_nothing = runs = self._runs(cell)
        if needed:
            calibrator = self.experiment.calibrators[cell.calibrator]
            saved_model = override("method.merged_model", str(self.models / needed[0].id))
            method = [*self._method("method", calibrator, cell), saved_model]
            runs = (self._run(method, cell, calibrator),)
        environment = environment_of(self.experiment.build, cell.seed)
        return Plan(
            cell=cell,
            needs=needed[0] if needed else None,
            saves=saves,
            runs=runs,
            command=" && ".join(shell_command(run.arguments, environment) for run in from_nothing),
            tasks=self._tasks,
            labels=self._labels(cell),
            stage=len(needed),
        )

    def _runs(self, cell: Cell) -> tuple[Run, ...]:
        """What makes a cell from nothing: the merger nested in its calibrators, in one run."""
        if cell.merger == EXPERTS:
            return tuple(self._expert_run(cell, task) for task in self._evaluated)
        if cell.merger == BASE:
            return (self._run(BASE_METHOD, cell, None),)
        calibrator = self.experiment.calibrators[cell.calibrator]
        method = self._method("method", calibrator, cell)
        method += self._upstream("method.merger", self.experiment.mergers[cell.merger], cell)
        return (self._run(method, cell, calibrator),)

    def _expert_run(self, cell: Cell, task: str) -> Run:
        """Evaluate an expert, on its own task alone."""
        taskpool = dict(self.pools.taskpool)
        if "test_datasets" in taskpool:  # the table's own overrides have taken out the others
            tests = taskpool["test_datasets"]
            taskpool["test_datasets"] = {t: tests[t] for t in tests if t in self._evaluated}
        run = self._run(take_expert(self.pools.experts[task]), cell, None)
        alone, seed = evaluate_only([task], taskpool), run.others[-1]
        others = (*run.others[:-1], *alone, seed)
        return replace(run, label=f"run-{task}", others=others, task=task)

    def _upstream(self, place: str, merger: Merger, cell: Cell) -> list[str]:
        if merger.origin is None:
            settings = settings_overrides(place, merger.settings_at(self.size))
            return [f"method@{place}={merger.config}", *settings]
        row, column = merger.origin
        here = self._method(place, self.experiment.calibrators[column], cell)
        upstream = self._upstream(f"{place}.merger", self.experiment.mergers[row], cell)
        return [*here, *upstream]

    def _method(self, place: str, calibrator: Calibrator, cell: Cell) -> list[str]:
        settings = calibrator.settings_at(self.size)
        outermost = place == "method"
        if outermost:
            settings |= dict(cell.point)
        if calibrator.random:
            settings |= {"seed": cell.seed}
        choice = place if outermost else f"method@{place}"
        return [f"{choice}={calibrator.config}", *settings_overrides(place, settings)]

    def _run(self, method: Sequence[str], cell: Cell, calibrator: Calibrator | None) -> Run:
        others = (
            *self.experiment.pools,
            *self.experiment.overrides,
            *self._sized.overrides,
            *self.pools.restricted_to(self._evaluated),
            *self.extra,
            *(calibrator.overrides if calibrator else ()),
            override("seed", cell.seed),
        )
        config_dir = None if self.config_dir is None else str(self.config_dir)
        return Run("run", config_dir, tuple(method), others)

    def _labels(self, cell: Cell) -> tuple[str, ...]:
        if cell.is_reference:
            return ()
        merger = self.experiment.mergers[cell.merger]
        labels = [*merger.labels, *self.experiment.calibrators[cell.calibrator].labels]
        if merger.origin:
            labels += self._labels(Cell(*merger.origin, cell.seed))
        # the one that tables look for comes first
        return tuple(dict.fromkeys(sorted(labels, key=lambda t: t != TRAINED_ON_TEST_INPUTS)))


def _among(tasks: tuple[str, ...], chosen: Sequence[str] | None) -> tuple[str, ...]:
    return tasks if chosen is None else tuple(task for task in tasks if task in chosen)
