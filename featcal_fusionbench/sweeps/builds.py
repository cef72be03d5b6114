"""Builds of the embedded benchmarks, of which a table on one of them needs one for each seed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module

from .errors import SweepError

__all__ = ["environment_of", "make_builds"]


def environment_of(benchmark: str | None, seed: int) -> dict[str, str]:
    """Environment variables by which the pools find a seed's build; none without a benchmark."""
    if benchmark is None:
        return {}
    module = import_module(f"featcal_fusionbench.benchmark.{benchmark}.recipe")
    recipe = module.Recipe(seed=seed)
    return {recipe.directory_variable: str(recipe.directory().absolute())}


def make_builds(benchmark: str, seeds: Sequence[int]) -> None:
    """Make what is missing of builds, in a process of its own: its memory goes back.

    Raises:
        SweepError: It failed; its output stands above.
    """
    module = "featcal_fusionbench.benchmark"
    command = [sys.executable, "-m", module, benchmark, "--build-only", "--seeds"]
    if subprocess.run([*command, *map(str, seeds)]).returncode:
        raise SweepError(
            f"the {benchmark} benchmark could not be built; its message stands above. "
            f"`python -m {module} {benchmark} --build-only` tries again."
        )
