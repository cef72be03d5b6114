"""The bars that are shown while a build is made."""

from __future__ import annotations

from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn


def build_progress() -> Progress:
    """A display of one bar per part of a build."""
    return Progress(*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
