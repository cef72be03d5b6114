"""What needs a whole expert: the answers that the decoder is to read are the expert's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from tqdm.auto import tqdm

from ..architectures import CompleteInputs
from ..calibration import Weights
from ..pools.opening import floating_tensors

if TYPE_CHECKING:
    from .preparation import TaskInputs

__all__ = ["complete_all", "each_expert"]


def each_expert(
    base: nn.Module, experts: Mapping[str, Weights], device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, nn.Module]]:
    """Every task's expert as a loaded model, one in memory at a time.

    Args:
        base: The model whose structure the experts share; it is not changed.
        experts: Weights by task.
        device: Where the experts run.
        dtype: The precision that they run in.

    Yields:
        The task and its expert, in evaluation mode, without gradients. It is the same module with
        other weights each time.
    """
    model = copy.deepcopy(base).requires_grad_(False).eval().to(device, dtype)
    tensors = floating_tensors(model)
    for task, weights in experts.items():
        for name, tensor in tensors.items():
            tensor.copy_(weights[name])
        yield task, model


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
    total = sum(len(of.calibration) + len(of.heldout) for of in inputs.values())
    completed = {}
    with tqdm(total=total, desc="Experts' answers", leave=False, disable=not show_progress) as bar:
        for task, model in each_expert(base, experts, device, dtype):
            of = inputs[task]
            batches = {}
            for part in ("calibration", "heldout"):
                batches[part] = []
                for batch in getattr(of, part):
                    batches[part].append(complete(model, batch))
                    bar.update()
            completed[task] = replace(of, **batches)
    return completed
