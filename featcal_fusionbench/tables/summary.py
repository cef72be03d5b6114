"""The cells of a table over their seeds: means, spreads, normalised values, gaps, comparisons.

All averages run over tasks first and over seeds then. An average never mixes seeds that have
different tasks: it runs over the tasks that every seed has, and says which those are.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from ..report.gap import share_of_gap
from .layout import PublishedValue, TableLayout
from .published import PublishedRow, require_one_tree
from .results import BASE, EXPERTS, NO_CALIBRATOR, CellResult

__all__ = [
    "Average",
    "CellKey",
    "CellSummary",
    "Comparison",
    "References",
    "Share",
    "Spread",
    "by_place",
    "cell_key",
    "in_order",
    "summarise",
]


@dataclass(frozen=True)
class CellKey:
    """A place in a table or on a curve, whatever the seed.

    Attributes:
        merger: Key of the row.
        calibrator: Key of the column.
        point: What a curve sweeps, sorted by name.
    """

    merger: str
    calibrator: str = NO_CALIBRATOR
    point: tuple[tuple[str, Any], ...] = ()

    @property
    def is_reference(self) -> bool:
        """Whether it is the base or the experts."""
        return self.merger in (BASE, EXPERTS)


def cell_key(merger: str, calibrator: str, point: Mapping[str, Any]) -> CellKey:
    """The key of a place, equal for equal points whatever the order of their names."""
    return CellKey(merger, calibrator, tuple(sorted(point.items())))


@dataclass(frozen=True)
class Spread:
    """A mean over seeds.

    Attributes:
        mean: Their mean.
        deviation: Sample standard deviation; None for one seed.
        n: Number of seeds.
    """

    mean: float
    deviation: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Mean and sample standard deviation of finite values, one a seed, at least one."""
        values = list(values)
        n = len(values)
        return cls(statistics.fmean(values), statistics.stdev(values) if n > 1 else None, n)


@dataclass(frozen=True)
class Average(Spread):
    """A mean over tasks and then over seeds.

    Attributes:
        tasks: The tasks that it runs over: those that every seed has.
        partial: Whether the table has more tasks.
    """

    tasks: tuple[str, ...] = ()
    partial: bool = False


@dataclass(frozen=True)
class Share:
    """A share of the gap between the merged model, or what a row starts from, and the experts.

    Attributes:
        value: See ``share_of_gap``; NaN where the experts are not better.
        partial: Whether its averages run over fewer tasks than the table has.
    """

    value: float
    partial: bool


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A published result beside a cell.

    Attributes:
        row: The published result.
        differences: By task, ours minus theirs, where both have a value.
        average: Ours minus theirs; None unless both run over all tasks of the table.
    """

    row: PublishedRow
    differences: Mapping[str, float]
    average: float | None


@dataclass(frozen=True, kw_only=True)
class CellSummary:
    """One place of a table or curve over all its seeds.

    Attributes:
        key: The place.
        cells: Its results, by seed; empty where there are none.
        missing_seeds: Seeds that were to be run and have no result.
        scores: By task; without the tasks that no seed has.
        normalised: By task, score / score of the experts of the same seed.
        average: None where no task has a score from every seed.
        normalised_average: Mean of ``normalised`` over tasks.
        share: Share of the gap closed. None for the reference rows and for what is not
            calibrated, and where the model it starts from or the experts have no result.
        seconds: Of the cell's own method; None unless all seeds have it.
        peak_memory_bytes: Highest of all seeds; None unless all seeds have it.
        peak_device_bytes: The same on the accelerator.
        labels: What a reader must know of it.
        comparisons: Published results beside it.
    """

    key: CellKey
    cells: tuple[CellResult, ...] = ()
    missing_seeds: tuple[int, ...] = ()
    scores: Mapping[str, Spread] = field(default_factory=dict)
    normalised: Mapping[str, Spread] = field(default_factory=dict)
    average: Average | None = None
    normalised_average: Average | None = None
    share: Share | None = None
    seconds: Spread | None = None
    peak_memory_bytes: int | None = None
    peak_device_bytes: int | None = None
    labels: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()


def summarise(cells: Sequence[CellResult], layout: TableLayout) -> list[CellSummary]:
    """Summarise every place of a table: base and experts, then row by row, column by column.

    Args:
        cells: Results of the layout's table that agree with one another (see ``checks``). Their
            order does not matter.
        layout: The table. Cells of rows and columns that it does not have are left out.

    Raises:
        PublishedNumberError: The layout names a published result that does not exist.
        MixedTreesError: Its published results are of two trees.
    """
    results: dict[CellKey, list[CellResult]] = {}
    for cell in sorted(cells, key=lambda cell: cell.seed):
        results.setdefault(cell_key(cell.merger, cell.calibrator, cell.point), []).append(cell)
    expected: dict[CellKey, set[int]] = {}
    for cell in layout.expected:
        place = cell_key(cell.merger, cell.calibrator, cell.point)
        expected.setdefault(place, set()).add(cell.seed)
    references = References(cells)
    published = _published(layout)
    if any(cell.size == "smoke" for cell in cells):
        published = {}  # a difference to a run that is no measurement means nothing
    order = _Order(layout)
    places = [place for place in {*results, *expected} if order.shows(place)]
    return [
        _summarise_place(
            place,
            results.get(place, []),
            expected.get(place, set()),
            layout,
            references,
            published.get(place, []),
        )
        for place in sorted(places, key=order.of)
    ]


def by_place(summaries: Iterable[CellSummary], layout: TableLayout) -> dict[CellKey, CellSummary]:
    """Summaries of a table by place.

    A row that starts from a calibrated model has that one where others have the merged model.
    """
    found = {summary.key: summary for summary in summaries if not summary.key.point}
    started = {CellKey(row): found.get(CellKey(*cell)) for row, cell in layout.starts.items()}
    return found | {place: summary for place, summary in started.items() if summary}


def in_order(cells: Iterable[CellResult], layout: TableLayout) -> list[CellResult]:
    """Sort cells as the table shows them, then by seed; those that it does not show come last."""
    order = _Order(layout)
    return sorted(
        cells,
        key=lambda c: (order.of(cell_key(c.merger, c.calibrator, c.point)), c.seed),
    )


class _Order:
    """The order of places in a table: row by row, column by column, then along the curve."""

    def __init__(self, layout: TableLayout) -> None:
        self._rows = {key: at for at, key in enumerate((BASE, EXPERTS, *layout.rows))}
        columns = dict.fromkeys((NO_CALIBRATOR, *layout.columns))
        self._columns = {key: at for at, key in enumerate(columns)}

    def shows(self, place: CellKey) -> bool:
        return place.merger in self._rows and place.calibrator in self._columns

    def of(self, place: CellKey) -> tuple[Any, ...]:
        return (
            self._rows.get(place.merger, len(self._rows)),
            self._columns.get(place.calibrator, len(self._columns)),
            # numbers by size, before names by the alphabet
            tuple(
                (name, 1, 0.0, value) if isinstance(value, str) else (name, 0, float(value), "")
                for name, value in place.point
            ),
        )


class References:
    """Finds the result of the model that a cell starts from, or of the experts."""

    def __init__(self, cells: Iterable[CellResult]) -> None:
        self._by_place: dict[CellKey, list[CellResult]] = {}
        for cell in cells:
            place = cell_key(cell.merger, cell.calibrator, cell.point)
            self._by_place.setdefault(place, []).append(cell)

    def find(self, reference: CellKey, cell: CellResult) -> CellResult | None:
        """The result at a place of the table that a cell is to be measured against.

        That of the cell's own seed and, if nothing was calibrated there, of its own point. What
        depends on neither was run once: then it is the only one there is, unless hashes say that it
        was made of other models.
        """
        places = [reference]
        if reference.calibrator == NO_CALIBRATOR:
            places.insert(0, cell_key(reference.merger, NO_CALIBRATOR, cell.point))
        for place in places:
            found = self._by_place.get(place, ())
            for other in found:
                if other.seed == cell.seed:
                    return other
            if len(found) == 1 and _may_share_models(found[0], cell):
                return found[0]
        return None

    def matrix(
        self, reference: CellKey, cells: Sequence[CellResult], tasks: Sequence[str]
    ) -> pd.DataFrame:
        """Scores of the references of cells, as ``_matrix`` has the cells' own."""
        found = {cell.seed: self.find(reference, cell) for cell in cells}
        return _matrix({s: other.scores if other else {} for s, other in found.items()}, tasks)


def _may_share_models(one: CellResult, other: CellResult) -> bool:
    """Whether no hash of base or experts contradicts that two cells were made of the same ones."""
    hashes = [
        {(m.role, m.name): m.sha256 for m in cell.models if m.role != "merged" and m.sha256}
        for cell in (one, other)
    ]
    return all(
        hashes[0][model] == hashes[1][model] for model in hashes[0].keys() & hashes[1].keys()
    )


def _matrix(scores: Mapping[int, Mapping[str, float]], tasks: Sequence[str]) -> pd.DataFrame:
    """Scores by seed (rows) and task (columns); NaN where there is none."""
    frame = pd.DataFrame.from_dict(dict(scores), orient="index", dtype=float)
    return frame.reindex(columns=list(tasks), index=list(scores)).astype(float)


def _summarise_place(
    place: CellKey,
    cells: Sequence[CellResult],
    expected_seeds: set[int],
    layout: TableLayout,
    references: References,
    published: Sequence[PublishedRow],
) -> CellSummary:
    missing = tuple(sorted(expected_seeds - {cell.seed for cell in cells}))
    if not cells:
        return CellSummary(key=place, missing_seeds=missing)
    tasks = layout.tasks
    scores = _matrix({cell.seed: cell.scores for cell in cells}, tasks)
    experts = references.matrix(CellKey(EXPERTS), cells, tasks)
    # a rho of zero or less is no measure to divide by
    normalised = scores / experts.where(experts > 0)
    average = _average(scores, tasks)
    start = CellKey(*layout.start(place.merger))
    return CellSummary(
        key=place,
        cells=tuple(cells),
        missing_seeds=missing,
        scores=_spreads(scores),
        normalised=_spreads(normalised),
        average=average,
        normalised_average=_average(normalised, tasks),
        share=(
            None
            if place.calibrator == NO_CALIBRATOR
            else _share(scores, references.matrix(start, cells, tasks), experts)
        ),
        seconds=_seconds(cells),
        peak_memory_bytes=_highest(cell.peak_memory_bytes for cell in cells),
        peak_device_bytes=_highest(cell.peak_device_bytes for cell in cells),
        labels=tuple(dict.fromkeys(label for cell in cells for label in cell.labels)),
        comparisons=tuple(_compare(scores, average, row, tasks) for row in published),
    )


def _spreads(matrix: pd.DataFrame) -> dict[str, Spread]:
    columns = {str(task): matrix[task].dropna() for task in matrix}
    return {task: Spread.of(values) for task, values in columns.items() if len(values)}


def _average(matrix: pd.DataFrame, tasks: Sequence[str]) -> Average | None:
    common = matrix.dropna(axis="columns")
    if common.empty:
        return None
    spread = Spread.of(common.mean(axis="columns"))
    return Average(
        spread.mean,
        spread.deviation,
        spread.n,
        tasks=tuple(map(str, common.columns)),
        partial=len(common.columns) < len(tasks),
    )


def _share(scores: pd.DataFrame, merged: pd.DataFrame, experts: pd.DataFrame) -> Share | None:
    common = [
        task for task in scores if not any(m[task].hasnans for m in (scores, merged, experts))
    ]
    if not common:
        return None
    averages = [float(m[common].mean(axis="columns").mean()) for m in (scores, merged, experts)]
    return Share(share_of_gap(*averages), partial=len(common) < scores.shape[1])


def _seconds(cells: Sequence[CellResult]) -> Spread | None:
    values = [cell.seconds for cell in cells if cell.seconds is not None]
    return Spread.of(values) if len(values) == len(cells) else None


def _highest(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else max((v for v in known if v is not None), default=None)


def _published(layout: TableLayout) -> dict[CellKey, list[PublishedRow]]:
    pairs: list[tuple[PublishedValue, PublishedRow]] = (
        layout.published.resolve() if layout.published else []
    )
    require_one_tree(row for _, row in pairs)
    by_place: dict[CellKey, list[PublishedRow]] = {}
    for value, row in pairs:
        by_place.setdefault(cell_key(value.merger, value.calibrator, value.point), []).append(row)
    return by_place


def _compare(
    scores: pd.DataFrame, average: Average | None, row: PublishedRow, tasks: Sequence[str]
) -> Comparison:
    ours = _spreads(scores)
    whole = average is not None and not average.partial and set(row.tasks) == set(tasks)
    return Comparison(
        row=row,
        differences={
            task: ours[task].mean - value for task, value in row.scores.items() if task in ours
        },
        average=average.mean - row.average
        if whole and average and row.average is not None
        else None,
    )
