"""Means, spreads, normalised values, gaps, comparisons and warnings, by hand and by their laws."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from cells import MACHINE, cell, expected, layout, models
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal_fusionbench.tables.checks import TableError, require_one_table, warnings
from featcal_fusionbench.tables.layout import PublishedValue, PublishedValues, TableLayout
from featcal_fusionbench.tables.published import look_up
from featcal_fusionbench.tables.results import Cell, CellResult
from featcal_fusionbench.tables.summary import AVERAGE, summarise

TASKS = ("a", "b")


def one(
    cells: Sequence[CellResult],
    merger: str,
    calibrator: str = "none",
    table: TableLayout | None = None,
    **point: Any,
) -> tuple[Any, Any]:
    """What is known of one place, and its scores by task."""
    summary = summarise(cells, table or layout())
    place = Cell(merger, calibrator, 0, tuple(point.items())).place
    return summary.places.loc[place], summary.scores.loc[place]


def two_seeds() -> list[CellResult]:
    """Numbers that can be checked by head; the experts differ from seed to seed."""
    return [
        cell("experts", scores={"a": 1.0, "b": 0.8}, seed=0),
        cell("experts", scores={"a": 0.5, "b": 0.8}, seed=1),
        cell("ta", scores={"a": 0.4, "b": 0.4}, seed=0),
        cell("ta", scores={"a": 0.2, "b": 0.4}, seed=1),
        cell("ta", "featcal", {"a": 0.8, "b": 0.6}, seed=0),
        cell("ta", "featcal", {"a": 0.4, "b": 0.4}, seed=1),
    ]


def test_means_and_sample_deviations() -> None:
    place, scores = one(two_seeds(), "ta", "featcal")
    assert scores.score["a"] == pytest.approx(0.6)
    assert scores.score_sd["a"] == pytest.approx(math.sqrt(0.08))  # n - 1
    # of the averages 0.7 and 0.4
    assert scores.score[AVERAGE] == pytest.approx(0.55)
    assert scores.score_sd[AVERAGE] == pytest.approx(math.sqrt(0.045))
    assert place.seeds == 2
    assert place.tasks == TASKS
    assert not place.score_partial
    _, scores = one([cell("ta")], "ta")
    assert scores.score_sd.isna().all()  # one seed has none


def test_normalised_is_by_task_and_seed_before_it_is_averaged() -> None:
    _, scores = one(two_seeds(), "ta", "featcal")
    assert scores.normalised["a"] == pytest.approx((0.8 / 1.0 + 0.4 / 0.5) / 2)
    assert scores.normalised["b"] == pytest.approx((0.6 / 0.8 + 0.4 / 0.8) / 2)
    of_seeds = [(0.8 + 0.75) / 2, (0.8 + 0.5) / 2]
    assert scores.normalised[AVERAGE] == pytest.approx(statistics.fmean(of_seeds))
    assert scores.normalised_sd[AVERAGE] == pytest.approx(statistics.stdev(of_seeds))
    _, experts = one(two_seeds(), "experts")
    assert experts.normalised[AVERAGE] == 1


def test_share_of_the_gap_is_that_of_averages() -> None:
    # row 0.55, merged 0.35, experts 0.775
    place, _ = one(two_seeds(), "ta", "featcal")
    assert place.share == pytest.approx((0.55 - 0.35) / (0.775 - 0.35))
    assert not place.share_partial
    assert one(two_seeds(), "ta")[0].share is None
    assert one(two_seeds(), "experts")[0].share is None


def test_the_share_is_measured_against_the_same_seeds() -> None:
    """A calibrator that lacks a seed is not compared with means over other seeds."""
    cells = [c for c in two_seeds() if (c.calibrator, c.seed) != ("featcal", 1)]
    place, _ = one(cells, "ta", "featcal")
    assert place.share == pytest.approx((0.7 - 0.4) / (0.9 - 0.4))


def test_what_does_not_depend_on_the_seed_was_run_once() -> None:
    cells = [
        cell("experts", scores={"a": 1.0, "b": 1.0}),
        cell("ta", scores={"a": 0.5, "b": 0.5}),
        cell("ta", "featcal", {"a": 0.75, "b": 0.75}, seed=0),
        cell("ta", "featcal", {"a": 0.85, "b": 0.85}, seed=1),
    ]
    place, scores = one(cells, "ta", "featcal")
    assert place.share == pytest.approx(0.6)
    assert scores.normalised["a"] == pytest.approx(0.8)
    # unless it is known to have been made of other models
    cells[0] = replace(cells[0], models=models(base="0", a="1"))
    cells[3] = replace(cells[3], models=models(base="0", a="2"))
    place, scores = one(cells, "ta", "featcal")
    assert place.share is None
    assert scores.normalised["a"] == pytest.approx(0.75)


def test_of_several_seeds_none_stands_for_another() -> None:
    cells = [cell("experts", seed=0), cell("experts", seed=1), cell("ta", seed=2)]
    _, scores = one(cells, "ta")
    assert scores.normalised.isna().all()


def chained() -> TableLayout:
    rows = {"ta": "Task Arithmetic", "ta_featcal": "Task Arithmetic → FeatCal"}
    columns = {"none": "merged", "surgery": "Surgery", "featcal": "FeatCal"}
    return layout(rows=rows, columns=columns, starts={"ta_featcal": ("ta", "featcal")})


def test_a_chain_is_measured_against_the_model_it_starts_from() -> None:
    cells = [
        *two_seeds(),
        cell("ta_featcal", "surgery", {"a": 0.9, "b": 0.7}, seed=0),
        cell("ta_featcal", "surgery", {"a": 0.5, "b": 0.6}, seed=1),
    ]
    place, _ = one(cells, "ta_featcal", "surgery", chained())
    # from 0.55 and towards 0.775, reached: 0.675
    assert place.share == pytest.approx((0.675 - 0.55) / (0.775 - 0.55))
    without = [c for c in cells if (c.merger, c.calibrator) != ("ta", "featcal")]
    assert one(without, "ta_featcal", "surgery", chained())[0].share is None


def test_a_curve_of_a_chain_starts_from_the_cell_and_not_from_its_own_points() -> None:
    cells = [
        *two_seeds(),
        cell("ta", "featcal", {"a": 0.1, "b": 0.1}, point={"n": 8}),
        cell("ta_featcal", "surgery", {"a": 0.9, "b": 0.7}, point={"n": 8}),
    ]
    place, _ = one(cells, "ta_featcal", "surgery", chained(), n=8)
    assert place.share == pytest.approx((0.8 - 0.7) / (0.9 - 0.7))


def test_a_point_is_measured_against_the_table_unless_it_has_its_own() -> None:
    cells = [
        cell("experts", scores={"a": 1.0, "b": 1.0}),
        cell("ta", scores={"a": 0.0, "b": 0.0}),
        cell("ta", "featcal", {"a": 0.5, "b": 0.5}, point={"n": 8}),
    ]
    assert one(cells, "ta", "featcal", n=8)[0].share == pytest.approx(0.5)
    cells.append(cell("ta", scores={"a": 0.4, "b": 0.4}, point={"n": 8}))
    assert one(cells, "ta", "featcal", n=8)[0].share == pytest.approx(1 / 6)


def test_no_gap_is_not_a_number() -> None:
    cells = [cell("experts"), cell("ta"), cell("ta", "featcal", {"a": 0.9, "b": 0.9})]
    assert math.isnan(one(cells, "ta", "featcal")[0].share)
    assert (
        "No gap for ta × featcal: the experts are no better than the models that these start from."
        in _warn(cells)
    )


def test_an_average_runs_over_the_tasks_that_every_seed_has() -> None:
    cells = [cell("ta", scores={"a": 0.2, "b": 0.8}, seed=0), cell("ta", scores={"a": 0.4}, seed=1)]
    place, scores = one(cells, "ta")
    assert place.tasks == ("a",)
    assert place.score_partial
    assert scores.score[AVERAGE] == pytest.approx(0.3)
    assert scores.score["b"] == 0.8
    assert any("Partial average, without b: ta × none." in line for line in _warn(cells))


def test_seeds_without_a_common_task_have_no_average() -> None:
    cells = [cell("ta", scores={"a": 0.2}, seed=0), cell("ta", scores={"b": 0.4}, seed=1)]
    place, scores = one(cells, "ta")
    assert math.isnan(scores.score[AVERAGE])
    assert not place.score_partial
    assert any("no task that all seeds have: ta × none" in line for line in _warn(cells))


def test_partial_cells_are_compared_on_the_tasks_that_all_three_have() -> None:
    cells = [
        cell("experts", scores={"a": 0.9, "b": 0.9}),
        cell("ta", scores={"a": 0.5, "b": 0.1}),
        cell("ta", "featcal", {"a": 0.7}),
    ]
    place, _ = one(cells, "ta", "featcal")
    assert place.share == pytest.approx(0.5)
    assert place.share_partial


def test_an_undefined_score_is_no_zero() -> None:
    metrics = {"a": "accuracy", "b": "spearman_rho"}
    cells = [cell("ta", scores={"a": 0.4, "b": math.nan}, metrics=metrics)]
    place, scores = one(cells, "ta")
    assert scores.score[AVERAGE] == 0.4
    assert place.score_partial
    assert any("score of b is undefined" in line for line in _warn(cells))


@pytest.mark.parametrize("rho", [0.0, -0.5])
def test_nothing_is_divided_by_experts_that_know_nothing(rho: float) -> None:
    metrics = {"a": "accuracy", "b": "spearman_rho"}
    cells = [
        cell("experts", scores={"a": 0.8, "b": rho}, metrics=metrics),
        cell("ta", scores={"a": 0.4, "b": 0.3}, metrics=metrics),
    ]
    place, scores = one(cells, "ta")
    assert math.isnan(scores.normalised["b"])
    assert scores.normalised[AVERAGE] == 0.5
    assert place.normalised_partial


def test_places_stand_in_the_tables_order() -> None:
    cells = [
        cell("ties", "featcal"),
        *(cell("ta", "featcal", point={"n": n}) for n in ("x", 16, 8)),
        cell("ta", "featcal"),
        cell("ties"),
        cell("experts"),
        cell("base"),
    ]
    summary = summarise(cells, layout(expected=expected(("ta", "none", 0))))
    points = [f"ta × featcal{n}" for n in ("", ", n=8", ", n=16", ", n=x")]
    rows = ["base", "experts", "ta × none", *points, "ties × none", "ties × featcal"]
    assert list(summary.places.index) == rows


def test_missing_seeds_are_those_that_were_to_be_run() -> None:
    table = layout(expected=expected(("ta", "none", 0), ("ta", "none", 2), ("ties", "none", 1)))
    assert list(one([cell("ta")], "ta", table=table)[0].missing) == [2]
    place, scores = one([cell("ta")], "ties", table=table)
    assert (place.seeds, list(place.missing)) == (0, [1])
    assert scores.isna().all(axis=None)


def test_costs() -> None:
    gib = 1 << 30
    cells = [
        cell("ta", seconds=10.0, peak_memory_bytes=gib, peak_device_bytes=None, seed=0),
        cell("ta", seconds=20.0, peak_memory_bytes=3 * gib, peak_device_bytes=gib, seed=1),
    ]
    place, _ = one(cells, "ta")
    assert place.seconds == 15
    assert place.memory == 3 * gib
    assert math.isnan(place.device)  # one seed does not tell
    assert math.isnan(one([*cells, cell("ta", seconds=None, seed=2)], "ta")[0].seconds)


# Comparisons with published values

TA8 = look_up("clip-vit-base-patch32", "TA8", "Pre-trained").tasks


def differences(scores: dict[str, float], tasks: tuple[str, ...] = TA8, **kwargs: Any) -> Any:
    """Ours minus theirs by task."""
    values = (PublishedValue(merger="ta", label="Task Arithmetic (lambda=0.3)"),)
    published = PublishedValues(backbone="clip-vit-base-patch32", task_set="TA8", values=values)
    cells = [cell("ta", scores=scores, tasks=tasks, **kwargs)]
    summary = summarise(cells, layout(tasks=tasks, published=published))
    return summary.published.set_index("task")["difference"].dropna()


def test_differences_are_ours_minus_theirs() -> None:
    found = differences(dict.fromkeys(TA8, 0.7))
    assert found["eurosat"] == pytest.approx(0.7 - 0.767)
    assert found[AVERAGE] == pytest.approx(0.7 - 0.68)


@pytest.mark.parametrize("tasks", [TA8, ("eurosat", "dtd")])
def test_averages_over_other_tasks_are_compared_task_by_task_alone(tasks: tuple[str, ...]) -> None:
    assert set(differences({"eurosat": 0.7, "dtd": 0.5}, tasks).index) == {"eurosat", "dtd"}


def test_a_smoke_run_is_compared_with_nothing() -> None:
    assert differences(dict.fromkeys(TA8, 0.7), size="smoke").empty


# Laws


@st.composite
def tables(draw: st.DrawFn) -> list[CellResult]:
    """Cells of some places, seeds and tasks, each at most once."""
    places = st.sampled_from(
        [("base", "none"), ("experts", "none")]
        + [(m, c) for m in ("ta", "ties") for c in ("none", "featcal")]
    )
    keys = draw(st.lists(st.tuples(places, st.integers(0, 2)), unique=True, min_size=1))
    score = st.floats(0.01, 1)
    return [
        cell(m, c, draw(st.dictionaries(st.sampled_from(TASKS), score, min_size=1)), seed)
        for (m, c), seed in keys
    ]


@settings(deadline=None, max_examples=15)
@given(cells=tables(), data=st.data())
def test_neither_the_order_nor_other_rows_matter(
    cells: list[CellResult], data: st.DataObject
) -> None:
    more = [*cells, cell("ties", "featcal", {"a": 0.3, "b": 0.2}, seed=7)]
    before = summarise(cells, layout())
    after = summarise(data.draw(st.permutations(more)), layout())
    others = [place for place in before.places.index if place != "ties × featcal"]
    assert after.places.loc[others].equals(before.places.loc[others])
    assert after.scores.loc[others].equals(before.scores.loc[others])


@settings(deadline=None, max_examples=15)
@given(low=st.floats(0, 0.4), gap=st.floats(0.01, 0.5), share=st.floats(-0.5, 1.2))
def test_share_inverts_interpolation(low: float, gap: float, share: float) -> None:
    between = min(1.0, max(0.0, low + share * gap))
    cells = [
        cell("experts", scores=dict.fromkeys(TASKS, low + gap)),
        cell("ta", scores=dict.fromkeys(TASKS, low)),
        cell("ta", "featcal", dict.fromkeys(TASKS, between)),
    ]
    place, _ = one(cells, "ta", "featcal")
    assert place.share == pytest.approx((between - low) / gap, abs=1e-9)


# What is refused, and what is warned of


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (cell("ties", table="second"), "Cells of second cannot stand in the table table"),
        (cell("ties", size="smoke"), r"two sizes \(1 full, 1 smoke\)"),
        (cell("ties", tasks=("b", "a")), "tasks are a, b, but those of table: ties × none"),
        (
            cell("ties", metrics={"a": "accuracy", "b": "spearman_rho"}),
            "b is measured by accuracy and by spearman_rho",
        ),
        (cell("ta", scores={"a": 0.1}), "several results of table: ta × none, seed 0"),
        (cell("ties", size="smoke", table="second"), "(?s)second.*two sizes"),
    ],
)
def test_cells_that_would_make_wrong_numbers_are_refused(other: CellResult, message: str) -> None:
    with pytest.raises(TableError, match=message):
        require_one_table([cell("ta"), other], layout())


def test_no_cells_make_no_table() -> None:
    with pytest.raises(TableError, match="has no results yet"):
        require_one_table([], layout())


def _warn(cells: list[CellResult]) -> list[str]:
    require_one_table(cells, layout())
    return warnings(summarise(cells, layout()), layout())


def whole() -> list[CellResult]:
    return [
        cell("experts", scores={"a": 0.9, "b": 0.9}),
        cell("ta"),
        cell("ta", "featcal", {"a": 0.6, "b": 0.8}),
    ]


OTHER_MACHINE = replace(MACHINE, cores=64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"versions": {"torch": "2.4.1"}}, "several versions of torch: 2.13.0, 2.4.1"),
        ({"machine": OTHER_MACHINE}, "run on 2 machines"),
        # without costs machines do not matter, and those of one kind are one
        ({"machine": OTHER_MACHINE, "seconds": None}, None),
        ({"machine": replace(MACHINE, memory_bytes=(24 << 30) + 9)}, None),
    ],
)
def test_what_makes_numbers_doubtful_is_said(change: dict[str, Any], message: str | None) -> None:
    *cells, last = whole()
    lines = _warn([*cells, replace(last, **change)])
    assert len(lines) == (message is not None)
    assert not message or message in lines[0]


def test_models_that_differ_between_cells_are_named() -> None:
    experts, merged, calibrated = whole()
    merged = replace(merged, models=models(base="0", a="1", merged="2"))
    calibrated = replace(calibrated, models=models(base="0", a="9", merged="8"))
    unlike, given = _warn([experts, merged, calibrated])
    assert "weights of a are not the same" in unlike and "between cells" in unlike
    assert "calibrators of ta, seed 0, were given 2 different merged" in given


def test_models_that_differ_between_seeds_are_named() -> None:
    cells = [cell("ta", seed=n, models=models(base=f"{n}", merged=f"{n}")) for n in (0, 1)]
    (line,) = _warn(cells)
    assert "weights of base are not the same" in line and "between seeds" in line


def test_a_row_that_the_table_has_no_more_is_named_and_left_out() -> None:
    cells = [*whole(), cell("old")]
    (line,) = _warn(cells)
    assert line == (
        "Not shown, since the table has no such row or column: table: old × none, seed 0."
    )
    assert "old × none" not in summarise(cells, layout()).places.index


def test_without_experts_nothing_is_normalised_and_that_is_said() -> None:
    lines = _warn([cell("ta"), cell("ta", "featcal")])
    assert any("No share of the gap for ta × featcal" in line for line in lines)
    assert any("The experts have no result" in line for line in lines)


def test_a_smoke_table_says_so_first() -> None:
    lines = _warn([replace(c, size="smoke") for c in whole()])
    assert lines[0].startswith("Smoke size")
