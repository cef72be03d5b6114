"""What the demo shows of a table's results: one line a method, a picture, and notes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from featcal_fusionbench.report import write_figure, write_json
from featcal_fusionbench.report.gap import share_of_gap
from featcal_fusionbench.sweeps.cells import Cell
from featcal_fusionbench.sweeps.experiment import Experiment
from featcal_fusionbench.tables.results import BASE, EXPERTS, NO_CALIBRATOR, CellResult

MERGED = "merged"
"""Row of the merged model, from which the gap to the experts is counted."""

COLOURS = {
    BASE: "#d9d9d9",
    EXPERTS: "#b5322a",
    MERGED: "#9a9a9a",
    "regmean": "#e3b778",
    "featcal-block": "#8fb8de",
    "featcal-module": "#1f5fa8",
}
"""Colours of the rows, in the order in which they are shown."""

MEASURES = {
    "image": "test accuracy in percent",
    "text": "exact match in percent (intensity: Spearman's rho x 100)",
}
_FIGURE_TITLES = {
    "image": "Seven small CLIP experts merged into one model",
    "text": "Six small T5 experts, trained on this machine, merged into one model",
}


def row_of(cell: Cell) -> str:
    """The demo's name for the row of a cell. Those that ``COLOURS`` lacks are not shown."""
    return cell.merger if cell.calibrator == NO_CALIBRATOR else cell.calibrator


def depends_on_the_build_alone(cell: Cell) -> bool:
    """Whether a result is kept beside the build: what the methods are compared with."""
    return cell.is_reference or row_of(cell) not in COLOURS


def scale_of(cell: Cell, experiment: Experiment) -> float | None:
    """The scaling factor of a merged model in a table that has several of them, else None."""
    scales = {
        row: merger.settings["scaling_factor"]
        for row, merger in experiment.mergers.items()
        if "scaling_factor" in merger.settings
    }
    return scales.get(row_of(cell)) if len(scales) > 1 else None


@dataclass(frozen=True)
class RowResult:
    """One row for one seed.

    Attributes:
        row: Its name.
        seed: The seed.
        accuracies: By task, 0 to 1; of a regression task Spearman's rho, -1 to 1.
        seconds: Elapsed, with evaluation; None if the result was kept.
        problems: By task, what is wrong with its number.
    """

    row: str
    seed: int
    accuracies: dict[str, float]
    seconds: float | None
    problems: dict[str, str]

    @classmethod
    def of(cls, cell: Cell, result: CellResult, kept: bool) -> RowResult:
        """Read a cell's result; an undefined rho counts as 0."""
        undefined = [task for task, score in result.scores.items() if math.isnan(score)]
        problem = "Spearman's rho is undefined (NaN): all answers are alike"
        return cls(
            row=row_of(cell),
            seed=cell.seed,
            accuracies=result.scores | dict.fromkeys(undefined, 0.0),
            seconds=None if kept else (result.finished - result.started).total_seconds(),
            problems=dict.fromkeys(undefined, problem),
        )

    @property
    def average(self) -> float:
        """Mean over tasks, every task counting the same."""
        return statistics.fmean(self.accuracies.values())


@dataclass(frozen=True)
class Summary:
    """One row over all seeds.

    Attributes:
        row: Its name.
        accuracies: By task, mean over seeds.
        average: Mean over tasks and seeds.
        deviation: Standard deviation of the average over seeds; None for one seed.
        share: Share of the gap closed; None unless both rows that make the gap were run.
        seconds: Mean over the seeds that were run now; None if all results were kept.
    """

    row: str
    accuracies: dict[str, float]
    average: float
    deviation: float | None
    share: float | None
    seconds: float | None


def summarise(results: Sequence[RowResult]) -> list[Summary]:
    """Average every row over its seeds, in the order of first appearance."""
    rows: dict[str, list[RowResult]] = {}
    for result in results:
        rows.setdefault(result.row, []).append(result)
    averages = {row: statistics.fmean(r.average for r in rows[row]) for row in rows}
    gap = (averages[MERGED], averages[EXPERTS]) if {MERGED, EXPERTS} <= rows.keys() else None
    summaries = []
    for row, members in rows.items():
        seconds = [r.seconds for r in members if r.seconds is not None]
        tasks = members[0].accuracies
        summary = Summary(
            row=row,
            accuracies={t: statistics.fmean(r.accuracies[t] for r in members) for t in tasks},
            average=averages[row],
            deviation=statistics.stdev(r.average for r in members) if len(members) > 1 else None,
            share=share_of_gap(averages[row], *gap) if gap else None,
            seconds=statistics.fmean(seconds) if seconds else None,
        )
        summaries.append(summary)
    return summaries


@dataclass
class Demo:
    """The results of a demo, as they are shown.

    Attributes:
        name: ``image`` or ``text``.
        experiment: Its table.
        seeds: The seeds.
        rows: The rows that are shown, in order.
        results: Their results.
        scales: Results by scaling factor and seed, where there are several factors.
    """

    name: str
    experiment: Experiment
    seeds: Sequence[int]
    rows: Sequence[str]
    results: list[RowResult] = field(default_factory=list)
    scales: dict[int, dict[float, RowResult]] = field(default_factory=dict)

    def add(self, cell: Cell, found: CellResult, *, kept: bool) -> None:
        """Add a cell's result, which was measured now, or kept."""
        result = RowResult.of(cell, found, kept)
        if result.row in self.rows:
            self.results.append(result)
        if (scale := scale_of(cell, self.experiment)) is not None:
            self.scales.setdefault(cell.seed, {})[scale] = result

    def title_of(self, row: str) -> str:
        """What a row is called."""
        if row in (BASE, EXPERTS):
            return row
        methods = {**self.experiment.calibrators, **self.experiment.mergers}
        return methods[row].title

    def notes(self) -> list[str]:
        """What stands below the table."""
        notes = []
        for seed in self.seeds:
            scales = sorted(self.scales.get(seed, {}).items())
            averages = {scale: result.average for scale, result in scales}
            if averages:
                best = max(averages, key=averages.__getitem__)
                notes.append(
                    f"seed {seed}: of the scaling factors {', '.join(map(str, averages))}, Task "
                    f"Arithmetic is best with {best} on the test inputs: "
                    f"{100 * averages[best]:.1f} on average"
                )
        return notes + [
            f"{self.title_of(result.row)}, seed {result.seed}, {task}: {problem}; counted as 0"
            for result in self.results
            for task, problem in result.problems.items()
        ]

    def write(self, directory: Path) -> Table:
        """Write ``table.json`` and ``table.png``.

        Returns:
            The table for the terminal.
        """
        results = sorted(
            self.results, key=lambda r: (self.seeds.index(r.seed), self.rows.index(r.row))
        )
        summaries = summarise(results)
        document = {
            "benchmark": self.name,
            "measure": MEASURES[self.name],
            "seeds": list(self.seeds),
            "rows": [asdict(summary) for summary in summaries],
            "runs": [asdict(result) for result in results],
            "notes": self.notes(),
        }
        write_json(directory / "table.json", document)
        write_figure(directory / "table.png", self._figure(summaries), dpi=160)
        return self._table(summaries)

    def _table(self, summaries: Sequence[Summary]) -> Table:
        tasks = list(summaries[0].accuracies)
        count = len(self.seeds)
        seeds = f"mean of {count} seeds" if count > 1 else f"seed {self.seeds[0]}"
        table = Table(
            title=f"{self.experiment.title}: {MEASURES[self.name]} ({seeds})",
            caption="gap closed = (row - Task Arithmetic) / (experts - Task Arithmetic); "
            "experts: each on its own task",
        )
        table.add_column("", no_wrap=True)
        for task in tasks:
            table.add_column(task, justify="right")
        table.add_column("average", justify="right", style="bold")
        table.add_column("gap closed", justify="right")
        table.add_column("seconds", justify="right", style="dim")
        for summary in summaries:
            average = _percent(summary.average)
            if summary.deviation is not None:
                average += f" ± {_percent(summary.deviation)}"
            share = None if summary.row in (BASE, EXPERTS, MERGED) else summary.share
            table.add_row(
                self.title_of(summary.row),
                *(_percent(summary.accuracies[task]) for task in tasks),
                average,
                "" if share is None else f"{_percent(share)} %",
                "kept" if summary.seconds is None else f"{summary.seconds:.0f}",
                style="bold cyan" if summary.row == "featcal-module" else "",
            )
        return table

    def _figure(self, summaries: Sequence[Summary]) -> Figure:
        """Bars per task and for the average; the experts are the marks the bars should reach."""
        bars = [summary for summary in summaries if summary.row != EXPERTS]
        groups = ["average", *summaries[0].accuracies]
        # the average stands apart from the tasks
        centres = [0.0] + [1.35 + index for index in range(len(groups) - 1)]
        width = 0.8 / max(1, len(bars))
        figure = Figure(figsize=(11, 4.4), layout="constrained")
        axes = figure.add_subplot()
        for summary in summaries:
            heights = [100 * v for v in (summary.average, *summary.accuracies.values())]
            look: dict[str, Any] = {
                "color": COLOURS[summary.row],
                "label": self.title_of(summary.row),
            }
            if summary.row == EXPERTS:
                starts, ends = ([centre + side for centre in centres] for side in (-0.43, 0.43))
                axes.hlines(heights, starts, ends, linewidth=2, zorder=3, **look)
                continue
            offset = (bars.index(summary) - (len(bars) - 1) / 2) * width
            places = [centre + offset for centre in centres]
            drawn = axes.bar(places, heights, width * 0.92, zorder=2, **look)
            axes.bar_label(
                drawn, [f"{heights[0]:.0f}", *[""] * (len(heights) - 1)], padding=2, fontsize=8
            )
        axes.set_xticks(centres, groups, fontsize=10)
        axes.get_xticklabels()[0].set_fontweight("bold")
        axes.set_ylabel(MEASURES[self.name])
        axes.set_ylim(0, 104)
        axes.yaxis.grid(True, color="#e6e6e6", zorder=0)
        axes.tick_params(length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        shares = [
            f"{self.title_of(summary.row)}: {100 * summary.share:.0f} %"
            for summary in bars
            if summary.share is not None and summary.row not in (BASE, MERGED)
        ]
        title = _FIGURE_TITLES[self.name]
        if shares:
            title += "\nshare of the gap to the experts closed: " + ",  ".join(shares)
        axes.set_title(title, loc="left", fontsize=11)
        figure.legend(loc="outside lower center", ncols=len(summaries), frameon=False, fontsize=9)
        return figure


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
