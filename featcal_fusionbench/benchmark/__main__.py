"""``python -m featcal_fusionbench.benchmark``: build if need be, run the rows, show the table.

The rows are cells of the tables ``demo_image`` and ``demo_text`` (``config/table``), run in this
process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

# Threads that wait should not burn the cores that others share; read by OpenMP when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import transformers  # noqa: E402
from rich.console import Console  # noqa: E402

from ..compat import apply_transformers_shim  # noqa: E402
from ..report import ReportError, write_bytes  # noqa: E402
from ..sweeps.cells import Plan, Selection  # noqa: E402
from ..sweeps.cli import show_failures, wide_console  # noqa: E402
from ..sweeps.directory import Identity, State  # noqa: E402
from ..sweeps.experiment import load_experiment  # noqa: E402
from ..sweeps.sweep import Sweep, to_run  # noqa: E402
from ..tables.results import CELL_FILE, CellResult  # noqa: E402
from .cache import Parts  # noqa: E402
from .demo import COLOURS, MEASURES, Demo, depends_on_the_build_alone  # noqa: E402


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m featcal_fusionbench.benchmark",
        description="Merge small experts made on this machine, calibrate, compare.",
    )
    parser.add_argument(
        "benchmark",
        nargs="?",
        choices=list(MEASURES),
        default="image",
        help="seven CLIP experts or six T5 experts (default: %(default)s)",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="one build and one run each (default: 0)"
    )
    parser.add_argument(
        "--rows", nargs="+", choices=list(COLOURS), help="default: all of the benchmark's"
    )
    parser.add_argument("--rebuild", action="store_true", help="delete the builds and start over")
    parser.add_argument("--build-only", action="store_true", help="make the builds, run no row")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/featcal_benchmark"),
        help="directory below which <benchmark>/ gets table.json, table.png and the runs' logs "
        "(default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.benchmark == "text" and "regmean" in (options.rows or ()):
        parser.error("the text benchmark has no row regmean")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Build, run, report.

    Returns:
        Exit status: 0 if all rows are done, 1 if some failed.
    """
    options = parse_arguments(arguments)
    # before anything imports FusionBench's task pools
    apply_transformers_shim()
    console = wide_console()
    # loading a vision tower out of a whole CLIP lists the text weights as unexpected, each time
    transformers.logging.set_verbosity_error()
    # their bars of milliseconds would break into the build's
    transformers.logging.disable_progress_bar()
    builds = {}
    for seed in options.seeds:
        builds[seed] = _build(options.benchmark, seed, options.rebuild)
        console.print(f"build of seed {seed}: {builds[seed].directory}")
    return 0 if options.build_only else _run(options, builds, console)


def _build(benchmark: str, seed: int, rebuild: bool) -> Parts:
    package = f"featcal_fusionbench.benchmark.{benchmark}"
    recipe = import_module(f"{package}.recipe").Recipe(seed=seed)
    if rebuild:
        shutil.rmtree(recipe.directory(), ignore_errors=True)
    return import_module(f"{package}.build").build(recipe)


def _run(options: argparse.Namespace, builds: dict[int, Parts], console: Console) -> int:
    output = (options.output / options.benchmark).absolute()
    experiment = load_experiment(f"demo_{options.benchmark}")
    identity = Identity(table=experiment.name, size="full")
    sweep = Sweep.of(experiment, identity, output / "sweep")
    rows = options.rows or list(COLOURS)
    demo = Demo(options.benchmark, experiment, options.seeds, rows)
    plans = sweep.plan(Selection(seeds=tuple(options.seeds)))
    plans = [plan for plan in plans if demo.wants(plan.cell)]
    _start_over(sweep, plans, builds)
    waiting = to_run(plans, sweep.statuses(plans), retry_failed=False)
    statuses = sweep.run(plans, launcher=None)
    show_failures(statuses, console)
    for cell in (plan.cell for plan in plans):
        if (found := statuses[cell].result) is not None:
            if depends_on_the_build_alone(cell):
                content = (sweep.directory.cell(cell) / CELL_FILE).read_bytes()
                write_bytes(builds[cell.seed].cell(cell.id), content)
            demo.add(cell, found, kept=all(plan.cell != cell for plan in waiting))
    if demo.runs:
        console.print(demo.write(output))
        for note in demo.notes():
            console.print(note, highlight=False)
        console.print(f"written: {output}/table.json, {output}/table.png")
    return 0 if all(status.state is State.DONE for status in statuses.values()) else 1


def _start_over(sweep: Sweep, plans: Sequence[Plan], builds: dict[int, Parts]) -> None:
    """Forget earlier results, but for those that are kept beside their build."""
    with sweep.directory.claim(sweep.identity):
        sweep.directory.begin(sweep.identity)
        for cell in (plan.cell for plan in plans):
            shutil.rmtree(sweep.directory.cell(cell), ignore_errors=True)
            kept = builds[cell.seed].cell(cell.id)
            # what another release wrote, or is damaged, is measured again
            with suppress(OSError, ReportError):
                if depends_on_the_build_alone(cell) and CellResult.read(kept):
                    write_bytes(sweep.directory.cell(cell) / CELL_FILE, kept.read_bytes())


if __name__ == "__main__":
    sys.exit(main())
