"""What a table must know of its experiment: titles, order, and which published values go beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .published import PublishedRow, look_up
from .results import BASE, EXPERTS, NO_CALIBRATOR, Cell

__all__ = ["PublishedValue", "PublishedValues", "TableLayout"]


@dataclass(frozen=True, kw_only=True)
class PublishedValue:
    """That a published row is the counterpart of a cell.

    Attributes:
        merger: Key of the cell's row.
        label: The published row's label.
        calibrator: Key of its column.
        point: Its place on a curve; empty in a table.
    """

    merger: str
    label: str
    calibrator: str = NO_CALIBRATOR
    point: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The ``place`` of the cell."""
        return Cell(self.merger, self.calibrator, 0, tuple(sorted(self.point.items()))).place


@dataclass(frozen=True, kw_only=True)
class PublishedValues:
    """The published values beside a table, all of one backbone and set of tasks.

    Attributes:
        backbone: Key of the model.
        task_set: Key of the set of tasks.
        values: Which of them belong to which cell, in the order of preference: where a cell has
            several, the first stands in the overview.
    """

    backbone: str
    task_set: str
    values: tuple[PublishedValue, ...] = ()

    def resolve(self) -> list[tuple[PublishedValue, PublishedRow]]:
        """Look all of them up.

        Raises:
            PublishedNumberError: There is no such backbone, set of tasks or label.
        """
        return [
            (value, look_up(self.backbone, self.task_set, value.label)) for value in self.values
        ]


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """One experiment as its tables and figures show it.

    Attributes:
        name: Of the experiment; equals ``CellResult.table``.
        title: Of the table.
        tasks: All tasks in order; equals ``CellResult.tasks``.
        rows: Titles of the mergers by key, in order. The base and the experts come first anyway.
        columns: Titles of the calibrators by key, in order.
        starts: Of rows that start from a calibrated model, the row and column of that cell.
        curves: Titles of swept settings by name, where the name is not title enough.
        expected: The cells that were to be run, with those of the base and the experts, and why
            they have no result, where that is known. Those without one show as "–" and are listed.
        published: Published values to stand beside; None: none.
        command: The command that makes the table.
        notes: Lines below the table, such as the sources of hyper-parameters.
    """

    name: str
    title: str
    tasks: tuple[str, ...]
    rows: Mapping[str, str]
    columns: Mapping[str, str]
    starts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    curves: Mapping[str, str] = field(default_factory=dict)
    expected: Mapping[Cell, str] = field(default_factory=dict)
    published: PublishedValues | None = None
    command: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if reserved := [key for key in (BASE, EXPERTS) if key in self.rows]:
            raise ValueError(f"{', '.join(reserved)} is no merger: every table has that row.")
        if not self.tasks:
            raise ValueError(f"The table {self.name} has no tasks.")

    @property
    def all_rows(self) -> tuple[str, ...]:
        """Keys of the rows in order, the base and the experts among them."""
        return (BASE, EXPERTS, *self.rows)

    @property
    def all_columns(self) -> tuple[str, ...]:
        """Keys of the columns in order; that of no calibrator is first if it is not listed."""
        return tuple(dict.fromkeys((NO_CALIBRATOR, *self.columns)))

    def shows(self, cell: Cell) -> bool:
        """Whether the table has a row and a column for a cell."""
        return cell.merger in self.all_rows and cell.calibrator in self.all_columns

    def order(self, cell: Cell) -> tuple[Any, ...]:
        """Sorts cells row by row, column by column, along curves, by seed; what is not shown last.

        Along a curve numbers stand by size and before names.
        """
        rows, columns = (*self.all_rows, cell.merger), (*self.all_columns, cell.calibrator)
        point = [(name, isinstance(value, str), value) for name, value in cell.point]
        return (rows.index(cell.merger), columns.index(cell.calibrator), point, cell.seed)

    def row_title(self, merger: str) -> str:
        """Title of a row; the base and the experts are called by their keys."""
        return self.rows.get(merger, merger)

    def column_title(self, calibrator: str) -> str:
        """Title of a column; that of no calibrator need not be listed."""
        return self.columns.get(calibrator, "none")

    def start(self, merger: str) -> tuple[str, str]:
        """Row and column of the cell whose model a row's calibrators take."""
        return self.starts.get(merger, (merger, NO_CALIBRATOR))

    def curve_title(self, name: str) -> str:
        """Title of a swept setting."""
        return self.curves.get(name, name)
