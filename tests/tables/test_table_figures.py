"""What the figures of a table draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from cells import cell, layout
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from featcal_fusionbench.tables import figures
from featcal_fusionbench.tables.figures import styles_of
from featcal_fusionbench.tables.layout import PublishedValue, PublishedValues, TableLayout
from featcal_fusionbench.tables.results import CellResult
from featcal_fusionbench.tables.summary import summarise

SCORES = {
    ("base", "none"): 0.45,
    ("experts", "none"): 0.9,
    ("ta", "none"): 0.5,
    ("ta", "featcal"): 0.8,
    ("ties", "none"): 0.6,
    ("ties", "featcal"): 0.85,
}


def whole(seeds: Sequence[int] = (0, 1)) -> list[CellResult]:
    return [
        cell(m, c, {"a": score, "b": score + 0.02 * seed}, seed)
        for (m, c), score in SCORES.items()
        for seed in seeds
    ]


def curve(name: str, values: Sequence[float]) -> list[CellResult]:
    return [
        cell("ta", "featcal", {"a": 0.6 + 0.01 * at, "b": 0.6}, seed, point={name: value})
        for at, value in enumerate(values)
        for seed in (0, 1)
    ]


def table_figure(cells: Sequence[CellResult], table: TableLayout | None = None) -> Figure:
    table = table or layout()
    return figures.table_figure(summarise(cells, table), table)


def tasks_figure(cells: Sequence[CellResult], table: TableLayout | None = None) -> Figure:
    table = table or layout()
    return figures.tasks_figure(summarise(cells, table), table)


def curve_figures(
    cells: Sequence[CellResult], table: TableLayout | None = None
) -> dict[str, Figure]:
    table = table or layout()
    return figures.curve_figures(summarise(cells, table), table)


def legend(figure: Figure) -> list[str]:
    (found,) = figure.legends
    return sorted(text.get_text() for text in found.get_texts())


def marks(axes: Axes, marker: str = "os^", face: str = "") -> list[float]:
    """Where marks of some kinds stand, left to right."""
    return sorted(
        float(x)
        for line in axes.lines
        if line.get_marker() in [*marker] and (not face or line.get_markerfacecolor() == face)
        for x in line.get_xdata()
        if not math.isnan(x)
    )


def bars(axes: Axes) -> list[float]:
    """The lengths of error bars."""
    lines = [line.get_xdata() for line in axes.lines if line.get_zorder() == 3]
    return [float(x[1] - x[0]) for x in lines if not math.isnan(x[0])]


def vertical_lines(axes: Axes) -> list[float]:
    return sorted(
        float(line.get_xdata()[0])
        for line in axes.lines
        if len(line.get_xdata()) == 2 and line.get_xdata()[0] == line.get_xdata()[1]
    )


def test_every_average_is_drawn_with_its_deviation() -> None:
    figure = table_figure(whole())
    (axes,) = figure.axes
    assert marks(axes) == pytest.approx([50.5, 60.5, 80.5, 85.5])
    assert bars(axes) == pytest.approx([2 * 100 * 0.01 / 2**0.5] * 4)
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["Task Arithmetic", "TIES"]
    assert vertical_lines(axes) == pytest.approx([45.5, 90.5])
    assert legend(figure) == sorted(["none", "FeatCal", "base", "experts"])
    assert "mean ± sd of 2 seeds" in axes.get_xlabel()


def test_one_seed_has_no_error_bars() -> None:
    (axes,) = table_figure(whole((0,))).axes
    assert bars(axes) == []
    assert "sd" not in axes.get_xlabel()


def test_a_base_far_below_is_written_and_leaves_room_for_the_rest() -> None:
    cells = [c for c in whole() if c.merger != "base"]
    cells.append(cell("base", scores={"a": 0.01, "b": 0.01}))
    figure = table_figure(cells)
    (axes,) = figure.axes
    assert axes.get_xlim()[0] > 40
    assert any("base 1.0" in text.get_text() for text in axes.texts)
    assert "base" not in legend(figure)


def test_partial_averages_are_hollow_and_published_ones_beside() -> None:
    table = layout(
        published=PublishedValues(
            backbone="clip-vit-base-patch32",
            task_set="TA8",
            values=(PublishedValue(merger="ta", label="TA (FeatCal paper, no calibration)"),),
        )
    )
    cells = [c for c in whole((0,)) if (c.merger, c.calibrator) != ("ties", "featcal")]
    cells.append(cell("ties", "featcal", {"a": 0.7}))
    figure = table_figure(cells, table)
    (axes,) = figure.axes
    assert marks(axes, face="white") == pytest.approx([70])
    assert marks(axes, "|") == pytest.approx([67.5])
    assert {"partial", "published"} <= set(legend(figure))


def test_every_task_has_a_panel() -> None:
    figure = tasks_figure(whole())
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["a", "b"]
    assert marks(figure.axes[1]) == pytest.approx([51, 61, 81, 86])


def test_training_on_test_inputs_is_told_of_whoever_did_it() -> None:
    seen = {"labels": ("trained on test inputs",)}
    cells = [
        cell("ta"),
        cell("ta", "featcal"),
        cell("ties", **seen),
        cell("ties", "featcal", **seen),
    ]
    figure = table_figure(cells)
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.get_yticklabels()] == ["Task Arithmetic", "TIES †"]
    assert legend(figure) == ["FeatCal", "none"]
    assert "† trained on test inputs" in axes.get_xlabel()

    cells[1] = cell("ta", "featcal", **seen)
    figure = table_figure(cells)
    assert legend(figure) == ["FeatCal †", "none"]
    (axes,) = table_figure(cells[:1]).axes
    assert "†" not in axes.get_xlabel()


def test_no_text_runs_out_of_the_picture() -> None:
    rows = {"ta": "A merger whose name takes a third of the width", "ties": "TIES"}
    title = "A benchmark of several words, calibrated on inputs of one kind or on those of another"
    table = replace(layout(rows=rows), title=title)
    cells = [
        cell(c.merger, c.calibrator, c.scores, c.seed, labels=("trained on test inputs",))
        for c in whole()
    ] + curve("n_samples", (1, 2))
    drawn = [table_figure(cells, table), tasks_figure(cells, table)]
    drawn += curve_figures(cells, table).values()
    assert len(drawn) == 3
    for figure in drawn:
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        assert title in figure.get_suptitle().replace("\n", " ")
        # not the numbers along an axis: matplotlib has some beyond its ends, which it does not draw
        numbers = {label for axes in figure.axes for label in axes.get_xticklabels()}
        for text in set(figure.findobj(Text)) - numbers:
            if not text.get_text():
                continue
            box = text.get_window_extent(canvas.get_renderer())
            assert box.x0 >= 0 and box.x1 <= figure.bbox.x1, text.get_text()


def test_names_of_a_base_and_experts_that_are_close_do_not_meet() -> None:
    cells = [
        cell("base", scores={"a": 0.78, "b": 0.78}),
        cell("experts", scores={"a": 0.8, "b": 0.8}),
        cell("ta", scores={"a": 0.5, "b": 0.5}),
    ]
    figure = table_figure(cells)
    figure.canvas.draw()
    boxes = {t.get_text(): t.get_window_extent() for t in figure.axes[0].texts}
    assert boxes["base 78.0"].x1 <= boxes["experts 80.0"].x0


def many() -> tuple[TableLayout, list[CellResult]]:
    columns = {"none": "none", "featcal": "FeatCal"}
    columns |= {f"featcal_{noise}": noise for noise in "abcdefgh"}
    cells = [cell("ta", column, {"a": 0.5, "b": 0.5}) for column in columns]
    return layout(rows={"ta": "TA"}, columns=columns), cells


def test_many_calibrators_have_rows_of_their_own_and_no_legend() -> None:
    table, cells = many()
    figure = table_figure(cells, table)
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == list(table.columns.values())
    assert figure.legends == []


def test_styles_are_distinct_and_variants_have_the_colour_of_their_kind() -> None:
    found = styles_of(layout(columns={k: k for k in ("none", "featcal", "x", "x_y", "z")}))
    assert len({(style.colour, style.marker) for style in found.values()}) == 5
    assert found["x"].colour == found["x_y"].colour
    assert len({found[key].colour for key in ("none", "featcal", "x", "z")}) == 4
    table, _ = many()
    assert len({style.colour for key, style in styles_of(table).items() if key != "none"}) == 1


def test_a_curve_is_drawn_by_size_with_its_band_and_references() -> None:
    cells = [*whole(), *curve("n_samples", (256, 1, 16))]
    (figure,) = curve_figures(cells, layout(curves={"n_samples": "inputs per task"})).values()
    (axes,) = figure.axes
    line = max(axes.lines, key=lambda line: line.get_linestyle() == "-" and len(line.get_xdata()))
    assert list(line.get_xdata()) == [1, 16, 256]
    assert list(line.get_ydata()) == pytest.approx([60.5, 61, 60])
    assert marks(axes) == [1, 16, 256]
    assert len(axes.collections) == 1  # the band
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "inputs per task"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "16", "256"]
    assert legend(figure) == sorted(["FeatCal", "not calibrated", "base", "experts"])


def test_published_points_stand_on_a_curve() -> None:
    label = "TA + FeatCal (paper, n=8)"
    values = (PublishedValue(merger="ta", calibrator="featcal", point={"n": 8}, label=label),)
    published = PublishedValues(backbone="clip-vit-base-patch32", task_set="TA8", values=values)
    (figure,) = curve_figures(curve("n", (4, 8)), layout(published=published)).values()
    assert marks(figure.axes[0], "_") == [8]
    assert "published" in legend(figure)


@pytest.mark.parametrize(
    ("values", "scale", "labels"),
    [
        ((0.0, 0.25, 0.5, 1.0), "linear", ["0", "0.25", "0.5", "1"]),
        ((1e-5, 0.05, 10.0), "log", ["1e-05", "0.05", "10"]),
        ((0.0, 1e-3, 1.0), "symlog", ["0", "0.001", "1"]),
        ((-1.0, 0.0, 1.0), "linear", ["-1", "0", "1"]),
        ((1.0, 100.0, 101.0), "log", ["1", "100", ""]),
    ],
)
def test_scales_and_labels(values: Sequence[float], scale: str, labels: list[str]) -> None:
    (axes,) = curve_figures(curve("x", values))["x"].axes
    axes.figure.canvas.draw()
    assert axes.get_xscale() == scale
    assert [tick.get_text() for tick in axes.get_xticklabels()] == labels


def test_a_curve_is_marked_for_what_it_shows_alone() -> None:
    cells = [
        *whole(),
        *curve("n", (1, 2)),
        cell("ties", labels=("trained on test inputs",), seed=9),
    ]
    (figure,) = curve_figures(cells).values()
    assert "†" not in figure.get_suptitle()
    assert "mean ± sd of 2 seeds" in figure.get_suptitle()


def test_names_and_single_values_make_no_curve() -> None:
    cells = [
        cell("ta", "featcal", point={"corruption": "blur"}),
        cell("ta", "featcal", point={"corruption": "noise"}),
        cell("ta", "featcal", point={"n": 8}),
        cell("ta", "featcal", point={"n": 8, "m": 1}),
    ]
    assert curve_figures(cells) == {}
