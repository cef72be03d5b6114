"""A document in GitHub's Markdown."""

from __future__ import annotations

import re

from .document import Cell, Document, Grid, Note

__all__ = ["markdown"]

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~#&])")


def markdown(document: Document) -> str:
    """Write a document in GitHub's Markdown: a section per grid and per note.

    Records, which are long, are folded.
    """
    parts = [f"# {_escape(document.title)}"]
    for grid in document.grids:
        parts += [f"## {_escape(grid.title)}", _grid(grid)]
        if grid.caption:
            parts.append(f"*{_escape(grid.caption)}*")
    for note in document.notes:
        if note.kind == "record":
            parts += [
                f"<details><summary>{_escape(note.heading)}</summary>",
                _note(note),
                "</details>",
            ]
        else:
            parts += [f"## {_escape(note.heading)}", _note(note)]
    return "\n\n".join(parts) + "\n"


def _grid(grid: Grid) -> str:
    numbers = len(grid.header) - grid.text_columns
    lines = [[_escape(text) for text in grid.header]]
    lines.append(["---"] * grid.text_columns + ["---:"] * numbers)
    lines += [[_cell(cell) for cell in row] for row in grid.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(cell: Cell) -> str:
    text = _escape(f"{cell.text} ± {cell.spread}" if cell.spread else cell.text)
    marks = f"<sup>{_escape(cell.marks)}</sup>" if cell.marks else ""
    return (f"**{text}**" if cell.bold and text else text) + marks


def _note(note: Note) -> str:
    if note.code:
        return "\n".join(["```bash", *note.lines, "```"])
    return "\n".join(f"- {_escape(line)}" for line in note.lines)


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
