"""All results as one tidy frame: a row per cell and task, from which everything else is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import pandas as pd

from .layout import TableLayout
from .results import EXPERTS, NO_CALIBRATOR, Cell, CellResult

__all__ = ["Frame", "tidy_csv", "tidy_frame"]

Frame: TypeAlias = Any
"""A ``pandas.DataFrame``: pandas annotates selections as unions that no type checker can use."""


_SETTINGS = "point."
"""Columns of swept settings begin with it."""


def tidy_frame(results: Sequence[CellResult], layout: TableLayout) -> Frame:
    """One row per cell and task, in the table's order.

    What belongs to the whole cell, such as its seconds, stands in each of its rows.

    Args:
        results: Results; those that the table does not show come last.
        layout: The table.

    Returns:
        Columns ``place`` (see ``Cell.place``), ``table``, ``size``, ``merger``, ``calibrator``,
        ``point`` (see ``Cell.point``), ``point.<name>`` for each swept setting, ``seed``, ``task``,
        ``metric`` (None where the cell lacks the task), ``score`` (0 to 1; NaN where it is
        undefined or lacking), ``experts`` and ``start`` (scores of the experts, and of the model
        that was calibrated), ``normalised`` (score over the experts'; NaN where they have none
        above zero), ``seconds``, ``peak_memory_bytes``, ``peak_device_bytes``, ``labels``,
        ``started``, ``finished`` and ``command``.
    """
    references = _References(results)
    rows = []
    for result in sorted(results, key=lambda result: layout.order(result.cell)):
        experts = references.scores(EXPERTS, NO_CALIBRATOR, result)
        start = references.scores(*layout.start(result.merger), result)
        for task in result.tasks:
            rows.append(
                {
                    "place": result.cell.place,
                    "table": result.table,
                    "size": result.size,
                    "merger": result.merger,
                    "calibrator": result.calibrator,
                    "point": result.cell.point,
                    **{f"{_SETTINGS}{name}": value for name, value in result.point.items()},
                    "seed": result.seed,
                    "task": task,
                    "metric": result.metrics[task] if task in result.scores else None,
                    "score": result.scores.get(task),
                    "experts": experts.get(task),
                    "start": None if result.calibrator == NO_CALIBRATOR else start.get(task),
                    "seconds": result.seconds,
                    "peak_memory_bytes": result.peak_memory_bytes,
                    "peak_device_bytes": result.peak_device_bytes,
                    "labels": result.labels,
                    "started": result.started.isoformat(),
                    "finished": result.finished.isoformat(),
                    "command": result.command,
                }
            )
    frame = pd.DataFrame(rows)
    numbers = dict.fromkeys(("score", "experts", "start", "seconds"), "float64")
    whole = dict.fromkeys(("peak_memory_bytes", "peak_device_bytes"), "Int64")
    frame = frame.astype(numbers | whole)
    # a rho of zero or less is no measure to divide by
    frame["normalised"] = frame["score"] / frame["experts"].where(frame["experts"] > 0)
    return frame


def tidy_csv(frame: Frame) -> str:
    """A tidy frame as CSV: a line for each task that a cell has. Numbers keep all their digits."""
    settings = sorted(name for name in frame if str(name).startswith(_SETTINGS))
    columns = ["table", "size", "merger", "calibrator", *settings, "seed", "task", "metric"]
    columns += ["score", "normalised", "seconds", "peak_memory_bytes", "peak_device_bytes"]
    columns += ["labels", "started", "finished", "command"]
    lines = frame.dropna(subset="metric").assign(labels=frame["labels"].map("; ".join))
    return lines.to_csv(columns=columns, index=False, lineterminator="\n")


class _References:
    """Finds what a cell is measured against: what it starts from, or the experts."""

    def __init__(self, results: Sequence[CellResult]) -> None:
        self._by_place: dict[str, list[CellResult]] = {}
        for result in results:
            self._by_place.setdefault(result.cell.place, []).append(result)

    def scores(self, merger: str, calibrator: str, result: CellResult) -> Mapping[str, float]:
        """Scores of a row and column of the table that a result is to be measured against.

        Those of the result's own seed and, if nothing was calibrated there, of its own point. What
        depends on neither was run once: then it is the only one there is, unless hashes say that it
        was made of other models.
        """
        places = [Cell(merger, calibrator, result.seed).place]
        if calibrator == NO_CALIBRATOR:
            places.insert(0, Cell(merger, calibrator, result.seed, result.cell.point).place)
        for place in places:
            found = self._by_place.get(place, [])
            for other in found:
                if other.seed == result.seed:
                    return other.scores
            if len(found) == 1 and _may_share_models(found[0], result):
                return found[0].scores
        return {}


def _may_share_models(one: CellResult, other: CellResult) -> bool:
    """Whether no hash of base or experts contradicts that two cells were made of the same ones."""
    hashes = [
        {(m.role, m.name): m.sha256 for m in result.models if m.role != "merged" and m.sha256}
        for result in (one, other)
    ]
    return all(
        hashes[0][model] == hashes[1][model] for model in hashes[0].keys() & hashes[1].keys()
    )
