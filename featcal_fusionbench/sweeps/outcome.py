"""From a sweep's cells to its table: what stands in it, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping

from ..tables.layout import TableLayout
from ..tables.write import WrittenTable, write_tables
from .cells import Cell
from .directory import State, Status, SweepDirectory
from .experiment import Experiment
from .pools import Pools

__all__ = ["layout_of", "write_outcome"]


def write_outcome(
    experiment: Experiment,
    pools: Pools,
    statuses: Mapping[Cell, Status],
    directory: SweepDirectory,
    command: str,
) -> WrittenTable | None:
    """Write the table of all cells that are done into the sweep's directory.

    Args:
        experiment: The table.
        pools: Its pools.
        statuses: State of the cells that belong into it.
        directory: The sweep's directory.
        command: The command that makes it.

    Returns:
        What was written; None where no cell is done.
    """
    results = [s.result for s in statuses.values() if s.state is State.DONE and s.result]
    if not results:
        return None
    layout = layout_of(experiment, pools, statuses, command)
    return write_tables(results, layout, directory.path)


def layout_of(
    experiment: Experiment, pools: Pools, statuses: Mapping[Cell, Status], command: str
) -> TableLayout:
    """What the table must know of its experiment; arguments as of ``write_outcome``."""
    shown = [cell for cell in statuses if not cell.is_reference]
    rows, columns = {cell.merger for cell in shown}, {cell.calibrator for cell in shown}
    return TableLayout(
        name=experiment.name,
        title=experiment.title,
        tasks=tuple(t for t in pools.tasks if experiment.tasks is None or t in experiment.tasks),
        rows={r: experiment.mergers[r].title for r in experiment.rows_shown if r in rows},
        columns={
            c: experiment.calibrators[c].title for c in experiment.columns_shown if c in columns
        },
        starts={row: origin for row in rows if (origin := experiment.mergers[row].origin)},
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
