"""What must agree before cells may stand in one table, and what a reader must be told of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from .layout import TableLayout
from .results import EXPERTS, NO_CALIBRATOR, CellResult
from .summary import CellSummary
from .wording import machine_text

__all__ = ["TableError", "place", "require_one_table", "warnings"]

_MOST_NAMED = 6
_Name = TypeVar("_Name", bound=Hashable)


class TableError(ValueError):
    """Results cannot stand in one table; the message says which and why."""


def require_one_table(cells: Sequence[CellResult], layout: TableLayout) -> None:
    """Refuse cells whose numbers would be wrong beside one another.

    Raises:
        TableError: No cells, cells of another table, of two sizes, with other tasks than the
            layout, with two metrics for a task, or two results of one cell.
    """
    if not cells:
        raise TableError(f"The table {layout.name} has no results yet: run its sweep first.")
    problems = []
    if foreign := sorted({cell.table for cell in cells} - {layout.name}):
        problems.append(
            f"Cells of {', '.join(foreign)} cannot stand in the table {layout.name}: give each "
            f"table a directory of its own."
        )
    if len(sizes := sorted({cell.size for cell in cells})) > 1:
        named = [f"{len([c for c in cells if c.size == size])} {size}" for size in sizes]
        problems.append(
            f"Cells of two sizes ({', '.join(named)}) cannot stand in one table: a smoke run is no "
            f"measurement. Give each size a directory of its own."
        )
    if other := [cell for cell in cells if cell.tasks != layout.tasks]:
        problems.append(
            f"The table's tasks are {', '.join(layout.tasks)}, but those of {_named(other)} are "
            f"{', '.join(other[0].tasks)}: run these cells again."
        )
    for task, metrics in _by(cells, lambda cell: cell.metrics.items()).items():
        if len(metrics) > 1:
            problems.append(
                f"{task} is measured by {' and by '.join(sorted(metrics))}: run the "
                f"cells of one of them again."
            )
    counts = Counter(cell.key for cell in cells)
    if twice := [cell for cell in cells if counts[cell.key] > 1]:
        problems.append(f"There are several results of {_named(twice)}: keep one of each.")
    if problems:
        raise TableError("\n".join(problems))


def warnings(
    cells: Sequence[CellResult], layout: TableLayout, summaries: Sequence[CellSummary]
) -> list[str]:
    """What stands below a table so that its numbers are not misread.

    Args:
        cells: All results, also those that the layout does not show.
        layout: The table.
        summaries: What ``summarise`` made of them.
    """
    shown = [cell for summary in summaries for cell in summary.cells]
    lines = []
    if any(cell.size == "smoke" for cell in cells):
        lines.append(
            "Smoke size: these runs show that the cells work; their numbers mean nothing, and no "
            "published values stand beside them."
        )
    known = {id(cell) for cell in shown}
    if left_out := [cell for cell in cells if id(cell) not in known]:
        lines.append(f"Not shown, since the table has no such row or column: {_named(left_out)}.")
    lines += _undefined(shown)
    lines += _partial(summaries, layout.tasks)
    lines += _no_gap(summaries)
    lines += _unlike_models(shown)
    for package, versions in _by(shown, lambda cell: cell.versions.items()).items():
        if len(versions) > 1:
            lines.append(f"Cells were run with several versions of {package}: {_list(versions)}.")
    machines = {machine_text(c.machine) for c in shown if c.machine and c.seconds is not None}
    if len(machines) > 1:
        lines.append(
            f"Cells were run on {len(machines)} machines: seconds and memory of different cells "
            f"cannot be compared."
        )
    return lines


def _undefined(cells: Sequence[CellResult]) -> list[str]:
    return [
        f"{cell.title}: the score of {task} is undefined, as ρ of constant answers is; averages "
        f"leave it out."
        for cell in cells
        for task, score in cell.scores.items()
        if math.isnan(score)
    ]


def _partial(summaries: Sequence[CellSummary], tasks: Sequence[str]) -> list[str]:
    partial: dict[str, list[str]] = {}
    for summary in summaries:
        if summary.cells and summary.average is None:
            partial.setdefault("no task that all seeds have", []).append(place(summary))
        elif summary.average and summary.average.partial:
            absent = [task for task in tasks if task not in summary.average.tasks]
            partial.setdefault(f"without {_list(absent)}", []).append(place(summary))
    return [
        f"Partial average, {which}: {_list(places)}. Not to be compared with averages over other "
        f"tasks."
        for which, places in partial.items()
    ]


def _no_gap(summaries: Sequence[CellSummary]) -> list[str]:
    calibrated = [s for s in summaries if s.cells and s.key.calibrator != NO_CALIBRATOR]
    lines = []
    if none := [place(s) for s in calibrated if s.share is None]:
        lines.append(
            f"No share of the gap for {_list(none)}: the experts, or the models that these start "
            f"from, have no result for the same seeds and tasks."
        )
    if closed := [place(s) for s in calibrated if s.share and math.isnan(s.share.value)]:
        lines.append(
            f"No gap for {_list(closed)}: the experts are no better than the models that these "
            f"start from."
        )
    if calibrated and not any(s.key.merger == EXPERTS and s.cells for s in summaries):
        lines.append("The experts have no result: nothing is normalised by them.")
    return lines


def _unlike_models(cells: Sequence[CellResult]) -> list[str]:
    """Base and experts should be the same everywhere, merged models in a row for one seed."""

    def common(cell: CellResult) -> Iterable[tuple[str, str]]:
        return (
            (m.name if m.role == "expert" else m.role, m.sha256)
            for m in cell.models
            if m.role != "merged" and m.sha256
        )

    def merged(cell: CellResult) -> Iterable[tuple[tuple[str, int], str]]:
        return (
            ((cell.merger, cell.seed), m.sha256)
            for m in cell.models
            if m.role == "merged" and m.sha256
        )

    lines = []
    if unlike := [name for name, hashes in _by(cells, common).items() if len(hashes) > 1]:
        seeds = {cell.seed for cell in cells}
        within = any(
            len(hashes) > 1
            for seed in seeds
            for hashes in _by([cell for cell in cells if cell.seed == seed], common).values()
        )
        lines.append(
            f"The weights of {_list(unlike)} are not the same in all cells: differences between "
            f"{'cells' if within else 'seeds'} are also differences between these models."
        )
    for key, hashes in _by(cells, merged).items():
        if len(hashes) > 1:
            merger, seed = key
            lines.append(
                f"The calibrators of {merger}, seed {seed}, were given {len(hashes)} different "
                f"merged models: its row compares unlike things."
            )
    return lines


def place(summary: CellSummary) -> str:
    """The place of a summary in words, by its keys."""
    point = "".join(f", {name}={value}" for name, value in summary.key.point)
    calibrator = "" if summary.key.is_reference else f" × {summary.key.calibrator}"
    return f"{summary.key.merger}{calibrator}{point}"


def _by(
    cells: Sequence[CellResult], pairs: Callable[[CellResult], Iterable[tuple[_Name, str]]]
) -> Mapping[_Name, set[str]]:
    """All values of each name over the cells."""
    values: dict[_Name, set[str]] = {}
    for cell in cells:
        for name, value in pairs(cell):
            values.setdefault(name, set()).add(value)
    return values


def _named(cells: Sequence[CellResult]) -> str:
    return _list(dict.fromkeys(cell.title for cell in cells))


def _list(names: Iterable[object]) -> str:
    texts = [str(name) for name in names]
    if isinstance(names, set):
        texts.sort()
    rest = len(texts) - _MOST_NAMED
    return ", ".join(texts[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
