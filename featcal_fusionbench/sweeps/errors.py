"""Errors of experiments and sweeps. Each message names the thing at fault and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["ExperimentError", "SweepError", "require_known"]


class ExperimentError(ValueError):
    """An experiment, a row, a column or a seed does not exist, or its file is wrong."""


class SweepError(RuntimeError):
    """A sweep cannot start: its directory, its launcher, or what it would read is not usable."""


def require_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Make sure that names exist.

    Args:
        what: What they name, with its place: ``table``, ``row of clip-…``.
        names: What was given.
        known: All names.

    Raises:
        ExperimentError: One does not exist; the message has near names, or all of them.
    """
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(known)}."
            raise ExperimentError(f"There is no {what} {name!r}. {hint}")
