"""What the demo shows of a table's results: one line a method, a picture, and notes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from rich.table import Table

from ..report import write_figure, write_json
from ..report.gap import share_of_gap
from ..report.style import GRID, clear_axes
from ..sweeps.experiment import Experiment
from ..tables.frame import Frame
from ..tables.results import BASE, EXPERTS, NO_CALIBRATOR, Cell, CellResult

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


@dataclass
class Demo:
    """A demo and its results.

    Attributes:
        name: ``image`` or ``text``.
        experiment: Its table.
        seeds: The seeds.
        rows: The rows that are shown, in order.
        runs: What is known of each cell: its ``row``, ``seed``, ``accuracies`` by task (0 to 1; of
            a regression task Spearman's rho, -1 to 1), ``seconds`` (elapsed, with evaluation; None
            if the result was kept), and by task the ``problems`` of its numbers.
        scales: Averages by seed and scaling factor, where there are several factors.
    """

    name: str
    experiment: Experiment
    seeds: Sequence[int]
    rows: Sequence[str]
    runs: list[dict[str, Any]] = field(default_factory=list)
    scales: dict[int, dict[float, float]] = field(default_factory=dict)

    def wants(self, cell: Cell) -> bool:
        """Whether a cell belongs to the demo."""
        return row_of(cell) in self.rows or self._scale_of(cell) is not None

    def add(self, cell: Cell, result: CellResult, *, kept: bool) -> None:
        """Add a cell's result, which was measured now, or kept. An undefined rho counts as 0."""
        undefined = [task for task, score in result.scores.items() if math.isnan(score)]
        problem = "Spearman's rho is undefined (NaN): all answers are alike"
        run = {
            "row": row_of(cell),
            "seed": cell.seed,
            "accuracies": result.scores | dict.fromkeys(undefined, 0.0),
            "seconds": None if kept else (result.finished - result.started).total_seconds(),
            "problems": dict.fromkeys(undefined, problem),
        }
        if run["row"] in self.rows:
            self.runs.append(run)
            self.runs.sort(key=lambda r: (self.seeds.index(r["seed"]), self.rows.index(r["row"])))
        if (scale := self._scale_of(cell)) is not None:
            average = pd.Series(run["accuracies"]).mean()
            self.scales.setdefault(cell.seed, {})[scale] = float(average)

    def lines(self) -> Frame:
        """Every row's means over its seeds, by task and in all; NaN is what is not known.

        Returns:
            By row: the tasks, ``average`` and its sample ``deviation`` over seeds, ``share`` of
            the gap closed, and ``seconds`` of the runs that were not kept.
        """
        runs = pd.DataFrame([run["accuracies"] for run in self.runs])
        runs["average"] = runs.mean(axis="columns")
        runs["seconds"] = pd.Series([run["seconds"] for run in self.runs], dtype="float64")
        by_row: Any = runs.groupby([run["row"] for run in self.runs])
        lines = by_row.mean().assign(deviation=by_row["average"].std())
        averages = lines["average"]
        merged, experts = (averages.get(row, math.nan) for row in (MERGED, EXPERTS))
        lines["share"] = [share_of_gap(average, merged, experts) for average in averages]
        return lines.reindex([row for row in self.rows if row in lines.index])

    def notes(self) -> list[str]:
        """What stands below the table."""
        notes = []
        for seed, averages in sorted(self.scales.items()):
            best = max(averages, key=averages.__getitem__)
            notes.append(
                f"seed {seed}: of the scaling factors {', '.join(map(str, sorted(averages)))}, "
                f"Task Arithmetic is best with {best} on the test inputs: "
                f"{_percent(averages[best])} on average"
            )
        return notes + [
            f"{self.title_of(run['row'])}, seed {run['seed']}, {task}: {problem}; counted as 0"
            for run in self.runs
            for task, problem in run["problems"].items()
        ]

    def title_of(self, row: str) -> str:
        """What a row is called."""
        methods = {**self.experiment.calibrators, **self.experiment.mergers}
        return row if row in (BASE, EXPERTS) else methods[row].title

    def write(self, directory: Path) -> Table:
        """Write ``table.json`` and ``table.png``.

        Returns:
            The table for the terminal.
        """
        lines = self.lines()
        rows = [
            {
                "row": row,
                "accuracies": line[self._tasks].to_dict(),
                **{
                    name: None if math.isnan(line[name]) else line[name]
                    for name in ("average", "deviation", "share", "seconds")
                },
            }
            for row, line in lines.iterrows()
        ]
        document = {
            "benchmark": self.name,
            "measure": MEASURES[self.name],
            "seeds": list(self.seeds),
            "rows": rows,
            "runs": self.runs,
            "notes": self.notes(),
        }
        write_json(directory / "table.json", document)
        write_figure(directory / "table.png", self._figure(lines), dpi=160)
        return self._table(lines)

    @property
    def _tasks(self) -> list[str]:
        return list(self.runs[0]["accuracies"])

    def _scale_of(self, cell: Cell) -> float | None:
        """The scaling factor of a merged model in a table that has several of them, else None."""
        scales = {
            row: merger.settings["scaling_factor"]
            for row, merger in self.experiment.mergers.items()
            if "scaling_factor" in merger.settings
        }
        return scales.get(row_of(cell)) if len(scales) > 1 else None

    def _table(self, lines: Frame) -> Table:
        count = len(self.seeds)
        seeds = f"mean of {count} seeds" if count > 1 else f"seed {self.seeds[0]}"
        table = Table(
            title=f"{self.experiment.title}: {MEASURES[self.name]} ({seeds})",
            caption="gap closed = (row - Task Arithmetic) / (experts - Task Arithmetic); "
            "experts: each on its own task",
        )
        table.add_column("", no_wrap=True)
        for task in self._tasks:
            table.add_column(task, justify="right")
        table.add_column("average", justify="right", style="bold")
        table.add_column("gap closed", justify="right")
        table.add_column("seconds", justify="right", style="dim")
        for row, line in lines.iterrows():
            deviation = "" if math.isnan(line.deviation) else f" ± {_percent(line.deviation)}"
            no_share = math.isnan(line.share) or row in (BASE, EXPERTS, MERGED)
            table.add_row(
                self.title_of(row),
                *(_percent(line[task]) for task in self._tasks),
                _percent(line.average) + deviation,
                "" if no_share else f"{_percent(line.share)} %",
                "kept" if math.isnan(line.seconds) else f"{line.seconds:.0f}",
                style="bold cyan" if row == "featcal-module" else "",
            )
        return table

    def _figure(self, lines: Frame) -> Figure:
        """Bars per task and for the average; the experts are the marks the bars should reach."""
        groups = ["average", *self._tasks]
        # the average stands apart from the tasks
        centres = [0.0] + [1.35 + index for index in range(len(groups) - 1)]
        bars = [row for row in lines.index if row != EXPERTS]
        width = 0.8 / max(1, len(bars))
        figure = Figure(figsize=(11, 4.4), layout="constrained")
        axes = figure.add_subplot()
        for row, line in lines.iterrows():
            heights = list(100 * line[groups])
            look: dict[str, Any] = {"color": COLOURS[row], "label": self.title_of(row)}
            if row == EXPERTS:
                starts, ends = ([centre + side for centre in centres] for side in (-0.43, 0.43))
                axes.hlines(heights, starts, ends, linewidth=2, zorder=3, **look)
                continue
            offset = (bars.index(row) - (len(bars) - 1) / 2) * width
            places = [centre + offset for centre in centres]
            drawn = axes.bar(places, heights, width * 0.92, zorder=2, **look)
            labels = [f"{heights[0]:.0f}", *[""] * len(self._tasks)]
            axes.bar_label(drawn, labels, padding=2, fontsize=8)
        axes.set_xticks(centres, groups)
        axes.get_xticklabels()[0].set_fontweight("bold")
        axes.set_ylabel(MEASURES[self.name])
        axes.set_ylim(0, 104)
        axes.yaxis.grid(True, color=GRID)
        clear_axes(axes, labelsize=10)
        shares = lines["share"].drop([BASE, EXPERTS, MERGED], errors="ignore").dropna()
        title = _FIGURE_TITLES[self.name]
        if len(shares):
            named = (f"{self.title_of(row)}: {100 * share:.0f} %" for row, share in shares.items())
            title += "\nshare of the gap to the experts closed: " + ",  ".join(named)
        axes.set_title(title, loc="left", fontsize=11)
        figure.legend(loc="outside lower center", ncols=len(lines), frameon=False, fontsize=9)
        return figure


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
