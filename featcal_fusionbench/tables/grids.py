"""The grids of a table: averages, what derives from them, and every task."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from .document import Entry, Grid
from .frame import Frame
from .layout import TableLayout
from .results import BASE, EXPERTS, NO_CALIBRATOR, SPEARMAN_RHO
from .summary import AVERAGE, Summary, with_starts
from .text import MINUS, NONE, bytes_text, number_text, percent, seconds_text

__all__ = ["PARTIAL", "make_grids"]

PARTIAL = "*"
"""Marks an average over fewer tasks than the table has."""

_MOST_COLUMNS = 10
"""Columns that a page, and a terminal, can hold."""
_KEYS = ["merger", "calibrator"]
_LABEL = "published as"


def make_grids(summary: Summary, layout: TableLayout) -> tuple[Grid, ...]:
    """Lay out all grids, those that say most first."""
    maker = _GridMaker(summary, layout)
    return (
        *maker.matrix(),
        *maker.curves(),
        *maker.overviews(),
        *maker.by_task("scores", "Scores per task", "score"),
        *maker.by_task("normalised", "Expert-normalised scores per task", "normalised"),
        *maker.published(),
    )


class _GridMaker:
    """Makes grids of frames whose index is the merger, or the merger and the calibrator."""

    def __init__(self, summary: Summary, layout: TableLayout) -> None:
        self._summary = summary
        self._layout = layout
        self._unit = _unit(summary, layout)
        self._entries = pd.DataFrame({v: self._entries_of(v) for v in ("score", "normalised")})
        averages = self._entries.xs(AVERAGE, level="task")
        self._places = summary.places.assign(
            mean=summary.scores["score"].xs(AVERAGE, level="task"),
            average=averages["score"],
            normalised=averages["normalised"],
        )

    def _entries_of(self, value: str) -> pd.Series:
        """The means with their deviations by place and task; those of averages are marked."""
        scores, places = self._summary.scores, self._summary.places
        marks = places[f"{value}_partial"].map({True: PARTIAL, False: ""})
        if value == "score":
            signs = self._summary.marks.items()
            marks += ["".join(s for label, s in signs if label in own) for own in places["labels"]]
        entries = [
            Entry(
                percent(mean),
                "" if math.isnan(deviation) else percent(deviation),
                marks[place] if task == AVERAGE else "",
            )
            for (place, task), mean, deviation in zip(
                scores.index, scores[value], scores[f"{value}_sd"], strict=True
            )
        ]
        return pd.Series(entries, scores.index)

    def matrix(self) -> Iterator[Grid]:
        """The average of every merger × calibrator, where it is wider than a list and fits."""
        table = with_starts(self._places, self._layout)
        only_plain = (table["calibrator"] == NO_CALIBRATOR).all()
        if only_plain or len(self._layout.columns) > _MOST_COLUMNS:
            return
        own = self._places[self._places["point"].map(len) == 0]
        entries = _compared(table, ["merger"], "calibrator").reindex(
            index=own["merger"].unique(), columns=list(self._layout.all_columns)
        )
        yield self._grid(
            "averages",
            "Average over tasks",
            entries.set_axis(map(self._layout.column_title, entries.columns), axis="columns"),
            caption=f"{self._unit} Bold: the best of its row.",
            brief=True,
        )

    def curves(self) -> Iterator[Grid]:
        """The average at every value of one swept setting, a grid per setting."""
        points = self._places[self._places["point"].map(len) == 1]
        names, values = (points["point"].map(lambda point, at=at: point[0][at]) for at in (0, 1))
        for name, own in points.assign(value=values.map(number_text)).groupby(names, sort=False):
            methods = pd.MultiIndex.from_frame(own[_KEYS].drop_duplicates())
            order = sorted(set(values[own.index]), key=lambda v: (isinstance(v, str), v))
            yield self._grid(
                f"curve-{name}",
                f"Average over tasks by {self._layout.curve_title(str(name))}",
                _compared(own, _KEYS, "value").reindex(methods, columns=map(number_text, order)),
                caption=f"{self._unit} Bold: the best of its row.",
                brief=True,
            )

    def overviews(self) -> Iterator[Grid]:
        """Averages, what is derived from them, costs: of the table, then of each curve."""
        settings = self._places["point"].map(lambda point: "-".join(name for name, _ in point))
        for setting, own in self._places.groupby(settings, sort=False):
            titles = [self._layout.curve_title(name) for name, _ in own["point"].iloc[0]]
            columns: dict[str, list[Any]] = {
                title: [number_text(point[at][1]) for point in own["point"]]
                for at, title in enumerate(titles)
            }
            columns["seeds"] = [
                f"{done} of {done + len(missing)}" if missing else f"{done}"
                for done, missing in zip(own["seeds"], own["missing"], strict=True)
            ]
            columns["average"] = list(own["average"])
            columns["normalised"] = list(own["normalised"])
            columns["gap closed"] = [_share(place) for place in own.itertuples()]
            columns |= self._first_published(own.index)
            columns["seconds"] = [seconds_text(seconds) for seconds in own["seconds"]]
            columns["memory"] = [bytes_text(memory) for memory in own["memory"]]
            if own["device"].notna().any():
                columns["device memory"] = [bytes_text(memory) for memory in own["device"]]
            which = f" by {' and '.join(titles)}" if titles else ""
            yield self._grid(
                f"overview-{setting}" if setting else "overview",
                f"Averages, share of the gap closed, cost{which}",
                pd.DataFrame(columns, pd.MultiIndex.from_frame(own[_KEYS])),
                brief=not titles,
            )

    def _first_published(self, places: pd.Index) -> dict[str, list[Any]]:
        """The first published averages; the grid of published values has them all."""
        published = self._summary.published
        published = published[published["place"].isin(places)]
        if published.empty:
            return {}
        first = published[published["task"] == AVERAGE].drop_duplicates("place").set_index("place")
        values = {
            p: Entry(percent(v), marks=m) for p, v, m in first[["value", "mark"]].itertuples()
        }
        differences = {p: percent(d, signed=True) for p, d in first["difference"].items()}
        return {
            "published": [values.get(place, "") for place in places],
            "difference": [differences.get(place, "") for place in places],
        }

    def by_task(self, name: str, title: str, value: str) -> Iterator[Grid]:
        """Scores of every task, absolute or relative to the experts'."""
        table = self._places[self._places["point"].map(len) == 0]
        if self._summary.scores[value][list(table.index)].isna().all():
            return
        entries = self._entries[value].unstack("task").loc[table.index]
        entries.index = pd.MultiIndex.from_frame(table[_KEYS])
        absolute = value == "score"
        caption = self._unit if absolute else "In percent of the experts' scores."
        for suffix, which, tasks in self._parts():
            full_name, full_title = f"{name}{suffix}", f"{title}{which}"
            yield self._grid(full_name, full_title, entries[tasks], caption, brief=absolute)

    def published(self) -> Iterator[Grid]:
        """Published results, and in parentheses by how much ours are above them."""
        published = self._summary.published
        if published.empty:
            return
        texts = [
            percent(value) + ("" if math.isnan(d) else f" ({percent(d, signed=True)})")
            for value, d in zip(published["value"], published["difference"], strict=True)
        ]
        rows = published.drop_duplicates(["place", "label"])
        entries = published.assign(text=texts).pivot(
            index=["place", "label"], columns="task", values="text"
        )
        entries = entries.reindex(pd.MultiIndex.from_frame(rows[["place", "label"]]))
        entries = entries.reindex(columns=[*self._layout.tasks, AVERAGE]).fillna(NONE)
        labels = [
            Entry(label, marks=m) for label, m in zip(rows["label"], rows["mark"], strict=True)
        ]
        entries.insert(0, _LABEL, labels)
        entries.index = pd.MultiIndex.from_frame(self._places.loc[rows["place"], _KEYS])
        for suffix, which, tasks in self._parts():
            title = f"Published values (ours minus them){which}"
            yield self._grid(f"published{suffix}", title, entries[[_LABEL, *tasks]])

    def _parts(self) -> list[tuple[str, str, list[str]]]:
        """Suffixes of names and titles of the grids that all tasks are divided among."""
        tasks = [*self._layout.tasks]
        count = math.ceil(len(tasks) / _MOST_COLUMNS)
        if count == 1:
            return [("", "", [*tasks, AVERAGE])]
        size = math.ceil(len(tasks) / count)
        chunks = [tasks[at : at + size] for at in range(0, len(tasks), size)]
        chunks[-1] = [*chunks[-1], AVERAGE]
        return [
            (f"-{part}", f", part {part} of {len(chunks)}", chunk)
            for part, chunk in enumerate(chunks, start=1)
        ]

    def _grid(
        self, name: str, title: str, entries: Frame, caption: str = "", brief: bool = False
    ) -> Grid:
        """A grid of a frame of entries and texts; what is NaN stays empty."""
        keys = entries.index.to_frame(index=False)
        references = keys["merger"].isin([BASE, EXPERTS])
        # a rule below the base and the experts, and between mergers that have several rows
        groups = references if keys["merger"].is_unique else keys["merger"].mask(references, "")
        keys["merger"] = keys["merger"].map(self._layout.row_title)
        if "calibrator" in keys:
            titles = keys["calibrator"].map(self._layout.column_title)
            keys["calibrator"] = titles.mask(references, "")
        entries = pd.concat([keys, entries.reset_index(drop=True)], axis="columns")
        return Grid(
            name=name,
            title=title,
            entries=entries.map(
                lambda e: e if isinstance(e, Entry) else Entry(e if isinstance(e, str) else "")
            ).rename(columns={AVERAGE: "average"}),
            text_columns=keys.shape[1] + (_LABEL in entries),
            rules=[at for at in range(1, len(groups)) if groups[at] != groups[at - 1]],
            caption=caption or self._unit,
            brief=brief,
        )


def _unit(summary: Summary, layout: TableLayout) -> str:
    rho = {
        task
        for result in summary.results
        for task, metric in result.metrics.items()
        if metric == SPEARMAN_RHO
    }
    if not rho:
        return "Accuracy in percent."
    if len(rho) == len(layout.tasks):
        return "100 × Spearman's ρ."
    named = ", ".join(task for task in layout.tasks if task in rho)
    return f"Accuracy in percent; {named}: 100 × Spearman's ρ."


def _share(place: Any) -> Entry:
    """The share of the gap of a row of ``Summary.places``."""
    if place.calibrator == NO_CALIBRATOR:
        return Entry()
    if place.share is None or math.isnan(place.share):
        return Entry(NONE)
    text = f"{100 * place.share:.0f} %".replace("-", MINUS)
    return Entry(text, marks=PARTIAL if place.share_partial else "")


def _compared(places: Frame, rows: Sequence[str], column: str) -> Frame:
    """Averages in a grid, the best of each row bold.

    The best are the highest as printed, if a row has several averages over the same tasks. What was
    never to be run is NaN; what is missing is not.
    """
    by_row = [places[key] for key in rows]
    printed = places["mean"].map(lambda mean: round(100 * mean, 1))
    of_row = printed.groupby(by_row)
    alike = places["tasks"].groupby(by_row).transform("nunique") == 1
    best = (printed == of_row.transform("max")) & (of_row.transform("count") > 1) & alike
    entries = [
        replace(entry, bold=bool(bold)) for entry, bold in zip(places["average"], best, strict=True)
    ]
    return places.assign(entry=entries).pivot(index=[*rows], columns=column, values="entry")
