"""What a table must know of the experiment that it shows."""

from __future__ import annotations

from collections.abc import Mapping

from ..tables.layout import TableLayout
from ..tables.results import Cell
from .directory import State, Status
from .experiment import Experiment
from .pools import Pools

__all__ = ["layout_of"]


def layout_of(
    experiment: Experiment, pools: Pools, statuses: Mapping[Cell, Status], command: str
) -> TableLayout:
    """Lay out the table of an experiment.

    Args:
        experiment: The experiment.
        pools: Its pools.
        statuses: State of the cells that belong into it.
        command: The command that makes it.
    """
    shown = [cell for cell in statuses if not cell.is_reference]
    rows, columns = {cell.merger for cell in shown}, {cell.calibrator for cell in shown}
    mergers, calibrators = experiment.mergers, experiment.calibrators
    return TableLayout(
        name=experiment.name,
        title=experiment.title,
        tasks=tuple(t for t in pools.tasks if experiment.tasks is None or t in experiment.tasks),
        rows={row: mergers[row].title for row in experiment.rows_shown if row in rows},
        columns={c: calibrators[c].title for c in experiment.columns_shown if c in columns},
        starts={row: origin for row in rows if (origin := mergers[row].origin)},
        curves={name: curve.title for name, curve in experiment.curves.items()},
        expected={cell: _why_not(status) for cell, status in statuses.items()},
        published=experiment.published_values,
        command=command,
        notes=(*experiment.notes, *experiment.sources(rows, columns)),
    )


def _why_not(status: Status) -> str:
    if status.failure is not None:
        return status.failure.reason
    return "what it starts from failed" if status.state is State.BLOCKED else ""
