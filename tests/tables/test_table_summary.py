"""Means, spreads, normalised values, gaps and comparisons, by hand and by their laws."""

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
from featcal_fusionbench.tables.figures import table_figure
from featcal_fusionbench.tables.layout import (
    PublishedValue,
    PublishedValues,
    TableLayout,
)
from featcal_fusionbench.tables.published import Tree, look_up
from featcal_fusionbench.tables.results import CellResult
from featcal_fusionbench.tables.summary import (
    CellSummary,
    Comparison,
    by_place,
    cell_key,
    summarise,
)
from featcal_fusionbench.tables.write import make_document

TASKS = ("a", "b")


def one(
    cells: Sequence[CellResult],
    merger: str,
    calibrator: str = "none",
    table: TableLayout | None = None,
    **point: Any,
) -> CellSummary:
    """The summary of one place."""
    key = cell_key(merger, calibrator, point)
    (found,) = [s for s in summarise(cells, table or layout()) if s.key == key]
    return found


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
    summary = one(two_seeds(), "ta", "featcal")
    assert summary.scores["a"].mean == pytest.approx(0.6)
    assert summary.scores["a"].deviation == pytest.approx(math.sqrt(0.08))  # n - 1
    assert summary.scores["a"].n == 2
    # of the averages 0.7 and 0.4
    assert summary.average is not None
    assert summary.average.mean == pytest.approx(0.55)
    assert summary.average.deviation == pytest.approx(math.sqrt(0.045))
    assert summary.average.tasks == TASKS
    assert not summary.average.partial


def test_one_seed_has_no_deviation() -> None:
    summary = one([cell("ta")], "ta")
    assert summary.average is not None
    assert summary.average.deviation is None
    assert summary.average.n == 1
    assert summary.scores["a"].deviation is None


def test_normalised_is_by_task_and_seed_before_it_is_averaged() -> None:
    summary = one(two_seeds(), "ta", "featcal")
    assert summary.normalised["a"].mean == pytest.approx((0.8 / 1.0 + 0.4 / 0.5) / 2)
    assert summary.normalised["b"].mean == pytest.approx((0.6 / 0.8 + 0.4 / 0.8) / 2)
    assert summary.normalised_average is not None
    of_seeds = [(0.8 + 0.75) / 2, (0.8 + 0.5) / 2]
    assert summary.normalised_average.mean == pytest.approx(statistics.fmean(of_seeds))
    assert summary.normalised_average.deviation == pytest.approx(statistics.stdev(of_seeds))
    experts = one(two_seeds(), "experts")
    assert experts.normalised_average is not None
    assert experts.normalised_average.mean == 1


def test_share_of_the_gap_is_that_of_averages() -> None:
    # row 0.55, merged 0.35, experts 0.775
    summary = one(two_seeds(), "ta", "featcal")
    assert summary.share is not None
    assert summary.share.value == pytest.approx((0.55 - 0.35) / (0.775 - 0.35))
    assert not summary.share.partial
    assert one(two_seeds(), "ta").share is None
    assert one(two_seeds(), "experts").share is None


def test_the_share_is_measured_against_the_same_seeds() -> None:
    """A calibrator that lacks a seed is not compared with means over other seeds."""
    cells = [c for c in two_seeds() if (c.calibrator, c.seed) != ("featcal", 1)]
    summary = one(cells, "ta", "featcal")
    assert summary.share is not None
    assert summary.share.value == pytest.approx((0.7 - 0.4) / (0.9 - 0.4))


def test_what_does_not_depend_on_the_seed_was_run_once() -> None:
    cells = [
        cell("experts", scores={"a": 1.0, "b": 1.0}),
        cell("ta", scores={"a": 0.5, "b": 0.5}),
        cell("ta", "featcal", {"a": 0.75, "b": 0.75}, seed=0),
        cell("ta", "featcal", {"a": 0.85, "b": 0.85}, seed=1),
    ]
    summary = one(cells, "ta", "featcal")
    assert summary.share is not None
    assert summary.share.value == pytest.approx(0.6)
    assert summary.normalised_average is not None
    assert summary.normalised_average.n == 2
    # unless it is known to have been made of other models
    cells[0] = replace(cells[0], models=models(base="0", a="1"))
    cells[3] = replace(cells[3], models=models(base="0", a="2"))
    summary = one(cells, "ta", "featcal")
    assert summary.share is None
    assert summary.normalised["a"].n == 1


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
    summary = one(cells, "ta_featcal", "surgery", chained())
    assert summary.share is not None  # from 0.55 and towards 0.775, reached: 0.675
    assert summary.share.value == pytest.approx((0.675 - 0.55) / (0.775 - 0.55))
    without = [c for c in cells if (c.merger, c.calibrator) != ("ta", "featcal")]
    assert one(without, "ta_featcal", "surgery", chained()).share is None


def test_a_chain_shows_what_it_starts_from_as_its_merged_model() -> None:
    cells = [*two_seeds(), cell("ta_featcal", "surgery")]
    document = make_document(cells, chained())
    rows = {row[0].text: [entry.text for entry in row[1:]] for row in document.grids[0].rows}
    assert rows["Task Arithmetic"] == ["35.0", "", "55.0"]
    assert rows["Task Arithmetic → FeatCal"] == ["55.0", "60.0", ""]
    places = by_place(summarise(cells, chained()), chained())
    start = places[cell_key("ta_featcal", "none", {})]
    assert start is places[cell_key("ta", "featcal", {})]
    assert table_figure(summarise(cells, chained()), chained()).axes


def test_a_curve_of_a_chain_starts_from_the_cell_and_not_from_its_own_points() -> None:
    cells = [
        *two_seeds(),
        cell("ta", "featcal", {"a": 0.1, "b": 0.1}, point={"n": 8}),
        cell("ta_featcal", "surgery", {"a": 0.9, "b": 0.7}, point={"n": 8}),
    ]
    summary = one(cells, "ta_featcal", "surgery", chained(), n=8)
    assert summary.share is not None
    assert summary.share.value == pytest.approx((0.8 - 0.7) / (0.9 - 0.7))


def test_of_several_seeds_none_stands_for_another() -> None:
    cells = [
        cell("experts", seed=0),
        cell("experts", seed=1),
        cell("ta", seed=2),
    ]
    assert one(cells, "ta").normalised == {}


def test_no_gap_is_not_a_number() -> None:
    cells = [
        cell("experts", scores={"a": 0.5, "b": 0.5}),
        cell("ta", scores={"a": 0.5, "b": 0.5}),
        cell("ta", "featcal", {"a": 0.9, "b": 0.9}),
    ]
    summaries = summarise(cells, layout())
    share = one(cells, "ta", "featcal").share
    assert share is not None
    assert math.isnan(share.value)
    assert (
        "No gap for ta × featcal: the experts are no better than the models that these start from."
        in warnings(cells, layout(), summaries)
    )


def test_an_average_runs_over_the_tasks_that_every_seed_has() -> None:
    cells = [
        cell("ta", scores={"a": 0.2, "b": 0.8}, seed=0),
        cell("ta", scores={"a": 0.4}, seed=1),
    ]
    summary = one(cells, "ta")
    assert summary.average is not None
    assert summary.average.tasks == ("a",)
    assert summary.average.partial
    assert summary.average.mean == pytest.approx(0.3)
    assert summary.scores["b"].n == 1
    assert any("Partial average, without b: ta × none." in line for line in _warn(cells))


def test_seeds_without_a_common_task_have_no_average() -> None:
    cells = [cell("ta", scores={"a": 0.2}, seed=0), cell("ta", scores={"b": 0.4}, seed=1)]
    assert one(cells, "ta").average is None
    assert any("no task that all seeds have: ta × none" in line for line in _warn(cells))


def test_partial_cells_are_compared_on_the_tasks_that_all_three_have() -> None:
    cells = [
        cell("experts", scores={"a": 0.9, "b": 0.9}),
        cell("ta", scores={"a": 0.5, "b": 0.1}),
        cell("ta", "featcal", {"a": 0.7}),
    ]
    share = one(cells, "ta", "featcal").share
    assert share is not None
    assert share.value == pytest.approx(0.5)
    assert share.partial


def test_an_undefined_score_is_no_zero() -> None:
    cells = [
        cell("ta", scores={"a": 0.4, "b": math.nan}, metrics={"a": "accuracy", "b": "spearman_rho"})
    ]
    summary = one(cells, "ta")
    assert summary.average is not None
    assert summary.average.mean == 0.4
    assert summary.average.partial
    assert "b" not in summary.scores
    assert any("score of b is undefined" in line for line in _warn(cells))


@pytest.mark.parametrize("rho", [0.0, -0.5])
def test_nothing_is_divided_by_experts_that_know_nothing(rho: float) -> None:
    metrics = {"a": "accuracy", "b": "spearman_rho"}
    cells = [
        cell("experts", scores={"a": 0.8, "b": rho}, metrics=metrics),
        cell("ta", scores={"a": 0.4, "b": 0.3}, metrics=metrics),
    ]
    summary = one(cells, "ta")
    assert list(summary.normalised) == ["a"]
    assert summary.normalised_average is not None
    assert summary.normalised_average.partial


def test_places_stand_in_the_tables_order() -> None:
    cells = [
        cell("ties", "featcal"),
        cell("ta", "featcal", point={"n": 16}),
        cell("ta", "featcal", point={"n": 8}),
        cell("ta", "featcal"),
        cell("ties"),
        cell("experts"),
        cell("base"),
    ]
    keys = [s.key for s in summarise(cells, layout(expected=expected(("ta", "none", 0))))]
    assert keys == [
        cell_key("base", "none", {}),
        cell_key("experts", "none", {}),
        cell_key("ta", "none", {}),
        cell_key("ta", "featcal", {}),
        cell_key("ta", "featcal", {"n": 8}),
        cell_key("ta", "featcal", {"n": 16}),
        cell_key("ties", "none", {}),
        cell_key("ties", "featcal", {}),
    ]


def test_a_point_is_measured_against_the_table_unless_it_has_its_own() -> None:
    cells = [
        cell("experts", scores={"a": 1.0, "b": 1.0}),
        cell("ta", scores={"a": 0.0, "b": 0.0}),
        cell("ta", "featcal", {"a": 0.5, "b": 0.5}, point={"n": 8}),
    ]
    share = one(cells, "ta", "featcal", n=8).share
    assert share is not None
    assert share.value == pytest.approx(0.5)
    cells.append(cell("ta", scores={"a": 0.4, "b": 0.4}, point={"n": 8}))
    share = one(cells, "ta", "featcal", n=8).share
    assert share is not None
    assert share.value == pytest.approx(1 / 6)


def test_missing_seeds_are_those_that_were_to_be_run() -> None:
    table = layout(expected=expected(("ta", "none", 0), ("ta", "none", 2), ("ties", "none", 1)))
    cells = [cell("ta", seed=0)]
    assert one(cells, "ta", table=table).missing_seeds == (2,)
    missing = one(cells, "ties", table=table)
    assert missing.missing_seeds == (1,)
    assert missing.average is None


def test_costs() -> None:
    gib = 1 << 30
    cells = [
        cell("ta", seconds=10.0, peak_memory_bytes=gib, peak_device_bytes=None, seed=0),
        cell("ta", seconds=20.0, peak_memory_bytes=3 * gib, peak_device_bytes=gib, seed=1),
    ]
    summary = one(cells, "ta")
    assert summary.seconds is not None
    assert summary.seconds.mean == 15
    assert summary.peak_memory_bytes == 3 * gib
    assert summary.peak_device_bytes is None  # one seed does not tell
    assert one([*cells, cell("ta", seconds=None, seed=2)], "ta").seconds is None


# Comparisons with published values

TA8 = look_up(Tree.FUSIONBENCH, "clip-vit-base-patch32", "TA8", "Pre-trained").tasks


def published_layout(
    tasks: tuple[str, ...] = TA8, label: str = "Task Arithmetic (lambda=0.3)"
) -> TableLayout:
    values = (PublishedValue(merger="ta", label=label),)
    published = PublishedValues(
        tree=Tree.FUSIONBENCH,
        backbone="clip-vit-base-patch32",
        task_set="TA8",
        values=values,
    )
    return layout(tasks=tasks, published=published)


def comparison(scores: dict[str, float], tasks: tuple[str, ...] = TA8, **kwargs: Any) -> Comparison:
    cells = [cell("ta", scores=scores, tasks=tasks, **kwargs)]
    (found,) = one(cells, "ta", table=published_layout(tasks)).comparisons
    return found


def test_differences_are_ours_minus_theirs() -> None:
    found = comparison(dict.fromkeys(TA8, 0.7))
    assert found.differences["eurosat"] == pytest.approx(0.7 - 0.767)
    assert found.average == pytest.approx(0.7 - 0.68)


def test_a_partial_average_is_compared_task_by_task_alone() -> None:
    found = comparison({"eurosat": 0.7, "dtd": 0.5})
    assert set(found.differences) == {"eurosat", "dtd"}
    assert found.average is None


def test_an_average_over_other_tasks_is_not_compared() -> None:
    found = comparison({"eurosat": 0.7, "dtd": 0.5}, tasks=("eurosat", "dtd"))
    assert set(found.differences) == {"eurosat", "dtd"}
    assert found.average is None


def test_a_smoke_run_is_compared_with_nothing() -> None:
    cells = [cell("ta", scores=dict.fromkeys(TA8, 0.7), tasks=TA8, size="smoke")]
    assert one(cells, "ta", table=published_layout()).comparisons == ()


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


def numbers(summaries: Sequence[CellSummary]) -> list[Any]:
    return [
        (
            s.key,
            s.scores,
            s.normalised,
            s.average,
            s.normalised_average,
            s.share and repr(s.share),  # NaN is equal to nothing
            s.seconds,
        )
        for s in summaries
    ]


@settings(deadline=None, max_examples=25)
@given(cells=tables(), data=st.data())
def test_the_order_of_cells_does_not_matter(cells: list[CellResult], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(cells))
    assert numbers(summarise(shuffled, layout())) == numbers(summarise(cells, layout()))


@settings(deadline=None, max_examples=25)
@given(cells=tables(), score=st.floats(0.01, 1))
def test_a_seed_of_another_row_changes_no_other_row(cells: list[CellResult], score: float) -> None:
    more = [*cells, cell("ties", "featcal", {"a": score, "b": score}, seed=7)]

    def others(members: list[CellResult]) -> list[Any]:
        found = summarise(members, layout())
        return numbers(
            [s for s in found if (s.key.merger, s.key.calibrator) != ("ties", "featcal")]
        )

    assert others(more) == others(cells)


@settings(deadline=None, max_examples=25)
@given(cells=tables())
def test_means_lie_within_their_values(cells: list[CellResult]) -> None:
    for summary in summarise(cells, layout()):
        for task, spread in summary.scores.items():
            own = [c.scores[task] for c in summary.cells if task in c.scores]
            assert min(own) - 1e-12 <= spread.mean <= max(own) + 1e-12
            assert spread.n == len(own)
            assert (spread.deviation is None) == (len(own) == 1)


@settings(deadline=None, max_examples=25)
@given(low=st.floats(0, 0.4), gap=st.floats(0.01, 0.5), share=st.floats(-0.5, 1.2))
def test_share_inverts_interpolation(low: float, gap: float, share: float) -> None:
    between = min(1.0, max(0.0, low + share * gap))
    cells = [
        cell("experts", scores=dict.fromkeys(TASKS, low + gap)),
        cell("ta", scores=dict.fromkeys(TASKS, low)),
        cell("ta", "featcal", dict.fromkeys(TASKS, between)),
    ]
    found = one(cells, "ta", "featcal").share
    assert found is not None
    assert found.value == pytest.approx((between - low) / gap, abs=1e-9)


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
    ],
)
def test_cells_that_would_make_wrong_numbers_are_refused(other: CellResult, message: str) -> None:
    with pytest.raises(TableError, match=message):
        require_one_table([cell("ta"), other], layout())


def test_all_reasons_are_named_at_once() -> None:
    cells = [cell("ta"), cell("ties", size="smoke", table="second")]
    with pytest.raises(TableError, match="(?s)second.*two sizes"):
        require_one_table(cells, layout())


def test_no_cells_make_no_table() -> None:
    with pytest.raises(TableError, match="has no results yet"):
        require_one_table([], layout())


def _warn(cells: list[CellResult], table: TableLayout | None = None) -> list[str]:
    table = table or layout()
    require_one_table(cells, table)
    return warnings(cells, table, summarise(cells, table))


def whole() -> list[CellResult]:
    return [
        cell("experts", scores={"a": 0.9, "b": 0.9}),
        cell("ta"),
        cell("ta", "featcal", {"a": 0.6, "b": 0.8}),
    ]


def test_a_sound_table_has_no_warnings() -> None:
    assert _warn(whole()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versions": {"torch": "2.4.1"}}, "several versions of torch: 2.13.0, 2.4.1"),
        ({"machine": replace(MACHINE, cores=64)}, "run on 2 machines"),
    ],
)
def test_what_makes_numbers_doubtful_is_said(change: dict[str, Any], message: str) -> None:
    *cells, last = whole()
    (line,) = _warn([*cells, replace(last, **change)])
    assert message in line


def test_machines_of_one_kind_are_one() -> None:
    *cells, last = whole()
    assert (
        _warn([*cells, replace(last, machine=replace(MACHINE, memory_bytes=(24 << 30) + 9))]) == []
    )


def test_machines_matter_only_where_there_are_costs() -> None:
    *cells, last = whole()
    assert _warn([*cells, replace(last, machine=replace(MACHINE, cores=64), seconds=None)]) == []


def test_models_that_differ_between_cells_are_named() -> None:
    experts, merged, calibrated = whole()
    merged = replace(merged, models=models(base="0", a="1", merged="2"))
    calibrated = replace(calibrated, models=models(base="0", a="9", merged="8"))
    lines = _warn([experts, merged, calibrated])
    assert any(
        "weights of a are not the same" in line and "between cells" in line for line in lines
    )
    assert any("calibrators of ta, seed 0, were given 2 different merged" in line for line in lines)


def test_models_that_differ_between_seeds_are_named() -> None:
    cells = [
        cell("ta", seed=seed, models=models(base=f"{seed}", merged=f"{seed}")) for seed in (0, 1)
    ]
    (line,) = _warn(cells)
    assert "weights of base are not the same" in line
    assert "between seeds" in line


def test_a_row_that_the_table_has_no_more_is_named_and_left_out() -> None:
    cells = [*whole(), cell("old")]
    (line,) = _warn(cells)
    assert "Not shown" in line
    assert "table: old × none, seed 0" in line
    assert all(s.key.merger != "old" for s in summarise(cells, layout()))


def test_without_experts_nothing_is_normalised_and_that_is_said() -> None:
    lines = _warn([cell("ta"), cell("ta", "featcal")])
    assert any("No share of the gap for ta × featcal" in line for line in lines)
    assert any("The experts have no result" in line for line in lines)


def test_a_smoke_table_says_so_first() -> None:
    lines = _warn([replace(c, size="smoke") for c in whole()])
    assert lines[0].startswith("Smoke size")
