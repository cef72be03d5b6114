"""Tables for the terminal that stay readable at 80 columns in a log file without colour.

Cells are ``Text`` and not ``str``: rich would take the brackets of a task called ``glue[cola]`` for
its markup. Whatever colour says is also said in words.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..calibration.results import CalibrationResult, ModuleResult, SkippedModule
from .drift import DriftChange
from .run_report import FeatCalReport, RunReport, SurgeryReport, TaskData
from .text import (
    common_prefix,
    format_bytes,
    format_change,
    format_duration,
    format_scientific,
    relative_name,
    split_index,
)

__all__ = [
    "PlanEstimate",
    "PlanRow",
    "module_table",
    "plan_table",
    "render_text",
    "summary_table",
]

_NAMES_PER_REASON = 3


@dataclass(frozen=True)
class PlanRow:
    """One module of a plan.

    Attributes:
        block: Name of its block, or of its stage outside all blocks; may be empty.
        module: Name of the module, in full.
        kind: What is solved.
        shape: Shape of its weight.
        bias: Whether its bias is calibrated too.
        note: A remark.
    """

    block: str
    module: str
    kind: str
    shape: tuple[int, ...]
    bias: bool
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanEstimate:
    """What a run is expected to take; None where there is no estimate.

    Attributes:
        flops: Floating-point operations over all tasks.
        seconds: Wall-clock seconds.
        memory_bytes: Peak memory of the process.
        available_bytes: Memory that is free now.
    """

    flops: float | None = None
    seconds: float | None = None
    memory_bytes: int | None = None
    available_bytes: int | None = None


def render_text(renderable: RenderableType, width: int = 80) -> str:
    """Render without colour or control characters, for log files.

    Args:
        renderable: A table of this module.
        width: Columns.
    """
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    # Rich pads every line to the full width, which only bloats a log.
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def plan_table(
    rows: Sequence[PlanRow],
    skipped: Sequence[SkippedModule] = (),
    estimate: PlanEstimate | None = None,
    every_block: bool = False,
) -> Group:
    """What a calibration would do.

    Args:
        rows: The modules in the order of calibration.
        skipped: Modules that keep their merged values, shown by reason.
        estimate: Expected time and memory.
        every_block: List each block, also where it repeats the one before it.
    """
    parts: list[RenderableType] = [
        Text(f"FeatCal plan: {len(rows)} modules to calibrate, {len(skipped)} skipped", "bold")
    ]
    blocks = [_PlanBlock.of(name, list(own)) for name, own in groupby(rows, key=lambda r: r.block)]
    longest = max((len(row.module) for block in blocks for row in block.rows), default=0)
    for _, group in groupby(blocks, key=lambda b: b.name if every_block else b.likeness):
        alike = list(group)
        parts += [Text(_block_title(alike), "cyan"), _plan_rows(alike[0].rows, min(longest, 40))]
    parts += _skipped_lines(skipped)
    if estimate is not None:
        parts.append(Text(_estimate_line(estimate)))
    return Group(*parts)


def summary_table(report: RunReport) -> Group:
    """The one table at the end of a run.

    Args:
        report: The run's report, complete or not.
    """
    parts: list[RenderableType] = []
    if isinstance(report, FeatCalReport):
        parts.append(_drift_table(report))
    elif isinstance(report, SurgeryReport):
        parts.append(_loss_table(report))
    else:
        parts.append(Text(f"{report.method} {report.status}", "bold"))
    if report.labels:
        parts.append(Text(f"note: {', '.join(report.labels)}", "yellow"))
    if report.error:
        parts.append(Text(f"error: {report.error}", "bold red"))
    parts += [Text(f"warning: {warning}", "yellow") for warning in report.all_warnings]
    parts += [Text(line) for line in _footer_lines(report)]
    return Group(*parts)


def _drift_table(report: FeatCalReport) -> Table:
    changes = {change.task: change for change in report.worsened}
    before = {drift.task: drift for drift in report.drift_before}
    after = {drift.task: drift for drift in report.drift_after}
    data = {entry.task: entry for entry in report.data}

    table = _table(f"FeatCal {report.status}: final feature drift on held-out inputs")
    table.add_column("task", overflow="fold")
    for name in ("samples", "held-out", "before", "after", "change"):
        table.add_column(name, justify="right", overflow="fold")
    # dict.fromkeys: a set that keeps the order of the first appearance
    for task in dict.fromkeys([*data, *before, *after]):
        measured = before.get(task) or after.get(task)
        heldout = measured.inputs if measured else len(data[task].heldout_indices)
        cells = _drift_cells(
            before[task].final if task in before else None,
            after[task].final if task in after else None,
            changes.get(task),
        )
        table.add_row(Text(task), _samples(data.get(task)), Text(str(heldout)), *cells)
    if len({*before, *after}) > 1:
        worse_mean = DriftChange(
            "mean", report.mean_drift_before or 0, report.mean_drift_after or 0
        )
        table.add_section()
        cells = _drift_cells(
            report.mean_drift_before,
            report.mean_drift_after,
            worse_mean if before and after and worse_mean.is_worse else None,
        )
        table.add_row(Text("mean", "bold"), Text(), Text(), *cells)
    return table


def _loss_table(report: SurgeryReport) -> Table:
    """Losses on held-out inputs where there are any: the training loss always falls."""
    data = {entry.task: entry for entry in report.data}
    trained = {task.task: task for task in report.result.tasks} if report.result else {}
    table = _table(f"{report.method} {report.status}: mean |difference| to the expert")
    table.add_column("task", overflow="fold")
    for name in ("samples", "before", "after", "held-out", "after", "change"):
        table.add_column(name, justify="right", overflow="fold")
    for name in dict.fromkeys([*data, *trained]):
        task = trained.get(name)
        losses = (
            (task.loss_start, task.loss_end, task.heldout_start, task.heldout_end)
            if task
            else (None,) * 4
        )
        cells = [Text("-" if value is None else f"{value:.4f}") for value in losses]
        start, end = losses[2:] if losses[2] is not None else losses[:2]
        change = Text("-")
        if start is not None and end is not None:
            worse = end > start
            change = Text(format_change(start, end) + " worse" * worse, "bold red" * worse)
        table.add_row(Text(name), _samples(data.get(name)), *cells, change)
    return table


def module_table(result: CalibrationResult) -> Group:
    """How each module's solve went: the numbers that show a bad system before accuracy does.

    Args:
        result: What the loop did.
    """
    table = _table("Modules")
    table.add_column("module", overflow="fold")
    for name in ("rows", "cond.", "residual", "damping", "change"):
        table.add_column(name, justify="right", overflow="fold")
    for _, group in groupby(result.modules, key=lambda module: module.block):
        modules = list(group)
        prefix = common_prefix(module.name for module in modules)
        if prefix:
            table.add_row(Text(prefix, "cyan"))
        for module in modules:
            name = ("  " if prefix else "") + relative_name(module.name, prefix)
            table.add_row(Text(name), *_module_cells(module))
    remarks = [
        Text(f"{'remark' if module.calibrated else 'kept'}: {module.name}: {module.note}", "yellow")
        for module in result.modules
        if module.note
    ]
    return Group(table, *remarks)


@dataclass(frozen=True)
class _PlanBlock:
    """A block's name and its rows, with module names as seen from the block."""

    name: str
    rows: tuple[PlanRow, ...]

    @classmethod
    def of(cls, name: str, rows: Iterable[PlanRow]) -> _PlanBlock:
        return cls(
            name, tuple(replace(r, block="", module=relative_name(r.module, name)) for r in rows)
        )

    @property
    def likeness(self) -> tuple[object, ...]:
        """Equal for neighbours that need only be shown once."""
        prefix, index = split_index(self.name)
        return (prefix, index is None, self.rows)


def _block_title(alike: Sequence[_PlanBlock]) -> str:
    first, last = alike[0].name, alike[-1].name
    if not first:
        return "outside all blocks"
    if len(alike) == 1:
        return first
    return f"{first} to {split_index(last)[1]} ({len(alike)} blocks alike)"


def _plan_rows(rows: Sequence[PlanRow], width: int) -> Table:
    # Fixed widths, so that the columns of all blocks stand below each other.
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 1))
    table.add_column(width=width, overflow="fold")
    table.add_column(width=10)
    table.add_column(width=13, justify="right")
    table.add_column(width=4)
    table.add_column(overflow="fold")
    for row in rows:
        shape = " x ".join(map(str, row.shape))
        bias = "bias" if row.bias else ""
        table.add_row(*map(Text, (row.module, row.kind, shape, bias, row.note)))
    return table


def _skipped_lines(skipped: Sequence[SkippedModule]) -> list[RenderableType]:
    by_reason: dict[str, list[str]] = {}
    for module in skipped:
        by_reason.setdefault(module.reason, []).append(module.name)
    lines: list[RenderableType] = []
    for reason, names in by_reason.items():
        more = len(names) - _NAMES_PER_REASON
        listed = ", ".join(names[:_NAMES_PER_REASON]) + (f" and {more} more" if more > 0 else "")
        lines.append(Text(f"skipped, {reason} ({len(names)}): {listed}"))
    return lines


def _estimate_line(estimate: PlanEstimate) -> str:
    parts = []
    if estimate.seconds is not None:
        parts.append(f"about {format_duration(estimate.seconds)}")
    if estimate.memory_bytes is not None:
        parts.append(f"peak memory about {format_bytes(estimate.memory_bytes)}")
    if estimate.available_bytes is not None:
        parts.append(f"{format_bytes(estimate.available_bytes)} free")
    if estimate.flops is not None:
        parts.append(f"{estimate.flops / 1e12:.3g} TFLOP")
    return f"estimate: {', '.join(parts) or 'none'}"


def _table(title: str) -> Table:
    return Table(
        title=Text(title, "bold"),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
    )


def _samples(data: TaskData | None) -> Text:
    if data is None:
        return Text("-")
    if data.used < data.requested:
        return Text(f"{data.used} of {data.requested}", "yellow")
    return Text(str(data.used))


def _drift_cells(
    before: float | None, after: float | None, worse: DriftChange | None
) -> list[Text]:
    texts = [Text("-" if value is None else f"{value:.4f}") for value in (before, after)]
    if before is None or after is None:
        return [*texts, Text("-")]
    change = format_change(before, after)
    if worse:
        return [*texts, Text(f"{change} worse", "bold red")]
    return [*texts, Text(change, "green" if after < before else "")]


def _module_cells(module: ModuleResult) -> list[Text]:
    change = f"{100 * module.relative_change:.2f}%" if module.calibrated else "kept"
    return [
        Text(str(module.rows)),
        Text(format_scientific(module.condition)),
        Text(format_scientific(module.residual)),
        Text(format_scientific(module.damping), "yellow" if module.damping else ""),
        Text(change, "" if module.calibrated else "yellow"),
    ]


def _footer_lines(report: RunReport) -> list[str]:
    lines = []
    if isinstance(report, FeatCalReport):
        lines.append(
            f"modules: {report.modules_calibrated} calibrated, {report.modules_kept} kept after a "
            f"failure, {report.modules_skipped} skipped by plan"
        )
    costs = []
    if report.wall_seconds is not None:
        costs.append(f"{format_duration(report.wall_seconds)} elapsed")
    if report.cpu_seconds is not None:
        costs.append(f"{format_duration(report.cpu_seconds)} CPU")
    if report.peak_memory_bytes is not None:
        costs.append(f"peak memory {format_bytes(report.peak_memory_bytes)}")
    if report.peak_device_bytes is not None:
        costs.append(f"on the GPU {format_bytes(report.peak_device_bytes)}")
    if costs:
        lines.append(f"cost: {', '.join(costs)}")
    return lines + [f"{name}: {path}" for name, path in report.outputs.items()]
