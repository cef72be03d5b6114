"""The cells of a table: which there are, what each needs, and the commands that make it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from .errors import ExperimentError, unknown
from .experiment import REFERENCE_ROWS, Calibrator, Experiment, Merger
from .pools import Pools

__all__ = ["Cell", "Plan", "Run", "Selection", "cells_of", "plan_cells"]


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
        chosen: dict[str, list[str]] = {}
        key = ""
        for part in ",".join(only).split(",") if only else ():
            name, equals, value = part.strip().partition("=")
            if equals:
                key, name = name, value
            if key not in ("merger", "calibrator"):
                raise ExperimentError(
                    f"--only {part!r} is not readable: give merger=KEY,… and calibrator=KEY,…"
                )
            chosen.setdefault(key, []).append(name)
        for row in chosen.get("merger", ()):
            known = (*REFERENCE_ROWS, *experiment.rows_shown)
            if row not in known:
                raise unknown(f"row of {experiment.name}", row, known)
        for column in chosen.get("calibrator", ()):
            if column not in experiment.columns_shown:
                raise unknown(f"column of {experiment.name}", column, experiment.columns_shown)
        return cls(
            mergers=tuple(chosen["merger"]) if "merger" in chosen else None,
            calibrators=tuple(chosen["calibrator"]) if "calibrator" in chosen else None,
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


def plan_cells(
    experiment: Experiment,
    size: Size,
    selection: Selection,
    pools: Pools,
    models: Path,
    *,
    extra: Sequence[str] = (),
    config_dir: Path | None = None,
) -> list[Plan]:
    """Plan the wanted cells and those that they need, in an order that can be followed.

    Args:
        experiment: The table.
        size: Its size.
        selection: What is wanted.
        pools: The table's composed pools.
        models: Directory of saved merged models.
        extra: Overrides of all runs that the user adds.
        config_dir: A further directory with configs.

    Raises:
        ExperimentError: Nothing is selected, or a task does not exist.
    """
    planner = _Planner(experiment, size, selection, pools, models, extra, config_dir)
    everything = cells_of(experiment, size, selection.seeds or (0,))
    wanted = [cell for cell in everything if selection.has(cell)]
    if not wanted:
        raise ExperimentError(
            f"--only leaves no cell of {experiment.name}: not every row has every column."
        )
    order: dict[Cell, None] = {}

    def add(cell: Cell) -> None:
        if needed := planner.needed(cell):
            add(needed)
        order.setdefault(cell)

    for cell in wanted:
        add(cell)
    # What anyone could start from is saved, wanted now or not: the table may be completed later.
    saved = {planner.needed(cell) for cell in (*everything, *order)}
    plans = [planner.plan(cell, cell in saved) for cell in order]
    return sorted(plans, key=lambda plan: plan.stage)


class _Planner:
    def __init__(
        self,
        experiment: Experiment,
        size: Size,
        selection: Selection,
        pools: Pools,
        models: Path,
        extra: Sequence[str],
        config_dir: Path | None,
    ) -> None:
        self._experiment = experiment
        self._size: Size = size
        self._pools = pools
        self._models = models
        self._config_dir = None if config_dir is None else str(config_dir)
        settings = experiment.sizes[size]
        for chosen in (experiment.tasks, settings.tasks, selection.tasks):
            pools.require_tasks(chosen or ())
        self.tasks = _among(pools.tasks, experiment.tasks)
        self._evaluated = _among(_among(self.tasks, settings.tasks), selection.tasks)
        if not self._evaluated:
            raise ExperimentError(f"--tasks leaves none of {', '.join(self.tasks)}.")
        self._common = (
            *experiment.pools,
            *experiment.overrides,
            *settings.overrides,
            *pools.restricted_to(self._evaluated),
            *extra,
        )

    def needed(self, cell: Cell) -> Cell | None:
        """The cell whose model a cell starts from."""
        if cell.is_reference or not self._experiment.save_merged:
            return None
        merger = self._experiment.mergers[cell.merger]
        if merger.origin:
            row, column = merger.origin
        elif cell.calibrator == NO_CALIBRATOR:
            return None
        else:
            row, column = cell.merger, NO_CALIBRATOR
        return Cell(row, column, cell.seed if self._experiment.is_random(row, column) else 0)

    def plan(self, cell: Cell, saves: bool) -> Plan:
        needs = self.needed(cell)
        runs = self._runs(cell, needs)
        standalone = [self._standalone(cell)] if cell.merger != EXPERTS else [*runs]
        return Plan(
            cell=cell,
            needs=needs,
            saves=saves,
            runs=runs,
            command=" && ".join(self._shell(cell, run) for run in standalone),
            tasks=self.tasks,
            labels=self._labels(cell),
            stage=self._stage(cell),
        )

    def _stage(self, cell: Cell) -> int:
        needs = self.needed(cell)
        return 0 if needs is None else 1 + self._stage(needs)

    def _runs(self, cell: Cell, needs: Cell | None) -> tuple[Run, ...]:
        if cell.merger == EXPERTS:
            return tuple(self._expert_run(cell, task) for task in self._evaluated)
        if needs is None:
            return (self._standalone(cell),)
        calibrator = self._experiment.calibrators[cell.calibrator]
        method = [
            *self._method("method", calibrator, cell, outermost=True),
            override("method.merged_model", str(self._models / needs.id)),
        ]
        return (self._run(method, cell, calibrator),)

    def _expert_run(self, cell: Cell, task: str) -> Run:
        # every expert is evaluated on its own task only
        others = (
            *self._common,
            *evaluate_only([task], self._remaining_taskpool()),
            override("seed", cell.seed),
        )
        method = take_expert(self._pools.experts[task])
        return Run(f"run-{task}", self._config_dir, method, others, task)

    def _remaining_taskpool(self) -> Mapping[str, Any]:
        """The task pool without what the table's own overrides have taken out already."""
        taskpool = dict(self._pools.taskpool)
        if "test_datasets" in taskpool:
            kept = {t: v for t, v in taskpool["test_datasets"].items() if t in self._evaluated}
            return {"test_datasets": kept}
        return taskpool

    def _standalone(self, cell: Cell) -> Run:
        """The whole chain in one command: the merger nested in its calibrators."""
        if cell.merger == BASE:
            return self._run(BASE_METHOD, cell, None)
        calibrator = self._experiment.calibrators[cell.calibrator]
        method = self._method("method", calibrator, cell, outermost=True)
        method += self._upstream("method", self._experiment.mergers[cell.merger], cell)
        return self._run(method, cell, calibrator)

    def _upstream(self, place: str, merger: Merger, cell: Cell) -> list[str]:
        place = f"{place}.merger"
        if merger.origin is None:
            settings = settings_overrides(place, merger.settings_at(self._size))
            return [f"method@{place}={merger.config}", *settings]
        row, column = merger.origin
        origin = self._experiment.calibrators[column]
        here = self._method(place, origin, cell, outermost=False)
        return [*here, *self._upstream(place, self._experiment.mergers[row], cell)]

    def _method(
        self, place: str, calibrator: Calibrator, cell: Cell, *, outermost: bool
    ) -> list[str]:
        settings = calibrator.settings_at(self._size)
        if outermost:
            settings |= dict(cell.point)
        if calibrator.random:
            settings |= {"seed": cell.seed}
        choice = place if outermost else f"method@{place}"
        return [f"{choice}={calibrator.config}", *settings_overrides(place, settings)]

    def _run(self, method: Sequence[str], cell: Cell, calibrator: Calibrator | None) -> Run:
        overrides = calibrator.overrides if calibrator else ()
        others = (*self._common, *overrides, override("seed", cell.seed))
        return Run("run", self._config_dir, tuple(method), others)

    def _shell(self, cell: Cell, run: Run) -> str:
        return shell_command(run.arguments, environment_of(self._experiment.build, cell.seed))

    def _labels(self, cell: Cell) -> tuple[str, ...]:
        if cell.is_reference:
            return ()
        merger = self._experiment.mergers[cell.merger]
        labels = [*merger.labels, *self._experiment.calibrators[cell.calibrator].labels]
        if merger.origin:
            labels += self._labels(Cell(*merger.origin, cell.seed))
        # the one that tables look for comes first
        return tuple(dict.fromkeys(sorted(labels, key=lambda t: t != TRAINED_ON_TEST_INPUTS)))


def _among(tasks: tuple[str, ...], chosen: Sequence[str] | None) -> tuple[str, ...]:
    return tasks if chosen is None else tuple(task for task in tasks if task in chosen)
