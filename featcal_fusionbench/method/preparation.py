"""Everything that can be checked before the long work: data, weights, plan, cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from fusion_bench import BaseModelPool
from torch import nn

from ..architectures import Architecture, architecture_of
from ..calibration import CalibrationSettings, build_plan
from ..calibration.estimate import Fit, fit_to_memory, measure_matmul_rate
from ..calibration.inputs import Inputs
from ..data.draws import TRAINING_SPLITS, Split, require_datasets
from ..pools.models import CheckedWeights, PoolModels, open_models, require_base_and_experts
from ..report import ModelIdentity, TaskData
from ..settings import SampleSettings
from .samples import TaskInputs, draw_samples

__all__ = ["Prepared", "TaskInputs", "plan_calibration", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """Models and data that are ready for a method.

    Attributes:
        models: The base and the experts.
        architecture: The architecture of the models.
        processor: What makes inputs of raw data.
        inputs: Calibration and held-out inputs by task.
        example: One prepared input, rather a large one.
        warnings: What the user should know.
    """

    models: PoolModels
    architecture: Architecture[Any]
    processor: Any
    inputs: Mapping[str, TaskInputs]
    example: Inputs
    warnings: tuple[str, ...]

    @property
    def base_model(self) -> nn.Module:
        """The base, on the host: its structure is everyone's."""
        return self.models.base_model

    @property
    def base(self) -> CheckedWeights:
        """The base's weights."""
        return self.models.base

    @property
    def experts(self) -> Mapping[str, CheckedWeights]:
        """Checked weights by task."""
        return self.models.experts

    @property
    def data(self) -> tuple[TaskData, ...]:
        """What was drawn, for the report."""
        return tuple(inputs.data for inputs in self.inputs.values())

    @property
    def identities(self) -> tuple[ModelIdentity, ...]:
        """Base and experts, for the report."""
        return self.models.identities


def prepare(
    pool: BaseModelPool,
    settings: SampleSettings,
    architectures: Sequence[Architecture[Any]],
    scratch: Path,
    *,
    show_progress: bool,
    splits: Sequence[Split] = TRAINING_SPLITS,
) -> Prepared:
    """Load, draw and check models and data; raise for whatever would fail later.

    Args:
        pool: The model pool; it is not changed.
        settings: How many inputs, and how they are made.
        architectures: All that are known, with their settings.
        scratch: Directory for weights that the pool has to assemble.
        show_progress: Whether to show a bar while weights and data are read.
        splits: Splits to draw from; of each task the first that the pool has.

    Raises:
        CalibrationError: The pool, its data or its weights cannot be used; the message says why.
    """
    tasks = require_base_and_experts(pool)
    require_datasets(pool, tasks, splits)
    find = partial(architecture_of, among=architectures)
    models = open_models(pool, scratch, show_progress=show_progress, require_base=find)
    architecture = find(models.base_model)
    processor = architecture.load_processor(pool)
    samples = draw_samples(
        pool,
        tasks,
        architecture,
        processor,
        models.base_model,
        settings,
        splits,
        show_progress=show_progress,
    )
    return Prepared(
        models,
        architecture,
        processor,
        samples.inputs,
        samples.example,
        (*_without_effect(architecture, architectures), *samples.warnings, *models.warnings),
    )


def _without_effect(
    used: Architecture[Any], architectures: Sequence[Architecture[Any]]
) -> Iterator[str]:
    """Settings of other architectures that are set."""
    for other in architectures:
        for name, value in other.settings.as_dict().items():
            if other is not used and value != getattr(other.settings_type, name):
                yield f"{name}={value} has no effect on a {used.name}: it is for a {other.name}."


def plan_calibration(
    prepared: Prepared, settings: CalibrationSettings, device: torch.device
) -> Fit:
    """Plan a calibration, estimate what it takes and fit it to the free memory.

    Args:
        prepared: Models and data.
        settings: The settings.
        device: Where the calibration will run.

    Raises:
        PlanError: Nothing is left to calibrate, or the forward cannot be traced.
    """
    architecture, base_model = prepared.architecture, prepared.base_model
    plan = build_plan(
        base_model,
        prepared.example,
        settings,
        architecture.row_rules(),
        architecture.releasable(base_model),
    )
    return fit_to_memory(
        plan,
        base_model,
        prepared.example,
        settings,
        tasks=len(prepared.inputs),
        flops_per_second=measure_matmul_rate(device),
        available_bytes=_available_bytes(device),
    )


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
