"""Figures of a swept setting: sample efficiency, sensitivity to λ, ρ and α."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, NullLocator

from ..report.style import GRID, INK, MUTED, clear_axes
from .layout import TableLayout
from .looks import (
    Look,
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
from .summary import Average, CellKey, CellSummary, by_place
from .wording import number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["curve_figures"]

_COLUMNS = 3
_LOG_SPREAD = 20.0
"""Values whose largest is so many times the smallest stand on a logarithmic axis."""
_LABEL_ROOM = 0.08
"""Share of the axis that a label needs."""
_PUBLISHED = "_"


def curve_figures(summaries: Sequence[CellSummary], layout: TableLayout) -> dict[str, Figure]:
    """Draw the average over each swept setting that has two or more numbers.

    Lines are means over seeds, bands their standard deviations. A panel per merger, with its
    uncalibrated average, the base and the experts across.

    Args:
        summaries: The places of the table in order.
        layout: The table.

    Returns:
        Figures by the setting's name.
    """
    names = dict.fromkeys(name for summary in summaries for name, _ in summary.key.point)
    curves = {name: [s for s in summaries if _value(s, name) is not None] for name in names}
    return {
        name: _figure(name, own, summaries, layout)
        for name, own in curves.items()
        if len({_value(summary, name) for summary in own}) > 1
    }


def _value(summary: CellSummary, name: str) -> float | None:
    """The value of a setting where it alone is swept, and there is an average to draw."""
    point = summary.key.point
    if len(point) != 1 or point[0][0] != name or summary.average is None:
        return None
    return None if isinstance(point[0][1], str) else float(point[0][1])


def _figure(
    name: str, own: Sequence[CellSummary], summaries: Sequence[CellSummary], layout: TableLayout
) -> Figure:
    fixed = {key: s.average for key, s in by_place(summaries, layout).items() if s.average}
    mergers = list(dict.fromkeys(summary.key.merger for summary in own))
    shown = [*own, *(s for s in summaries if s.key in map(CellKey, mergers))]
    columns = min(_COLUMNS, len(mergers))
    rows = math.ceil(len(mergers) / columns)
    figure = new_figure(max(5.6, 1.2 + 3.6 * columns), 1.3 + 2.9 * rows)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
    drawn: list[float] = []
    for axes, merger in zip(panels.flat, mergers, strict=False):
        members = [summary for summary in own if summary.key.merger == merger]
        drawn += _draw_lines(axes, name, members, layout)
        if plain := fixed.get(CellKey(merger)):
            drawn.append(100 * plain.mean)
            axes.axhline(drawn[-1], color=MUTED, linewidth=1.4, linestyle="--", zorder=2)
        _set_scale(axes, sorted({v for s in own if (v := _value(s, name)) is not None}))
        clear_axes(axes, labelsize=9)
        axes.grid(axis="y", color=GRID)
        axes.set_title(merger_title(merger, shown, layout), loc="left", fontsize=11, color=INK)
        axes.set_xlabel(layout.curve_title(name), fontsize=10, color=INK)
    references = {
        key: 100 * average.mean for key in (BASE, EXPERTS) if (average := fixed.get(CellKey(key)))
    }
    lines: set[str] = set()
    for at, axes in enumerate(panels.flat):
        if at < len(mergers):
            lines |= draw_references(axes, references, drawn, along="y")
        else:
            axes.set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylabel(f"{measure(own)}, average", fontsize=10, color=INK)
    title = "; ".join((layout.title, *remarks(shown)))
    add_title(figure, title)
    handles = _handles(own, shown, layout)
    if any(CellKey(merger) in fixed for merger in mergers):
        handles.append(Line2D([], [], color=MUTED, linestyle="--", label="not calibrated"))
    handles += reference_handles(lines)
    if any(_published_average(summary) is not None for summary in own):
        handles.append(published_handle(_PUBLISHED))
    add_legend(figure, handles)
    return figure


def _draw_lines(
    axes: Axes, name: str, members: Sequence[CellSummary], layout: TableLayout
) -> list[float]:
    """Draw a line per calibrator.

    Returns:
        The ends of what was drawn, in percent.
    """
    drawn: list[float] = []
    for calibrator, look in looks(layout).items():
        line = [
            (value, summary.average, _published_average(summary))
            for summary in members
            if summary.key.calibrator == calibrator
            and (value := _value(summary, name)) is not None
            and summary.average
        ]
        line.sort(key=lambda entry: entry[0])
        if line:
            drawn += _draw_line(axes, [(x, average) for x, average, _ in line], look)
        for x, _, beside in line:
            if beside is not None:
                drawn.append(100 * beside)
                published(axes, x, drawn[-1], look, _PUBLISHED)
    return drawn


def _draw_line(axes: Axes, line: Sequence[tuple[float, Average]], look: Look) -> list[float]:
    x = [value for value, _ in line]
    means = [100 * average.mean for _, average in line]
    deviations = [100 * (average.deviation or 0.0) for _, average in line]
    low = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
    high = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
    axes.fill_between(x, low, high, color=look.colour, alpha=0.2, linewidth=0, zorder=3)
    axes.plot(x, means, color=look.colour, linewidth=1.8, zorder=4)
    for value, mean, (_, average) in zip(x, means, line, strict=True):
        axes.plot(
            value,
            mean,
            marker=look.marker,
            markersize=5,
            color=look.colour,
            markerfacecolor="white" if average.partial else look.colour,
            zorder=4,
        )
    return [*low, *high]


def _published_average(summary: CellSummary) -> float | None:
    averages = [comparison.row.average for comparison in summary.comparisons]
    return next((average for average in averages if average is not None), None)


def _set_scale(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis where values span orders of magnitude; ticks at the values themselves."""
    positive = [value for value in values if value > 0]
    places = list(values)
    if positive and min(values) >= 0 and max(positive) / min(positive) >= _LOG_SPREAD:
        lowest = math.log10(min(positive))
        # zero has a place of its own, a decade left of the smallest value
        places = [math.log10(value) if value > 0 else lowest - 1 for value in values]
        if min(values) > 0:
            axes.set_xscale("log")
        else:
            axes.set_xscale("symlog", linthresh=min(positive))
    axes.set_xticks(list(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FixedFormatter(_labels(values, places)))


def _labels(values: Sequence[float], places: Sequence[float]) -> list[str]:
    """A label for each value, empty where it would run into the one before it."""
    room = _LABEL_ROOM * (max(places) - min(places))
    labels, last = [], -math.inf
    for value, at in zip(values, places, strict=True):
        fits = at - last >= room
        labels.append(number_text(value) if fits else "")
        last = at if fits else last
    return labels


def _handles(
    own: Sequence[CellSummary], summaries: Sequence[CellSummary], layout: TableLayout
) -> list[Line2D]:
    look_of = looks(layout)
    present = {summary.key.calibrator for summary in own}
    return [
        Line2D(
            [],
            [],
            color=look_of[calibrator].colour,
            marker=look_of[calibrator].marker,
            label=calibrator_title(calibrator, summaries, layout),
        )
        for calibrator in dict.fromkeys((NO_CALIBRATOR, *layout.columns))
        if calibrator in present
    ]
