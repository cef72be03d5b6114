"""A document on the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .document import Cell, Document, Grid

__all__ = ["terminal"]

_MOST_SPREADS = 7
"""Columns of numbers with their deviations that fit a terminal."""


def terminal(document: Document) -> Group:
    """Render a document with rich: what is brief, and the notes that a reader needs.

    Cells are ``Text`` and not ``str``: rich would take brackets for its markup.
    """
    parts: list[RenderableType] = [Text(document.title, "bold")]
    parts += [_grid(grid) for grid in document.grids if grid.brief]
    for note in document.notes:
        if note.kind != "record":
            style = "yellow" if note.kind == "warning" else ""
            parts.append(Text(note.heading, f"bold {style}"))
            parts += [Text(f"  {line}", style) for line in note.lines]
    return Group(*parts)


def _grid(grid: Grid) -> Table:
    with_spread = sum(any(row[at].spread for row in grid.rows) for at in range(len(grid.header)))
    leave_out = with_spread > _MOST_SPREADS
    note = " Deviations stand in the written files." if leave_out else ""
    table = Table(
        title=Text(grid.title),
        caption=Text(grid.caption + note),
        box=SIMPLE_HEAD,
        title_justify="left",
    )
    rows = [[_text(cell, spread=not leave_out) for cell in row] for row in grid.rows]
    for at, text in enumerate(grid.header):
        if at < grid.text_columns:
            table.add_column(Text(text), overflow="fold")
        else:  # headings may wrap, numbers may not
            words = map(len, text.split())
            width = max(*words, *(row[at].cell_len for row in rows), 1)
            table.add_column(Text(text), justify="right", min_width=width, overflow="fold")
    for at, row in enumerate(rows):
        if at in grid.rules:
            table.add_section()
        elif at and row[0] == rows[at - 1][0]:
            row = [Text(), *row[1:]]
        table.add_row(*row)
    return table


def _text(cell: Cell, spread: bool) -> Text:
    deviation = f" ± {cell.spread}" if spread and cell.spread else ""
    return Text(cell.text + deviation + cell.marks, "bold" if cell.bold else "")
