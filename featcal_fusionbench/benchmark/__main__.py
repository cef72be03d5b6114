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

from featcal_fusionbench.benchmark.build import build  # noqa: E402
from featcal_fusionbench.benchmark.recipe import Recipe  # noqa: E402
from featcal_fusionbench.benchmark.results import summarise, write_json  # noqa: E402
from featcal_fusionbench.benchmark.rows import ROWS, run_row  # noqa: E402
from featcal_fusionbench.benchmark.table import render_table, save_figure  # noqa: E402

TABLE_WIDTH = 130


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m featcal_fusionbench.benchmark",
        description="Merge seven small CLIP experts made on this machine, calibrate, compare.",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="one build and one run each (default: 0)"
    )
    parser.add_argument(
        "--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="default: all"
    )
    parser.add_argument("--rebuild", action="store_true", help="delete the builds and start over")
    parser.add_argument("--build-only", action="store_true", help="make the builds, run no row")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/featcal_benchmark"),
        help="directory of table.json, table.png and the runs' logs (default: %(default)s)",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Build, run, report."""
    options = parse_arguments(arguments)
    console = Console()
    if not console.is_terminal:
        # a log file has no width; rich's fallback of 80 columns would cut the table's columns
        console = Console(width=TABLE_WIDTH)
    # loading a vision tower out of a whole CLIP lists the text weights as unexpected, each time
    transformers.logging.set_verbosity_error()
    # their bars of milliseconds would break into the build's
    transformers.logging.disable_progress_bar()
    results = []
    for seed in options.seeds:
        recipe = Recipe(seed=seed)
        if options.rebuild:
            shutil.rmtree(recipe.directory(), ignore_errors=True)
        parts = build(recipe)
        console.print(f"build of seed {seed}: {parts.directory}")
        if options.build_only:
            continue
        output = options.output.absolute()
        results += [run_row(name, parts, seed, output, console) for name in options.rows]
    if not results:
        return
    summaries = summarise(results)
    document = {
        "seeds": options.seeds,
        "rows": [dataclasses.asdict(summary) for summary in summaries],
        "runs": [dataclasses.asdict(result) for result in results],
    }
    write_json(document, options.output / "table.json")
    save_figure(summaries, options.output / "table.png")
    console.print(render_table(summaries, options.seeds))
    console.print(f"written: {options.output}/table.json, {options.output}/table.png")


if __name__ == "__main__":
    main()
