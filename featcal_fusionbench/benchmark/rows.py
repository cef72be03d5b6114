"""The rows of the table, each one or several FusionBench runs, and how they are run in-process.

A run composes FusionBench's own program configuration as its command line would, and runs the
program. The command line is printed before, so that every number can be had without this module.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_bench.constants import DEFAULT_CONFIG_PATH
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import OmegaConf, open_dict
from rich.console import Console

from featcal_fusionbench.benchmark.build import Build
from featcal_fusionbench.benchmark.recipe import DIRECTORY_VARIABLE
from featcal_fusionbench.benchmark.results import EXPERTS, MERGED, RowResult, write_json
from featcal_fusionbench.benchmark.tasks import TASKS

CONFIG_NAME = "fabric_model_fusion"
POOLS = (
    "modelpool=CLIPVisionModelPool/featcal_embedded",
    "taskpool=CLIPVisionModelTaskPool/featcal_embedded",
)
SILENCE = ("print_config=false", "print_function_call=false")
"""Given to the runs in this process on top of what is printed: they change no number."""


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        title: as the table calls it.
        method: Hydra overrides that choose and set the method.
        kept: whether the result depends on the build alone, so that it is kept beside it.
    """

    title: str
    method: tuple[str, ...]
    kept: bool = False


ROWS: dict[str, Row] = {
    "base": Row("base", ("method=merge_only", "method@method.merger=dummy"), kept=True),
    EXPERTS: Row("experts", ("method=merge_only",), kept=True),
    MERGED: Row(
        "Task Arithmetic 0.3",
        (
            "method=merge_only",
            "method@method.merger=task_arithmetic",
            "method.merger.scaling_factor=0.3",
        ),
    ),
    "regmean": Row("RegMean", ("method=merge_only", "method@method.merger=regmean/clip_regmean")),
    "featcal-block": Row("FeatCal (block)", ("method=featcal", "method.granularity=block")),
    "featcal-module": Row("FeatCal (module)", ("method=featcal", "method.granularity=module")),
}


def run_row(name: str, parts: Build, seed: int, output: Path, console: Console) -> RowResult:
    """Run one row on a build, or take its kept result.

    Args:
        name: a key of :data:`ROWS`.
        parts: the build.
        seed: of the program and of FeatCal's calibration sets.
        output: directory below which every run has its log directory.
        console: where command lines are printed.
    """
    row, kept_at = ROWS[name], parts.evaluation(name)
    if row.kept and kept_at.is_file():
        return dataclasses.replace(RowResult(**json.loads(kept_at.read_text())), seconds=None)
    start, accuracies = time.perf_counter(), {}
    for label, overrides in _runs(name, parts, seed):
        directory = output / "runs" / f"seed{seed}" / label
        overrides = [*overrides, f"path.log_dir={directory}"]
        command = shlex.join(["fusion_bench", *overrides])
        console.print(
            f"[bold]{row.title}[/]\n  {DIRECTORY_VARIABLE}={shlex.quote(str(parts.directory))} ",
            end="",
        )
        console.print(command, markup=False, highlight=False, soft_wrap=True)
        with _pools_from(parts):
            report = run_program(overrides, directory)
        accuracies |= {task: report[task]["accuracy"] for task in TASKS if task in report}
    result = RowResult(name, seed, accuracies, time.perf_counter() - start)
    if row.kept:
        write_json(dataclasses.asdict(result), kept_at)
    return result


def _runs(name: str, parts: Build, seed: int) -> Iterator[tuple[str, list[str]]]:
    """Label and overrides of every FusionBench run of a row."""
    overrides = [*ROWS[name].method, *POOLS, f"seed={seed}"]
    if name != EXPERTS:
        if "method=featcal" in overrides:
            overrides.append(f"method.seed={seed}")
        yield name, overrides
        return
    # every expert is evaluated on its own task only
    for task in TASKS:
        others = [f"~taskpool.test_datasets.{other}" for other in TASKS if other != task]
        chosen = [*overrides, f"method.merged_model={parts.expert(task)}", *others]
        yield f"expert-{task}", chosen


@contextmanager
def _pools_from(parts: Build) -> Iterator[None]:
    """Let both YAML files find this build."""
    before = os.environ.get(DIRECTORY_VARIABLE)
    os.environ[DIRECTORY_VARIABLE] = str(parts.directory)
    try:
        yield
    finally:
        if before is None:
            del os.environ[DIRECTORY_VARIABLE]
        else:
            os.environ[DIRECTORY_VARIABLE] = before


def run_program(overrides: list[str], directory: Path) -> dict[str, Any]:
    """Run FusionBench's program in this process, as ``fusion_bench`` would with these overrides.

    Args:
        overrides: Hydra overrides; ``path.log_dir`` among them should be ``directory``.
        directory: Hydra's output directory of the run.

    Returns:
        The task pool's report.
    """
    directory.mkdir(parents=True, exist_ok=True)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(DEFAULT_CONFIG_PATH), version_base=None):
        # the command line sets the output directory as it starts; composing alone does not
        runtime = f"hydra.runtime.output_dir={directory}"
        config = compose(
            CONFIG_NAME, overrides=[*overrides, *SILENCE, runtime], return_hydra_config=True
        )
    HydraConfig.instance().set_config(config)
    with open_dict(config):
        del config["hydra"]
    OmegaConf.resolve(config)
    return instantiate(config).run()["report"]
