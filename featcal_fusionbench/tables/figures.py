"""The figures of a table: the average of every cell at a glance, every task, swept settings."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedFormatter, NullLocator

from ..report.style import BLUE, GREEN, GRID, INK, MUTED, ORANGE, PURPLE, SKY, clear_axes
from .frame import Frame
from .layout import TableLayout
from .results import ACCURACY, BASE, EXPERTS, NO_CALIBRATOR, TRAINED_ON_TEST_INPUTS
from .summary import AVERAGE, Summary, with_starts
from .text import number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Style", "curve_figures", "styles_of", "table_figure", "tasks_figure"]

_FEATCAL = "featcal"
_PLAIN = "#8A8A8A"
_COLOURS = (ORANGE, GREEN, PURPLE, SKY, "#7A4F00", "#4B0082")
_MARKERS = ("s", "^", "D", "v", "P", "X")
_ROW_INCHES = 0.42
_SMALL_ROW_INCHES = 0.28
_MOST_MARKS = 7
"""Calibrators that can be told apart in a merger's row; with more, each has a row of its own."""
_TASKS_ACROSS = 4
_CURVES_ACROSS = 3
_LOG_SPREAD = 20.0
"""Values whose largest is so many times the smallest stand on a logarithmic axis."""
_LABEL_ROOM = 0.08
"""Share of the axis that the label of a value needs."""
_NAME_ROOM = 0.2
"""Share of the axis that the names of the base and the experts need."""
_FAR = 0.4
"""How far below all other values the base may lie, as a share of their range, to be drawn."""
_HANDLE_INCHES = 0.55
_LETTER_INCHES = 0.078
"""Room that an entry of a legend takes besides its text, and a letter of it."""
_TITLE_LETTER_INCHES = 0.115
"""Room that a letter of a title takes."""
_MARK = " †"


def table_figure(summary: Summary, layout: TableLayout) -> Figure:
    """Draw the average of every merger × calibrator between the base and the experts.

    Args:
        summary: Of the table; what stands on curves is not drawn.
        layout: The table.
    """
    rows = _Rows(summary, layout)
    data, published = _drawn(summary, AVERAGE)
    data, published = with_starts(data, layout), published[published["point"].map(len) == 0]
    height = _SMALL_ROW_INCHES if rows.single else _ROW_INCHES
    figure = _new_figure(8.0, 1.9 + height * len(rows.labels))
    axes = figure.subplots()
    rows.draw(axes, data, published, size=6.5, named=True)
    label = f"{_measure(data)}, average over {len(layout.tasks)} tasks"
    # a line of their own: long names of mergers leave the axis little width
    below = filter(None, (label, "; ".join(rows.titles.remarks)))
    axes.set_xlabel("\n".join(below), fontsize=10, color=INK)
    return _finished(figure, layout.title)


def tasks_figure(summary: Summary, layout: TableLayout) -> Figure:
    """Draw every task as ``table_figure`` draws the average; arguments as there."""
    rows = _Rows(summary, layout)
    across = min(_TASKS_ACROSS, len(layout.tasks))
    down = math.ceil(len(layout.tasks) / across)
    height = 1.1 + down * (0.8 + _SMALL_ROW_INCHES * len(rows.labels))
    figure = _new_figure(max(6.0, 2.0 + 2.3 * across), height)
    panels = list(figure.subplots(down, across, sharey=True, squeeze=False).flat)
    for axes, task in zip(panels, layout.tasks, strict=False):
        data, published = _drawn(summary, task)
        rows.draw(axes, with_starts(data, layout), published.iloc[:0], size=4.5)
        axes.set_title(task, loc="left", fontsize=10, color=INK, fontweight="bold")
    for axes in panels[len(layout.tasks) :]:
        axes.set_visible(False)
    title = f"{layout.title}: {_measure(summary.seeds)} per task"
    return _finished(figure, "; ".join((title, *rows.titles.remarks)))


def curve_figures(summary: Summary, layout: TableLayout) -> dict[str, Figure]:
    """Draw the average over each swept setting that has two or more numbers.

    Lines are means over seeds, bands their standard deviations. A panel per merger, with its
    uncalibrated average, the base and the experts across.

    Returns:
        Figures by the setting's name.
    """
    data, published = map(_sweeps_of_numbers, _drawn(summary, AVERAGE))
    return {
        str(name): _curve_figure(
            str(name), own, published[published["name"] == name], summary, layout
        )
        for name, own in data.groupby("name", sort=False)
        if own["position"].nunique() > 1
    }


def _curve_figure(
    name: str, data: Frame, published: Frame, summary: Summary, layout: TableLayout
) -> Figure:
    mergers = list(data["merger"].unique())
    plain = with_starts(_drawn(summary, AVERAGE)[0], layout)
    plain = plain[plain["calibrator"] == NO_CALIBRATOR]
    shown = pd.concat([data, plain[plain["merger"].isin(mergers)]])
    titles = _Titles(summary.places.loc[shown["place"].unique()], layout)
    across = min(_CURVES_ACROSS, len(mergers))
    down = math.ceil(len(mergers) / across)
    figure = _new_figure(max(5.6, 1.2 + 3.6 * across), 1.3 + 2.9 * down)
    grid = figure.subplots(down, across, sharey=True, squeeze=False)
    panels = list(grid.flat[: len(mergers)])
    fixed = plain.groupby("merger")["percent"].mean()
    styles = styles_of(layout)
    _label_marks(panels[0], data, published, styles, titles, "x")
    palette = {key: style.colour for key, style in styles.items()}
    band: Any = {"errorbar": "sd", "err_kws": {"linewidth": 0}, "palette": palette, "legend": False}
    for axes, merger in zip(panels, mergers, strict=True):
        own, beside = (frame[frame["merger"] == merger] for frame in (data, published))
        sns.lineplot(own, x="position", y="percent", hue="calibrator", ax=axes, **band)
        _dots(axes, own, beside, styles, "x", size=5)
        if merger in fixed:
            dashes: Any = {"color": MUTED, "linewidth": 1.4, "linestyle": "--", "zorder": 2}
            axes.axhline(fixed[merger], label="not calibrated", **dashes)
        _set_scale(axes, sorted(data["position"].unique()))
        clear_axes(axes, labelsize=9)
        axes.grid(axis="y", color=GRID)
        axes.set_title(titles.merger(merger), loc="left", fontsize=11, color=INK)
        axes.set_xlabel(layout.curve_title(name), fontsize=10, color=INK)
        axes.set_ylabel("")
    for axes in grid[:, 0]:
        axes.set_ylabel(f"{_measure(data)}, average", fontsize=10, color=INK)
    _draw_references(panels, fixed, along="y")
    for axes in grid.flat[len(mergers) :]:
        axes.set_visible(False)
    return _finished(figure, "; ".join((layout.title, *titles.remarks)))


# What is drawn


def _drawn(summary: Summary, task: str) -> tuple[Frame, Frame]:
    """Scores of all seeds, and the first published one of each place, in percent.

    Both have ``merger``, ``calibrator``, ``point`` and ``percent``, the scores ``partial`` too.
    """
    data = summary.seeds[summary.seeds["task"] == task]
    partial = summary.places["score_partial"][data["place"]].to_numpy() & (task == AVERAGE)
    published = summary.published[summary.published["task"] == task].drop_duplicates("place")
    published = published.join(summary.places[["merger", "calibrator", "point"]], on="place")
    return (
        data.assign(percent=100 * data["score"], partial=partial).dropna(subset="percent"),
        published.assign(percent=100 * published["value"]),
    )


def _sweeps_of_numbers(frame: Frame) -> Frame:
    """What one setting alone was swept for, by numbers: its ``name``, its value as ``position``."""
    pairs = [point[0] if len(point) == 1 else ("", "") for point in frame["point"]]
    frame = frame.assign(name=[name for name, _ in pairs], position=[value for _, value in pairs])
    numbers = [not isinstance(value, str) for _, value in pairs]
    return frame.loc[numbers].astype({"position": "float64"})


@dataclass(frozen=True)
class Style:
    """How a calibrator is drawn: by colour and by shape, since some print without colours."""

    colour: str
    marker: str


def styles_of(layout: TableLayout) -> dict[str, Style]:
    """The look of every calibrator, the same in all figures of a table.

    Variants of a calibrator, whose keys begin with its key, have its colour.
    """
    found = {NO_CALIBRATOR: Style(_PLAIN, "o"), _FEATCAL: Style(BLUE, "o")}
    families = dict.fromkeys(_family(column, layout) for column in layout.columns)
    colours = dict(zip([f for f in families if f not in found], cycle(_COLOURS), strict=False))
    markers = {family: cycle(_MARKERS[at % len(_MARKERS) :]) for at, family in enumerate(colours)}
    for column in layout.columns:
        family = _family(column, layout)
        if column not in found:
            colour = colours[family] if family in colours else found[family].colour
            found[column] = Style(colour, next(markers.setdefault(family, cycle(_MARKERS))))
    return {column: found[column] for column in layout.all_columns}


def _family(column: str, layout: TableLayout) -> str:
    """The shortest key of a column that this one begins with; itself if there is none."""
    parts = column.split("_")
    begins = ("_".join(parts[:count]) for count in range(1, len(parts)))
    return next((key for key in begins if key in layout.columns), column)


class _Titles:
    """Titles of what a figure shows, marked where it was trained on test inputs.

    A calibrator was where a cell says so whose merger, left alone, does not.

    Args:
        places: What is shown, as in ``Summary.places``.
        layout: The table.
    """

    def __init__(self, places: Frame, layout: TableLayout) -> None:
        self._layout = layout
        self._seeds = sorted(set(places["seeds"]) - {0})
        saw = places.loc[[TRAINED_ON_TEST_INPUTS in labels for labels in places["labels"]]]
        plain = saw["calibrator"] == NO_CALIBRATOR
        self._mergers = set(saw["merger"][plain])
        self._calibrators = set(saw["calibrator"][~plain & ~saw["merger"].isin(self._mergers)])

    def merger(self, merger: str) -> str:
        return self._layout.row_title(merger) + _MARK * (merger in self._mergers)

    def calibrator(self, calibrator: str) -> str:
        return self._layout.column_title(calibrator) + _MARK * (calibrator in self._calibrators)

    @property
    def remarks(self) -> list[str]:
        """What marks and bars are, to stand behind a figure's title or the name of its axis."""
        lines = []
        if self._seeds and self._seeds[-1] > 1:
            ends = dict.fromkeys((self._seeds[0], self._seeds[-1]))
            lines.append(f"mean ± sd of {' to '.join(map(str, ends))} seeds")
        if self._mergers or self._calibrators:
            lines.append(f"{_MARK.strip()} {TRAINED_ON_TEST_INPUTS}")
        return lines


class _Rows:
    """The rows of a figure, and where on them mergers and calibrators are marked.

    Attributes:
        titles: Of all that is marked.
        labels: Of the rows.
        single: Whether each row has one mark.
    """

    def __init__(self, summary: Summary, layout: TableLayout) -> None:
        table = summary.places[summary.places["point"].map(len) == 0]
        own = table[~table["merger"].isin([BASE, EXPERTS])]
        self._styles = styles_of(layout)
        self.titles = titles = _Titles(table, layout)
        mergers = list(own["merger"].unique())
        calibrators = [key for key in self._styles if key in set(own["calibrator"])]
        if len(calibrators) <= _MOST_MARKS:
            self.labels = [titles.merger(merger) for merger in mergers]
            # one above the other, so that equal values do not hide each other
            step = 0.6 / len(calibrators)
            places = [
                (merger, calibrator, line + (at - (len(calibrators) - 1) / 2) * step)
                for line, merger in enumerate(mergers)
                for at, calibrator in enumerate(calibrators)
            ]
        else:
            keys = list(zip(own["merger"], own["calibrator"], strict=True))
            several = len(mergers) > 1
            self.labels = [
                (f"{titles.merger(merger)}: " if several else "") + titles.calibrator(calibrator)
                for merger, calibrator in keys
            ]
            places = [(*key, float(line)) for line, key in enumerate(keys)]
        self.single = len(places) == len(self.labels)
        self._positions = pd.DataFrame(places, columns=["merger", "calibrator", "position"])

    def draw(
        self, axes: Axes, data: Frame, published: Frame, size: float, named: bool = False
    ) -> None:
        """Draw what ``_drawn`` gives row by row, and the base and the experts across all rows."""
        for line in range(len(self.labels)):
            axes.axhline(line, color=GRID, linewidth=1, zorder=1)
        own, beside = data.merge(self._positions), published.merge(self._positions)
        # rows with one mark each are named by it
        titles = None if self.single and len(self.labels) > 1 else self.titles
        _label_marks(axes, own, beside, self._styles, titles, "y")
        _dots(axes, own, beside, self._styles, "y", size, errorbar="sd")
        means = data[data["merger"].isin([BASE, EXPERTS])].groupby("merger")["percent"].mean()
        _draw_references([axes], means, along="x", named=named)
        axes.set_yticks(range(len(self.labels)), self.labels)
        axes.set_ylim(len(self.labels) - 0.4, -0.6)
        axes.set(xlabel="", ylabel="")
        axes.grid(axis="x", color=GRID)
        clear_axes(axes, labelsize=10 if named else 8)


# How it is drawn


def _dots(
    axes: Axes,
    data: Frame,
    published: Frame,
    styles: Mapping[str, Style],
    orient: Literal["x", "y"],
    size: float,
    errorbar: str | None = None,
) -> None:
    """Mark means over seeds, hollow where they are partial, and published values by strokes.

    Both frames have ``percent`` by ``position`` and ``calibrator``; positions run along ``orient``.
    """
    options: Any = {"x": "percent", "y": "percent", orient: "position", "hue": "calibrator"}
    options |= {"palette": {key: style.colour for key, style in styles.items()}}
    options |= {"hue_order": list(styles), "orient": orient, "native_scale": True}
    options |= {"linestyle": "none", "legend": False, "ax": axes}
    dots: Any = {"markers": [style.marker for style in styles.values()], "markersize": size}
    dots |= {"zorder": 4, "errorbar": errorbar, "err_kws": {"linewidth": 1.6, "zorder": 3}}
    sns.pointplot(data[~data["partial"]], **options, **dots)
    sns.pointplot(data[data["partial"]], **options, **dots, markerfacecolor="white")
    sns.pointplot(published, **options, **_stroke(orient, 14), errorbar=None, zorder=5)


def _stroke(orient: Literal["x", "y"], size: float) -> Any:
    """The look of published values: a stroke across, which hides nothing."""
    return {"marker": {"x": "_", "y": "|"}[orient], "markersize": size, "markeredgewidth": 1.8}


def _label_marks(
    axes: Axes,
    data: Frame,
    published: Frame,
    styles: Mapping[str, Style],
    titles: _Titles | None,
    orient: Literal["x", "y"],
) -> None:
    """Name all kinds of marks for the legend; calibrators only if there are titles."""

    def label(text: str, **style: Any) -> None:
        axes.plot([], [], label=text, **style)

    line = "-" if orient == "x" else "none"
    for key, style in styles.items():
        if titles and key in set(data["calibrator"]):
            label(titles.calibrator(key), color=style.colour, marker=style.marker, linestyle=line)
    muted = {"color": MUTED, "linestyle": "none"}
    if data["partial"].any():
        label("partial", marker="o", markerfacecolor="white", **muted)
    if not published.empty:
        label("published", **_stroke(orient, 12), **muted)


def _draw_references(
    panels: Sequence[Axes],
    references: Mapping[str, float],
    along: Literal["x", "y"],
    named: bool = False,
) -> None:
    """Draw the base and the experts, in percent, as lines; all panels get the same limits.

    A base far below everything else would leave no room for the differences that matter: then its
    value is written where its line would be.
    """
    base, experts = references.get(BASE), references.get(EXPERTS)
    ends = [end for axes in panels for end in getattr(axes.dataLim, f"interval{along}")]
    inner = [end for end in (*ends, experts) if end is not None and math.isfinite(end)]
    inner = inner or [0.0 if base is None else base, 100.0]
    low, high = min(inner), max(inner)
    is_far = base is not None and base < low - _FAR * max(high - low, 1.0)
    if base is not None and not is_far:
        low, high = min(low, base), max(high, base)
    margin = 0.06 * max(high - low, 1.0)
    # room for the words that stand in for the line
    low -= 2.2 * margin if is_far and along == "y" else margin
    high += margin
    # names of lines that are close to each other stand on their outer sides
    align = {BASE: "center", EXPERTS: "center"}
    if base is not None and experts is not None and abs(experts - base) < _NAME_ROOM * (high - low):
        sides = ("right", "left") if base < experts else ("left", "right")
        align = {BASE: sides[0], EXPERTS: sides[1]}
    for axes in panels:
        (axes.set_xlim if along == "x" else axes.set_ylim)(low, high)
        line = axes.axvline if along == "x" else axes.axhline
        above: Any = {"xycoords": axes.get_xaxis_transform(), "fontsize": 9}
        above |= {"xytext": (0, 4), "textcoords": "offset points"}
        for key, value, style, colour in ((BASE, base, ":", MUTED), (EXPERTS, experts, "-", INK)):
            if value is None or (key == BASE and is_far):
                continue
            line(value, color=colour, linewidth=1.4, linestyle=style, zorder=2, label=key)
            if named:
                text = f"{key} {value:.1f}"
                axes.annotate(text, (value, 1), ha=align[key], color=colour, **above)
        if is_far and along == "x" and named:
            text = f"\N{BLACK LEFT-POINTING SMALL TRIANGLE} base {base:.1f}"
            axes.annotate(text, (low, 1), ha="left", color=MUTED, **above)
        elif is_far and along == "y":
            text = f"base {base:.1f} \N{BLACK DOWN-POINTING SMALL TRIANGLE}"
            inside = above | {"xycoords": "axes fraction", "fontsize": 8}
            axes.annotate(text, (1, 0), ha="right", color=MUTED, **inside)


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
    labels, last = [], -math.inf
    for value, at in zip(values, places, strict=True):
        fits = at - last >= _LABEL_ROOM * (max(places) - min(places))
        labels.append(number_text(value) if fits else "")  # none that would run into the last
        last = at if fits else last
    axes.set_xticks(list(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FixedFormatter(labels))


def _measure(data: Frame) -> str:
    return "accuracy (%)" if set(data["metric"].dropna()) <= {ACCURACY} else "score (%)"


def _new_figure(width: float, height: float) -> Figure:
    engine = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    return Figure(figsize=(width, height), dpi=100, layout=engine, facecolor="white")


def _finished(figure: Figure, title: str) -> Figure:
    """The figure with a title above, and below it a legend of all artists that have labels."""
    lines = textwrap.fill(title, int(figure.get_figwidth() / _TITLE_LETTER_INCHES))
    figure.suptitle(lines, fontsize=12, color=INK, fontweight="bold", x=0.02, ha="left")
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if not found:
        return figure
    entry = _HANDLE_INCHES + _LETTER_INCHES * max(map(len, found))
    count = math.ceil(len(found) / max(1, int(figure.get_figwidth() / entry)))
    columns = math.ceil(len(found) / count)
    # matplotlib fills columns; people read lines
    in_lines = [label for at in range(columns) for label in list(found)[at::columns]]
    figure.legend(
        handles=[found[label] for label in in_lines],
        labels=in_lines,
        loc="outside lower center",
        ncols=columns,
        fontsize=9,
        frameon=False,
        labelcolor=INK,
    )
    return figure
