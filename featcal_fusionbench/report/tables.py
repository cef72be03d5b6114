"""Tables for the terminal that stay readable at 80 columns in a log file without colour.

Cells are ``Text`` and not ``str``: rich would take the brackets of a task called ``glue[cola]`` for
its markup. Whatever colour says is also said in words.
"""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .run_report import RunReport, TaskData
from .text import format_bytes, format_change, format_duration

__all__ = ["change_cell", "number_cell", "samples_cell", "summary_table", "task_table"]


def summary_table(report: RunReport) -> Group:
    """The one table at the end of a run.

    Args:
        report: The run's report, complete or not.
    """
    parts: list[RenderableType] = [report.table()]
    if report.labels:
        parts.append(Text(f"note: {', '.join(report.labels)}", "yellow"))
    if report.error:
        parts.append(Text(f"error: {report.error}", "bold red"))
    parts += [Text(f"warning: {warning}", "yellow") for warning in report.all_warnings]
    parts += [Text(line) for line in report.details()]
    costs = [
        text.format(as_text(value))
        for text, as_text, value in (
            ("{} elapsed", format_duration, report.wall_seconds),
            ("{} CPU", format_duration, report.cpu_seconds),
            ("peak memory {}", format_bytes, report.peak_memory_bytes),
            ("on the GPU {}", format_bytes, report.peak_device_bytes),
        )
        if value is not None
    ]
    if costs:
        parts.append(Text(f"cost: {', '.join(costs)}"))
    parts += [Text(f"{name}: {path}") for name, path in report.outputs.items()]
    return Group(*parts)


def task_table(title: str, *columns: str) -> Table:
    """An empty table with a row per task; its first column is the task.

    Args:
        title: What it shows.
        columns: Headings of the other columns.
    """
    style: Any = {"title_justify": "left", "box": SIMPLE_HEAD, "pad_edge": False}
    table = Table(title=Text(title, "bold"), **style, padding=(0, 1))
    table.add_column("task", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    return table


def samples_cell(data: TaskData | None) -> Text:
    """How many inputs a task used, and of how many asked for if those were more."""
    if data is None:
        return Text("-")
    if data.used < data.requested:
        return Text(f"{data.used} of {data.requested}", "yellow")
    return Text(str(data.used))


def number_cell(value: float | None) -> Text:
    """A drift or a loss."""
    return Text("-" if value is None else f"{value:.4f}")


def change_cell(before: float | None, after: float | None, *, worse: bool) -> Text:
    """The change in percent of a number that should fall."""
    if before is None or after is None:
        return Text("-")
    change = format_change(before, after)
    if worse:
        return Text(f"{change} worse", "bold red")
    return Text(change, "green" if after < before else "")
