"""All files of a table: from the results of its cells to text, numbers and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from ..report.files import write_figure, write_text
from .checks import require_one_table
from .document import Document
from .figures import curve_figures, table_figure, tasks_figure
from .frame import tidy_csv
from .grids import make_grids
from .latex import latex
from .layout import TableLayout
from .markdown import markdown
from .notes import make_notes
from .results import CellResult
from .summary import Summary, summarise

__all__ = ["WrittenTable", "lay_out", "write_tables"]

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


def write_tables(
    results: Sequence[CellResult], layout: TableLayout, directory: str | Path
) -> WrittenTable:
    """Write everything that is made of a table's results.

    ``table.md``, ``table.tex``, ``table.csv``; ``table.png`` and ``table-tasks.png`` where mergers
    were run, ``curve-<name>.png`` for each swept setting; every picture as PDF too.

    Args:
        results: Results of the table, in any order.
        layout: The table.
        directory: Where the files go; it is made if missing. Files of an earlier call are replaced.

    Raises:
        TableError: The results cannot stand in one table.
        PublishedNumberError: The layout names a published result that does not exist.
        OSError: A file cannot be written.
    """
    document, summary, layout = lay_out(results, layout)
    directory = Path(directory)
    texts = {
        "table.md": markdown(document),
        "table.tex": latex(document),
        "table.csv": tidy_csv(summary.tidy),
    }
    files = []
    for name, text in texts.items():
        files.append(directory / name)
        write_text(files[-1], text)
    for name, figure in _figures(summary, layout).items():
        for suffix in (".png", ".pdf"):
            files.append(directory / f"{name}{suffix}")
            write_figure(files[-1], figure, dpi=_DPI)
    return WrittenTable(document=document, files=tuple(files))


def lay_out(
    results: Sequence[CellResult], layout: TableLayout
) -> tuple[Document, Summary, TableLayout]:
    """A table as text, what its figures show, and its layout; errors as of ``write_tables``."""
    require_one_table(results, layout)
    if results[0].size != "full":  # said in every title, since pictures travel alone
        layout = replace(layout, title=f"{layout.title} ({results[0].size} size)")
    summary = summarise(results, layout)
    grids, notes = make_grids(summary, layout), make_notes(summary, layout)
    return Document(name=layout.name, title=layout.title, grids=grids, notes=notes), summary, layout


def _figures(summary: Summary, layout: TableLayout) -> dict[str, Figure]:
    figures = {}
    if any(not result.point and not result.cell.is_reference for result in summary.results):
        figures["table"] = table_figure(summary, layout)
        figures["table-tasks"] = tasks_figure(summary, layout)
    for name, figure in curve_figures(summary, layout).items():
        figures[f"curve-{name}"] = figure
    return figures
