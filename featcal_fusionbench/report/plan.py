"""What a calibration would do, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..calibration.estimate import Fit
from ..calibration.plan import Stage
from .text import format_bytes, format_duration, relative_name, split_index

__all__ = ["plan_table"]

_NAMES_PER_REASON = 3
_LONGEST_NAME = 40

_Row = tuple[str, ...]
"""Of one module: its name as seen from its block, kind, shape, bias, and which rows count."""


def plan_table(fit: Fit) -> Group:
    """The modules in the order of calibration, those that are skipped, and what it will take.

    Args:
        fit: The plan and its estimate. Neighbouring blocks that are alike are shown once.
    """
    plan, estimate = fit.plan, fit.estimate
    blocks = [
        (name, _rows(name, stages))
        for name, stages in groupby(
            plan.stages, key=lambda stage: "" if stage.block is None else stage.block.name
        )
    ]
    rows = [row for _, own in blocks for row in own]
    width = min(max((len(row[0]) for row in rows), default=0), _LONGEST_NAME)
    parts: list[RenderableType] = [
        Text(f"FeatCal plan: {len(rows)} modules to calibrate, {len(plan.skipped)} skipped", "bold")
    ]
    for (_, _, own), group in groupby(blocks, key=_likeness):
        parts += [Text(_title([name for name, _ in group]), "cyan"), _rows_table(own, width)]
    skipped: dict[str, list[str]] = {}
    for module in plan.skipped:
        skipped.setdefault(module.reason, []).append(module.name)
    for reason, names in skipped.items():
        more = len(names) - _NAMES_PER_REASON
        listed = ", ".join(names[:_NAMES_PER_REASON]) + (f" and {more} more" if more > 0 else "")
        parts.append(Text(f"skipped, {reason} ({len(names)}): {listed}"))
    parts.append(
        Text(
            f"estimate: about {format_duration(estimate.seconds)}, "
            f"peak memory about {format_bytes(estimate.memory_bytes)}, "
            f"{format_bytes(fit.available_bytes)} free, {estimate.flops / 1e12:.3g} TFLOP"
        )
    )
    parts.append(Text(f"memory: {fit.holding}"))
    return Group(*parts)


def _rows(block: str, stages: Iterable[Stage]) -> tuple[_Row, ...]:
    return tuple(
        (
            relative_name(module.name, block),
            module.kind.name,
            " x ".join(map(str, module.shape)),
            "bias" if module.has_bias else "",
            "" if group.rule is None else str(group.rule),
        )
        for stage in stages
        for group in stage.groups
        for module in group.modules
    )


def _likeness(block: tuple[str, tuple[_Row, ...]]) -> tuple[str, bool, tuple[_Row, ...]]:
    """Equal for neighbours that need only be shown once."""
    name, rows = block
    parent, index = split_index(name)
    return parent, index is None, rows


def _title(alike: list[str]) -> str:
    first, last = alike[0], alike[-1]
    if not first:
        return "outside all blocks"
    if len(alike) == 1:
        return first
    return f"{first} to {split_index(last)[1]} ({len(alike)} blocks alike)"


def _rows_table(rows: Iterable[_Row], width: int) -> Table:
    # Fixed widths, so that the columns of all blocks stand below each other.
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 1))
    table.add_column(width=width, overflow="fold")
    table.add_column(width=10)
    table.add_column(width=13, justify="right")
    table.add_column(width=4)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
