"""Footnote marks: one for every label of cells and every source of published values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .results import TRAINED_ON_TEST_INPUTS
from .summary import CellSummary

__all__ = ["PARTIAL", "Marks"]

PARTIAL = "*"
"""Marks an average over fewer tasks than the table has."""

_SIGNS = ("†", "‡", "§", "¶", "‖")


@dataclass(frozen=True)
class Marks:
    """The marks of one document.

    Attributes:
        labels: Mark of each label; the first sign is that of training on test inputs.
        sources: Mark of each source of published values.
    """

    labels: Mapping[str, str]
    sources: Mapping[str, str]

    @classmethod
    def of(cls, summaries: Sequence[CellSummary]) -> Marks:
        """Give out marks for what the summaries hold."""
        labels = sorted(
            {label for summary in summaries for label in summary.labels},
            key=lambda label: (label != TRAINED_ON_TEST_INPUTS, label),
        )
        sources = dict.fromkeys(c.row.source for s in summaries for c in s.comparisons)
        return cls(
            labels={
                label: _SIGNS[at % len(_SIGNS)] * (1 + at // len(_SIGNS))
                for at, label in enumerate(labels)
            },
            sources={source: f"[{number}]" for number, source in enumerate(sources, start=1)},
        )

    def of_labels(self, labels: Iterable[str]) -> str:
        """The marks of a cell with these labels."""
        return "".join(self.labels[label] for label in labels)
