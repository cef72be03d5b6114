"""A Hydra application whose every job makes one cell of a table.

``--multirun cell=a,b,c`` makes several, by whatever launcher Hydra is given. The cell's runs are
FusionBench's own command, each a process of its own: its memory goes back when it ends, its log is
kept, and it is what the printed command line says. Small ones may be run in this process instead,
which saves the start of a program for each; what they print is then seen and not kept.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import hydra
import psutil
from filelock import FileLock, Timeout
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig

from ..report import RunReport, collect_versions, describe_machine
from ..report.errors import ReportError
from ..report.files import read_json, write_json, write_text
from ..report.text import format_duration
from ..tables.results import ACCURACY, CELL_FILE, EXPERTS, SPEARMAN_RHO, CellResult, Metric
from .cells import Run
from .command_line import environment_variables, override, shell_command
from .directory import (
    FAILURE_FILE,
    JOB_FILE,
    LOG_FILE,
    Failure,
    Job,
    SweepDirectory,
    job_lock,
)

__all__ = ["CONFIG_NAME", "main", "run_cell"]

CONFIG_NAME = "featcal_cell"

PROGRAM_REPORT = "program_report.json"
PROCESS_FILE = "process.json"
TAIL_LINES = 30
PATIENCE = 10.0
"""Seconds that a process gets to end before it is killed."""


@dataclass
class _Config:
    """Configuration of the application.

    Attributes:
        sweep: The sweep's directory.
        cell: The cell's id.
    """

    sweep: str = MISSING
    cell: str = MISSING


ConfigStore.instance().store(name=CONFIG_NAME, node=_Config)


@hydra.main(version_base="1.3", config_path=None, config_name=CONFIG_NAME)
def main(config: DictConfig) -> None:
    """Make the cell that the configuration names."""
    run_cell(Path(config.sweep), config.cell)


def run_cell(sweep: Path, cell: str) -> None:
    """Make a cell: its result or its failure is then in its directory.

    A cell that another process is at is left to that one.

    Args:
        sweep: The sweep's directory.
        cell: The cell's id.
    """
    directory = sweep / "cells" / cell
    try:
        with job_lock(directory).acquire(timeout=0), _terminable():
            _make(sweep, directory, cell)
    except Timeout:
        print(f"{cell}: another process is at it", flush=True)


class _Failed(Exception):
    """A cell cannot be made: the reason, the command that failed, and its log."""


def _make(sweep: Path, directory: Path, cell: str) -> None:
    job = Job.read(directory / JOB_FILE)
    _end_orphan(directory)
    for name in (CELL_FILE, FAILURE_FILE):
        (directory / name).unlink(missing_ok=True)
    print(f"{cell}: started", flush=True)
    started = datetime.now(timezone.utc)
    try:
        with _device(sweep, job) as device:
            for run in job.plan.runs:
                _run(run, job, device, sweep, directory)
        result = _result(job, directory, started)
    except _Failed as failed:
        reason, command, log = failed.args
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        failure = Failure(
            command=command,
            reason=reason,
            log=str(log),
            tail=tuple(text.splitlines()[-TAIL_LINES:]),
            started=started,
            finished=datetime.now(timezone.utc),
        )
        write_json(directory / FAILURE_FILE, failure)
        print(f"{cell}: FAILED, {reason}; see {log}", flush=True)
        return
    result.write(directory / CELL_FILE)
    seconds = (result.finished - started).total_seconds()
    print(f"{cell}: done in {format_duration(seconds)}", flush=True)


def _run(run: Run, job: Job, device: Mapping[str, str], sweep: Path, directory: Path) -> None:
    log_dir = directory / run.label
    shutil.rmtree(log_dir, ignore_errors=True)
    log_dir.mkdir(parents=True)
    files = [override("path.log_dir", log_dir)]
    if job.plan.saves:
        model = SweepDirectory(sweep).model(job.plan.cell)
        files.append(override("merged_model_save_path", model))
    command = [*(job.program or ("fusion_bench",)), *run.arguments, *files]
    if job.program:
        reason = _call(command, job, device, directory, log_dir / LOG_FILE)
    else:
        reason = _run_here(run, files, job, log_dir)
    if reason is None and not (log_dir / PROGRAM_REPORT).is_file():
        reason = "the run ended well, but left no report of its scores"
    if reason is not None:
        raise _Failed(reason, shlex.join(command), log_dir / LOG_FILE)


def _run_here(run: Run, files: Sequence[str], job: Job, log_dir: Path) -> str | None:
    """Run FusionBench's program in this process; why it failed, or None."""
    from .in_process import run_program

    print(f"  {shell_command([*run.arguments, *files], job.environment)}", flush=True)
    config_dir = None if run.config_dir is None else Path(run.config_dir)
    try:
        with environment_variables(job.environment):
            run_program([*run.overrides, *files], config_dir, log_dir)
    except Exception as error:
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        write_text(log_dir / LOG_FILE, text)
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _call(
    command: list[str], job: Job, device: Mapping[str, str], directory: Path, log: Path
) -> str | None:
    """Run a command, its output to a file; why it failed, or None."""
    environment = {**os.environ, **job.environment, **device}
    with open(log, "wb") as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        process = subprocess.Popen(
            command,
            cwd=job.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            born = psutil.Process(process.pid).create_time()
            write_json(directory / PROCESS_FILE, {"pid": process.pid, "born": born})
            code = process.wait()
        finally:
            if process.poll() is None:
                _end(psutil.Process(process.pid))
            (directory / PROCESS_FILE).unlink(missing_ok=True)
    if code < 0:
        name = signal.Signals(-code).name
        why = " (by the system, if memory ran out)" if -code == signal.SIGKILL else ""
        return f"killed by {name}{why}"
    return None if code == 0 else f"exit status {code}"


def _result(job: Job, directory: Path, started: datetime) -> CellResult:
    """Put together what the runs have left."""
    plan, cell = job.plan, job.plan.cell
    scores: dict[str, float] = {}
    metrics: dict[str, Metric] = {}
    reports: list[RunReport] = []
    try:
        for run in plan.runs:
            for path in (directory / run.label).glob("*_report.json"):
                if path.name != PROGRAM_REPORT:
                    reports.append(RunReport.read(path))
                    continue
                for task, (metric, score) in _scores(path).items():
                    if task in plan.tasks and run.task in (None, task):
                        metrics[task], scores[task] = metric, score
        models = [model for report in reports for model in report.models]
        if cell.merger == EXPERTS:  # whose runs return each expert as the merged model
            models = [model for model in models if model.role != "merged"]
        labels = [*plan.labels, *(label for report in reports for label in report.labels)]
        first = reports[0] if reports else None
        return CellResult(
            table=job.table,
            size=job.size,
            merger=cell.merger,
            calibrator=cell.calibrator,
            seed=cell.seed,
            point=dict(cell.point),
            tasks=plan.tasks,
            scores=scores,
            metrics=metrics,
            seconds=_seconds(job, reports),
            peak_memory_bytes=_highest(report.peak_memory_bytes for report in reports),
            peak_device_bytes=_highest(report.peak_device_bytes for report in reports),
            models=tuple({(model.role, model.name): model for model in models}.values()),
            labels=tuple(dict.fromkeys(labels)),
            command=plan.command,
            versions=(first and first.versions) or collect_versions(),
            machine=(first and first.machine) or describe_machine(),
            started=started,
            finished=datetime.now(timezone.utc),
        )
    except (AttributeError, OSError, ReportError, TypeError, ValueError) as error:
        log = directory / plan.runs[-1].label / LOG_FILE
        raise _Failed(f"what the runs left cannot be read: {error}", plan.command, log) from error


def _scores(path: Path) -> dict[str, tuple[Metric, float]]:
    """Metric and score by task of a task pool's report; NaN where there is none."""
    content = json.loads(path.read_text())  # FusionBench's own file: NaN may stand in it
    found: dict[str, tuple[Metric, float]] = {}
    for task, entry in content.items():
        for metric in (ACCURACY, SPEARMAN_RHO):
            if isinstance(entry, dict) and metric in entry:
                score = entry[metric]
                found[task] = (metric, float("nan") if score is None else float(score))
    return found


def _seconds(job: Job, reports: list[RunReport]) -> float | None:
    if len(reports) != 1:
        return None
    # where the cell starts from a model that is there, its own cost leaves the merging out
    phases = [p for p in reports[0].phases if not (job.plan.needs and p.name == "merging")]
    return sum(phase.wall_seconds for phase in phases)


def _highest(values: Iterable[int | None]) -> int | None:
    """The highest of all runs; None unless all have it."""
    known = list(values)
    return None if None in known else max((v for v in known if v is not None), default=None)


@contextmanager
def _device(sweep: Path, job: Job) -> Iterator[dict[str, str]]:
    """One GPU of several for the time of a cell, since parallel jobs share a machine.

    Yields:
        Environment variables that show the run this GPU alone; none where there is one GPU or no,
        where the cell's overrides say how many it takes, or where it runs in this process.
    """
    runs = job.plan.runs
    own = any(text.startswith("fabric.devices=") for run in runs for text in run.others)
    devices = [] if own or not job.program else _visible_gpus()
    if len(devices) < 2:
        yield {}
        return
    (sweep / "gpus").mkdir(exist_ok=True)
    while True:
        for device in devices:
            lock = FileLock(sweep / "gpus" / f"{platform.node()}-{device}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            try:
                yield {"CUDA_VISIBLE_DEVICES": device}
            finally:
                lock.release()
            return
        time.sleep(1)


def _visible_gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device.strip() for device in visible.split(",") if device.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the run too, as an interrupt does; only the main thread can."""
    try:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_orphan(directory: Path) -> None:
    """End the run of a process that was killed itself: two runs must not write to one place."""
    path = directory / PROCESS_FILE
    if not path.is_file():
        return
    content = read_json(path)
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(content["pid"])
        if process.create_time() == content["born"]:
            print(f"ending process {process.pid}, left by a sweep that was killed", flush=True)
            _end(process)
    path.unlink(missing_ok=True)


def _end(process: psutil.Process) -> None:
    """End a process and those that it has started."""
    family = []
    with suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.terminate()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive, timeout=PATIENCE)
