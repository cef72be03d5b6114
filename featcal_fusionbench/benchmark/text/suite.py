"""The text benchmark as the driver sees it: its rows, its pools, its builds."""

from __future__ import annotations

from pathlib import Path

from featcal_fusionbench.benchmark.results import EXPERTS, MERGED
from featcal_fusionbench.benchmark.rows import BASE_ROW, EXPERTS_ROW, featcal_rows, task_arithmetic
from featcal_fusionbench.benchmark.suite import Suite
from featcal_fusionbench.benchmark.text.build import Build, build
from featcal_fusionbench.benchmark.text.recipe import DIRECTORY_VARIABLE, Recipe
from featcal_fusionbench.benchmark.text.tasks import TASKS


def _directory_of(seed: int) -> Path:
    return Recipe(seed=seed).directory()


def _build(seed: int) -> Build:
    return build(Recipe(seed=seed))


ROWS = {
    "base": BASE_ROW,
    EXPERTS: EXPERTS_ROW,
    MERGED: task_arithmetic(0.3),
    **featcal_rows("featcal/flan_t5_task_arithmetic"),
}

TEXT = Suite(
    name="text",
    title="Embedded text benchmark",
    figure_title="Six small T5 experts, trained on this machine, merged into one model",
    measure="exact match in percent (intensity: Spearman's rho x 100)",
    tasks={task.name: task.metric for task in TASKS.values()},
    rows=ROWS,
    pools=(
        "modelpool=Seq2SeqLMPool/featcal_embedded_text",
        "taskpool=featcal_embedded_text",
    ),
    directory_variable=DIRECTORY_VARIABLE,
    directory_of=_directory_of,
    build=_build,
    scales=(0.1, 0.2, 0.3, 0.4),
)
