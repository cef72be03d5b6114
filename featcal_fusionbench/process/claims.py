"""Which run owns a directory: no two runs write into one.

FusionBench gives all jobs of one `--multirun`, and all runs that start in the same second, the same
log directory. A plain run in a directory of an earlier one goes on to replace what lies there.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock
from fusion_bench.mixins import LightningFabricMixin
from fusion_bench.utils.hydra_utils import get_hydra_output_dir
from fusion_bench.utils.path import create_symlink
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from ..errors import OutputError
from ..report import write_json

__all__ = ["claim_log_dir", "claim_path"]

_FILE = ".featcal_run.json"
_PROCESS = secrets.token_hex(8)  # process ids are given again
_REMEDY = (
    "With --multirun set 'path.log_dir=${hydra:runtime.output_dir}'; otherwise give another one."
)


def claim_log_dir(user: LightningFabricMixin) -> str | None:
    """Take the log directory for this run, or move the log to one beside it that is free.

    FusionBench asks the logger for the directory whenever it writes something, so all that it and
    this package write from now on moves too.

    Args:
        user: Who has the fabric, with a log directory.

    Returns:
        What the user should know, where the log was moved.

    Raises:
        OutputError: The directory is another run's, and the logger cannot be moved; or nothing can
            be written there.
    """
    taken = _log_dir(user)
    loggers: list[Any] = list(user.fabric.loggers)
    root = getattr(loggers[0], "_root_dir", None)
    movable = [logger for logger in loggers if root and getattr(logger, "_root_dir", None) == root]
    moved, count = root, 1
    while user.fabric.is_global_zero and not _claim(_log_dir(user) / _FILE, "path.log_dir"):
        count += 1
        before, moved = _log_dir(user), f"{str(root).rstrip('/')}-{count}"
        _move(movable, moved)
        if _log_dir(user) == before:
            raise OutputError(f"path.log_dir={taken} is another run's. {_REMEDY}")
    if user.fabric.world_size > 1:
        _move(movable, user.fabric.broadcast(moved))
    if _log_dir(user) == taken:
        return None
    if HydraConfig.initialized():
        with suppress(OSError, ValueError):  # a help for reading alone
            create_symlink(get_hydra_output_dir(), str(_log_dir(user)), link_name="hydra_output")
    return f"path.log_dir={taken} is another run's: this one writes to {_log_dir(user)}."


def claim_path(path: str | Path, setting: str) -> None:
    """Take a path that was set for this run, where it is a job of a `--multirun`.

    Args:
        path: What the run will write.
        setting: Name of the setting that the path comes from.

    Raises:
        OutputError: Another job of the same multirun writes there too.
    """
    sweep, job = _multirun()
    if sweep is None:
        return
    name = hashlib.sha256(os.path.abspath(path).encode()).hexdigest()[:16]
    if not _claim(Path(sweep, f".featcal_path_{name}.json"), "hydra.sweep.dir"):
        raise OutputError(
            f"{setting}={path} is the same for several jobs of this multirun, and job {job} would "
            f"replace what another has written. Give each its own: {setting}="
            "'${hydra:runtime.output_dir}/…'."
        )


def _log_dir(user: LightningFabricMixin) -> Path:
    return Path(str(user.log_dir))


def _move(loggers: list[Any], root: Any) -> None:
    for logger in loggers:
        logger._root_dir = root


@dataclass(frozen=True)
class _Run:
    """A run as others see it.

    Attributes:
        host: Its machine.
        pid: Its process there.
        process: What tells this process from others with the same number.
        claimed: When it took the directory, in seconds since 1970.
        sweep: Directory of the multirun that it is a job of.
        job: Number of the job.
    """

    host: str
    pid: int
    process: str
    claimed: float
    sweep: str | None
    job: int | None

    @property
    def is_alive(self) -> bool:
        """Whether its process is known to be there; not known of other machines."""
        if self.host != platform.node():
            return False
        try:
            return psutil.Process(self.pid).create_time() <= self.claimed
        except psutil.Error:
            return False

    def keeps_from(self, other: _Run) -> bool:
        """Whether the other must not write where this one does."""
        if self.sweep is not None and self.sweep == other.sweep and self.job != other.job:
            return True
        if (self.host, self.pid, self.process) == (other.host, other.pid, other.process):
            return False  # one after the other, as the user's program wants it
        # A claim that is younger than this process is that of a twin, even if it has ended.
        return self.is_alive or self.claimed >= psutil.Process().create_time()


def _claim(file: Path, setting: str) -> bool:
    """Whether this run has what the file stands for; if so, the file says so."""
    me = _Run(platform.node(), os.getpid(), _PROCESS, time.time(), *_multirun())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            with suppress(OSError, NotImplementedError):  # a file system without locks
                stack.enter_context(FileLock(file.with_name(file.name + ".lock")))
            owner = _read(file.read_text(encoding="utf-8")) if file.is_file() else None
            if owner is not None and owner.keeps_from(me):
                return False
            write_json(file, asdict(me))
    except OSError as error:
        raise OutputError(
            f"Cannot write to {file.parent} ({error}). Set {setting} to a directory that can be "
            "written to, or mend its permissions or free space."
        ) from error
    return True


def _read(text: str) -> _Run | None:
    try:
        return _Run(**json.loads(text))
    except (TypeError, ValueError):  # new, or cut off when its writer was killed
        return None


def _multirun() -> tuple[str | None, int | None]:
    """Directory of the multirun and number of the job that this is; None outside of one."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None, None
    hydra = HydraConfig.get()
    return os.path.join(hydra.runtime.cwd, hydra.sweep.dir), hydra.job.num
