"""Accuracies of the rows, and their summary over seeds."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from featcal_fusionbench.report.gap import share_of_gap

MERGED = "merged"
EXPERTS = "experts"
"""Keys of the two rows between which the gap lies."""


@dataclass(frozen=True)
class RowResult:
    """One row of the table for one seed.

    Attributes:
        row: key of the row.
        seed: seed of the build and of the run.
        accuracies: by task, from 0 to 1; of a regression task Spearman's rho, from -1 to 1.
        seconds: wall-clock time of the row's FusionBench runs; None if the result was kept.
        problems: by task, what is wrong with its number.
    """

    row: str
    seed: int
    accuracies: dict[str, float]
    seconds: float | None = None
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def average(self) -> float:
        """Mean over tasks, every task counting the same."""
        return statistics.fmean(self.accuracies.values())


@dataclass(frozen=True)
class Summary:
    """One row over all seeds.

    Attributes:
        row: key of the row.
        accuracies: by task, mean over seeds.
        average: mean over tasks and seeds.
        deviation: standard deviation of the average over seeds; None for one seed.
        share: share of the gap closed; None unless both its rows were run.
        seconds: mean over the seeds that were run now; None if all results were kept.
    """

    row: str
    accuracies: dict[str, float]
    average: float
    deviation: float | None
    share: float | None
    seconds: float | None


def summarise(results: list[RowResult]) -> list[Summary]:
    """Average every row over its seeds, in the order of first appearance."""
    rows: dict[str, list[RowResult]] = {}
    for result in results:
        rows.setdefault(result.row, []).append(result)
    averages = {
        row: statistics.fmean(result.average for result in members) for row, members in rows.items()
    }
    summaries = []
    for row, members in rows.items():
        times = [result.seconds for result in members if result.seconds is not None]
        share = None
        if MERGED in averages and EXPERTS in averages:
            share = share_of_gap(averages[row], averages[MERGED], averages[EXPERTS])
        summaries.append(
            Summary(
                row=row,
                accuracies={
                    task: statistics.fmean(result.accuracies[task] for result in members)
                    for task in members[0].accuracies
                },
                average=averages[row],
                deviation=(
                    statistics.stdev(result.average for result in members)
                    if len(members) > 1
                    else None
                ),
                share=share,
                seconds=statistics.fmean(times) if times else None,
            )
        )
    return summaries
