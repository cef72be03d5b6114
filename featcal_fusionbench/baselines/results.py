"""What the training of the modules leaves behind, as plain typed values."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SurgeryResult", "TaskSurgery"]


@dataclass(frozen=True, kw_only=True)
class TaskSurgery:
    """One task's module.

    The losses are mean absolute differences to the expert's representation, of the representation
    as inference gives it (without noise).

    Attributes:
        task: Name of the task.
        inputs: Training inputs.
        rows: Representations that they gave: one per image, one per decoder position of a text.
        width: Width of the representation.
        parameters: Parameters of the module.
        steps: Steps of the optimiser.
        loss_start: Over all training rows before the first step.
        loss_end: The same after the last one.
        heldout_start: Over the rows of the held-out inputs, before; None where there are none.
        heldout_end: The same after.
    """

    task: str
    inputs: int
    rows: int
    width: int
    parameters: int
    steps: int
    loss_start: float
    loss_end: float
    heldout_start: float | None = None
    heldout_end: float | None = None


@dataclass(frozen=True)
class SurgeryResult:
    """The modules of all tasks, in the order of training."""

    tasks: tuple[TaskSurgery, ...]
