"""Who runs cells, by short names: this process alone, or one of Hydra's launchers."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

from .errors import SweepError

__all__ = ["LAUNCHERS", "require_launcher"]

LAUNCHERS = ("local", "in_process", "joblib", "submitit", "submitit_local", "ray")

_JOBS = {"joblib": "hydra.launcher.n_jobs", "submitit_slurm": "hydra.launcher.array_parallelism"}
"""The setting that says how many cells run at once, of the launchers that have one."""


def require_launcher(name: str, jobs: int | None = None) -> list[str] | None:
    """Make sure that a launcher can be used.

    Args:
        name: One of ``LAUNCHERS``. ``submitit`` means Slurm where there is one, and processes of
            this machine elsewhere.
        jobs: How many cells may run at once; None: what the launcher does by itself.

    Returns:
        Overrides that choose it; None where the cells run in this process.

    Raises:
        SweepError: It is not installed, or cannot take that many jobs.
    """
    config = {"local": "basic", "submitit": "submitit_slurm"}.get(name, name)
    if config == "submitit_slurm" and shutil.which("sbatch") is None:
        config = name = "submitit_local"
    plugin = name.partition("_")[0]
    if name not in ("local", "in_process") and not find_spec(
        f"hydra_plugins.hydra_{plugin}_launcher"
    ):
        raise SweepError(
            f"the launcher {name} is not installed: pip install hydra-{plugin}-launcher, or take "
            "--launcher local."
        )
    if jobs is not None and config not in _JOBS:
        raise SweepError(
            f"--jobs {jobs}: the launcher {name} has no such setting; joblib, submitit have."
        )
    if name == "in_process":
        return None
    return [f"hydra/launcher={config}", *([] if jobs is None else [f"{_JOBS[config]}={jobs}"])]
