"""What the figures of a table share: colours and shapes, legends, the base and the experts."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Literal

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from ..report.style import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, SKY
from .layout import TableLayout
from .results import ACCURACY, BASE, EXPERTS, NO_CALIBRATOR, TRAINED_ON_TEST_INPUTS
from .summary import CellSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "Look",
    "add_legend",
    "add_title",
    "calibrator_title",
    "draw_references",
    "looks",
    "measure",
    "merger_title",
    "new_figure",
    "published",
    "published_handle",
    "reference_handles",
    "remarks",
]

_FEATCAL = "featcal"
_PLAIN = "#8A8A8A"
_COLOURS = (ORANGE, GREEN, PURPLE, SKY, "#7A4F00", "#4B0082")
_MARKERS = ("s", "^", "D", "v", "P", "X")
_HANDLE_INCHES = 0.55
_LETTER_INCHES = 0.078
"""Room that an entry of a legend takes besides its text, and a letter of it."""
_TITLE_LETTER_INCHES = 0.115
"""Room that a letter of a title takes."""
_MARK = " †"
_NAME_ROOM = 0.2
"""Share of the axis that the names of the base and the experts need."""
_FAR = 0.4
"""How far below all other values the base may lie, as a share of their range, to be drawn."""


@dataclass(frozen=True)
class Look:
    """How a calibrator is drawn: by colour and by shape, since some print without colours."""

    colour: str
    marker: str


def looks(layout: TableLayout) -> dict[str, Look]:
    """The look of every calibrator, the same in all figures of a table.

    Variants of a calibrator, whose keys begin with its key, have its colour.
    """
    found = {NO_CALIBRATOR: Look(_PLAIN, "o"), _FEATCAL: Look(BLUE, "o")}
    families = dict.fromkeys(_family(column, layout) for column in layout.columns)
    colours = dict(zip([f for f in families if f not in found], cycle(_COLOURS), strict=False))
    markers = {family: cycle(_MARKERS[at % len(_MARKERS) :]) for at, family in enumerate(colours)}
    for column in layout.columns:
        family = _family(column, layout)
        if column not in found:
            colour = colours[family] if family in colours else found[family].colour
            found[column] = Look(colour, next(markers.setdefault(family, cycle(_MARKERS))))
    return found


def _trained_on_test_inputs(summaries: Sequence[CellSummary]) -> tuple[set[str], set[str]]:
    """Which mergers and which calibrators saw the inputs that they are scored on.

    A calibrator did where a cell says so whose merger, left alone, does not.

    Returns:
        Keys of mergers, and keys of calibrators.
    """
    saw = {s.key for s in summaries if TRAINED_ON_TEST_INPUTS in s.labels}
    mergers = {key.merger for key in saw if key.calibrator == NO_CALIBRATOR}
    return mergers, {
        key.calibrator
        for key in saw
        if key.calibrator != NO_CALIBRATOR and key.merger not in mergers
    }


def merger_title(merger: str, summaries: Sequence[CellSummary], layout: TableLayout) -> str:
    """A merger beside its row or above its panel; marked where it was trained on test inputs."""
    return layout.row_title(merger) + _MARK * (merger in _trained_on_test_inputs(summaries)[0])


def calibrator_title(calibrator: str, summaries: Sequence[CellSummary], layout: TableLayout) -> str:
    """A calibrator in a legend; marked where it was trained on test inputs."""
    marked = calibrator in _trained_on_test_inputs(summaries)[1]
    return layout.column_title(calibrator) + _MARK * marked


def remarks(summaries: Sequence[CellSummary]) -> list[str]:
    """What a figure's marks and bars are, to stand behind its title or the name of its axis."""
    counts = sorted({len(summary.cells) for summary in summaries if summary.cells})
    lines = []
    if counts and counts[-1] > 1:
        span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        lines.append(f"mean ± sd of {span} seeds")
    if any(_trained_on_test_inputs(summaries)):
        lines.append(f"{_MARK.strip()} {TRAINED_ON_TEST_INPUTS}")
    return lines


def _family(column: str, layout: TableLayout) -> str:
    """The shortest key of a column that this one begins with; itself if there is none."""
    parts = column.split("_")
    begins = ("_".join(parts[:count]) for count in range(1, len(parts)))
    return next((key for key in begins if key in layout.columns), column)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches."""
    engine = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    return Figure(figsize=(width, height), dpi=100, layout=engine, facecolor="white")


def measure(summaries: Sequence[CellSummary]) -> str:
    """What the numbers are."""
    metrics = {m for s in summaries for c in s.cells for m in c.metrics.values()}
    return "accuracy (%)" if metrics <= {ACCURACY} else "score (%)"


def draw_references(
    axes: Axes,
    references: Mapping[str, float],
    values: Sequence[float],
    along: Literal["x", "y"],
    named: bool = False,
) -> set[str]:
    """Draw the base and the experts as lines, and set the limits of their axis.

    A base far below everything else would leave no room for the differences that matter: then its
    value is written where its line would be.

    Args:
        axes: Where to draw.
        references: In percent, by row key: the base, the experts, both or neither.
        values: In percent, all that is drawn besides.
        along: The axis that values run along.
        named: Whether the lines are named beside them.

    Returns:
        The keys that were drawn as lines.
    """
    inner = [*values, *(v for key, v in references.items() if key != BASE)]
    if not inner:
        inner = list(references.values()) or [0.0, 100.0]
    low, high = min(inner), max(inner)
    reach = max(high - low, 1.0)
    base = references.get(BASE)
    is_far = base is not None and base < low - _FAR * reach
    if base is not None and not is_far:
        low, high = min(low, base), max(high, base)
    margin = 0.06 * max(high - low, 1.0)
    # room for the words that stand in for the line
    low -= 2.2 * margin if is_far and along == "y" else margin
    (axes.set_xlim if along == "x" else axes.set_ylim)(low, high + margin)
    line = axes.axvline if along == "x" else axes.axhline
    drawn = references.keys() - ({BASE} if is_far else set())
    # names of lines that are close to each other stand on their outer sides
    gap = references.get(EXPERTS, math.inf) - references.get(BASE, -math.inf)
    beside: dict[str, Literal["left", "center", "right"]] = {}
    if len(drawn) > 1 and abs(gap) < _NAME_ROOM * (high - low):
        beside = {BASE: "right", EXPERTS: "left"} if gap > 0 else {BASE: "left", EXPERTS: "right"}
    for key, style, colour in ((BASE, ":", MUTED), (EXPERTS, "-", INK)):
        if key not in drawn:
            continue
        value = references[key]
        line(value, color=colour, linewidth=1.4, linestyle=style, zorder=2)
        if named:
            _name(axes, f"{key} {value:.1f}", value, colour, beside.get(key, "center"))
    if is_far and named:
        text = f"\N{BLACK LEFT-POINTING SMALL TRIANGLE} base {base:.1f}"
        _name(axes, text, low, MUTED, "left")
    elif is_far and along == "y":
        axes.annotate(
            f"base {base:.1f} \N{BLACK DOWN-POINTING SMALL TRIANGLE}",
            (1, 0),
            (0, 4),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=MUTED,
        )
    return drawn


def _name(
    axes: Axes, text: str, x: float, colour: str, align: Literal["left", "center", "right"]
) -> None:
    axes.annotate(
        text,
        (x, 1),
        (0, 4),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        ha=align,
        fontsize=9,
        color=colour,
    )


def published(axes: Axes, x: float, y: float, look: Look, marker: str) -> None:
    """Draw a published value: a stroke, which hides nothing."""
    axes.plot(
        x,
        y,
        marker=marker,
        markersize=14,
        markeredgewidth=1.8,
        markeredgecolor=look.colour,
        linestyle="none",
        zorder=5,
    )


def published_handle(marker: str) -> Line2D:
    """The legend's entry for published values."""
    return Line2D(
        [],
        [],
        color=MUTED,
        marker=marker,
        markersize=12,
        markeredgewidth=1.8,
        linestyle="none",
        label="published",
    )


def reference_handles(drawn: set[str]) -> list[Line2D]:
    """The legend's entries for the lines that ``draw_references`` drew."""
    base = Line2D([], [], color=MUTED, linestyle=":", label=BASE)
    experts = Line2D([], [], color=INK, linestyle="-", label=EXPERTS)
    return [handle for handle in (base, experts) if handle.get_label() in drawn]


def add_title(figure: Figure, text: str) -> None:
    """Put a title above a figure, in as many lines as it needs."""
    fitting = int(figure.get_figwidth() / _TITLE_LETTER_INCHES)
    lines = textwrap.fill(text, fitting)
    figure.suptitle(lines, fontsize=12, color=INK, fontweight="bold", x=0.02, ha="left")


def add_legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    """Put a legend below a figure, as many entries in a line as fit."""
    if not handles:
        return
    longest = max(len(str(handle.get_label())) for handle in handles)
    entry = _HANDLE_INCHES + _LETTER_INCHES * longest
    fitting = max(1, int(figure.get_figwidth() / entry))
    lines = math.ceil(len(handles) / fitting)
    columns = math.ceil(len(handles) / lines)
    # matplotlib fills columns; people read lines
    in_lines = [handle for at in range(columns) for handle in handles[at::columns]]
    figure.legend(
        handles=in_lines,
        loc="outside lower center",
        ncols=columns,
        fontsize=9,
        frameon=False,
        labelcolor=INK,
    )
