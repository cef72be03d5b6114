"""The figures of a table: the average of every cell at a glance, and every task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..report.style import GRID, INK, MUTED, clear_axes
from .layout import TableLayout
from .looks import (
    add_legend,
    add_title,
    calibrator_title,
    draw_references,
    looks,
    measure,
    merger_title,
    new_figure,
    published,
    published_handle,
    reference_handles,
    remarks,
)
from .results import BASE, EXPERTS, NO_CALIBRATOR
from .summary import Average, CellKey, CellSummary, Spread, by_place

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["table_figure", "tasks_figure"]

_ROW_INCHES = 0.42
_SMALL_ROW_INCHES = 0.28
_MOST_MARKS = 7
"""Calibrators that can be told apart in a merger's row; with more, each has a row of its own."""
_COLUMNS = 4
_PUBLISHED = "|"


def table_figure(summaries: Sequence[CellSummary], layout: TableLayout) -> Figure:
    """Draw the average of every merger × calibrator between the base and the experts.

    Args:
        summaries: The places of the table in order; those on curves are not drawn.
        layout: The table.
    """
    shown = [summary for summary in summaries if not summary.key.point]
    averages = {key: s.average for key, s in by_place(shown, layout).items()}
    beside = {
        summary.key: comparison.row.average
        for summary in shown
        for comparison in reversed(summary.comparisons)  # so that the first one stays
        if comparison.row.average is not None
    }
    rows = _rows(shown, layout)
    marks = max(len(row.keys) for row in rows)
    figure = new_figure(8.0, 1.9 + (_SMALL_ROW_INCHES if marks == 1 else _ROW_INCHES) * len(rows))
    axes = figure.subplots()
    lines = _draw(axes, averages, rows, layout, beside)
    add_title(figure, layout.title)
    label = f"{measure(shown)}, average over {len(layout.tasks)} tasks"
    # a line of their own: long names of mergers leave the axis little width
    lines_below = filter(None, (label, "; ".join(remarks(shown))))
    axes.set_xlabel("\n".join(lines_below), fontsize=10, color=INK)
    handles = [*_handles(shown, rows, layout), *reference_handles(lines)]
    if any(average and average.partial for average in averages.values()):
        handles.append(
            Line2D(
                [],
                [],
                color=MUTED,
                marker="o",
                markerfacecolor="white",
                linestyle="none",
                label="partial",
            )
        )
    if beside:
        handles.append(published_handle(_PUBLISHED))
    add_legend(figure, handles)
    return figure


def tasks_figure(summaries: Sequence[CellSummary], layout: TableLayout) -> Figure:
    """Draw every task as ``table_figure`` draws the average.

    Args:
        summaries: The places of the table in order; those on curves are not drawn.
        layout: The table.
    """
    shown = [summary for summary in summaries if not summary.key.point]
    rows = _rows(shown, layout)
    across = min(_COLUMNS, len(layout.tasks))
    down = math.ceil(len(layout.tasks) / across)
    height = 1.1 + down * (0.8 + _SMALL_ROW_INCHES * len(rows))
    figure = new_figure(max(6.0, 2.0 + 2.3 * across), height)
    lines: set[str] = set()
    panels = list(figure.subplots(down, across, sharey=True, squeeze=False).flat)
    places = by_place(shown, layout)
    for axes, task in zip(panels, layout.tasks, strict=False):
        scores = {key: summary.scores.get(task) for key, summary in places.items()}
        lines |= _draw(axes, scores, rows, layout, small=True)
        axes.set_title(task, loc="left", fontsize=10, color=INK, fontweight="bold")
    for axes in panels[len(layout.tasks) :]:
        axes.set_visible(False)
    title = f"{layout.title}: {measure(shown)} per task"
    add_title(figure, "; ".join((title, *remarks(shown))))
    add_legend(figure, [*_handles(shown, rows, layout), *reference_handles(lines)])
    return figure


@dataclass(frozen=True)
class _Row:
    """One line of a figure: what it is called, and the places that are marked on it."""

    label: str
    keys: tuple[CellKey, ...]


def _rows(summaries: Sequence[CellSummary], layout: TableLayout) -> list[_Row]:
    keys = [summary.key for summary in summaries if not summary.key.is_reference]
    mergers = list(dict.fromkeys(key.merger for key in keys))
    calibrators = list(dict.fromkeys(key.calibrator for key in keys))
    if len(calibrators) <= _MOST_MARKS:
        return [
            _Row(
                merger_title(merger, summaries, layout),
                tuple(CellKey(merger, calibrator) for calibrator in calibrators),
            )
            for merger in mergers
        ]
    rows = []
    for key in keys:
        label = calibrator_title(key.calibrator, summaries, layout)
        if len(mergers) > 1:
            label = f"{merger_title(key.merger, summaries, layout)}: {label}"
        rows.append(_Row(label, (key,)))
    return rows


def _draw(
    axes: Axes,
    values: Mapping[CellKey, Spread | None],
    rows: Sequence[_Row],
    layout: TableLayout,
    beside: Mapping[CellKey, float] | None = None,
    small: bool = False,
) -> set[str]:
    """Draw marks row by row, and the base and the experts across all of them.

    Returns:
        Which of the base and the experts were drawn.
    """
    look_of = looks(layout)
    drawn: list[float] = []
    for line, row in enumerate(rows):
        axes.axhline(line, color=GRID, linewidth=1, zorder=1)
        for at, key in enumerate(row.keys):
            look = look_of[key.calibrator]
            # one above the other, so that equal values do not hide each other
            y = line + (at - (len(row.keys) - 1) / 2) * 0.6 / len(row.keys)
            if beside and key in beside:
                drawn.append(100 * beside[key])
                published(axes, drawn[-1], y, look, _PUBLISHED)
            spread = values.get(key)
            if spread is None:
                continue
            deviation = 100 * (spread.deviation or 0.0)
            drawn += [100 * spread.mean - deviation, 100 * spread.mean + deviation]
            partial = isinstance(spread, Average) and spread.partial
            axes.errorbar(
                100 * spread.mean,
                y,
                xerr=deviation or None,
                fmt=look.marker,
                color=look.colour,
                markerfacecolor="white" if partial else look.colour,
                markersize=4.5 if small else 6.5,
                elinewidth=1.6,
                zorder=4,
            )
    references = {
        merger: 100 * spread.mean
        for merger in (BASE, EXPERTS)
        if (spread := values.get(CellKey(merger))) is not None
    }
    lines = draw_references(axes, references, drawn, along="x", named=not small)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="x", color=GRID)
    clear_axes(axes, labelsize=8 if small else 10)
    return lines


def _handles(
    summaries: Sequence[CellSummary], rows: Sequence[_Row], layout: TableLayout
) -> list[Line2D]:
    if all(len(row.keys) == 1 for row in rows) and len(rows) > 1:
        return []  # the rows are named by them
    look_of = looks(layout)
    present = {s.key.calibrator for s in summaries if s.cells and not s.key.is_reference}
    return [
        Line2D(
            [],
            [],
            color=look_of[calibrator].colour,
            marker=look_of[calibrator].marker,
            linestyle="none",
            markersize=6.5,
            label=calibrator_title(calibrator, summaries, layout),
        )
        for calibrator in dict.fromkeys((NO_CALIBRATOR, *layout.columns))
        if calibrator in present
    ]
