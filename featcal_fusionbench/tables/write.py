"""All files of a table: from the results of its cells to text, numbers and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from ..report.files import write_figure, write_text
from .checks import require_one_table
from .curves import curve_figures
from .document import Document
from .figures import table_figure, tasks_figure
from .grids import make_grids
from .latex import latex
from .layout import TableLayout
from .markdown import markdown
from .marks import Marks
from .notes import make_notes
from .results import CellResult
from .summary import CellSummary, summarise
from .tidy import tidy_csv

__all__ = ["WrittenTable", "make_document", "write_tables"]

_DPI = 160


@dataclass(frozen=True, kw_only=True)
class WrittenTable:
    """A table that was written.

    Attributes:
        document: Its text; ``terminal.terminal`` shows it.
        files: What was written.
    """

    document: Document
    files: tuple[Path, ...]


def make_document(cells: Sequence[CellResult], layout: TableLayout) -> Document:
    """Lay a table out as text.

    Args:
        cells: Results of the table, in any order.
        layout: The table.

    Raises:
        TableError: The cells cannot stand in one table.
        PublishedNumberError: The layout names a published result that does not exist.
        MixedTreesError: Its published results are of two trees.
    """
    require_one_table(cells, layout)
    layout = _with_size(cells, layout)
    return _document(cells, summarise(cells, layout), layout)


def write_tables(
    cells: Sequence[CellResult], layout: TableLayout, directory: str | Path
) -> WrittenTable:
    """Write everything that is made of a table's results.

    ``table.md``, ``table.tex``, ``table.csv``; ``table.png`` and ``table-tasks.png`` where mergers
    were run, ``curve-<name>.png`` for each swept setting; every picture as PDF too.

    Args:
        cells: Results of the table, in any order.
        layout: The table.
        directory: Where the files go; it is made if missing. Files of an earlier call are replaced.

    Raises:
        TableError: The cells cannot stand in one table.
        PublishedNumberError: The layout names a published result that does not exist.
        MixedTreesError: Its published results are of two trees.
        OSError: A file cannot be written.
    """
    require_one_table(cells, layout)
    layout = _with_size(cells, layout)
    directory = Path(directory)
    summaries = summarise(cells, layout)
    document = _document(cells, summaries, layout)
    texts = {
        "table.md": markdown(document),
        "table.tex": latex(document),
        "table.csv": tidy_csv(cells, layout),
    }
    files = []
    for name, text in texts.items():
        files.append(directory / name)
        write_text(files[-1], text)
    for name, figure in _figures(summaries, layout).items():
        for suffix in (".png", ".pdf"):
            files.append(directory / f"{name}{suffix}")
            write_figure(files[-1], figure, dpi=_DPI)
    return WrittenTable(document=document, files=tuple(files))


def _with_size(cells: Sequence[CellResult], layout: TableLayout) -> TableLayout:
    """Say in every title that a smoke run is no measurement, since pictures travel alone."""
    if cells[0].size == "full":
        return layout
    return replace(layout, title=f"{layout.title} ({cells[0].size} size)")


def _document(
    cells: Sequence[CellResult], summaries: Sequence[CellSummary], layout: TableLayout
) -> Document:
    marks = Marks.of(summaries)
    return Document(
        name=layout.name,
        title=layout.title,
        grids=make_grids(summaries, layout, marks),
        notes=make_notes(cells, summaries, layout, marks),
    )


def _figures(summaries: Sequence[CellSummary], layout: TableLayout) -> dict[str, Figure]:
    figures = {}
    if any(s.cells and not s.key.point and not s.key.is_reference for s in summaries):
        figures["table"] = table_figure(summaries, layout)
        figures["table-tasks"] = tasks_figure(summaries, layout)
    for name, figure in curve_figures(summaries, layout).items():
        figures[f"curve-{name}"] = figure
    return figures
