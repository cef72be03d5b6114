"""Inputs that only a task's expert can complete: its own answers, for the decoder to read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from tqdm.auto import tqdm

from .architectures import CompleteInputs
from .calibration import Weights
from .experts import floating_tensors

if TYPE_CHECKING:
    from .preparation import TaskInputs

__all__ = ["complete_all"]


def complete_all(
    inputs: Mapping[str, TaskInputs],
    base: nn.Module,
    experts: Mapping[str, Weights],
    complete: CompleteInputs,
    device: torch.device,
    dtype: torch.dtype,
    *,
    show_progress: bool,
) -> dict[str, TaskInputs]:
    """Let every task's expert complete the task's inputs, one expert in memory at a time.

    Args:
        inputs: Calibration and held-out inputs by task.
        base: The model whose structure the experts share; it is not changed.
        experts: Weights by task.
        complete: Completes one batch, given the loaded expert.
        device: Where the experts run.
        dtype: The precision that they run in.
        show_progress: Whether to show a bar.

    Returns:
        The inputs with all batches read and completed.
    """
    model = copy.deepcopy(base).requires_grad_(False).eval().to(device, dtype)
    tensors = floating_tensors(model)
    total = sum(len(of.calibration) + len(of.heldout) for of in inputs.values())
    completed = {}
    with tqdm(total=total, desc="Experts' answers", leave=False, disable=not show_progress) as bar:
        for task, of in inputs.items():
            for name, tensor in tensors.items():
                tensor.copy_(experts[task][name])
            batches = {}
            for part in ("calibration", "heldout"):
                batches[part] = []
                for batch in getattr(of, part):
                    batches[part].append(complete(model, batch))
                    bar.update()
            completed[task] = replace(of, **batches)
    return completed
