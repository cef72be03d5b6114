"""Pictures of feature drift, drawn with matplotlib's object API: no pyplot, no global state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ..calibration.results import TaskDrift
from .drift import DriftChange, mean_final_drift
from .style import BLUE, GRID, INK, MUTED, ORANGE, clear_axes
from .text import format_change

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["drift_figure"]

_BEFORE, _AFTER = ORANGE, BLUE
_WORSE = "#B00020"
_DASHED: Any = {"linewidth": 1.8, "linestyle": (0, (3, 1.6))}
_LINK = "#BDBDBD"
_WIDTH_INCHES = 12.0
_MOST_TICKS = 14
_MOST_MARKERS = 24
_LONGEST_NAME = 24


def drift_figure(before: Sequence[TaskDrift], after: Sequence[TaskDrift] = ()) -> Figure:
    """Draw where drift arises and what calibration took away.

    Left: drift at each block's output, mean over tasks with the range of tasks behind it, and the
    blocks' own mismatch dashed. Right: final drift of each task.

    Args:
        before: Held-out drift of the merged model.
        after: Held-out drift of the calibrated model; empty for a run that did not get there.

    Returns:
        A figure 12 inches wide, 1200 pixels at 100 dpi; it grows in height with the tasks.
    """
    tasks = list(dict.fromkeys(drift.task for drift in (*before, *after)))
    height = max(5.2, 2.2 + 0.3 * len(tasks))
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.03)  # inches, but for wspace
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=100, layout=layout, facecolor="white")
    stacks = _stacks(before, after)
    if not tasks:
        middle: Any = {"ha": "center", "va": "center"}
        figure.text(0.5, 0.5, "No drift was measured", **middle, color=MUTED, size=14)
        return figure
    if stacks:
        left, right = figure.subplots(1, 2, width_ratios=(1.5, 1.0))
        _draw_blocks(left, stacks, before, after)
        _draw_tasks(right, before, after)
    else:
        _draw_tasks(figure.subplots(), before, after)
    figure.legend(
        handles=_legend(bool(before), bool(after), bool(stacks), with_range=len(tasks) > 1),
        loc="outside lower center",
        ncols=5,
        fontsize=12,
        frameon=False,
        labelcolor=INK,
    )
    return figure


@dataclass(frozen=True)
class _Stack:
    """A run of neighbouring blocks below one parent: an encoder, a decoder.

    Attributes:
        label: What sets its name apart from the other stacks'.
        start: Where its first block stands on the axis; its others follow one by one.
        blocks: Positions of its blocks in forward order.
        numbers: What the blocks are called within the stack.
    """

    label: str
    start: int
    blocks: tuple[int, ...]
    numbers: tuple[str, ...]

    @property
    def places(self) -> range:
        """Where its blocks stand on the axis."""
        return range(self.start, self.start + len(self.blocks))


def _stacks(before: Sequence[TaskDrift], after: Sequence[TaskDrift]) -> list[_Stack]:
    names = {block.block: block.name for drift in (*before, *after) for block in drift.blocks}
    runs: list[tuple[str, list[int]]] = []
    for position in sorted(names):
        parent = names[position].rpartition(".")[0]
        if not runs or runs[-1][0] != parent:
            runs.append((parent, []))
        runs[-1][1].append(position)
    labels = _distinct_parts([parent for parent, _ in runs])
    stacks: list[_Stack] = []
    start = 0
    for label, (_, blocks) in zip(labels, runs, strict=True):
        numbers = tuple(names[position].rpartition(".")[2] for position in blocks)
        stacks.append(_Stack(label, start, tuple(blocks), numbers))
        start += len(blocks) + 1  # a gap, for drift does not run on from one stack into the next
    return stacks


def _distinct_parts(names: Sequence[str]) -> list[str]:
    """Drop the last parts that all names share, and keep two: ``encoder.block`` → ``encoder``."""
    parts = [name.split(".") for name in names]
    while len(parts) > 1 and min(map(len, parts)) > 1 and len({part[-1] for part in parts}) == 1:
        parts = [part[:-1] for part in parts]
    return [".".join(part[-2:]) for part in parts]


def _draw_blocks(
    axes: Axes, stacks: Sequence[_Stack], before: Sequence[TaskDrift], after: Sequence[TaskDrift]
) -> None:
    _style(axes, "Feature drift, block by block")
    for stack in stacks:
        for drift, color in ((before, _BEFORE), (after, _AFTER)):
            _draw_stack(axes, stack, drift, color)
    axes.set_ylabel("drift relative to the expert's features", fontsize=12, color=INK)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GRID)

    step = math.ceil(sum(len(stack.blocks) for stack in stacks) / _MOST_TICKS)
    ticks = [
        tick
        for stack in stacks
        for tick in list(zip(stack.places, stack.numbers, strict=True))[::step]
    ]
    axes.set_xticks([place for place, _ in ticks], [number for _, number in ticks])
    if len(stacks) == 1:
        axes.set_xlabel("block", fontsize=12, color=INK)
        return
    for stack in stacks:
        if stack.start:
            axes.axvline(stack.start - 1, color=MUTED, linewidth=1, linestyle=":")
        middle = (stack.places[0] + stack.places[-1]) / 2
        # Data coordinates across, points below the axis down.
        where: Any = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        text: Any = {"ha": "center", "va": "top", "fontsize": 12, "color": INK}
        axes.annotate(stack.label, (middle, 0), (0, -24), **where, **text)


def _draw_stack(axes: Axes, stack: _Stack, drift: Sequence[TaskDrift], color: str) -> None:
    blocks = [[b for task in drift for b in task.blocks if b.block == at] for at in stack.blocks]
    totals = [_finite(b.total for b in own) for own in blocks]
    if not any(totals):
        return
    # A lone block is visible only by its marker; eighty markers hide their line.
    style: Any = {"color": color, "marker": "o" if len(stack.blocks) <= _MOST_MARKERS else None}
    means = [_mean(own) for own in totals]
    axes.plot(stack.places, means, **style, linewidth=2.8, markersize=6, zorder=4)
    own_share = [_mean(_finite(b.local for b in own)) for own in blocks]
    axes.plot(stack.places, own_share, **style, **_DASHED, markersize=3.5, zorder=3)
    if len(drift) > 1:
        lowest, highest = ([end(own, default=math.nan) for own in totals] for end in (min, max))
        band: Any = {"color": color, "alpha": 0.16, "linewidth": 0, "zorder": 2}
        axes.fill_between(stack.places, lowest, highest, **band)


def _draw_tasks(axes: Axes, before: Sequence[TaskDrift], after: Sequence[TaskDrift]) -> None:
    _style(axes, "Final drift, task by task")
    rows = _task_rows(before, after)
    largest = max(_finite(v for row in rows for v in (row.before, row.after)), default=1.0)
    for place, row in enumerate(rows):
        values = _finite((row.before, row.after))
        if len(values) == 2:
            link: Any = {"color": _LINK, "linewidth": 3.5, "solid_capstyle": "butt"}
            axes.plot(values, (place, place), **link, zorder=2)
            worse = row.after > row.before
            axes.annotate(
                format_change(row.before, row.after).replace("-", "\N{MINUS SIGN}"),
                (max(values), place),
                (11, 0),
                textcoords="offset points",
                va="center",
                fontsize=12,
                color=_WORSE if worse else INK,
                fontweight="bold" if worse or len(rows) > 1 and place == 0 else "normal",
            )
        for value, color in ((row.before, _BEFORE), (row.after, _AFTER)):
            axes.plot(value, place, "o", color=color, markersize=9.5, zorder=3, clip_on=False)
    axes.set_yticks(range(len(rows)), [_clip(row.task) for row in rows])
    if len(rows) > 1:
        axes.get_yticklabels()[0].set_fontweight("bold")
        axes.axhline(0.5, color=GRID, linewidth=1.2)
    spare = max(3 - len(rows), 0) / 2  # a single row stands in the middle
    axes.set_ylim(-0.7 - spare, len(rows) - 0.3 + spare)
    axes.set_xlim(0, 1.28 * largest)  # room for the percentages
    axes.set_xlabel("drift relative to the expert's features", fontsize=12, color=INK)
    axes.grid(axis="x", color=GRID)


def _task_rows(before: Sequence[TaskDrift], after: Sequence[TaskDrift]) -> list[DriftChange]:
    """From the bottom up: the mean, then tasks by drift before; NaN where one was not measured."""
    old = {drift.task: drift.final for drift in before}
    new = {drift.task: drift.final for drift in after}
    rows = [
        DriftChange(task, old.get(task, math.nan), new.get(task, math.nan))
        for task in dict.fromkeys((*old, *new))
    ]
    rows.sort(key=lambda row: row.before if math.isfinite(row.before) else -1)
    if len(rows) > 1:
        means = [math.nan if m is None else m for m in map(mean_final_drift, (before, after))]
        rows.insert(0, DriftChange("mean", *means))
    return rows


def _legend(before: bool, after: bool, with_blocks: bool, with_range: bool) -> list[Artist]:
    total = "total, mean over tasks" if with_range else "total"
    line: Any = {"xdata": [], "ydata": [], "linewidth": 2.8}
    dashed = Line2D([], [], color=MUTED, **_DASHED, label="the block's own share")
    handles = (
        (before, Line2D(**line, color=_BEFORE, marker="o", label="before (merged)")),
        (after, Line2D(**line, color=_AFTER, marker="o", label="after calibration")),
        (with_blocks, Line2D(**line, color=MUTED, label=total)),
        (with_blocks, dashed),
        (
            with_blocks and with_range,
            Patch(color=MUTED, alpha=0.25, linewidth=0, label="range of the tasks"),
        ),
    )
    return [handle for shown, handle in handles if shown]


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=14, color=INK, fontweight="bold", pad=12)
    clear_axes(axes, labelsize=12)


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _clip(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
