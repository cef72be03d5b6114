"""A sweep's directory: whose it is, who works in it, and how far each cell has come.

Layout::

    sweep.json                      the table, its size, and what else makes all its numbers
    sweep.lock                      held by the one sweep that starts cells
    table.md …                      the table, once there are results
    models/<cell>/                  saved models that other cells start from
    launcher/                       what Hydra's launcher leaves
    cells/<row>/<column>/seed0/     one cell; of a curve: <row>/<column>/n_samples=8/seed0/
        job.json                    what is to be run
        job.lock                    held by the process that runs it
        run/                        log directory of the FusionBench run, and of a program log.txt
        cell.json                   the result, once it is done
        failure.json                what happened, if it failed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path

from filelock import FileLock, Timeout

from ..report.codec import from_json
from ..report.errors import ReportError
from ..report.files import read_json, require_writable, write_json
from ..tables.results import CELL_FILE, Cell, CellResult, Size
from .cells import Plan
from .errors import SweepError

__all__ = ["Failure", "Identity", "Job", "State", "Status", "SweepDirectory"]

IDENTITY_FILE = "sweep.json"
LOCK_FILE = "sweep.lock"
JOB_FILE = "job.json"
FAILURE_FILE = "failure.json"
LOG_FILE = "log.txt"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What all cells of a sweep share: results with another one never lie in its directory.

    Attributes:
        table: Name of the experiment.
        size: Its size.
        tasks: The tasks that are evaluated; None: all.
        overrides: Overrides that the user gave.
    """

    table: str
    size: Size
    tasks: tuple[str, ...] | None = None
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.table}, size {self.size}"
        text += f", tasks {','.join(self.tasks)}" if self.tasks else ""
        return text + (f", overrides {' '.join(self.overrides)}" if self.overrides else "")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One cell as the process that runs it needs to know it.

    Attributes:
        table: Name of the experiment.
        size: Its size.
        plan: What is to be run.
        program: The command of FusionBench; empty: its program is run in the job's own process.
        environment: Environment variables of the runs.
        directory: Where relative paths among the arguments start.
    """

    table: str
    size: Size
    plan: Plan
    program: tuple[str, ...]
    environment: dict[str, str]
    directory: str

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job that was written as JSON."""
        return from_json(cls, read_json(path), str(path))


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a cell has no result.

    Attributes:
        command: The command line that failed.
        reason: What happened, in one line.
        log: Path of its log.
        tail: The log's last lines.
        started: When the cell started.
        finished: When it failed.
    """

    command: str
    reason: str
    log: str
    tail: tuple[str, ...]
    started: datetime
    finished: datetime


class State(Enum):
    """How far a cell has come."""

    DONE = "done"
    PENDING = "pending"
    STALE = "stale"
    """Done by another command than the table's: it will be run again."""
    FAILED = "failed"
    RUNNING = "running"
    """Another process is at it."""
    BLOCKED = "blocked"
    """It starts from the model of a cell that failed."""


@dataclass(frozen=True)
class Status:
    """State of a cell, with its result or its failure."""

    state: State
    result: CellResult | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class SweepDirectory:
    """Paths and states below a sweep's directory."""

    path: Path

    @property
    def models(self) -> Path:
        """Directory of saved models."""
        return self.path / "models"

    def cell(self, cell: Cell) -> Path:
        """Directory of a cell."""
        return self.path / "cells" / cell.id

    def model(self, cell: Cell) -> Path:
        """Where a cell's model is saved, if others start from it."""
        return self.models / cell.id

    def check(self, identity: Identity) -> None:
        """Make sure that the directory is this sweep's, or nobody's.

        Raises:
            SweepError: It holds another sweep, or files that are none of a sweep's.
        """
        path = self.path / IDENTITY_FILE
        if path.is_file():
            try:
                found = from_json(Identity, read_json(path), str(path))
            except ReportError as error:
                raise SweepError(f"{error} Give another --output.") from error
            if found != identity:
                raise SweepError(
                    f"{self.path} holds another sweep ({found}), not this one ({identity}): their "
                    "numbers must not be mixed. Give another --output, or what it was begun with."
                )
        elif self.path.exists() and any(p.name != LOCK_FILE for p in self.path.iterdir()):
            raise SweepError(f"{self.path} is not empty and holds no sweep: give another --output.")

    @contextmanager
    def claim(self, identity: Identity) -> Iterator[None]:
        """Hold the directory while cells are started; the lock ends with the process, however.

        Raises:
            SweepError: Another sweep holds it, it is another sweep's, or it cannot be written to.
        """
        self.check(identity)
        require_writable(self.path, "--output")
        lock = FileLock(self.path / LOCK_FILE)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise SweepError(
                f"another sweep is at work in {self.path}: wait for it, or give another --output."
            ) from None
        try:
            yield
        finally:
            lock.release()

    def begin(self, identity: Identity) -> None:
        """Record which sweep the directory belongs to, once all checks before a run are passed."""
        write_json(self.path / IDENTITY_FILE, identity)

    def write_job(self, job: Job) -> None:
        """Write down what is to be run for a cell."""
        write_json(self.cell(job.plan.cell) / JOB_FILE, job)

    def statuses(self, plans: Sequence[Plan], table: str) -> dict[Cell, Status]:
        """State of every planned cell.

        Raises:
            SweepError: Results cannot be read; all of them are named.
        """
        statuses: dict[Cell, Status] = {}
        problems: list[str] = []
        for plan in plans:
            try:
                statuses[plan.cell] = self._status(plan, table)
            except (OSError, ReportError) as error:
                problems.append(str(error))
        if problems:
            raise SweepError("\n".join(["results cannot be read:", *problems]))
        for plan in plans:  # in an order in which needed cells come first
            if plan.needs and statuses[plan.cell].state in (State.PENDING, State.STALE):
                if statuses[plan.needs].state in (State.FAILED, State.BLOCKED):
                    statuses[plan.cell] = Status(State.BLOCKED)
                elif statuses[plan.needs].state is State.DONE and not self._has_model(plan.needs):
                    statuses[plan.needs] = Status(State.PENDING)
        return statuses

    def is_done(self, cell: Cell, table: str) -> bool:
        """Whether a cell has a result and the model that others start from."""
        path = self.cell(cell) / CELL_FILE
        return path.is_file() and self._has_model(cell) and bool(CellResult.read(path, table))

    def _has_model(self, cell: Cell) -> bool:
        directory = self.model(cell)
        return directory.is_dir() and any(directory.iterdir())

    def _status(self, plan: Plan, table: str) -> Status:
        directory = self.cell(plan.cell)
        if not directory.is_dir():
            return Status(State.PENDING)
        if is_running(directory):
            return Status(State.RUNNING)
        path = directory / CELL_FILE
        if path.is_file():
            result = CellResult.read(path, table)
            state = State.DONE if result.command == plan.command else State.STALE
            return Status(state, result)
        path = directory / FAILURE_FILE
        if path.is_file():
            return Status(State.FAILED, failure=from_json(Failure, read_json(path), str(path)))
        return Status(State.PENDING)


def job_lock(directory: Path) -> FileLock:
    """The lock that is held while a cell is run."""
    return FileLock(directory / "job.lock")


def is_running(directory: Path) -> bool:
    """Whether some process runs the cell of a directory."""
    if not (directory / "job.lock").exists():
        return False
    try:
        with job_lock(directory).acquire(timeout=0):
            return False
    except Timeout:
        return True
