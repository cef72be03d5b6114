"""The cells of a table over their seeds: means, spreads, normalised values, gaps, comparisons.

All averages run over tasks first and over seeds then. An average never mixes seeds that have
different tasks: it runs over the tasks that every seed has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ..report.gap import share_of_gap
from .frame import Frame, tidy_frame
from .layout import TableLayout
from .results import NO_CALIBRATOR, TRAINED_ON_TEST_INPUTS, Cell, CellResult

__all__ = ["AVERAGE", "Summary", "summarise", "with_starts"]

AVERAGE = ""
"""Stands in a frame's column ``task`` for the average over tasks."""

_SIGNS = ("†", "‡", "§", "¶", "‖")
_VALUES = ["score", "normalised"]
_PLACE_AND_TASK = ["place", "task"]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A table's results, and the frames that its grids and figures show.

    Attributes:
        results: What the table shows, in its order.
        left_out: What it has no row or column for.
        tidy: All results, see ``tidy_frame``.
        seeds: Those that are shown, and rows whose task is ``AVERAGE``.
        scores: By place and task: ``score`` and ``normalised``, means over seeds, with their sample
            standard deviations ``score_sd`` and ``normalised_sd``. NaN where there is none.
        places: By place (see ``Cell.place``) in the table's order, also those without results:
            ``merger``, ``calibrator``, ``point``; ``seeds``, the number of results; ``missing``,
            reasons by seed; ``tasks`` that the average runs over; ``share`` of the gap closed, NaN
            where there is no gap and None where it is not known; whether there are fewer tasks than
            the table has behind ``score_partial``, ``normalised_partial`` and ``share_partial``;
            ``seconds`` (mean), ``memory`` and ``device`` (highest, in bytes), NaN unless all seeds
            have them; ``labels``.
        published: A row per published result and task, by place: ``label``, ``source``, its
            footnote ``mark``, ``note``, ``value`` and ``difference``, ours minus theirs. That of
            averages is NaN unless both run over all tasks of the table.
        marks: Footnote marks of labels.
    """

    results: tuple[CellResult, ...]
    left_out: tuple[CellResult, ...]
    tidy: Frame
    seeds: Frame
    scores: Frame
    places: Frame
    published: Frame
    marks: Mapping[str, str]


def summarise(results: Sequence[CellResult], layout: TableLayout) -> Summary:
    """Summarise a table.

    Args:
        results: Results of the layout's table that agree with one another (see ``checks``). Their
            order does not matter.
        layout: The table. Cells of rows and columns that it does not have are left out.

    Raises:
        PublishedNumberError: The layout names a published result that does not exist.
    """
    results = sorted(results, key=lambda result: layout.order(result.cell))
    shown = tuple(result for result in results if layout.shows(result.cell))
    everything = tidy_frame(results, layout)
    tidy = everything[everything["place"].isin({result.cell.place for result in shown})]
    # whether all seeds of a place have a task: of a share, they and what they are measured against
    has = tidy[_VALUES].notna()
    has["share"] = tidy[["score", "start", "experts"]].notna().all(axis="columns")
    common = has.groupby([tidy["place"], tidy["task"]]).transform("all")

    averages = _averages(tidy, common)
    seeds = pd.concat([tidy, averages], ignore_index=True)
    places = _places(shown, layout)
    places = places.join([_shares(tidy, common), _costs(averages), _partial(tidy, common, places)])
    of_seeds: Any = seeds.groupby(_PLACE_AND_TASK)[_VALUES]
    scores = of_seeds.mean().join(of_seeds.std().add_suffix("_sd"))
    tasks = [*layout.tasks, AVERAGE]
    scores = scores.reindex(
        pd.MultiIndex.from_product([places.index, tasks], names=_PLACE_AND_TASK)
    )
    return Summary(
        results=shown,
        left_out=tuple(result for result in results if not layout.shows(result.cell)),
        tidy=everything,
        seeds=seeds,
        scores=scores,
        places=places,
        published=_published(shown, layout, places, scores),
        marks=_marks(shown),
    )


def with_starts(frame: Frame, layout: TableLayout) -> Frame:
    """The rows of a frame that belong to the table, not to a curve, with what mergers start from.

    Where a merger of the table starts from a calibrated model, that model is its merged model.
    """
    table = frame[frame["point"].map(len) == 0]
    chained = table["merger"].isin(layout.starts) & (table["calibrator"] == NO_CALIBRATOR)
    starts = [
        table[(table["merger"] == merger) & (table["calibrator"] == calibrator)].assign(
            merger=row, calibrator=NO_CALIBRATOR
        )
        for row, (merger, calibrator) in layout.starts.items()
    ]
    return pd.concat([table[~chained], *starts])


def _averages(tidy: Frame, common: Frame) -> Frame:
    """Of each cell, the mean over the tasks that all seeds of its place have."""
    cell = ["place", "seed"]
    means = tidy[cell].join(tidy[_VALUES].where(common[_VALUES])).groupby(cell).mean()
    averages = tidy.drop_duplicates(cell).drop(columns=_VALUES).join(means, on=cell)
    return averages.assign(task=AVERAGE)


def _places(shown: Sequence[CellResult], layout: TableLayout) -> Frame:
    """Every place with what does not depend on scores."""
    found = {result.cell: result for result in shown}
    by_place: dict[str, list[Cell]] = {}
    for cell in sorted({*found, *layout.expected}, key=layout.order):
        if layout.shows(cell):
            by_place.setdefault(cell.place, []).append(cell)
    rows = [
        {
            "merger": own[0].merger,
            "calibrator": own[0].calibrator,
            "point": own[0].point,
            "seeds": sum(cell in found for cell in own),
            "missing": {cell.seed: layout.expected[cell] for cell in own if cell not in found},
            "labels": {label for cell in own if cell in found for label in found[cell].labels},
        }
        for own in by_place.values()
    ]
    columns = ["merger", "calibrator", "point", "seeds", "missing", "labels"]
    return pd.DataFrame(rows, pd.Index(by_place, name="place"), columns)


def _shares(tidy: Frame, common: Frame) -> pd.Series:
    """The share of the gap closed, of averages."""
    trio = tidy[["score", "start", "experts"]].where(common["share"])
    means = trio.groupby(tidy["place"]).mean()
    # as objects: None, what is not known, is another thing than NaN, where there is no gap
    shares = [
        None if math.isnan(score) else share_of_gap(score, start, experts)
        for score, start, experts in means.itertuples(index=False)
    ]
    return pd.Series(shares, means.index, dtype=object, name="share")


def _costs(cells: Frame) -> Frame:
    """Seconds and memory of the places whose seeds all have them."""
    seconds, memory, device = "seconds", "peak_memory_bytes", "peak_device_bytes"
    by_place = cells[[seconds, memory, device]].astype("float64").groupby(cells["place"])
    costs = by_place.agg({seconds: "mean", memory: "max", device: "max"})
    costs = costs.where(by_place.count().eq(by_place.size(), axis="index"))
    return costs.rename(columns={memory: "memory", device: "device"})


def _partial(tidy: Frame, common: Frame, places: Frame) -> Frame:
    """The tasks of averages of scores, and which averages run over fewer than the table has."""
    by_place = common.groupby(tidy["place"])
    partial = (by_place.any() & ~by_place.all()).reindex(places.index, fill_value=False)
    tasks = tidy[common["score"]].groupby("place")["task"].agg(lambda own: tuple(own.unique()))
    tasks = tasks.reindex(places.index).astype(object).rename("tasks")  # also where all have none
    return partial.add_suffix("_partial").join(tasks)


def _marks(shown: Sequence[CellResult]) -> dict[str, str]:
    """The footnote mark of each label; the first sign is that of training on test inputs."""
    labels = sorted(
        {label for result in shown for label in result.labels},
        key=lambda label: (label != TRAINED_ON_TEST_INPUTS, label),
    )
    return {
        label: _SIGNS[at % len(_SIGNS)] * (1 + at // len(_SIGNS)) for at, label in enumerate(labels)
    }


def _published(
    shown: Sequence[CellResult], layout: TableLayout, places: Frame, scores: Frame
) -> Frame:
    """Published values, merged with our scores by place and task."""
    pairs = layout.published.resolve() if layout.published else []
    if any(result.size == "smoke" for result in shown):
        pairs = []  # a difference to a run that is no measurement means nothing
    order = {place: at for at, place in enumerate(places.index[places["seeds"] > 0])}
    pairs = [pair for pair in pairs if pair[0].place in order]
    marks: dict[str, str] = {}
    rows = []
    for value, row in sorted(pairs, key=lambda pair: order[pair[0].place]):
        mark = marks.setdefault(row.source, f"[{len(marks) + 1}]")
        whole = set(row.tasks) == set(layout.tasks) and not places.at[value.place, "score_partial"]
        averages = {} if row.average is None else {AVERAGE: row.average}
        rows += [
            (value.place, row.label, row.source, mark, row.note, task, score, whole)
            for task, score in {**row.scores, **averages}.items()
        ]
    columns = ["place", "label", "source", "mark", "note", "task", "value", "whole"]
    published = pd.DataFrame(rows, columns=columns).drop_duplicates(["place", "label", "task"])
    ours = published.join(scores["score"], on=_PLACE_AND_TASK)["score"]
    comparable = (published["task"] != AVERAGE) | published["whole"]
    return published.assign(difference=(ours - published["value"]).where(comparable))
