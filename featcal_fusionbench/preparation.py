"""Everything that can be checked before the long work: data, weights, plan, cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from fusion_bench import BaseModelPool
from torch import Tensor, nn
from tqdm.auto import tqdm

from .architectures import Architecture, architecture_of
from .calibration import CalibrationSettings, build_plan
from .calibration.estimate import Fit, fit_to_memory, measure_matmul_rate
from .calibration.inputs import Inputs
from .data import (
    TRAINING_SPLITS,
    Batches,
    Split,
    draw,
    load_calibration_dataset,
    require_datasets,
    shortfalls,
    source_of,
)
from .experts import (
    CheckedWeights,
    check_weights,
    floating_tensors,
    open_weights,
    require_base_and_experts,
    warn_of_equal_experts,
    warn_of_other_bases,
)
from .report import ModelIdentity, TaskData
from .settings import SampleSettings

__all__ = ["Prepared", "TaskInputs", "plan_calibration", "prepare"]


@dataclass(frozen=True)
class TaskInputs:
    """What was drawn for one task, and its batches: read when iterated over, or in memory."""

    data: TaskData
    calibration: Batches | Sequence[Inputs]
    heldout: Batches | Sequence[Inputs]


@dataclass(frozen=True)
class Prepared:
    """Models and data that are ready for a method.

    Attributes:
        architecture: The architecture of the models.
        processor: What makes inputs of raw data.
        base_model: The base, on the host: its structure is everyone's.
        base: Its weights.
        experts: Checked weights by task.
        inputs: Calibration and held-out inputs by task.
        example: One prepared input, rather a large one.
        warnings: What the user should know.
    """

    architecture: Architecture
    processor: Any
    base_model: nn.Module
    base: CheckedWeights
    experts: Mapping[str, CheckedWeights]
    inputs: Mapping[str, TaskInputs]
    example: Inputs
    warnings: tuple[str, ...]

    @property
    def data(self) -> tuple[TaskData, ...]:
        """What was drawn, for the report."""
        return tuple(inputs.data for inputs in self.inputs.values())

    @property
    def identities(self) -> tuple[ModelIdentity, ...]:
        """Base and experts, for the report."""
        return (self.base.identity, *(expert.identity for expert in self.experts.values()))


def prepare(
    pool: BaseModelPool,
    settings: SampleSettings,
    scratch: Path,
    *,
    show_progress: bool,
    splits: Sequence[Split] = TRAINING_SPLITS,
) -> Prepared:
    """Load, draw and check models and data; raise for whatever would fail later.

    Args:
        pool: The model pool; it is not changed.
        settings: How many inputs, and how they are made.
        scratch: Directory for weights that the pool has to assemble.
        show_progress: Whether to show a bar while weights are read.
        splits: Splits to draw from; of each task the first that the pool has.

    Raises:
        CalibrationError: The pool, its data or its weights cannot be used; the message says why.
    """
    tasks = require_base_and_experts(pool)
    found = require_datasets(pool, tasks, splits)
    base_model = pool.load_model("_pretrained_").eval()
    architecture = architecture_of(base_model)
    processor = architecture.load_processor(pool)
    prepare_inputs = architecture.prepare_inputs(processor, base_model, settings)
    warnings: list[str] = []
    inputs: dict[str, TaskInputs] = {}
    examples: list[Inputs] = []  # one per task, so that unreadable data is found before long work
    for task in tasks:
        dataset = load_calibration_dataset(pool, task, found[task])
        data = draw(
            task,
            source_of(pool, task, found[task]),
            found[task],
            len(dataset),
            n_samples=settings.n_samples,
            n_heldout=settings.n_heldout,
            seed=settings.seed,
        )
        drawn = ((i, dataset[i]) for i in (*data.indices, *data.heldout_indices))
        checked = architecture.check_items(task, drawn, processor, base_model, settings)
        warnings += checked.warnings
        calibration, heldout = (
            Batches(
                dataset,
                sorted(indices, key=lambda index: checked.lengths.get(index, 0)),
                settings.batch_size,
                prepare_inputs,
                task,
            )
            for indices in (data.indices, data.heldout_indices)
        )
        inputs[task] = TaskInputs(data, calibration, heldout)
        examples.append(next(iter(Batches(dataset, data.indices[:1], 1, prepare_inputs, task))))

    reference = floating_tensors(base_model)
    base = _read(pool, "_pretrained_", reference, scratch)
    bar = tqdm(tasks, desc="Checking experts", leave=False, disable=not show_progress)
    experts = {task: _read(pool, task, reference, scratch) for task in bar}
    for task in tasks:
        warnings += shortfalls(inputs[task].data, settings.n_heldout)
    warnings += warn_of_equal_experts(experts)
    warnings += warn_of_other_bases(pool)
    return Prepared(
        architecture,
        processor,
        base_model,
        base,
        experts,
        inputs,
        max(examples, key=_tensor_bytes),  # of texts, rather a long one for the estimate
        tuple(warnings),
    )


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
        architecture.row_rules(settings),
        architecture.spent(base_model),
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


def _tensor_bytes(inputs: Inputs) -> int:
    return sum(value.nbytes for value in inputs.values() if isinstance(value, Tensor))


def _read(
    pool: BaseModelPool, name: str, reference: Mapping[str, Tensor], scratch: Path
) -> CheckedWeights:
    weights, source = open_weights(pool, name, reference, scratch)
    role = "base" if name == "_pretrained_" else "expert"
    return check_weights(role, name, weights, source, reference)


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
