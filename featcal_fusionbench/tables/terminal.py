"""A document on the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .document import Document, Entry, Grid

__all__ = ["terminal"]

_MOST_SPREADS = 7
"""Columns of numbers with their deviations that fit a terminal."""


def terminal(document: Document) -> Group:
    """Render a document with rich: what is brief, and the notes that a reader needs.

    Entries are ``Text`` and not ``str``: rich would take brackets for its markup.
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
    with_spread = grid.entries.map(lambda entry: bool(entry.spread)).any().sum()
    leave_out = with_spread > _MOST_SPREADS
    note = " Deviations stand in the written files." if leave_out else ""
    table = Table(
        title=Text(grid.title),
        caption=Text(grid.caption + note),
        box=SIMPLE_HEAD,
        title_justify="left",
    )
    texts = grid.entries.map(lambda entry: _text(entry, spread=not leave_out))
    for at, header in enumerate(texts.columns):
        if at < grid.text_columns:
            table.add_column(Text(header), overflow="fold")
        else:  # headings may wrap, numbers may not
            words = map(len, header.split())
            width = max(*words, *(text.cell_len for text in texts.iloc[:, at]), 1)
            table.add_column(Text(header), justify="right", min_width=width, overflow="fold")
    before = None
    for at, (first, *others) in enumerate(texts.itertuples(index=False)):
        if at in grid.rules:
            table.add_section()
        table.add_row(Text() if first == before and at not in grid.rules else first, *others)
        before = first
    return table


def _text(entry: Entry, spread: bool) -> Text:
    deviation = f" ± {entry.spread}" if spread and entry.spread else ""
    return Text(entry.text + deviation + entry.marks, "bold" if entry.bold else "")
