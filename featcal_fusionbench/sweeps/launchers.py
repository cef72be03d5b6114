"""Hydra's launchers by short names, and whether they are installed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.util import find_spec

from .errors import SweepError

__all__ = ["LAUNCHERS", "Launcher", "require_launcher"]


@dataclass(frozen=True)
class Launcher:
    """One of Hydra's launchers.

    Attributes:
        config: What ``hydra/launcher=`` takes.
        module: The module that must be there.
        package: What pip installs it by; empty for Hydra's own.
        jobs: The setting that says how many, if it has one.
    """

    config: str
    module: str
    package: str = ""
    jobs: str = ""


_SUBMITIT = ("hydra_plugins.hydra_submitit_launcher", "hydra-submitit-launcher")

LAUNCHERS = {
    "local": Launcher("basic", "hydra"),
    "joblib": Launcher(
        "joblib",
        "hydra_plugins.hydra_joblib_launcher",
        "hydra-joblib-launcher",
        jobs="hydra.launcher.n_jobs",
    ),
    "submitit": Launcher("submitit_slurm", *_SUBMITIT, jobs="hydra.launcher.array_parallelism"),
    "submitit_local": Launcher("submitit_local", *_SUBMITIT),
    "ray": Launcher("ray", "hydra_plugins.hydra_ray_launcher", "hydra-ray-launcher"),
}


def require_launcher(name: str, jobs: int | None = None) -> list[str]:
    """Make sure that a launcher can be used.

    Args:
        name: A key of ``LAUNCHERS``. ``submitit`` means Slurm where there is one, and processes of
            this machine elsewhere.
        jobs: How many cells may run at once; None: what the launcher does by itself.

    Returns:
        Overrides that choose it.

    Raises:
        SweepError: It is not installed, or cannot take that many jobs.
    """
    if name == "submitit" and shutil.which("sbatch") is None:
        name = "submitit_local"
    launcher = LAUNCHERS[name]
    try:
        found = find_spec(launcher.module) is not None
    except ModuleNotFoundError:  # not even its parent package
        found = False
    if not found:
        raise SweepError(
            f"the launcher {name} is not installed: pip install {launcher.package}, or take "
            "--launcher local."
        )
    overrides = [f"hydra/launcher={launcher.config}"]
    if jobs is not None:
        if not launcher.jobs:
            raise SweepError(
                f"--jobs {jobs}: the launcher {name} has no such setting; "
                f"{', '.join(n for n, known in LAUNCHERS.items() if known.jobs)} have."
            )
        overrides.append(f"{launcher.jobs}={jobs}")
    return overrides
