"""Errors of experiments and sweeps. Each message names the thing at fault and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["ExperimentError", "SweepError", "unknown"]


class ExperimentError(ValueError):
    """An experiment, a row, a column or a seed does not exist, or its file is wrong."""


class SweepError(RuntimeError):
    """A sweep cannot start: its directory, its launcher, or what it would read is not usable."""


def unknown(what: str, name: str, known: Iterable[str]) -> ExperimentError:
    """The error for a name that does not exist, with near names or all of them.

    Args:
        what: What was to be named, with its place: ``table``, ``row of clip-…``.
        name: What was given.
        known: All names.
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(known)}."
    return ExperimentError(f"There is no {what} {name!r}. {hint}")
