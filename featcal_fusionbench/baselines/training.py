"""Training one task's module on representations that were computed once.

Neither the merged model nor the expert changes while the modules are trained, so their final
representations of the training inputs are the whole of the data. The modules share nothing:
going through the tasks in turn, step by step, as the papers' code does, gives the same as
training one after the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .modules import Correction, make_module
from .results import TaskSurgery
from .settings import SurgerySettings

__all__ = ["Representations", "batch_indices", "generator_of", "train_module"]


@dataclass(frozen=True)
class Representations:
    """Final representations of one task's inputs.

    Attributes:
        merged: The merged model's, of shape (inputs, positions, width).
        expert: The expert's on the same inputs, of the same shape.
        mask: Which positions count, of shape (inputs, positions).
    """

    merged: Tensor
    expert: Tensor
    mask: Tensor

    def __post_init__(self) -> None:
        if self.merged.shape != self.expert.shape or self.mask.shape != self.merged.shape[:2]:
            raise ValueError(
                f"representations do not fit together: merged {tuple(self.merged.shape)}, expert "
                f"{tuple(self.expert.shape)}, mask {tuple(self.mask.shape)}."
            )

    def __len__(self) -> int:
        return len(self.mask)

    def rows(self, inputs: Tensor | slice = slice(None)) -> tuple[Tensor, Tensor]:
        """The rows that count of some inputs, of shape (rows, width): merged and expert."""
        mask = self.mask[inputs]
        return self.merged[inputs][mask], self.expert[inputs][mask]


def generator_of(seed: int, task: str, purpose: str) -> torch.Generator:
    """A generator of one task's own for one purpose, on the host."""
    digest = hashlib.sha256(f"{seed}/{task}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def batch_indices(inputs: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Indices of batches without end: all inputs in a new order, again and again."""
    while True:
        yield from torch.randperm(inputs, generator=generator).split(size)


def train_module(
    task: str,
    training: Representations,
    heldout: Representations | None,
    settings: SurgerySettings,
) -> tuple[Correction, TaskSurgery]:
    """Train the module of one task.

    Args:
        task: Its name, part of the seeds.
        training: Representations to train on; they decide device and precision.
        heldout: Representations to measure the loss on, besides.
        settings: The settings.

    Returns:
        The trained module, without gradients, and what the training did.

    Raises:
        FloatingPointError: The loss is no longer finite.
    """
    merged = training.merged
    width = merged.shape[-1]
    module = make_module(settings, width, generator_of(settings.seed, task, "initialisation"))
    module = module.to(merged.device, merged.dtype)
    start = _loss(module, training)
    heldout_start = None if heldout is None else _loss(module, heldout)
    optimiser = torch.optim.Adam(module.parameters(), lr=settings.learning_rate)
    noise = generator_of(settings.seed, task, "noise")
    batches = batch_indices(
        len(training), settings.train_batch_size, generator_of(settings.seed, task, "batches")
    )
    with torch.enable_grad():
        for _ in range(settings.steps_per_task):
            loss = module.loss(*training.rows(next(batches).to(merged.device)), noise)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    end = _loss(module, training)
    if not end < float("inf"):  # also NaN
        raise FloatingPointError(
            f"the module of task {task} diverged (loss {end}): lower learning_rate, now "
            f"{settings.learning_rate:g}."
        )
    result = TaskSurgery(
        task=task,
        inputs=len(training),
        rows=int(training.mask.sum()),
        width=width,
        parameters=sum(value.numel() for value in module.parameters()),
        steps=settings.steps_per_task,
        loss_start=start,
        loss_end=end,
        heldout_start=heldout_start,
        heldout_end=None if heldout is None else _loss(module, heldout),
    )
    return module.requires_grad_(False).eval(), result


@torch.no_grad()
def _loss(module: Correction, representations: Representations) -> float:
    merged, expert = representations.rows()
    return float(F.l1_loss(merged - module(merged), expert))
