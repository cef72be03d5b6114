"""The image benchmark as the driver sees it: its rows, its pools, its builds."""

from __future__ import annotations

from pathlib import Path

from featcal_fusionbench.benchmark.image.build import Build, build
from featcal_fusionbench.benchmark.image.recipe import DIRECTORY_VARIABLE, Recipe
from featcal_fusionbench.benchmark.image.tasks import TASKS
from featcal_fusionbench.benchmark.results import EXPERTS, MERGED
from featcal_fusionbench.benchmark.rows import BASE_ROW, EXPERTS_ROW, featcal_rows, task_arithmetic
from featcal_fusionbench.benchmark.suite import Row, Suite


def _directory_of(seed: int) -> Path:
    return Recipe(seed=seed).directory()


def _build(seed: int) -> Build:
    return build(Recipe(seed=seed))


ROWS = {
    "base": BASE_ROW,
    EXPERTS: EXPERTS_ROW,
    MERGED: task_arithmetic(0.3),
    "regmean": Row(
        "RegMean",
        ("method=merge_only", "method@method.merger=regmean/clip_regmean"),
        colour="#e3b778",
    ),
    **featcal_rows("featcal"),
}

IMAGE = Suite(
    name="image",
    title="Embedded image benchmark",
    figure_title="Seven small CLIP experts merged into one model",
    measure="test accuracy in percent",
    tasks=dict.fromkeys(TASKS, "accuracy"),
    rows=ROWS,
    pools=(
        "modelpool=CLIPVisionModelPool/featcal_embedded",
        "taskpool=CLIPVisionModelTaskPool/featcal_embedded",
    ),
    directory_variable=DIRECTORY_VARIABLE,
    directory_of=_directory_of,
    build=_build,
)
