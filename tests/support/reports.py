"""Small reports, and terminal output as text."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from featcal_fusionbench.calibration.results import (
    BlockDrift,
    CalibrationResult,
    ModuleResult,
    PhaseCost,
    SkippedModule,
    TaskDrift,
)
from featcal_fusionbench.calibration.settings import CalibrationSettings
from featcal_fusionbench.method.featcal_report import FeatCalReport
from featcal_fusionbench.report import Machine, ModelIdentity, TaskData

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
LAYERS = "vision_model.encoder.layers"


def drift(task: str, final: float, blocks: int = 0, parent: str = LAYERS) -> TaskDrift:
    shape = [BlockDrift(i, f"{parent}.{i}", 0.1 * (i + 1), 0.1, 0.1 * i) for i in range(blocks)]
    return TaskDrift(task, 16, final, tuple(shape))


def module(name: str, **changes: Any) -> ModuleResult:
    healthy = ModuleResult(
        name=name, kind="linear", block=0, shape=(8, 4), rows=512, condition=1.5e3, residual=2e-7,
        damping=0.0, relative_change=0.031, seconds=0.2,
    )  # fmt: skip
    return replace(healthy, **changes)


def full_report(**changes: Any) -> FeatCalReport:
    values: dict[str, Any] = dict(
        status="complete",
        settings=CalibrationSettings(include=("mlp",), ridge_lambda=0.25, n_samples=8),
        started=START,
        finished=START + timedelta(seconds=312),
        versions={"torch": "2.13.0"},
        machine=Machine(system="Linux", cpu="x", cores=4, threads=2, memory_bytes=None),
        command="fusion_bench method=featcal",
        merger={"name": "task_arithmetic", "scaling_factor": 0.3},
        models=(
            ModelIdentity(role="expert", name="svhn", source="a/b", sha256="00", parameters=7),
        ),
        data=(
            TaskData(
                task="svhn",
                source="d",
                split="train",
                available=900,
                requested=256,
                used=256,
                indices=(5, 3),
            ),
            TaskData(task="dtd", source="d", split="train", available=200, requested=256, used=200),
        ),
        result=CalibrationResult(
            (
                module(f"{LAYERS}.0.mlp.fc1"),
                module(f"{LAYERS}.0.mlp.fc2", calibrated=False, condition=None, note="no tokens"),
            ),
            (SkippedModule("head", "Linear", "outside all blocks"),),
            (PhaseCost("solves", 1.0, 2.0, 2**30),),
        ),
        drift_before=(drift("svhn", 0.5, 3), drift("dtd", 0.4, 3)),
        drift_after=(drift("svhn", 0.2, 3), drift("dtd", 0.6, 3)),
        phases=(
            PhaseCost("models", 12.0, 10.0, 2**31),
            PhaseCost("calibration", 300.0, 490.0, 3 * 2**30, 2**30),
        ),
        outputs={"report": Path("/out/report.json")},
    )
    return FeatCalReport(**(values | changes))


def render_text(renderable: RenderableType, width: int = 80) -> str:
    """What a log file gets: no colour, no control characters; without the spaces at line ends."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
