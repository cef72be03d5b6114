"""One table as its file ``config/table/<name>.yaml`` describes it, validated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..report.codec import from_json
from ..report.errors import ReportError
from ..tables.layout import PublishedValues
from ..tables.results import BASE, EXPERTS, NO_CALIBRATOR, Size
from .compose import compose_group, config_roots, plain
from .errors import ExperimentError, require_known

__all__ = [
    "Calibrator",
    "CostModel",
    "Curve",
    "Experiment",
    "Merger",
    "SizeSettings",
    "load_experiment",
    "table_names",
]

GROUP = "table"

REFERENCE_ROWS = (BASE, EXPERTS)


@dataclass(frozen=True, kw_only=True)
class _Method:
    """What a row and a column have in common: a method of FusionBench, or of this package.

    Attributes:
        title: As the table calls it.
        config: The method's config: what ``method=…`` or ``method@method.merger=…`` takes.
        settings: What is set in it, by name.
        smoke: Further settings at the smoke size.
        source: Where a setting comes from, by name; ``recipe`` for all that is left as it is.
        random: Whether the result depends on the seed, which a column takes as ``method.seed``.
        labels: What a reader must know of its results.
        forwards: Cost, for estimates: how many inputs a task it pushes through the model once,
            or work of that size.
        models: Memory, for estimates: how many models it holds at once; None: all of the table.
    """

    title: str
    config: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    smoke: dict[str, Any] = field(default_factory=dict)
    source: dict[str, str] = field(default_factory=dict)
    random: bool = False
    labels: tuple[str, ...] = ()
    forwards: float = 0.0
    models: int | None = None

    def settings_at(self, size: Size) -> dict[str, Any]:
        """Its settings at a size."""
        return self.settings | (self.smoke if size == "smoke" else {})


@dataclass(frozen=True, kw_only=True)
class Merger(_Method):
    """A row: an upstream merger, or the result of another cell.

    Attributes:
        after: ``row/column`` of the cell whose model this row starts from, in place of ``config``.
        calibrators: The columns that it is run with; None: all.
    """

    after: str = ""
    calibrators: tuple[str, ...] | None = None

    @property
    def origin(self) -> tuple[str, str] | None:
        """Row and column of the cell that it starts from."""
        if not self.after:
            return None
        row, _, column = self.after.partition("/")
        return row, column


@dataclass(frozen=True, kw_only=True)
class Calibrator(_Method):
    """A column: a method that takes a merged model.

    Attributes:
        overrides: Overrides outside the method, such as other calibration data.
    """

    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A sweep of one setting of a calibrator.

    Attributes:
        title: As the figure calls it.
        values: The setting's values.
        smoke: Its values at the smoke size.
        mergers: Rows that it is swept for.
        calibrators: Columns that it is swept for.
    """

    title: str
    values: tuple[Any, ...]
    smoke: tuple[Any, ...]
    mergers: tuple[str, ...]
    calibrators: tuple[str, ...]

    def values_at(self, size: Size) -> tuple[Any, ...]:
        """The values at a size."""
        return self.smoke if size == "smoke" else self.values


@dataclass(frozen=True, kw_only=True)
class SizeSettings:
    """What a size of the table changes.

    Attributes:
        seeds: Number of seeds, from 0.
        overrides: Overrides of all its runs.
        tasks: The tasks that it evaluates; None: all. Fewer make its averages partial.
    """

    seeds: int = 1
    overrides: tuple[str, ...] = ()
    tasks: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """What estimates of time and memory need to know of the models and the data.

    Attributes:
        parameters: Parameters of one model.
        tokens: Tokens of one input.
        test_inputs: Test inputs a task, on average.
    """

    parameters: float
    tokens: float
    test_inputs: float


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One table.

    Attributes:
        name: Its file's name.
        title: Of the table.
        pools: Overrides that choose FusionBench's model pool and task pool.
        overrides: Further overrides of all runs.
        mergers: Rows by key.
        calibrators: Columns by key.
        rows: Keys of the rows that the table has, in order; None: all.
        columns: Keys of the columns that it has, in order; None: all.
        curves: Sweeps of a setting, by the setting's name.
        sizes: ``full`` and ``smoke``.
        tasks: The tasks that the table has; None: all of the task pool.
        expert: Name of a task's expert in the model pool.
        build: The embedded benchmark that it runs on, of which each seed has a build.
        launcher: How its cells are run where the command does not say.
        save_merged: Whether a row's columns start from its saved model. Otherwise each of them
            merges anew, so that the run is the printed command.
        published: Published values that stand beside it.
        cost: For estimates.
        notes: Lines below the table.
    """

    name: str
    title: str
    pools: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    mergers: dict[str, Merger]
    calibrators: dict[str, Calibrator]
    rows: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    curves: dict[str, Curve] = field(default_factory=dict)
    sizes: dict[str, SizeSettings]
    tasks: tuple[str, ...] | None = None
    expert: str = "{task}"
    build: Literal["image", "text"] | None = None
    launcher: Literal["local", "in_process"] = "local"
    save_merged: bool = True
    published: PublishedValues | None = None
    cost: CostModel
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        where = f"config/{GROUP}/{self.name}.yaml"
        for key in (*self.mergers, *self.calibrators):
            if not key.replace("_", "").replace("-", "").isalnum():
                raise ExperimentError(f"{where}: {key!r} is no key: use letters, digits, _ and -.")
        if reserved := [key for key in REFERENCE_ROWS if key in self.mergers]:
            raise ExperimentError(f"{where}: {', '.join(reserved)} is in every table by itself.")
        if NO_CALIBRATOR not in self.calibrators:
            raise ExperimentError(f"{where}: calibrators has no {NO_CALIBRATOR!r}.")
        if set(self.sizes) != {"full", "smoke"}:
            raise ExperimentError(f"{where}: sizes should be full and smoke, not {[*self.sizes]}.")
        require_known(f"row of {where}", self.rows or (), self.mergers)
        require_known(f"column of {where}", self.columns or (), self.calibrators)
        first_rows = [key for key, merger in self.mergers.items() if not merger.after]
        for key, merger in self.mergers.items():
            if bool(merger.config) == bool(merger.after):
                raise ExperimentError(f"{where}: row {key} needs one of config and after.")
            columns = merger.calibrators or ()
            if merger.origin:
                row, column = merger.origin
                require_known(f"row of {where}, as {key} comes after it,", [row], first_rows)
                columns = (column, *columns)
            require_known(f"column of {where}, for row {key},", columns, self.calibrators)
        for name, curve in self.curves.items():
            place = f"of {where}, for curve {name},"
            require_known(f"row {place}", curve.mergers, self.rows_shown)
            require_known(f"column {place}", curve.calibrators, self.columns_shown)

    @property
    def rows_shown(self) -> tuple[str, ...]:
        """Keys of the rows in order, without the base and the experts."""
        return tuple(self.mergers) if self.rows is None else self.rows

    @property
    def columns_shown(self) -> tuple[str, ...]:
        """Keys of the columns in order."""
        return tuple(self.calibrators) if self.columns is None else self.columns

    def columns_of(self, row: str) -> tuple[str, ...]:
        """The columns that a row is run with, in the table's order."""
        allowed = self.mergers[row].calibrators
        return tuple(key for key in self.columns_shown if allowed is None or key in allowed)

    @property
    def published_values(self) -> PublishedValues | None:
        """The published values, for the cells that the table has."""
        if self.published is None:
            return None
        rows = {*REFERENCE_ROWS, *self.rows_shown}
        values = tuple(
            value
            for value in self.published.values
            if value.merger in rows and value.calibrator in self.columns_shown
        )
        return replace(self.published, values=values)

    def is_random(self, row: str, column: str = NO_CALIBRATOR) -> bool:
        """Whether a cell's result depends on the seed."""
        if self.build:  # each seed has models and data of its own
            return True
        if row in REFERENCE_ROWS:
            return False
        merger = self.mergers[row]
        upstream = self.is_random(*merger.origin) if merger.origin else merger.random
        return upstream or self.calibrators[column].random

    def sources(self, rows: Collection[str], columns: Collection[str]) -> tuple[str, ...]:
        """Where the hyper-parameters of some rows and columns come from, one line a method."""
        shown = [self.mergers[row] for row in self.rows_shown if row in rows]
        shown += [self.calibrators[column] for column in self.columns_shown if column in columns]
        return tuple(
            f"{method.title}: "
            + "; ".join(v if k == "recipe" else f"{k} {v}" for k, v in method.source.items())
            for method in shown
            if method.source
        )


def table_names(config_dir: Path | None = None) -> list[str]:
    """Names of all tables that can be run, sorted. Parts of others start with ``_``."""
    return sorted(
        {
            path.stem
            for root in config_roots(config_dir)
            for path in (root / GROUP).glob("*.yaml")
            if not path.stem.startswith("_")
        }
    )


def load_experiment(name: str, config_dir: Path | None = None) -> Experiment:
    """Read a table's description.

    Args:
        name: Of a file in ``config/table``, without its suffix.
        config_dir: A further directory with configs, whose ``table/`` is looked into first.

    Raises:
        ExperimentError: There is no such table, or its file is wrong; the message says where.
    """
    require_known("table", [name], table_names(config_dir))
    # Not resolved: overrides may hold interpolations, for FusionBench's configuration.
    content = plain(compose_group(GROUP, name, config_dir), resolve=False)
    try:
        content = {"name": name, **content, "calibrators": _inherited(name, content)}
        return from_json(Experiment, content, f"the table {name}")
    except ReportError as error:
        raise ExperimentError(f"config/{GROUP}/{name}.yaml: {error}") from error


def _inherited(name: str, content: Mapping[Any, Any]) -> dict[str, Any]:
    """The columns, those with ``like`` filled up from the one that they name."""
    columns: dict[str, Any] = content.get("calibrators") or {}
    filled = {}
    for key, column in columns.items():
        column = dict(column)
        if like := column.pop("like", None):
            require_known(f"column of config/{GROUP}/{name}.yaml, for {key},", [like], columns)
            # the sources are told once, with the column that has them
            column = {k: v for k, v in columns[like].items() if k != "source"} | column
        filled[key] = column
    return filled
