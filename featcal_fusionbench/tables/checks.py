"""What must agree before cells may stand in one table, and what a reader must be told of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from .layout import TableLayout
from .results import EXPERTS, NO_CALIBRATOR, CellResult
from .summary import AVERAGE, Summary
from .text import machine_text

__all__ = ["TableError", "require_one_table", "warnings"]

_MOST_NAMED = 6
_Name = TypeVar("_Name", bound=Hashable)


class TableError(ValueError):
    """Results cannot stand in one table; the message says which and why."""


def require_one_table(results: Sequence[CellResult], layout: TableLayout) -> None:
    """Refuse results whose numbers would be wrong beside one another.

    Raises:
        TableError: No results, results of another table, of two sizes, with other tasks than the
            layout, with two metrics for a task, or two results of one cell.
    """
    if not results:
        raise TableError(f"The table {layout.name} has no results yet: run its sweep first.")
    problems = []
    if foreign := {result.table for result in results} - {layout.name}:
        problems.append(
            f"Cells of {', '.join(sorted(foreign))} cannot stand in the table {layout.name}: give "
            f"each table a directory of its own."
        )
    if len(sizes := Counter(result.size for result in results)) > 1:
        named = [f"{count} {size}" for size, count in sorted(sizes.items())]
        problems.append(
            f"Cells of two sizes ({', '.join(named)}) cannot stand in one table: a smoke run is no "
            f"measurement. Give each size a directory of its own."
        )
    if other := [result for result in results if result.tasks != layout.tasks]:
        problems.append(
            f"The table's tasks are {', '.join(layout.tasks)}, but those of {_titles(other)} are "
            f"{', '.join(other[0].tasks)}: run these cells again."
        )
    for task, metrics in _by(results, lambda result: result.metrics.items()).items():
        if len(metrics) > 1:
            problems.append(
                f"{task} is measured by {' and by '.join(sorted(metrics))}: run the "
                f"cells of one of them again."
            )
    counts = Counter(result.cell for result in results)
    if twice := [result for result in results if counts[result.cell] > 1]:
        problems.append(f"There are several results of {_titles(twice)}: keep one of each.")
    if problems:
        raise TableError("\n".join(problems))


def warnings(summary: Summary, layout: TableLayout) -> list[str]:
    """What stands below a table so that its numbers are not misread."""
    shown = summary.results
    lines = []
    if any(result.size == "smoke" for result in (*shown, *summary.left_out)):
        lines.append(
            "Smoke size: these runs show that the cells work; their numbers mean nothing, and no "
            "published values stand beside them."
        )
    if summary.left_out:
        titles = _titles(summary.left_out)
        lines.append(f"Not shown, since the table has no such row or column: {titles}.")
    lines += [
        f"{result.title}: the score of {task} is undefined, as ρ of constant answers is; averages "
        f"leave it out."
        for result in shown
        for task, score in result.scores.items()
        if math.isnan(score)
    ]
    lines += _partial(summary, layout)
    lines += _no_gap(summary)
    lines += _unlike_models(shown)
    for package, versions in _by(shown, lambda result: result.versions.items()).items():
        if len(versions) > 1:
            named = _list(sorted(versions))
            lines.append(f"Cells were run with several versions of {package}: {named}.")
    machines = {machine_text(r.machine) for r in shown if r.machine and r.seconds is not None}
    if len(machines) > 1:
        lines.append(
            f"Cells were run on {len(machines)} machines: seconds and memory of different cells "
            f"cannot be compared."
        )
    return lines


def _partial(summary: Summary, layout: TableLayout) -> list[str]:
    places = summary.places[summary.places["seeds"] > 0]
    averages = summary.scores["score"].xs(AVERAGE, level="task")
    by_reason: dict[str, list[str]] = {}
    for place, tasks in places["tasks"].items():
        if math.isnan(averages[place]):
            by_reason.setdefault("no task that all seeds have", []).append(str(place))
        elif absent := [task for task in layout.tasks if task not in tasks]:
            by_reason.setdefault(f"without {_list(absent)}", []).append(str(place))
    return [
        f"Partial average, {reason}: {_list(own)}. Not to be compared with averages over other "
        f"tasks."
        for reason, own in by_reason.items()
    ]


def _no_gap(summary: Summary) -> list[str]:
    done = summary.places[summary.places["seeds"] > 0]
    shares = done["share"][done["calibrator"] != NO_CALIBRATOR]
    lines = []
    if unknown := [place for place, share in shares.items() if share is None]:
        lines.append(
            f"No share of the gap for {_list(unknown)}: the experts, or the models that these "
            f"start from, have no result for the same seeds and tasks."
        )
    if closed := [place for place, share in shares.items() if share and math.isnan(share)]:
        lines.append(
            f"No gap for {_list(closed)}: the experts are no better than the models that these "
            f"start from."
        )
    if len(shares) and EXPERTS not in done.index:
        lines.append("The experts have no result: nothing is normalised by them.")
    return lines


def _unlike_models(results: Sequence[CellResult]) -> list[str]:
    """Base and experts should be the same everywhere, merged models in a row for one seed."""

    def common(result: CellResult) -> Iterable[tuple[str, str]]:
        return (
            (model.name if model.role == "expert" else model.role, model.sha256)
            for model in result.models
            if model.role != "merged" and model.sha256
        )

    def merged(result: CellResult) -> Iterable[tuple[tuple[str, int], str]]:
        return (
            ((result.merger, result.seed), model.sha256)
            for model in result.models
            if model.role == "merged" and model.sha256
        )

    lines = []
    if unlike := [name for name, hashes in _by(results, common).items() if len(hashes) > 1]:
        within = any(
            len(hashes) > 1
            for seed in {result.seed for result in results}
            for hashes in _by([r for r in results if r.seed == seed], common).values()
        )
        lines.append(
            f"The weights of {_list(unlike)} are not the same in all cells: differences between "
            f"{'cells' if within else 'seeds'} are also differences between these models."
        )
    for (merger, seed), hashes in _by(results, merged).items():
        if len(hashes) > 1:
            lines.append(
                f"The calibrators of {merger}, seed {seed}, were given {len(hashes)} different "
                f"merged models: its row compares unlike things."
            )
    return lines


def _by(
    results: Iterable[CellResult], pairs: Callable[[CellResult], Iterable[tuple[_Name, str]]]
) -> Mapping[_Name, set[str]]:
    """All values of each name over the results."""
    values: dict[_Name, set[str]] = {}
    for result in results:
        for name, value in pairs(result):
            values.setdefault(name, set()).add(value)
    return values


def _titles(results: Iterable[CellResult]) -> str:
    return _list(dict.fromkeys(result.title for result in results))


def _list(names: Iterable[object]) -> str:
    texts = [str(name) for name in names]
    rest = len(texts) - _MOST_NAMED
    return ", ".join(texts[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
