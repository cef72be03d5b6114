"""What one cell of a table measured, as a file: the interface between the sweep and the tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from ..report.codec import from_json, to_json
from ..report.errors import ReportError
from ..report.files import read_json, write_json
from ..report.run_report import Machine, ModelIdentity
from .text import number_text

__all__ = [
    "ACCURACY",
    "BASE",
    "CELL_FILE",
    "EXPERTS",
    "FORMAT_VERSION",
    "NO_CALIBRATOR",
    "SPEARMAN_RHO",
    "TRAINED_ON_TEST_INPUTS",
    "Cell",
    "CellResult",
    "Metric",
    "Size",
]

FORMAT_VERSION = 1
_FORMAT = "featcal-table-cell"

CELL_FILE = "cell.json"
"""Name of the file that a cell's directory holds once the cell is done."""

BASE = "base"
"""Row key of the base model, which knows no task."""
EXPERTS = "experts"
"""Row key of the experts, each on its own task."""
NO_CALIBRATOR = "none"
"""Column key of the merged models as their merger left them, and of both reference rows."""

TRAINED_ON_TEST_INPUTS = "trained on test inputs"
"""Label of a cell whose calibrator saw the inputs that it is scored on."""

ACCURACY = "accuracy"
SPEARMAN_RHO = "spearman_rho"
Metric = Literal["accuracy", "spearman_rho"]
Size = Literal["full", "smoke"]

_LOWEST: dict[str, float] = {ACCURACY: 0.0, SPEARMAN_RHO: -1.0}


@dataclass(frozen=True)
class Cell:
    """Which cell of a table or which point of a curve, for one seed: the key of all about it.

    Attributes:
        merger: Key of the row.
        calibrator: Key of the column.
        seed: The seed. Of a cell that does not depend on it, 0.
        point: What a curve sweeps, as pairs of name and value sorted by name; empty in a table.
    """

    merger: str
    calibrator: str
    seed: int
    point: tuple[tuple[str, Any], ...] = ()

    @property
    def id(self) -> str:
        """Its directory below those of all cells, and its name in messages."""
        place = [f"{name}={value}" for name, value in self.point]
        return "/".join([self.merger, self.calibrator, *place, f"seed{self.seed}"])

    @property
    def is_reference(self) -> bool:
        """Whether it is of the base or the experts."""
        return self.merger in (BASE, EXPERTS)

    @property
    def place(self) -> str:
        """The same for all its seeds and for no other cell: the key of what is said of all seeds.

        It is made for readers too: ``ta × featcal, n_samples=8``.
        """
        calibrator = "" if self.is_reference else f" × {self.calibrator}"
        point = "".join(f", {name}={number_text(value)}" for name, value in self.point)
        return f"{self.merger}{calibrator}{point}"


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """What one cell measured.

    Attributes:
        table: Name of the experiment.
        size: ``smoke`` for a run that only shows that the cell works.
        merger: Key of the row; ``BASE`` and ``EXPERTS`` for the reference rows.
        calibrator: Key of the column; ``NO_CALIBRATOR`` for the merged model and for the reference
            rows.
        seed: Seed of the run.
        point: What a curve sweeps, by name: numbers or names, ``{"n_samples": 8}``. Empty for a
            cell of a table.
        tasks: All tasks of the table, in its order.
        scores: By task, 0 to 1 (Spearman's rho: -1 to 1); NaN where the metric is undefined, as
            rho of constant answers is. Fewer tasks than ``tasks`` make the cell partial.
        metrics: By task, what its score is.
        seconds: Elapsed seconds of the cell's own method, without evaluation, and without the
            merger where the calibrator took a merged model that was there; None if unknown.
        peak_memory_bytes: Highest resident memory while the method ran; None if unknown.
        peak_device_bytes: Highest memory allocated on the accelerator; None on a CPU.
        models: Base, experts and merged model.
        labels: What a reader must know of the cell, ``TRAINED_ON_TEST_INPUTS`` for one.
        command: The command line that makes this cell.
        versions: Version of each library that matters.
        machine: Where the cell ran.
        started: When it started, with a time zone.
        finished: When it ended, with a time zone.
        format_version: Version of the file format.
    """

    table: str
    size: Size
    merger: str
    calibrator: str
    seed: int
    tasks: tuple[str, ...]
    scores: dict[str, float]
    metrics: dict[str, Metric]
    started: datetime
    finished: datetime
    point: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    peak_memory_bytes: int | None = None
    peak_device_bytes: int | None = None
    models: tuple[ModelIdentity, ...] = ()
    labels: tuple[str, ...] = ()
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    machine: Machine | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in ("table", "merger", "calibrator"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty.")
        if self.merger in (BASE, EXPERTS) and self.calibrator != NO_CALIBRATOR:
            raise ValueError(f"The row {self.merger} has no calibrator, so no {self.calibrator}.")
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks should be one or more distinct names, not {self.tasks}.")
        for name in ("scores", "metrics"):
            if unknown := [task for task in getattr(self, name) if task not in self.tasks]:
                raise ValueError(f"{name} has tasks that are none: {', '.join(unknown)}.")
        for task, score in self.scores.items():
            if task not in self.metrics:
                raise ValueError(f"metrics does not say what the score of {task} is.")
            low = _LOWEST[self.metrics[task]]
            if not (math.isnan(score) or low <= score <= 1):
                raise ValueError(f"The score of {task} should lie between {low} and 1: {score}.")
        for name, value in self.point.items():
            number = isinstance(value, int | float) and math.isfinite(value)
            if not number and not isinstance(value, str):
                raise ValueError(f"point.{name} should be a finite number or a name: {value!r}.")
        if self.seconds is not None and not 0 <= self.seconds < math.inf:
            raise ValueError(f"seconds should be finite and not negative: {self.seconds}.")
        for name in ("started", "finished"):
            if getattr(self, name).tzinfo is None:
                raise ValueError(f"{name} needs a time zone: use datetime.now(timezone.utc).")

    @property
    def cell(self) -> Cell:
        """Its key: no two results of one sweep share it."""
        return Cell(self.merger, self.calibrator, self.seed, tuple(sorted(self.point.items())))

    @property
    def title(self) -> str:
        """The cell in words, for messages."""
        return f"{self.table}: {self.cell.place}, seed {self.seed}"

    def write(self, path: str | Path) -> None:
        """Write the cell as JSON, atomically."""
        own = to_json(self)
        head = {"format": _FORMAT, "format_version": own.pop("format_version")}
        write_json(path, {**head, **own})

    @classmethod
    def read(cls, path: str | Path, table: str | None = None) -> CellResult:
        """Read a cell that ``write`` wrote.

        Args:
            path: The file.
            table: The experiment that it should belong to; None: any.

        Raises:
            ReportError: The file is cut off, no cell, of another format version or another table.
            OSError: The file cannot be opened.
        """
        content = read_json(path)
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise ReportError(
                f"{path} is not the result of a table's cell: give a directory that a sweep wrote."
            )
        found = content.get("format_version")
        if found != FORMAT_VERSION:
            raise ReportError(
                f"{path} has format version {found!r}, and this featcal-fusionbench reads version "
                f"{FORMAT_VERSION}: use the release that wrote it (the file names it under "
                f"versions), or delete the file and run the cell again."
            )
        try:
            cell = from_json(cls, content, "the cell")
        except ReportError as error:
            raise ReportError(
                f"{path} is damaged: {error} Restore it from a copy, or delete it and run the "
                f"cell again."
            ) from error
        if table is not None and cell.table != table:
            raise ReportError(
                f"{path} belongs to the table {cell.table}, not to {table}: give each table a "
                f"directory of its own."
            )
        return cell
