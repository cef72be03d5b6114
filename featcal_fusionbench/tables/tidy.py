"""Cells as a tidy frame: one line per cell, task and seed, for whoever computes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from .layout import TableLayout
from .results import EXPERTS, CellResult
from .summary import CellKey, References, in_order

__all__ = ["tidy_csv", "tidy_frame"]

_WHOLE = ("peak_memory_bytes", "peak_device_bytes")


def tidy_frame(cells: Sequence[CellResult], layout: TableLayout) -> pd.DataFrame:
    """One line per cell, task and seed, in the table's order.

    What belongs to the whole cell, such as its seconds, stands in each of its lines.

    Args:
        cells: Results; those that the table does not show come last.
        layout: The table.

    Returns:
        Columns ``table``, ``size``, ``merger``, ``calibrator``, ``point.<name>`` for each swept
        name, ``seed``, ``task``, ``metric``, ``score`` (0 to 1; empty where undefined),
        ``normalised`` (score over the experts'; empty where they have none above zero),
        ``seconds``, ``peak_memory_bytes``, ``peak_device_bytes``, ``labels``, ``started``,
        ``finished`` and ``command``.
    """
    references = References(cells)
    points = sorted({name for cell in cells for name in cell.point})
    lines = [line for cell in in_order(cells, layout) for line in _lines(cell, references, points)]
    return pd.DataFrame(lines).astype({name: "Int64" for name in _WHOLE} if lines else {})


def tidy_csv(cells: Sequence[CellResult], layout: TableLayout) -> str:
    """``tidy_frame`` as CSV; numbers keep all their digits."""
    return tidy_frame(cells, layout).to_csv(index=False, lineterminator="\n")


def _lines(cell: CellResult, references: References, points: Sequence[str]) -> list[dict[str, Any]]:
    experts = references.find(CellKey(EXPERTS), cell)
    lines = []
    for task in cell.tasks:
        if task not in cell.scores:
            continue
        score = cell.scores[task]
        best = experts.scores.get(task) if experts else None
        lines.append(
            {
                "table": cell.table,
                "size": cell.size,
                "merger": cell.merger,
                "calibrator": cell.calibrator,
                **{f"point.{name}": cell.point.get(name) for name in points},
                "seed": cell.seed,
                "task": task,
                "metric": cell.metrics[task],
                "score": score,
                "normalised": score / best if best is not None and best > 0 else math.nan,
                "seconds": cell.seconds,
                "peak_memory_bytes": cell.peak_memory_bytes,
                "peak_device_bytes": cell.peak_device_bytes,
                "labels": "; ".join(cell.labels),
                "started": cell.started.isoformat(),
                "finished": cell.finished.isoformat(),
                "command": cell.command,
            }
        )
    return lines
