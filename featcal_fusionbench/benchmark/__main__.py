"""``python -m featcal_fusionbench.benchmark``: build if need be, run the rows, show the table."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
from pathlib import Path

# Threads that wait should not burn the cores that others share; read by OpenMP when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import transformers  # noqa: E402
from rich.console import Console  # noqa: E402

from featcal_fusionbench.compat import apply_transformers_shim  # noqa: E402

# before anything imports FusionBench's task pools
apply_transformers_shim()

from featcal_fusionbench.benchmark.cache import Parts  # noqa: E402
from featcal_fusionbench.benchmark.image.suite import IMAGE  # noqa: E402
from featcal_fusionbench.benchmark.results import RowResult, summarise  # noqa: E402
from featcal_fusionbench.benchmark.rows import best_task_arithmetic, run_row  # noqa: E402
from featcal_fusionbench.benchmark.suite import Suite  # noqa: E402
from featcal_fusionbench.benchmark.table import render_table, save_figure  # noqa: E402
from featcal_fusionbench.benchmark.text.suite import TEXT  # noqa: E402
from featcal_fusionbench.report import write_json  # noqa: E402

TABLE_WIDTH = 130
SUITES = {suite.name: suite for suite in (IMAGE, TEXT)}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m featcal_fusionbench.benchmark",
        description="Merge small experts made on this machine, calibrate, compare.",
    )
    parser.add_argument(
        "benchmark",
        nargs="?",
        choices=list(SUITES),
        default=IMAGE.name,
        help="seven CLIP experts or six T5 experts (default: %(default)s)",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="one build and one run each (default: 0)"
    )
    every = list(dict.fromkeys(row for suite in SUITES.values() for row in suite.rows))
    parser.add_argument("--rows", nargs="+", choices=every, help="default: all of the benchmark's")
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
    rows = SUITES[options.benchmark].rows
    options.rows = options.rows or list(rows)
    if unknown := [row for row in options.rows if row not in rows]:
        parser.error(f"the {options.benchmark} benchmark has no row {', '.join(unknown)}")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Build, run, report."""
    options = parse_arguments(arguments)
    suite = SUITES[options.benchmark]
    console = Console()
    if not console.is_terminal:
        # a log file has no width; rich's fallback of 80 columns would cut the table's columns
        console = Console(width=TABLE_WIDTH)
    # loading a vision tower out of a whole CLIP lists the text weights as unexpected, each time
    transformers.logging.set_verbosity_error()
    # their bars of milliseconds would break into the build's
    transformers.logging.disable_progress_bar()
    output = (options.output / suite.name).absolute()
    results: list[RowResult] = []
    notes: list[str] = []
    for seed in options.seeds:
        if options.rebuild:
            shutil.rmtree(suite.directory_of(seed), ignore_errors=True)
        parts = suite.build(seed)
        console.print(f"build of seed {seed}: {parts.directory}")
        if options.build_only:
            continue
        results += [run_row(suite, name, parts, seed, output, console) for name in options.rows]
        if suite.scales:
            notes.append(_best_scale(suite, parts, seed, output, console))
    if not results:
        return
    summaries = summarise(results)
    notes += [
        f"{suite.rows[result.row].title}, seed {result.seed}, {task}: {problem}; counted as 0"
        for result in results
        for task, problem in result.problems.items()
    ]
    document = {
        "benchmark": suite.name,
        "measure": suite.measure,
        "seeds": options.seeds,
        "rows": [dataclasses.asdict(summary) for summary in summaries],
        "runs": [dataclasses.asdict(result) for result in results],
        "notes": notes,
    }
    write_json(output / "table.json", document)
    save_figure(suite, summaries, output / "table.png")
    console.print(render_table(suite, summaries, options.seeds))
    for note in notes:
        console.print(note, highlight=False)
    console.print(f"written: {output}/table.json, {output}/table.png")


def _best_scale(suite: Suite, parts: Parts, seed: int, output: Path, console: Console) -> str:
    scale, result = best_task_arithmetic(suite, parts, seed, output, console)
    return (
        f"seed {seed}: of the scaling factors {', '.join(map(str, suite.scales))}, Task Arithmetic "
        f"is best with {scale} on the test inputs: {100 * result.average:.1f} on average"
    )


if __name__ == "__main__":
    main()
