"""The record of one run: what went in, what was done to it, what came out, and what it cost.

All methods of this package leave one, each a subclass of ``RunReport`` with the settings and the
result of its own, which lies beside the method.
"""

from __future__ import annotations

import os
import pkgutil
import platform
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import psutil
import torch
from rich.console import RenderableType
from rich.text import Text

from ..calibration.results import PhaseCost
from ..settings import MethodSettings
from .codec import from_json, to_json
from .errors import ReportError
from .files import read_json, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "FORMAT_VERSION",
    "Machine",
    "ModelIdentity",
    "RunReport",
    "RunStatus",
    "TaskData",
    "collect_versions",
    "describe_machine",
    "report_name",
]

FORMAT_VERSION = 4
_FORMAT = "featcal-run-report"

_REPORTS = {
    "merge_only": "merge_only_report:MergeReport",
    "featcal": "featcal_report:FeatCalReport",
    "representation_surgery": "surgery_report:RepresentationSurgeryReport",
    "prob_surgery": "surgery_report:ProbSurgeryReport",
}
"""Where in ``featcal_fusionbench.method`` the reports are; imported when one is read."""

RunStatus = Literal["complete", "interrupted", "failed", "planned"]


def report_name(method: str) -> str:
    """The file name of a method's report, the same rule for all."""
    return f"{method}_report.json"


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """One model that took part.

    Attributes:
        role: What it was in the merge.
        name: Its name in the model pool; for an expert, the task.
        source: Directory or hub id that it came from.
        sha256: Hash of its weights; None where none was taken.
        parameters: Number of its parameters; None where they were not counted.
    """

    role: Literal["base", "expert", "merged"]
    name: str
    source: str
    sha256: str | None = None
    parameters: int | None = None


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """The inputs of one task.

    Attributes:
        task: Name of the task.
        source: Directory or hub id of the data set.
        split: The split that was drawn from.
        available: Inputs in that split; None for a stream of unknown length.
        requested: Calibration inputs asked for.
        used: Calibration inputs that entered the statistics.
        indices: Their positions in the split, in the order of use.
        heldout_indices: Positions of the inputs on which drift was measured.
        note: Why fewer were used than asked for, or a remark.
    """

    task: str
    source: str
    split: str
    available: int | None
    requested: int
    used: int
    indices: tuple[int, ...] = ()
    heldout_indices: tuple[int, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that a run's times were measured on.

    Attributes:
        system: Operating system and architecture.
        cpu: Name of the processor.
        cores: Logical cores that this process may use.
        threads: Threads that torch uses within one operation.
        memory_bytes: Installed memory; None where the system does not tell.
        gpus: Names of the GPUs that torch sees.
    """

    system: str
    cpu: str
    cores: int
    threads: int
    memory_bytes: int | None
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What the runs of all methods have in common.

    Attributes:
        method: The method, by the name of its configuration.
        figure_name: What the file with its figure is called; empty for a method without one.
        settings: The method's settings.
        architecture_settings: Those of the models' architecture; empty before it is known.
        status: How the run ended; ``planned`` for one that only looked ahead.
        started: When it started, with a time zone.
        finished: When it ended.
        labels: What has to stand beside the run's numbers wherever they are shown.
        versions: Version of each library that matters; see ``collect_versions``.
        machine: Where it ran; see ``describe_machine``.
        command: The command line.
        merger: Configuration of the upstream merger; empty where a merged model was given. Made
            JSON-safe on construction.
        merged_model: Path or hub id of the merged model that was given instead of a merger.
        models: Base, experts and merged model.
        data: The inputs, one entry per task.
        phases: Costs of the run's phases, which do not overlap.
        warnings: What the user should know.
        error: What ended a run that failed; empty otherwise.
        outputs: Files written, by what they are: ``report``, ``figure``, ``model``; ``merger`` is
            the report of an upstream method of this package.
        format_version: Version of the file format.
    """

    method: ClassVar[str]
    figure_name: ClassVar[str] = ""

    settings: MethodSettings
    architecture_settings: dict[str, Any] = field(default_factory=dict)
    status: RunStatus
    started: datetime
    finished: datetime | None = None
    labels: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    machine: Machine | None = None
    command: str = ""
    merger: dict[str, Any] = field(default_factory=dict)
    merged_model: str | None = None
    models: tuple[ModelIdentity, ...] = ()
    data: tuple[TaskData, ...] = ()
    phases: tuple[PhaseCost, ...] = ()
    warnings: tuple[str, ...] = ()
    error: str = ""
    outputs: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in ("started", "finished"):
            time = getattr(self, name)
            if time is not None and time.tzinfo is None:
                raise ValueError(f"{name} needs a time zone: use datetime.now(timezone.utc).")
        # Here and not on writing, so that a report equals what is read back from its file.
        for name in ("merger", "architecture_settings"):
            object.__setattr__(self, name, to_json(getattr(self, name)))
        object.__setattr__(self, "outputs", {key: str(path) for key, path in self.outputs.items()})

    @property
    def all_warnings(self) -> tuple[str, ...]:
        """The run's warnings and, last, those that follow from its numbers."""
        return self.warnings

    @property
    def wall_seconds(self) -> float | None:
        """Elapsed seconds from start to finish, or those of the phases while it has no finish."""
        if self.finished is not None:
            return (self.finished - self.started).total_seconds()
        return sum(p.wall_seconds for p in self._costs) if self._costs else None

    @property
    def cpu_seconds(self) -> float | None:
        """Seconds of processor time over all phases."""
        return sum(p.cpu_seconds for p in self._costs) if self._costs else None

    @property
    def peak_memory_bytes(self) -> int | None:
        """Highest resident memory in any phase."""
        return max((p.peak_memory_bytes for p in self._costs), default=None)

    @property
    def peak_device_bytes(self) -> int | None:
        """Highest memory allocated on the accelerator in any phase; None on a CPU."""
        peaks = (p.peak_device_bytes for p in self._costs)
        return max((peak for peak in peaks if peak is not None), default=None)

    @property
    def _costs(self) -> tuple[PhaseCost, ...]:
        return self.phases

    def summary(self) -> dict[str, Any]:
        """Derived numbers, for programs that read the file."""
        return {
            "wall_seconds": self.wall_seconds,
            "cpu_seconds": self.cpu_seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "peak_device_bytes": self.peak_device_bytes,
            "warnings": self.all_warnings,
        }

    def table(self) -> RenderableType:
        """The result by task, for the terminal."""
        return Text(f"{self.method} {self.status}", "bold")

    def details(self) -> list[str]:
        """What else is worth a line below the table."""
        return []

    def figure(self) -> Figure | None:
        """A picture of the result; None where there is nothing to draw."""
        return None

    def numbers(self) -> dict[str, float | None]:
        """Single numbers by a name; None for what was not measured."""
        peaks = {"memory": self.peak_memory_bytes, "device": self.peak_device_bytes}
        return {
            "seconds": self.wall_seconds,
            "cpu_seconds": self.cpu_seconds,
            **{f"peak_{k}_gib": None if v is None else v / 2**30 for k, v in peaks.items()},
        }

    def scalars(self) -> dict[str, float]:
        """The numbers that were measured, for a metrics logger: ``featcal/seconds``."""
        numbers = self.numbers().items()
        return {f"{self.method}/{name}": float(n) for name, n in numbers if n is not None}

    def to_json_dict(self) -> dict[str, Any]:
        """The report as JSON values, with derived numbers under ``summary`` for other programs."""
        own = to_json(self)
        return {
            "format": _FORMAT,
            "format_version": own.pop("format_version"),
            "method": self.method,
            "status": own.pop("status"),
            "summary": to_json(self.summary()),
            **own,
        }

    def write(self, path: str | Path) -> None:
        """Write the report as JSON, atomically."""
        write_json(path, self.to_json_dict())

    @staticmethod
    def read(path: str | Path) -> RunReport:
        """Read a report that ``write`` wrote, as the class of its method.

        Raises:
            ReportError: The file is cut off, no report, or of another format version or method.
            OSError: The file cannot be opened.
        """
        content = read_json(path)
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise ReportError(
                f"{path} is not a FeatCal run report: give the path of the JSON report that a run "
                f"wrote."
            )
        found = content.get("format_version")
        if found != FORMAT_VERSION:
            raise ReportError(
                f"{path} has format version {found!r}, and this featcal-fusionbench reads version "
                f"{FORMAT_VERSION}: read it with the release that wrote it (the file names it "
                f"under versions), or run again."
            )
        method = content.pop("method", None)
        content.pop("summary", None)  # derived anew
        try:
            if method not in _REPORTS:
                known = ", ".join(_REPORTS)
                raise ReportError(f"method should be one of {known}, not {method!r:.80}.")
            kind = pkgutil.resolve_name(f"featcal_fusionbench.method.{_REPORTS[method]}")
            return from_json(kind, content)
        except ReportError as error:
            raise ReportError(
                f"{path} is damaged: {error} Restore it from a copy, or run again."
            ) from error


def collect_versions() -> dict[str, str]:
    """Versions of the libraries that decide what a run computes, ``not installed`` for the rest."""
    versions = {"python": platform.python_version()}
    packages = "featcal-fusionbench fusion-bench torch transformers greenlet safetensors"
    for package in packages.split():
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def describe_machine() -> Machine:
    """Look up what this process runs on."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_name(),
        cores=_usable_cores(),
        threads=torch.get_num_threads(),
        memory_bytes=psutil.virtual_memory().total,
        gpus=tuple(torch.cuda.get_device_name(index) for index in gpus),
    )


def _cpu_name() -> str:
    try:  # platform.processor() is empty or just the architecture on most Linux systems
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # respects the limits of a container or a scheduler
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
