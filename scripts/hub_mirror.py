#!/usr/bin/env python
r"""Make a mirror of the hub with random weights and say how to run against it.

The paper's main setting, with random weights of the true shape (3.2 GB), then all sizes of tables
with tiny models, then pools of one's choice::

    python scripts/hub_mirror.py DIRECTORY
    python scripts/hub_mirror.py DIRECTORY --size pico --set clip-b32 --set flan-t5-base
    python scripts/hub_mirror.py DIRECTORY \
        --modelpool CLIPVisionModelPool/clip-vit-large-patch14_TALL20 \
        --taskpool CLIPVisionModelTaskPool/clip-vit-classification_TALL20 \
        --override taskpool.base_model=openai/clip-vit-large-patch14
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from mirror import Mirror, MirrorError, MirrorSettings, Selection
from mirror.home import WARNING
from mirror.sets import DEFAULT_SET, SETS
from rich.console import Console
from rich.filesize import decimal

from featcal_fusionbench.benchmark.progress import build_progress


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `selections` and `settings` of the result are what it asks for."""
    parser = argparse.ArgumentParser(
        description="Make a local mirror of the Hugging Face hub with random weights and made-up "
        "data, so that FusionBench's unchanged configs run without a network. What a mirror holds "
        "is kept: call it again to add to it.",
    )
    parser.add_argument("directory", type=Path, help="new, empty, or a mirror: for HF_HOME")
    what = parser.add_argument_group("what to mirror")
    what.add_argument("--modelpool", action="append", default=[], metavar="NAME",
                      help="as behind modelpool= of fusion_bench; with --taskpool, any number "
                      "of times")  # fmt: skip
    what.add_argument("--taskpool", action="append", default=[], metavar="NAME",
                      help="as behind taskpool= of fusion_bench")  # fmt: skip
    what.add_argument("--override", action="append", default=[], metavar="KEY=VALUE",
                      help="an override of each of these pools, any number of times")  # fmt: skip
    what.add_argument("--set", action="append", default=[], choices=[*SETS, "all"], dest="sets",
                      help=f"pools that belong together (default: {DEFAULT_SET})")  # fmt: skip
    defaults = MirrorSettings()
    how = parser.add_argument_group("how it is made")
    how.add_argument("--size", choices=["true", "pico"], default=defaults.size,
                     help="published shapes, or tiny ones (default: %(default)s)")  # fmt: skip
    how.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default=defaults.dtype,
                     help="precision of the checkpoints (default: %(default)s)")  # fmt: skip
    how.add_argument("--rows", type=int, default=defaults.rows,
                     help="rows of each split (default: %(default)s)")  # fmt: skip
    how.add_argument("--image-size", type=int, default=defaults.image_size,
                     help="pixels on a side of an image (default: %(default)s)")  # fmt: skip
    options = parser.parse_args(arguments)
    if len(options.modelpool) != len(options.taskpool):
        parser.error("--modelpool and --taskpool come in pairs; `--taskpool dummy` for none")
    if options.override and not options.modelpool:
        parser.error("--override belongs to --modelpool and --taskpool")
    names = list(SETS) if "all" in options.sets else options.sets
    if not names and not options.modelpool:
        names = [DEFAULT_SET]
    options.selections = [selection for name in names for selection in SETS[name]]
    for modelpool, taskpool in zip(options.modelpool, options.taskpool, strict=True):
        options.selections.append(Selection(modelpool, taskpool, tuple(options.override)))
    try:
        options.settings = MirrorSettings(
            options.size, options.dtype, options.rows, options.image_size
        )
    except MirrorError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> None:
    """Make a mirror."""
    options = parse_arguments(arguments)
    console = Console(soft_wrap=True, highlight=False)
    try:
        mirror = Mirror(options.directory, options.selections, options.settings)
        needs = mirror.needs
        console.print(
            f"{WARNING} {len(needs.models)} models ({len(mirror.missing_models)} to write, "
            f"{decimal(mirror.bytes_to_write)}) and {len(needs.datasets)} data sets "
            f"({len(mirror.missing_datasets)} to write) in {mirror.home.directory}"
        )
        with build_progress() as progress:
            mirror.write(progress)
    except MirrorError as error:
        sys.exit(f"error: {error}")
    console.print("\nRun against it, from any directory:\n")
    for name, value in mirror.home.environment.items():
        console.print(f"export {name}={shlex.quote(value)}", markup=False)
    for selection in mirror.selections:
        command = ["fusion_bench", f"method={selection.method}", *selection.arguments]
        console.print(shlex.join(command), markup=False)


if __name__ == "__main__":
    main()
