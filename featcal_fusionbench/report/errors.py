"""The errors of the report package. Each message names the file or directory and the remedy."""

from __future__ import annotations

__all__ = ["ReportError", "UnwritableDirectoryError"]


class ReportError(ValueError):
    """A file is not a report that this version can read."""


class UnwritableDirectoryError(OSError):
    """A directory that results are to be written to cannot be written to."""
