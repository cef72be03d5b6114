"""A document in GitHub's Markdown."""

from __future__ import annotations

import re

from .document import Document, Entry, Grid, Note

__all__ = ["markdown"]

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~#&])")


def markdown(document: Document) -> str:
    """Write a document in GitHub's Markdown: a section per grid and per note.

    Records, which are long, are folded.
    """
    parts = [f"# {_escape(document.title)}"]
    for grid in document.grids:
        parts += [f"## {_escape(grid.title)}", _grid(grid), f"*{_escape(grid.caption)}*"]
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
    texts = grid.entries.map(_entry).rename(columns=_escape)
    numbers = texts.shape[1] - grid.text_columns
    align = ["left"] * grid.text_columns + ["right"] * numbers
    return texts.to_markdown(index=False, colalign=align, disable_numparse=True)


def _entry(entry: Entry) -> str:
    text = _escape(f"{entry.text} ± {entry.spread}" if entry.spread else entry.text)
    marks = f"<sup>{_escape(entry.marks)}</sup>" if entry.marks else ""
    return (f"**{text}**" if entry.bold and text else text) + marks


def _note(note: Note) -> str:
    if note.code:
        return "\n".join(["```bash", *note.lines, "```"])
    return "\n".join(f"- {_escape(line)}" for line in note.lines)


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
