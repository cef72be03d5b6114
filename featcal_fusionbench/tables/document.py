"""A table as text that knows no format: grids of entries, and what stands below them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .frame import Frame

__all__ = ["Document", "Entry", "Grid", "Note"]


@dataclass(frozen=True)
class Entry:
    """What stands in one place of a grid.

    Attributes:
        text: What it says.
        spread: The deviation that belongs to it, if any, without the sign.
        marks: Footnote marks behind it.
        bold: Whether it stands out.
    """

    text: str = ""
    spread: str = ""
    marks: str = ""
    bold: bool = False


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table.

    Attributes:
        name: Short name, for labels.
        title: Heading.
        entries: A frame of ``Entry``; its columns are the header.
        text_columns: Leading columns that hold names; the others hold numbers.
        rules: Numbers of rows before which a rule stands.
        caption: What one needs to read it.
        brief: Whether it stands also where there is little room.
    """

    name: str
    title: str
    entries: Frame
    text_columns: int
    rules: Sequence[int] = ()
    caption: str = ""
    brief: bool = False


@dataclass(frozen=True)
class Note:
    """Lines below the grids.

    Attributes:
        heading: What they are about.
        lines: One statement each.
        kind: ``warning``: what makes numbers doubtful; ``reader``: what explains them;
            ``record``: how they were made, for whoever wants to make them again.
        code: Whether the lines are to be typed as they stand.
    """

    heading: str
    lines: tuple[str, ...]
    kind: Literal["warning", "reader", "record"] = "reader"
    code: bool = False


@dataclass(frozen=True, kw_only=True)
class Document:
    """All of a table.

    Attributes:
        name: Of the experiment.
        title: Of the table.
        grids: Those that say most first.
        notes: What stands below.
    """

    name: str
    title: str
    grids: tuple[Grid, ...]
    notes: tuple[Note, ...]
