"""The grids of a table: averages, what derives from them, and every task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from .document import Cell, Grid
from .layout import TableLayout
from .marks import PARTIAL, Marks
from .results import BASE, EXPERTS, NO_CALIBRATOR, SPEARMAN_RHO
from .summary import Average, CellKey, CellSummary, Comparison, Spread, by_place
from .wording import (
    MINUS,
    NONE,
    bytes_text,
    number_text,
    percent,
    seconds_text,
)

__all__ = ["make_grids"]

_MOST_COLUMNS = 10
"""Columns that a page, and a terminal, can hold."""

_NAMES = ("merger", "calibrator")


def make_grids(
    summaries: Sequence[CellSummary], layout: TableLayout, marks: Marks
) -> tuple[Grid, ...]:
    """Lay out all grids, those that say most first.

    Args:
        summaries: The places of the table in order.
        layout: The table.
        marks: Footnote marks for labels and sources.
    """
    maker = _GridMaker(summaries, layout, marks)
    return (
        *maker.matrix(),
        *maker.curves(),
        *maker.overviews(),
        *maker.scores(),
        *maker.normalised(),
        *maker.published(),
    )


class _GridMaker:
    def __init__(self, summaries: Sequence[CellSummary], layout: TableLayout, marks: Marks) -> None:
        self._summaries = summaries
        self._cells_of_table = [summary for summary in summaries if not summary.key.point]
        self._layout = layout
        self._marks = marks
        self._unit = _unit(summaries, layout)

    def matrix(self) -> list[Grid]:
        """The average of every merger × calibrator, where it is wider than a list and fits."""
        places = by_place(self._summaries, self._layout)
        only_plain = all(key.calibrator == NO_CALIBRATOR for key in places)
        if only_plain or len(self._layout.columns) > _MOST_COLUMNS:
            return []
        columns = list(dict.fromkeys((NO_CALIBRATOR, *self._layout.columns)))
        mergers = list(dict.fromkeys(summary.key.merger for summary in self._cells_of_table))
        rows = []
        for merger in mergers:
            own = [places.get(CellKey(merger, column)) for column in columns]
            rows.append((Cell(self._layout.row_title(merger)), *self._compared(own)))
        return [
            Grid(
                name="averages",
                title="Average over tasks",
                header=("", *(self._layout.column_title(column) for column in columns)),
                rows=tuple(rows),
                text_columns=1,
                rules=_rules([merger in (BASE, EXPERTS) for merger in mergers]),
                caption=f"{self._unit} Bold: the best of its row.",
                brief=True,
            )
        ]

    def curves(self) -> list[Grid]:
        """The average at every value of one swept setting, a grid per setting."""
        swept: dict[str, dict[float | str, None]] = {}
        for summary in self._summaries:
            if len(summary.key.point) == 1:
                name, value = summary.key.point[0]
                swept.setdefault(name, {})[value] = None
        return [self._curve(name, list(values)) for name, values in swept.items()]

    def _curve(self, name: str, values: Sequence[float | str]) -> Grid:
        points = {summary.key: summary for summary in self._summaries}
        values = sorted(values, key=lambda value: (isinstance(value, str), value))
        methods = list(
            dict.fromkeys(
                CellKey(summary.key.merger, summary.key.calibrator)
                for summary in self._summaries
                if [key for key, _ in summary.key.point] == [name]
            )
        )
        rows = []
        for method in methods:
            keys = [CellKey(method.merger, method.calibrator, ((name, v),)) for v in values]
            rows.append((*self._method(method), *self._compared([points.get(k) for k in keys])))
        return Grid(
            name=f"curve-{name}",
            title=f"Average over tasks by {self._layout.curve_title(name)}",
            header=(*_NAMES, *map(number_text, values)),
            rows=tuple(rows),
            text_columns=len(_NAMES),
            rules=_rules([method.merger for method in methods]),
            caption=f"{self._unit} Bold: the best of its row.",
            brief=True,
        )

    def overviews(self) -> list[Grid]:
        """Averages, what is derived from them, costs: of the table, then of each curve."""
        by_names: dict[tuple[str, ...], list[CellSummary]] = {}
        for summary in self._summaries:
            by_names.setdefault(tuple(n for n, _ in summary.key.point), []).append(summary)
        return [self._overview(names, members) for names, members in by_names.items()]

    def _overview(self, names: tuple[str, ...], members: Sequence[CellSummary]) -> Grid:
        with_published = any(summary.comparisons for summary in members)
        with_device = any(summary.peak_device_bytes is not None for summary in members)
        titles = [self._layout.curve_title(name) for name in names]
        header = [*titles, "seeds", "average", "normalised", "gap closed"]
        header += ["published", "difference"] if with_published else []
        header += ["seconds", "memory"]
        header += ["device memory"] if with_device else []

        def values(summary: CellSummary) -> list[Cell]:
            cells = [Cell(number_text(value)) for _, value in summary.key.point]
            cells += [
                _seeds(summary),
                self._average(summary),
                _average_cell(summary.normalised_average),
                _share(summary),
            ]
            if with_published:
                cells += self._first_comparison(summary)
            cells.append(Cell(seconds_text(summary.seconds)))
            cells.append(Cell(bytes_text(summary.peak_memory_bytes)))
            if with_device:
                cells.append(Cell(bytes_text(summary.peak_device_bytes)))
            return cells

        which = f" by {' and '.join(titles)}" if titles else ""
        return self._places_grid(
            "-".join(("overview", *names)),
            f"Averages, share of the gap closed, cost{which}",
            header,
            members,
            values,
            brief=not names,
        )

    def scores(self) -> list[Grid]:
        """The score of every task."""
        return self._by_task(
            "scores", "Scores per task", lambda summary: summary.scores, self._average, brief=True
        )

    def normalised(self) -> list[Grid]:
        """Scores relative to the experts'."""
        if not any(summary.normalised for summary in self._cells_of_table):
            return []
        return self._by_task(
            "normalised",
            "Expert-normalised scores per task",
            lambda summary: summary.normalised,
            lambda summary: _average_cell(summary.normalised_average),
            caption="In percent of the experts' scores.",
        )

    def published(self) -> list[Grid]:
        """Published results, and in parentheses by how much ours are above them."""
        pairs = [(s, comparison) for s in self._summaries for comparison in s.comparisons]
        if not pairs:
            return []
        grids = []
        for name, which, tasks, last in self._task_chunks():
            rows = []
            for summary, comparison in pairs:
                row = comparison.row
                cells = [Cell(row.label, marks=self._marks.sources[row.source])]
                cells += [
                    _beside(row.scores.get(task), comparison.differences.get(task))
                    for task in tasks
                ]
                cells += [_beside(row.average, comparison.average)] if last else []
                rows.append((*self._method(summary.key), *cells))
            grids.append(
                Grid(
                    name=f"published{name}",
                    title=f"Published values (ours minus them){which}",
                    header=(*_NAMES, "published as", *tasks, *(["average"] if last else [])),
                    rows=tuple(rows),
                    text_columns=len(_NAMES) + 1,
                    rules=_rules([_group(summary.key) for summary, _ in pairs]),
                    caption=self._unit,
                )
            )
        return grids

    # Parts of several grids

    def _by_task(
        self,
        name: str,
        title: str,
        values: Callable[[CellSummary], Mapping[str, Spread]],
        average: Callable[[CellSummary], Cell],
        caption: str = "",
        brief: bool = False,
    ) -> list[Grid]:
        if not self._cells_of_table:
            return []

        def cells(summary: CellSummary, tasks: Sequence[str], last: bool) -> list[Cell]:
            own = values(summary)
            found = [_spread_cell(own.get(task)) for task in tasks]
            return [*found, average(summary)] if last else found

        return [
            self._places_grid(
                f"{name}{suffix}",
                f"{title}{which}",
                [*tasks, "average"] if last else tasks,
                self._cells_of_table,
                lambda summary, tasks=tasks, last=last: cells(summary, tasks, last),
                caption,
                brief=brief,
            )
            for suffix, which, tasks, last in self._task_chunks()
        ]

    def _task_chunks(self) -> list[tuple[str, str, tuple[str, ...], bool]]:
        """Names and tasks of the grids that all tasks are divided among, and which is the last."""
        tasks = self._layout.tasks
        count = math.ceil(len(tasks) / _MOST_COLUMNS)
        if count == 1:
            return [("", "", tasks, True)]
        size = math.ceil(len(tasks) / count)
        chunks = [tasks[at : at + size] for at in range(0, len(tasks), size)]
        return [
            (f"-{part}", f", part {part} of {len(chunks)}", chunk, part == len(chunks))
            for part, chunk in enumerate(chunks, start=1)
        ]

    def _places_grid(
        self,
        name: str,
        title: str,
        header: Sequence[str],
        summaries: Sequence[CellSummary],
        values: Callable[[CellSummary], list[Cell]],
        caption: str = "",
        brief: bool = False,
    ) -> Grid:
        """A grid with a row per place."""
        return Grid(
            name=name,
            title=title,
            header=(*_NAMES, *header),
            rows=tuple((*self._method(summary.key), *values(summary)) for summary in summaries),
            text_columns=len(_NAMES),
            rules=_rules([_group(summary.key) for summary in summaries]),
            caption=caption or self._unit,
            brief=brief,
        )

    def _method(self, key: CellKey) -> tuple[Cell, Cell]:
        calibrator = "" if key.is_reference else self._layout.column_title(key.calibrator)
        return (Cell(self._layout.row_title(key.merger)), Cell(calibrator))

    def _average(self, summary: CellSummary) -> Cell:
        cell = _average_cell(summary.average)
        return replace(cell, marks=cell.marks + self._marks.of_labels(summary.labels))

    def _compared(self, own: Sequence[CellSummary | None]) -> list[Cell]:
        """Averages of a row, the best of them bold.

        What was never to be run stays empty; what is missing does not.
        """
        best = _best(own)
        cells = [Cell() if summary is None else self._average(summary) for summary in own]
        return [replace(cell, bold=at in best) for at, cell in enumerate(cells)]

    def _first_comparison(self, summary: CellSummary) -> list[Cell]:
        """The first published average; the grid of published values has them all."""
        found: Comparison | None = next(
            (c for c in summary.comparisons if c.row.average is not None), None
        )
        if found is None:
            return [Cell(), Cell()]
        mark = self._marks.sources[found.row.source]
        difference = NONE if found.average is None else percent(found.average, signed=True)
        return [Cell(percent(found.row.average), marks=mark), Cell(difference)]


def _unit(summaries: Sequence[CellSummary], layout: TableLayout) -> str:
    cells = [cell for summary in summaries for cell in summary.cells]
    rhos = [
        task
        for task in layout.tasks
        if any(cell.metrics.get(task) == SPEARMAN_RHO for cell in cells)
    ]
    if not rhos:
        return "Accuracy in percent."
    if len(rhos) == len(layout.tasks):
        return "100 × Spearman's ρ."
    return f"Accuracy in percent; {', '.join(rhos)}: 100 × Spearman's ρ."


def _spread_cell(spread: Spread | None) -> Cell:
    if spread is None:
        return Cell(NONE)
    return Cell(percent(spread.mean), "" if spread.deviation is None else percent(spread.deviation))


def _average_cell(average: Average | None) -> Cell:
    partial = average is not None and average.partial
    return replace(_spread_cell(average), marks=PARTIAL if partial else "")


def _seeds(summary: CellSummary) -> Cell:
    present = len(summary.cells)
    wanted = present + len(summary.missing_seeds)
    return Cell(f"{present}" if present == wanted else f"{present} of {wanted}")


def _share(summary: CellSummary) -> Cell:
    if summary.key.calibrator == NO_CALIBRATOR:
        return Cell()
    if summary.share is None or math.isnan(summary.share.value):
        return Cell(NONE)
    text = f"{100 * summary.share.value:.0f} %".replace("-", MINUS)
    return Cell(text, marks=PARTIAL if summary.share.partial else "")


def _beside(published: float | None, difference: float | None) -> Cell:
    if published is None or difference is None:
        return Cell(percent(published))
    return Cell(f"{percent(published)} ({percent(difference, signed=True)})")


def _best(own: Sequence[CellSummary | None]) -> set[int]:
    """Where the highest averages as printed stand, if there are several over the same tasks."""
    averages = {at: s.average for at, s in enumerate(own) if s is not None and s.average}
    if len(averages) < 2 or len({average.tasks for average in averages.values()}) > 1:
        return set()
    printed = {at: round(100 * average.mean, 1) for at, average in averages.items()}
    return {at for at, value in printed.items() if value == max(printed.values())}


def _group(key: CellKey) -> str:
    """Places between which there is no rule have the same."""
    return "" if key.is_reference else key.merger


def _rules(groups: Sequence[object]) -> tuple[int, ...]:
    """Where a new group begins, the first left out."""
    return tuple(at for at in range(1, len(groups)) if groups[at] != groups[at - 1])
