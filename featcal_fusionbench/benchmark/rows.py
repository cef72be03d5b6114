"""How the rows of a table are run, each in one or several FusionBench runs in this process.

A run composes FusionBench's own program configuration as its command line would, and runs the
program. The command line is printed before, so that every number can be had without this module.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusion_bench.constants import DEFAULT_CONFIG_PATH
from fusion_bench.utils.instantiate_utils import set_print_function_call
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import OmegaConf, open_dict
from rich.console import Console

from featcal_fusionbench.benchmark.cache import Parts
from featcal_fusionbench.benchmark.results import EXPERTS, RowResult
from featcal_fusionbench.benchmark.suite import Row, Suite
from featcal_fusionbench.command_line import (
    BASE_METHOD,
    environment_variables,
    evaluate_only,
    take_expert,
)
from featcal_fusionbench.report import write_json

CONFIG_NAME = "fabric_model_fusion"
SILENCE = ("print_config=false",)
"""Given to the runs in this process on top of what is printed: changes no number."""


BASE_ROW = Row("base", BASE_METHOD, kept=True, colour="#d9d9d9")
EXPERTS_ROW = Row("experts", (), kept=True)
"""Each expert on its own task: a run for every task, which chooses the expert."""


def task_arithmetic(scale: float) -> Row:
    """The row of Task Arithmetic with a scaling factor."""
    method = (
        "method=merge_only",
        "method@method.merger=task_arithmetic",
        f"method.merger.scaling_factor={scale}",
    )
    return Row(f"Task Arithmetic {scale}", method)


def featcal_rows(method: str) -> dict[str, Row]:
    """FeatCal at both granularities, by key.

    Args:
        method: the config of FeatCal that the benchmark uses.
    """
    colours = {"block": "#8fb8de", "module": "#1f5fa8"}
    return {
        f"featcal-{granularity}": Row(
            f"FeatCal ({granularity})",
            (f"method={method}", f"method.granularity={granularity}"),
            seeded=True,
            colour=colour,
        )
        for granularity, colour in colours.items()
    }


def run_row(
    suite: Suite, name: str, parts: Parts, seed: int, output: Path, console: Console
) -> RowResult:
    """Run one row on a build, or take its kept result.

    Args:
        suite: the benchmark.
        name: a key of its rows.
        parts: the build.
        seed: of the program and of FeatCal's calibration sets.
        output: directory below which every run has its log directory.
        console: where command lines are printed.
    """
    return _run(suite, suite.rows[name], name, parts, seed, output, console)


def best_task_arithmetic(
    suite: Suite, parts: Parts, seed: int, output: Path, console: Console
) -> tuple[float, RowResult]:
    """The scaling factor of Task Arithmetic that is best on the test inputs, and its result.

    Chosen by what is measured, so better than anyone could choose it. Kept with the build.
    """
    results = {}
    for scale in suite.scales:
        row = dataclasses.replace(task_arithmetic(scale), kept=True)
        label = f"task-arithmetic-{scale}"
        results[scale] = _run(suite, row, label, parts, seed, output, console)
    best = max(results, key=lambda scale: results[scale].average)
    return best, results[best]


def _run(
    suite: Suite, row: Row, name: str, parts: Parts, seed: int, output: Path, console: Console
) -> RowResult:
    kept_at = parts.evaluation(name)
    if row.kept and kept_at.is_file():
        return dataclasses.replace(RowResult(**json.loads(kept_at.read_text())), seconds=None)
    start = time.perf_counter()
    accuracies: dict[str, float] = {}
    problems: dict[str, str] = {}
    for label, overrides in _runs(suite, row, name, seed):
        directory = output / "runs" / f"seed{seed}" / label
        overrides = [*overrides, f"path.log_dir={directory}"]
        command = shlex.join(["fusion_bench", *overrides])
        build = f"{suite.directory_variable}={shlex.quote(str(parts.directory))}"
        console.print(f"[bold]{row.title}[/]\n  {build} ", end="")
        console.print(command, markup=False, highlight=False, soft_wrap=True)
        with environment_variables({suite.directory_variable: str(parts.directory)}):
            report = run_program(overrides, directory)
        accuracies |= suite.scores(report)
        problems |= suite.problems(report)
    result = RowResult(name, seed, accuracies, time.perf_counter() - start, problems)
    if row.kept:
        write_json(kept_at, result)
    return result


def _runs(suite: Suite, row: Row, name: str, seed: int) -> Iterator[tuple[str, list[str]]]:
    """Label and overrides of every FusionBench run of a row."""
    common = [*suite.pools, f"seed={seed}"]
    if name != EXPERTS:
        seeded = [f"method.seed={seed}"] if row.seeded else []
        yield name, [*row.method, *common, *seeded]
        return
    # every expert is evaluated on its own task only
    for task in suite.tasks:
        alone = evaluate_only([task], {"test_datasets": suite.tasks})
        yield f"expert-{task}", [*take_expert(task), *common, *alone]


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
    # its option of the same name has no effect (0.2.33): a panel for every data set and model
    with set_print_function_call(False):
        return instantiate(config).run()["report"]
