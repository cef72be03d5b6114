"""What a table must know of its experiment: titles, order, and which published values go beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .published import PublishedRow, Tree, look_up
from .results import BASE, EXPERTS, NO_CALIBRATOR

__all__ = ["ExpectedCell", "PublishedValue", "PublishedValues", "TableLayout"]

_REFERENCE_TITLES = {BASE: "base", EXPERTS: "experts"}


@dataclass(frozen=True, kw_only=True)
class PublishedValue:
    """That a published row is the counterpart of a cell.

    Attributes:
        merger: Key of the cell's row.
        calibrator: Key of its column.
        point: Its place on a curve; empty in a table.
        label: The published row's label.
    """

    merger: str
    label: str
    calibrator: str = NO_CALIBRATOR
    point: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PublishedValues:
    """The published values beside a table, all of one tree, backbone and set of tasks.

    Attributes:
        tree: Whose checkpoints they were measured on.
        backbone: Key of the model.
        task_set: Key of the set of tasks.
        values: Which of them belong to which cell, in the order of preference: where a cell has
            several, the first stands in the overview.
    """

    tree: Tree
    backbone: str
    task_set: str
    values: tuple[PublishedValue, ...] = ()

    def resolve(self) -> list[tuple[PublishedValue, PublishedRow]]:
        """Look all of them up.

        Raises:
            PublishedNumberError: There is no such backbone, set of tasks or label.
        """
        return [
            (value, look_up(self.tree, self.backbone, self.task_set, value.label))
            for value in self.values
        ]


@dataclass(frozen=True, kw_only=True)
class ExpectedCell:
    """A cell that was to be run.

    Attributes:
        merger: Key of the row.
        calibrator: Key of the column.
        seed: Seed.
        point: Place on a curve.
        failure: Why it has no result, where that is known.
    """

    merger: str
    calibrator: str
    seed: int
    point: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""


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
        expected: The cells that were to be run, with those of the base and the experts. The ones
            without a result show as "–" and are listed.
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
    expected: tuple[ExpectedCell, ...] = ()
    published: PublishedValues | None = None
    command: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if reserved := [key for key in (BASE, EXPERTS) if key in self.rows]:
            raise ValueError(f"{', '.join(reserved)} is no merger: every table has that row.")
        if not self.tasks:
            raise ValueError(f"The table {self.name} has no tasks.")

    def row_title(self, merger: str) -> str:
        """Title of a row, the reference rows among them."""
        return _REFERENCE_TITLES.get(merger) or self.rows[merger]

    def column_title(self, calibrator: str) -> str:
        """Title of a column; that of no calibrator need not be listed."""
        return self.columns.get(calibrator, "none")

    def start(self, merger: str) -> tuple[str, str]:
        """Row and column of the cell whose model a row's calibrators take."""
        return self.starts.get(merger, (merger, NO_CALIBRATOR))

    def curve_title(self, name: str) -> str:
        """Title of a swept setting."""
        return self.curves.get(name, name)
