"""What the driver, the rows and the table have to know of one embedded benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featcal_fusionbench.benchmark.cache import Parts


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        title: as the table calls it.
        method: Hydra overrides that choose and set the method.
        kept: whether the result depends on the build alone, so that it is kept beside it.
        seeded: whether the method draws calibration sets, by ``method.seed``.
        colour: of its bars in the figure.
    """

    title: str
    method: tuple[str, ...]
    kept: bool = False
    seeded: bool = False
    colour: str = "#9a9a9a"


@dataclass(frozen=True)
class Suite:
    """One embedded benchmark.

    Attributes:
        name: as the command line calls it.
        title: of the table.
        figure_title: first line of the figure's.
        measure: what the numbers are.
        tasks: the metric of every task in the task pool's report.
        rows: by key, in the table's order.
        pools: Hydra overrides that choose model pool and task pool.
        directory_variable: environment variable by which the pools find a build.
        directory_of: the directory of a seed's build, whether it exists or not.
        build: make the build of a seed, or what is missing of it.
        scales: scaling factors of Task Arithmetic among which the best is looked for; none: not.
    """

    name: str
    title: str
    figure_title: str
    measure: str
    tasks: Mapping[str, str]
    rows: Mapping[str, Row]
    pools: tuple[str, ...]
    directory_variable: str
    directory_of: Callable[[int], Path]
    build: Callable[[int], Parts]
    scales: tuple[float, ...] = ()

    def scores(self, report: Mapping[str, Any]) -> dict[str, float]:
        """The number of every task in a task pool's report; an undefined one counts as 0."""
        return {
            task: report[task][metric] or 0.0
            for task, metric in self.tasks.items()
            if task in report
        }

    def problems(self, report: Mapping[str, Any]) -> dict[str, str]:
        """What a task pool's report says is wrong with a task's number."""
        return {
            task: report[task]["problem"]
            for task in self.tasks
            if "problem" in report.get(task, {})
        }
